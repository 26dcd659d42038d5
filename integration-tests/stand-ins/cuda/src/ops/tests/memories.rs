use super::{Bench, INTEGERS};

#[test]
fn loads_and_stores_have_widths_signs_and_vectors() {
    let text = ".extern .shared .align 16 .b8 dynamic[];
        .visible .entry f(.param .u64 in, .param .u64 out) {
        .shared .align 8 .b8 fixed[24]; .reg .b64 %d<8>; .reg .b32 %r<8>; .reg .b16 %h<5>;
        ld.param.u64 %d1, [in]; ld.param.u64 %d2, [out]; ld.b64 %d3, [%d1]; ld.global.nc.b64 %d4, [%d1+8];
        st.shared.v2.b64 [dynamic+16], {%d3, %d4};
        ld.shared.s8 %r1, [dynamic+17]; ld.shared.u16 %r2, [dynamic+18]; ld.shared.v4.b32 {_, %r3, %r4, _}, [dynamic+16];
        ld.shared.v4.b16 {%h1, %h2, %h3, %h4}, [dynamic+16]; st.shared.v4.b16 [fixed+8], {%h4, %h3, %h2, %h1};
        ld.shared.v2.b32 {%r5, %r6}, [fixed+8];
        st.v4.b32 [%d2], {%r1, %r2, %r3, %r4}; st.global.v2.b32 [%d2+16], {%r5, %r6}; ret; }";
    let bench = Bench::load(text);
    let f = bench.function(c"f");
    for (&a, &b) in INTEGERS.iter().zip(INTEGERS.iter().rev()) {
        let input = bench.upload(&[a, b]);
        let out = bench.allocate(24);
        assert_eq!(bench.launch(f, [1; 3], [1; 3], 64, &[input, out]), (0, 0));
        let sign = i32::from((a >> 8) as i8) as u32;
        let turned = (0..4).fold(0, |all, i| all << 16 | a >> (16 * i) & 0xffff);
        let expected = [
            sign,
            (a >> 16 & 0xffff) as u32,
            (a >> 32) as u32,
            b as u32,
            turned as u32,
            (turned >> 32) as u32,
        ];
        assert_eq!(bench.u32s(out, 6), expected, "{a:#x} {b:#x}");
    }
}

#[test]
fn asynchronous_copies_arrive_at_the_wait() {
    let text = ".visible .entry f(.param .u64 in, .param .u64 out) {
        .shared .align 16 .b8 tile[1536]; .reg .b64 %d<6>; .reg .b32 %r<9>; .reg .pred %p;
        ld.param.u64 %d1, [in]; ld.param.u64 %d2, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %d3, %r1, 16; add.s64 %d1, %d1, %d3;
        mov.b32 %r2, tile; shl.b32 %r3, %r1, 4; add.s32 %r2, %r2, %r3;
        cp.async.cg.shared.global [%r2], [%d1], 16; cp.async.commit_group;
        cp.async.ca.shared.global [%r2+512], [%d1], 8; cp.async.commit_group;
        cp.async.ca.shared.global [%r2+1024], [%d1], 4; cp.async.commit_group;
        ld.shared.b32 %r4, [%r2]; cp.async.wait_group 2; ld.shared.b32 %r5, [%r2]; ld.shared.b32 %r6, [%r2+516];
        cp.async.wait_group 0; ld.shared.b32 %r7, [%r2+516]; ld.shared.b32 %r8, [%r2+1024];
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
        assert_eq!(found, [u32::MAX, first, u32::MAX, second, first], "{lane}");
    }
}
