use super::{Bench, check, triples};

/// Threads of a warp diverge and reconverge: loops of different lengths, with a break.
#[test]
fn threads_part_and_meet_again() {
    let inputs: Vec<[u64; 3]> = (0..96).map(|i| [i, i * 37 % 53, i % 4]).collect();
    let code = "mov.b32 %r, 0; mov.b32 %t0, 0;
        LOOP: setp.ge.u32 %p0, %t0, %x; @%p0 bra DONE;
        and.b32 %t1, %t0, 3; setp.eq.u32 %p1, %t1, 2; @!%p1 bra ODD;
        add.u32 %r, %r, 5; bra.uni NEXT;
        ODD: xor.b32 %r, %r, %t0; setp.gt.u32 %p2, %r, 60; @%p2 bra DONE;
        NEXT: add.u32 %t0, %t0, 1; bra LOOP;
        DONE: add.u32 %r, %r, 1000;";
    check(code, &inputs, |[x, ..]| {
        let mut r = 0;
        for i in 0..x {
            if i & 3 == 2 {
                r += 5;
            } else {
                r ^= i;
                if r > 60 {
                    break;
                }
            }
        }
        r + 1000
    });
}

#[test]
fn instructions_heed_their_predicates() {
    let inputs = triples(&(0..40).collect::<Vec<_>>());
    let code =
        "setp.lt.u32 %p0, %x, %y; mov.b32 %r, 7; @%p0 mov.b32 %r, %x; @!%p0 add.u32 %r, %r, %y;";
    check(code, &inputs, |[x, y, _]| if x < y { x } else { 7 + y });
}

#[test]
fn threads_know_where_they_are() {
    let text = ".visible .entry f(.param .u64 out) {
        .reg .b64 %d<4>; .reg .b32 %r<20>;
        ld.param.u64 %d1, [out];
        mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z; mov.u32 %r4, %ntid.x; mov.u32 %r5, %ntid.y;
        mov.u32 %r6, %ctaid.x; mov.u32 %r7, %ctaid.y; mov.u32 %r8, %nctaid.x; mov.u32 %r9, %laneid; mov.u32 %r10, %warpid;
        mad.lo.s32 %r12, %r3, %r5, %r2; mad.lo.s32 %r12, %r12, %r4, %r1;
        mad.lo.s32 %r13, %r7, %r8, %r6; mad.lo.s32 %r14, %r13, 48, %r12;
        mul.wide.u32 %d2, %r14, 16; add.s64 %d3, %d1, %d2;
        st.global.v4.b32 [%d3], {%r12, %r9, %r10, 0}; ret; }";
    let bench = Bench::load(text);
    let out = bench.allocate(6 * 48 * 16);
    assert_eq!(
        bench.launch(bench.function(c"f"), [3, 2, 1], [4, 6, 2], 0, &[out]),
        (0, 0)
    );

    for (at, found) in bench.u32s(out, 6 * 48 * 4).chunks(4).enumerate() {
        let thread = at as u32 % 48;
        assert_eq!(found, [thread, thread % 32, thread / 32, 0]);
    }
}
