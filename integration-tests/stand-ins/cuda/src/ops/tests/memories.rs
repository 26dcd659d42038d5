use super::{Bench, INTEGERS, check, triples};

#[test]
fn loads_and_stores_have_widths_signs_and_vectors() {
    // Through local memory and through its generic address.
    let all = triples(&INTEGERS);
    let local =
        ".local .align 16 .b8 place[32]; .reg .b64 %g; mov.b64 %g, place; cvta.local.u64 %g, %g;";
    check(
        &format!("{local} st.local.b64 [place], %a; ld.s8 %r, [%g+1];"),
        &all,
        |[a, ..]| u64::from(i32::from((a >> 8) as i8) as u32),
    );
    check(
        &format!("{local} st.b64 [%g+8], %a; ld.local.u16 %r, [place+10];"),
        &all,
        |[a, ..]| a >> 16 & 0xffff,
    );
    check(
        &format!("{local} st.v2.b64 [%g], {{%a, %b}}; ld.local.v4.b32 {{_, %t1, %r, _}}, [place];"),
        &all,
        |[_, b, _]| b & 0xffff_ffff,
    );

    check(
        &format!("{local} st.local.v4.b16 [place+8], {{%i, %j, %k, %i}}; ld.b64 %d, [%g+8];"),
        &all,
        |[a, b, c]| {
            let h = |x: u64, s: u32| (x & 0xffff) << s;
            h(a, 0) | h(b, 16) | h(c, 32) | h(a, 48)
        },
    );
}

#[test]
fn spaces_are_told_apart_by_address() {
    let text = ".extern .shared .align 16 .b8 dynamic[];
        .global .align 8 .u64 table[3] = {5, 6, generic(other)+4}; .const .align 4 .u32 other[2] = {11, 12};
        .visible .entry f(.param .u64 out) {
        .shared .align 8 .b8 fixed[24]; .reg .b64 %d<12>; .reg .b32 %r<8>; .reg .pred %p<5>;
        ld.param.u64 %d1, [out];
        mov.b64 %d2, dynamic; cvta.shared.u64 %d3, %d2; st.u32 [%d3+4], 77; ld.shared.u32 %r1, [dynamic+4];
        isspacep.shared %p1, %d3; isspacep.global %p2, %d3; isspacep.global %p3, %d1;
        selp.b32 %r2, 1, 0, %p1; selp.b32 %r3, 2, 0, %p2; selp.b32 %r4, 4, 0, %p3; or.b32 %r2, %r2, %r3; or.b32 %r2, %r2, %r4;
        cvta.to.shared.u64 %d4, %d3; cvt.u32.u64 %r3, %d4;
        ld.global.u64 %d5, [table+16]; ld.u32 %r4, [%d5]; ld.global.nc.u64 %d6, [table+8]; cvt.u32.u64 %r5, %d6;
        mov.u32 %r6, %dynamic_smem_size; ld.const.u32 %r7, [other];
        st.global.v4.b32 [%d1], {%r1, %r2, %r3, %r4}; st.global.v4.b32 [%d1+16], {%r5, %r6, %r7, 0}; ret; }";
    let bench = Bench::load(text);
    let out = bench.allocate(32);
    assert_eq!(
        bench.launch(bench.function(c"f"), [1; 3], [1; 3], 64, &[out]),
        (0, 0)
    );
    // Dynamic memory follows 24 bytes of static memory, at a multiple of 16.
    assert_eq!(bench.u32s(out, 8), [77, 5, 32, 12, 6, 64, 11, 0]);
}

