use super::Bench;
use crate::ops::format::{BF16, F16, Format};

/// A pattern without symmetry, exact in every format.
fn value(row: usize, column: usize) -> f64 {
    ((row * 37 + column * 11) % 23) as f64 / 4.0 - 2.5
}

/// As in an attention kernel: tiles in shared memory, `ldmatrix`, `mma`, sums in registers.
#[test]
fn tiles_multiply_as_matrices_do() {
    // A is 16 x 16, row-major; B is 16 x 8, row-major and read transposed.
    for (name, format) in [("bf16", BF16), ("f16", F16)] {
        let text = format!(
            ".visible .entry f(.param .u64 a, .param .u64 b, .param .u64 out) {{
            .shared .align 16 .b8 left[512]; .shared .align 16 .b8 right[256]; .reg .b64 %d<8>; .reg .b32 %r<24>; .reg .f32 %f<5>;
            ld.param.u64 %d1, [a]; ld.param.u64 %d2, [b]; ld.param.u64 %d3, [out]; mov.u32 %r1, %tid.x;
            mul.wide.u32 %d4, %r1, 16; add.s64 %d1, %d1, %d4; ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%d1];
            mov.b32 %r6, left; shl.b32 %r7, %r1, 4; add.s32 %r8, %r6, %r7; st.shared.v4.b32 [%r8], {{%r2, %r3, %r4, %r5}};
            mul.wide.u32 %d4, %r1, 8; add.s64 %d2, %d2, %d4; ld.global.b64 %d5, [%d2];
            mov.b32 %r9, right; shl.b32 %r7, %r1, 3; add.s32 %r10, %r9, %r7; st.shared.b64 [%r10], %d5; bar.sync 0;
            and.b32 %r11, %r1, 15; shl.b32 %r11, %r11, 5; shr.u32 %r12, %r1, 4; shl.b32 %r12, %r12, 4; add.s32 %r11, %r11, %r12;
            add.s32 %r11, %r11, %r6;
            ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r13, %r14, %r15, %r16}}, [%r11];
            and.b32 %r12, %r1, 15; shl.b32 %r12, %r12, 4; add.s32 %r12, %r12, %r9;
            ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {{%r17, %r18}}, [%r12];
            mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f3F800000; mov.f32 %f3, 0f3F800000; mov.f32 %f4, 0f3F800000;
            mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {{%f1, %f2, %f3, %f4}}, {{%r13, %r14, %r15, %r16}},
                {{%r17, %r18}}, {{%f1, %f2, %f3, %f4}};
            shr.u32 %r19, %r1, 2; shl.b32 %r19, %r19, 5; and.b32 %r20, %r1, 3; shl.b32 %r20, %r20, 3; add.s32 %r19, %r19, %r20;
            cvt.u64.u32 %d6, %r19; add.s64 %d7, %d3, %d6;
            st.global.v2.f32 [%d7], {{%f1, %f2}}; st.global.v2.f32 [%d7+256], {{%f3, %f4}}; ret; }}"
        );
        let bits = |format: Format, x: f64| format.narrow(x) as u16;
        let a: Vec<u16> = (0..256)
            .map(|i| bits(format, value(i / 16, i % 16)))
            .collect();
        let b: Vec<u16> = (0..128)
            .map(|i| bits(format, value(i % 8 + 3, i / 8)))
            .collect();
        let bench = Bench::load(&text);
        let a = bench.upload(&a);
        let b = bench.upload(&b);
        let out = bench.allocate(512);
        assert_eq!(
            bench.launch(bench.function(c"f"), [1; 3], [32, 1, 1], 0, &[a, b, out]),
            (0, 0)
        );
        for (at, found) in bench.u32s(out, 128).into_iter().enumerate() {
            let row = at / 8;
            let column = at % 8;
            let sum: f64 = (0..16).map(|k| value(row, k) * value(column + 3, k)).sum();
            assert_eq!(
                f64::from(f32::from_bits(found)),
                sum + 1.0,
                "{name} {row} {column}"
            );
        }
    }
}
