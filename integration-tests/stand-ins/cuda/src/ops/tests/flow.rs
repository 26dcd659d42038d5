use super::{Bench, check, triples};

/// Threads of a warp diverge and reconverge: loops of different lengths, with a break and a jump
/// table.
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

    let code = "TABLE: .branchtargets A, B, C, D; brx.idx %z, TABLE; A: mov.b32 %t2, 10; bra END0; B: mov.b32 %t2, 20; bra END0;
        C: mov.b32 %t2, 30; bra END0; D: mov.b32 %t2, 40; END0: add.u32 %r, %t2, %x;";
    check(code, &inputs, |[x, _, z]| (z + 1) * 10 + x);
}

#[test]
fn instructions_heed_their_predicates() {
    let inputs = triples(&(0..40).collect::<Vec<_>>());
    let code =
        "setp.lt.u32 %p0, %x, %y; mov.b32 %r, 7; @%p0 mov.b32 %r, %x; @!%p0 add.u32 %r, %r, %y;";
    check(code, &inputs, |[x, y, _]| if x < y { x } else { 7 + y });
}

#[test]
fn functions_are_called_with_their_parameters() {
    let text = "
        .func (.param .b32 out) square(.param .b32 in) {
            .reg .b32 %r<3>; .reg .pred %p; ld.param.b32 %r1, [in]; setp.gt.u32 %p, %r1, 50; @%p bra BIG;
            mul.lo.u32 %r2, %r1, %r1; st.param.b32 [out], %r2; ret;
            BIG: mov.b32 %r2, 1; st.param.b32 [out], %r2; ret; }
        .func (.param .b64 out) twice(.param .b64 in) {
            .reg .b64 %d<3>; .reg .b32 %r<3>; ld.param.b64 %d1, [in]; cvt.u32.u64 %r1, %d1;
            { .param .b32 p; st.param.b32 [p], %r1; .param .b32 q; call.uni (q), square, (p); ld.param.b32 %r2, [q]; }
            cvt.u64.u32 %d2, %r2; add.u64 %d2, %d2, %d2; st.param.b64 [out], %d2; ret; }
        .visible .entry f(.param .u64 out) {
            .reg .b64 %d<6>; .reg .b32 %r<3>;
            ld.param.u64 %d1, [out]; mov.u32 %r1, %tid.x; cvt.u64.u32 %d2, %r1;
            { .param .b64 a; st.param.b64 [a], %d2; .param .b64 b; call (b), twice, (a); ld.param.b64 %d3, [b]; }
            shl.b64 %d4, %d2, 3; add.s64 %d5, %d1, %d4; st.global.u64 [%d5], %d3; ret; }";
    let bench = Bench::load(text);
    let out = bench.allocate(64 * 8);
    assert_eq!(
        bench.launch(bench.function(c"f"), [1; 3], [64, 1, 1], 0, &[out]),
        (0, 0)
    );
    let expected: Vec<u64> = (0..64)
        .map(|i| if i > 50 { 2 } else { 2 * i * i })
        .collect();
    assert_eq!(bench.u64s(out, 64), expected);
}

#[test]
fn threads_know_where_they_are() {
    let text = ".visible .entry f(.param .u64 out) {
        .reg .b64 %d<4>; .reg .b32 %r<20>;
        ld.param.u64 %d1, [out];
        mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z; mov.u32 %r4, %ntid.x; mov.u32 %r5, %ntid.y;
        mov.u32 %r6, %ctaid.x; mov.u32 %r7, %ctaid.y; mov.u32 %r8, %nctaid.x; mov.u32 %r9, %laneid; mov.u32 %r10, %warpid;
        mov.u32 %r11, %lanemask_lt;
        mad.lo.s32 %r12, %r3, %r5, %r2; mad.lo.s32 %r12, %r12, %r4, %r1;
        mad.lo.s32 %r13, %r7, %r8, %r6; mad.lo.s32 %r14, %r13, 48, %r12;
        mul.wide.u32 %d2, %r14, 16; add.s64 %d3, %d1, %d2;
        st.global.v4.b32 [%d3], {%r12, %r9, %r10, %r11}; ret; }";
    let bench = Bench::load(text);
    let out = bench.allocate(6 * 48 * 16);
    assert_eq!(
        bench.launch(bench.function(c"f"), [3, 2, 1], [4, 6, 2], 0, &[out]),
        (0, 0)
    );

    for (at, found) in bench.u32s(out, 6 * 48 * 4).chunks(4).enumerate() {
        let thread = at as u32 % 48;
        assert_eq!(
            found,
            [thread, thread % 32, thread / 32, (1 << (thread % 32)) - 1]
        );
    }
}