#[test]
fn atomics_of_all_blocks_add_up() {
    let text = ".visible .entry f(.param .u64 p) {
        .shared .align 4 .u32 once; .reg .b64 %d<6>; .reg .b32 %r<9>; .reg .pred %q;
        ld.param.u64 %d1, [p]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.s32 %r3, %r2, 64, %r1; cvt.u64.u32 %d2, %r3;
        atom.global.add.u64 %d3, [%d1], %d2; red.global.max.u32 [%d1+8], %r3; red.relaxed.gpu.global.or.b32 [%d1+12], 1;
        atom.global.add.f32 %r4, [%d1+16], 0f3F800000; red.global.add.f64 [%d1+24], 0d3FE0000000000000;
        atom.global.inc.u32 %r5, [%d1+32], 9; atom.global.add.noftz.bf16x2 %r6, [%d1+36], 0x3f803f80;
        atom.global.cas.b32 %r7, [%d1+40], -1, %r3; atom.global.exch.b32 %r8, [%d1+44], 3; red.global.min.s32 [%d1+48], -5;
        setp.eq.u32 %q, %r1, 0; @%q st.shared.u32 [once], 0; bar.sync 0; red.shared.add.u32 [once], 2; bar.sync 0;
        ld.shared.u32 %r1, [once]; @%q red.global.add.u32 [%d1+52], %r1; ret; }";
    let bench = Bench::load(text);
    let start: [u32; 14] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, u32::MAX, 0, 0, 0];
    let place = bench.upload(&start);
    assert_eq!(
        bench.launch(bench.function(c"f"), [50, 1, 1], [64, 1, 1], 0, &[place]),
        (0, 0)
    );
    let found = bench.u32s(place, 14);
    assert_eq!(found[..2], [3200 * 3199 / 2, 0]);
    assert_eq!(found[2..4], [3199, 1]);
    assert_eq!(f32::from_bits(found[4]), 3200.0);
    assert_eq!(
        f64::from_bits(u64::from(found[7]) << 32 | u64::from(found[6])),
        1600.0
    );
    // A counter that wraps after 9; the bf16 sum stops growing where 1 is half an ulp.
    assert_eq!((found[8], found[9]), (3200 % 10, 0x4380_4380));
    assert!(found[10] < 3200 && found[11] == 3 && found[12] as i32 == -5);
    assert_eq!(found[13], 50 * 128);
}

#[test]
fn asynchronous_copies_arrive_at_the_wait() {
    let text = ".visible .entry f(.param .u64 in, .param .u64 out) {
        .shared .align 16 .b8 tile[1536]; .reg .b64 %d<6>; .reg .b32 %r<9>; .reg .pred %p;
        ld.param.u64 %d1, [in]; ld.param.u64 %d2, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %d3, %r1, 16; add.s64 %d1, %d1, %d3;
        mov.b32 %r2, tile; shl.b32 %r3, %r1, 4; add.s32 %r2, %r2, %r3;
        cp.async.cg.shared.global.L2::128B [%r2], [%d1], 16; cp.async.commit_group;
        cp.async.ca.shared.global [%r2+512], [%d1], 8; cp.async.commit_group;
        cp.async.ca.shared.global [%r2+1024], [%d1], 16, 6; cp.async.commit_group;
        ld.shared.b32 %r4, [%r2]; cp.async.wait_group 2; ld.shared.b32 %r5, [%r2]; ld.shared.b32 %r6, [%r2+516];
        cp.async.wait_group 0; ld.shared.b32 %r7, [%r2+516]; ld.shared.b32 %r8, [%r2+1028];
        mul.wide.u32 %d4, %r1, 20; add.s64 %d2, %d2, %d4; st.global.b32 [%d2], %r4; st.global.b32 [%d2+4], %r5;
        st.global.b32 [%d2+8], %r6; st.global.b32 [%d2+12], %r7; st.global.b32 [%d2+16], %r8; ret; }";
    let bench = Bench::load(text);
    let values: Vec<u32> = (0..128).map(|i| i * 0x0101_0101 + 1).collect();
    let input = bench.upload(&values);
    let output = bench.allocate(32 * 20);

    assert_eq!(
        bench.launch(
            bench.function(c"f"),
            [1; 3],
            [32, 1, 1],
            0,
            &[input, output]
        ),
        (0, 0)
    );

    for (lane, found) in bench.u32s(output, 160).chunks(5).enumerate() {
        let first = values[lane * 4];
        let second = values[lane * 4 + 1];
        assert_eq!(
            found,
            [u32::MAX, first, u32::MAX, second, second & 0xffff],
            "{lane}"
        );
    }
}
