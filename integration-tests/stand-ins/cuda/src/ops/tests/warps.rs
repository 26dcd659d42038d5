use super::{Bench, check};

fn lanes() -> Vec<[u64; 3]> {
    (0..96)
        .map(|i: u64| [i.wrapping_mul(0x9e37_79b9) & 0xffff_ffff, i % 32, i])
        .collect()
}

#[test]
fn shuffles_read_other_lanes() {
    let all = lanes();
    let of = |i: u64, lane: u64| all[(i / 32 * 32 + lane) as usize][0];
    check(
        "shfl.sync.bfly.b32 %r, %x, 5, 31, -1;",
        &all,
        |[_, lane, i]| of(i, lane ^ 5),
    );
    check(
        "shfl.sync.down.b32 %r, %x, 3, 31, -1;",
        &all,
        |[_, lane, i]| of(i, if lane + 3 < 32 { lane + 3 } else { lane }),
    );
    check(
        "shfl.sync.up.b32 %r, %x, 7, 0, -1;",
        &all,
        |[_, lane, i]| of(i, if lane >= 7 { lane - 7 } else { lane }),
    );
    // Each lane reads another, within segments of 8.
    check(
        "mul.lo.u32 %t0, %y, 3; shfl.sync.idx.b32 %r, %x, %t0, 0x181f, -1;",
        &all,
        |[_, lane, i]| of(i, lane & 24 | (lane * 3) & 7),
    );
    let code = "shfl.sync.down.b32 %t0|%p0, %x, 3, 0x1807, -1; selp.b32 %r, %t0, 1, %p0;";
    check(code, &all, |[_, lane, i]| {
        if lane % 8 + 3 < 8 { of(i, lane + 3) } else { 1 }
    });
}

/// Half a warp takes a branch that is earlier in the text than the instruction where the other half
/// waits for it.
#[test]
fn a_shuffle_waits_for_the_lanes_of_its_mask() {
    let all = lanes();
    let code = "setp.lt.u32 %p0, %y, 16; mov.b32 %t0, 0; @%p0 bra LATE;
        MEET: shfl.sync.bfly.b32 %t1, %x, 16, 31, -1; add.u32 %r, %t1, %t0; bra OUT;
        LATE: add.u32 %t0, %t0, 1; setp.lt.u32 %p1, %t0, 4; @%p1 bra LATE; bra MEET;
        OUT: bar.warp.sync -1;";
    check(code, &all, |[_, lane, i]| {
        (all[(i ^ 16) as usize][0] + if lane < 16 { 4 } else { 0 }) & 0xffff_ffff
    });
}

#[test]
fn barriers_order_a_reduction() {
    // A tree in shared memory.
    let text = ".visible .entry f(.param .u64 out) {
        .shared .align 4 .b8 sums[1024]; .reg .b64 %d<4>; .reg .b32 %r<12>; .reg .pred %p<6>;
        ld.param.u64 %d1, [out]; mov.u32 %r1, %tid.x; mov.b32 %r2, sums; shl.b32 %r3, %r1, 2; add.s32 %r4, %r2, %r3;
        st.shared.u32 [%r4], %r1; mov.b32 %r5, 512;
        LOOP: bar.sync 0; shr.u32 %r6, %r5, 2; setp.ge.u32 %p1, %r1, %r6; @%p1 bra SKIP;
        add.s32 %r7, %r4, %r5; ld.shared.u32 %r8, [%r7]; ld.shared.u32 %r9, [%r4]; add.u32 %r9, %r9, %r8; st.shared.u32 [%r4], %r9;
        SKIP: shr.u32 %r5, %r5, 1; setp.gt.u32 %p2, %r5, 2; @%p2 bra LOOP;
        bar.sync 0; ld.shared.u32 %r9, [sums];
        mul.wide.u32 %d2, %r1, 4; add.s64 %d3, %d1, %d2; st.global.b32 [%d3], %r9; ret; }";
    let bench = Bench::load(text);
    let out = bench.allocate(256 * 4);
    assert_eq!(
        bench.launch(bench.function(c"f"), [1; 3], [256, 1, 1], 0, &[out]),
        (0, 0)
    );

    assert_eq!(bench.u32s(out, 256), [255 * 128; 256]);
}
