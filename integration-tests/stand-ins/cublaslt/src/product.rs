//! The arithmetic: `d = epilogue(alpha op(a) op(b) + beta c + bias)`, all matrices column-major.

use std::ops::Range;

use crate::storage::Storage;
use crate::sums::Sums;

/// A column-major matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) storage: Storage,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) stride: usize,
}

/// Transpositions and epilogue of a product (`cublasLtMatmulDescAttributes_t`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Description {
    pub(crate) transposed: [bool; 2],
    pub(crate) epilogue: u32,
    pub(crate) bias: u64,
    pub(crate) aux: u64,
    pub(crate) aux_stride: usize,
}

/// Bits of `cublasLtEpilogue_t`.
pub(crate) const NOTHING: u32 = 1;
pub(crate) const BIAS: u32 = 4;
pub(crate) const GELU: u32 = 32;
pub(crate) const GELU_BACKWARD: u32 = 64;
pub(crate) const AUX: u32 = 128;
/// The sums of the rows of op(a) are written to the bias.
pub(crate) const BIAS_GRADIENT: u32 = 256;

/// The arguments of one `cublasLtMatmul`, copied, since the caller may change them after the call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) what: Description,
    /// Layouts of a, b, c and d.
    pub(crate) layouts: [Layout; 4],
    pub(crate) at: [u64; 4],
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
    pub(crate) sums: Sums,
}

/// Whether the sizes match and the types and the epilogue are supported.
pub(crate) fn is_supported(what: &Description, [a, b, c, d]: &[Layout; 4], gelu: bool) -> bool {
    let op = |l: &Layout, transposed: bool| {
        if transposed {
            [l.cols, l.rows]
        } else {
            [l.rows, l.cols]
        }
    };

    let [m, k] = op(a, what.transposed[0]);
    let [k_b, n] = op(b, what.transposed[1]);
    let has_aux = what.epilogue & AUX != 0;
    let known = match what.epilogue {
        NOTHING | BIAS | BIAS_GRADIENT => true,
        e if e == GELU | AUX | BIAS || e == GELU_BACKWARD | AUX => gelu,
        _ => false,
    };

    known
        && k == k_b
        && [c.rows, c.cols] == [m, n]
        && [d.rows, d.cols] == [m, n]
        && [a, b, c, d].iter().all(|l| l.stride >= l.rows)
        && a.storage == b.storage
        && c.storage == d.storage
        && (d.storage == a.storage || d.storage == Storage::F32)
        && (!has_aux || (what.aux_stride >= m && what.aux_stride.is_multiple_of(8)))
}

impl Product {
    /// Its sizes, epilogue, whether it adds to `c`, and the type of `d`.
    pub(crate) fn name(&self) -> String {
        let [a, _, _, d] = &self.layouts;
        let Description {
            transposed,
            epilogue,
            ..
        } = &self.what;
        let k = if transposed[0] { a.rows } else { a.cols };
        let letter = |transposed: bool| if transposed { 'T' } else { 'N' };
        let add = if self.beta == 0.0 { "" } else { " + C" };
        let ta = letter(transposed[0]);
        let tb = letter(transposed[1]);
        format!(
            "{}x{}x{k} {ta}{tb} epilogue {epilogue}{add} to {:?}",
            d.rows, d.cols, d.storage
        )
    }

    /// Bytes loaded and stored if each matrix is used once, and floating-point operations.
    pub(crate) fn work(&self) -> [u64; 3] {
        let [a, b, c, d] = &self.layouts;
        let what = &self.what;
        let bytes = |l: &Layout| (l.rows * l.cols * l.storage.bytes()) as u64;
        let k = if what.transposed[0] { a.rows } else { a.cols };
        let aux = if what.epilogue & AUX == 0 {
            0
        } else {
            bytes(d)
        };

        let (aux_loaded, aux_stored) = if what.epilogue & GELU_BACKWARD == 0 {
            (0, aux)
        } else {
            (aux, 0)
        };

        let addend = if self.beta == 0.0 { 0 } else { bytes(c) };
        let loaded = bytes(a) + bytes(b) + addend + aux_loaded;
        [
            loaded,
            bytes(d) + aux_stored,
            2 * (d.rows * d.cols * k) as u64,
        ]
    }

    /// Computes the product.
    ///
    /// # Safety
    /// The addresses are those of arrays that match the layouts and the description. During the
    /// call nothing else writes them, and nothing else reads d or the auxiliary array.
    pub(crate) unsafe fn run(&self) {
        let [a, b, c, d] = self.layouts;
        let k = if self.what.transposed[0] {
            a.rows
        } else {
            a.cols
        };

        // Rows of op(a) and columns of op(b), each contiguous.
        // SAFETY: the caller guarantees it.
        let left = unsafe { gather(self.at[0], &a, !self.what.transposed[0]) };
        // SAFETY: the caller guarantees it.
        let right = unsafe { gather(self.at[1], &b, self.what.transposed[1]) };
        let parts = self.sums.parts();
        // The parts of a sum of k terms are added in order.
        let sum = |part: &dyn Fn(Range<usize>) -> f32| -> f32 {
            let part = |i: usize| part(i * k / parts..(i + 1) * k / parts);
            (0..parts)
                .map(|i| {
                    if self.sums.rounds() {
                        d.storage.round(part(i))
                    } else {
                        part(i)
                    }
                })
                .sum()
        };

        if self.what.epilogue & BIAS_GRADIENT != 0 {
            let ones = vec![1.0; k];
            for i in 0..d.rows {
                let x = sum(&|terms| dot(&left[i * k..][terms.clone()], &ones[terms]));
                // SAFETY: the caller guarantees it.
                unsafe { d.storage.write(self.what.bias, i, x) };
            }
        }

        for j in 0..d.cols {
            for i in 0..d.rows {
                let row = &left[i * k..][..k];
                let col = &right[j * k..][..k];
                let mut x = sum(&|terms| self.alpha * dot(&row[terms.clone()], &col[terms]));
                // With beta 0 the library does not read c, which may be uninitialized.
                if self.beta != 0.0 {
                    // SAFETY: the caller guarantees it.
                    x += self.beta * unsafe { c.storage.read(self.at[2], i + j * c.stride) };
                }
                // SAFETY: the caller guarantees it.
                x = unsafe { self.finish(x, i, j) };
                // SAFETY: the caller guarantees it.
                unsafe { d.storage.write(self.at[3], i + j * d.stride, x) };
            }
        }
    }

    /// Applies the epilogue to element (i, j).
    ///
    /// # Safety
    /// As for `run`.
    unsafe fn finish(&self, mut x: f32, i: usize, j: usize) -> f32 {
        let what = &self.what;
        let storage = self.layouts[3].storage;
        let aux = i + j * what.aux_stride;
        if what.epilogue & BIAS != 0 {
            // SAFETY: the caller guarantees it.
            x += unsafe { storage.read(what.bias, i) };
        }
        if what.epilogue & GELU != 0 {
            // SAFETY: the caller guarantees it.
            unsafe { storage.write(what.aux, aux, x) };
            x = gelu(x);
        }
        if what.epilogue & GELU_BACKWARD != 0 {
            // SAFETY: the caller guarantees it.
            x *= gelu_slope(unsafe { storage.read(what.aux, aux) });
        }
        x
    }
}

/// All elements, row by row or column by column.
///
/// # Safety
/// The array matches the layout, and nothing writes it during the call.
unsafe fn gather(at: u64, l: &Layout, by_rows: bool) -> Vec<f32> {
    let (outer, inner) = if by_rows {
        (l.rows, l.cols)
    } else {
        (l.cols, l.rows)
    };
    let mut all = Vec::with_capacity(outer * inner);
    for o in 0..outer {
        for i in 0..inner {
            let (row, col) = if by_rows { (o, i) } else { (i, o) };
            // SAFETY: within the matrix.
            all.push(unsafe { l.storage.read(at, row + col * l.stride) });
        }
    }
    all
}

/// The dot product, in eight sums so that the loop vectorises.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    let a_chunks = a.chunks_exact(8);
    let b_chunks = b.chunks_exact(8);
    let rest: f32 = a_chunks
        .remainder()
        .iter()
        .zip(b_chunks.remainder())
        .map(|(a, b)| a * b)
        .sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f32>() + rest
}

/// GELU, tanh approximation.
fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + inner(x).tanh())
}

fn gelu_slope(x: f32) -> f32 {
    let t = inner(x).tanh();
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * ROOT_2_OVER_PI * (1.0 + 3.0 * CUBIC * x * x)
}

const ROOT_2_OVER_PI: f32 = 0.797_884_6;
const CUBIC: f32 = 0.044_715;

fn inner(x: f32) -> f32 {
    ROOT_2_OVER_PI * (x + CUBIC * x * x * x)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(rows: usize, cols: usize, stride: usize) -> Layout {
        Layout {
            storage: Storage::F32,
            rows,
            cols,
            stride,
        }
    }

    const PLAIN: Description = Description {
        transposed: [false; 2],
        epilogue: NOTHING,
        bias: 0,
        aux: 0,
        aux_stride: 0,
    };

    fn address(x: &mut [f32]) -> u64 {
        x.as_mut_ptr().expose_provenance() as u64
    }

    #[test]
    fn a_product_with_strides_transposition_bias_and_addend() {
        // a = [1 3; 2 4] (stride 3), b^T stored as [5 6 7; 8 9 10]^T..., c all 100, bias
        // [1000, 2000].
        let mut a = [1.0, 2.0, -1.0, 3.0, 4.0, -1.0];
        let mut b = [5.0, 6.0, 7.0, 8.0, 9.0, 10.0];
        let mut c = [100.0; 6];
        let mut d = [f32::NAN; 12];
        let mut bias = [1000.0, 2000.0];
        let what = Description {
            transposed: [false, true],
            epilogue: BIAS,
            bias: address(&mut bias),
            ..PLAIN
        };

        let layouts = [
            layout(2, 2, 3),
            layout(3, 2, 3),
            layout(2, 3, 2),
            layout(2, 3, 4),
        ];
        assert!(is_supported(&what, &layouts, true));
        let at = [
            address(&mut a),
            address(&mut b),
            address(&mut c),
            address(&mut d),
        ];

        // SAFETY: arrays of this test, with the sizes of the layouts.
        unsafe {
            Product {
                what,
                layouts,
                at,
                alpha: 1.0,
                beta: 2.0,
                sums: Sums::Whole,
            }
            .run()
        };

        // b^T = [5 6 7; 8 9 10]; a b^T = [29 33 37; 42 48 54].
        let want = [1229.0, 2242.0, 1233.0, 2248.0, 1237.0, 2254.0];
        assert_eq!([d[0], d[1], d[4], d[5], d[8], d[9]], want);
        assert!(
            d[2].is_nan() && d[3].is_nan(),
            "between columns nothing is written"
        );
    }

    #[test]
    fn bias_gradient_sums_rows_of_the_first_factor() {
        // a = [1 3 5; 2 4 6]; beta does not concern its sums.
        let mut a = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let mut b = [1.0, 0.0, 0.0];
        let mut d = [10.0; 2];
        let mut sums = [f32::NAN; 2];
        let what = Description {
            epilogue: BIAS_GRADIENT,
            bias: address(&mut sums),
            ..PLAIN
        };

        let layouts = [
            layout(2, 3, 2),
            layout(3, 1, 3),
            layout(2, 1, 2),
            layout(2, 1, 2),
        ];
        assert!(is_supported(&what, &layouts, false));
        let at = [
            address(&mut a),
            address(&mut b),
            address(&mut d),
            address(&mut d),
        ];

        // SAFETY: arrays of this test, with the sizes of the layouts.
        unsafe {
            Product {
                what,
                layouts,
                at,
                alpha: 1.0,
                beta: 1.0,
                sums: Sums::InFourParts,
            }
            .run()
        };

        assert_eq!((sums, d), ([9.0, 12.0], [11.0, 12.0]));
    }

    #[test]
    fn what_is_not_known_is_not_supported() {
        let good = [
            layout(2, 4, 2),
            layout(4, 3, 4),
            layout(2, 3, 2),
            layout(2, 3, 2),
        ];
        assert!(is_supported(&PLAIN, &good, true));
        let with = |epilogue| Description {
            epilogue,
            aux_stride: 8,
            ..PLAIN
        };

        let half = good.map(|l| Layout {
            storage: Storage::Bf16,
            ..l
        });

        assert!(is_supported(&with(GELU | AUX | BIAS), &half, true));
        assert!(
            !is_supported(&with(GELU | AUX | BIAS), &half, false),
            "switched off"
        );

        assert!(!is_supported(
            &Description {
                aux_stride: 9,
                ..with(GELU_BACKWARD | AUX)
            },
            &half,
            true
        ));

        assert!(!is_supported(&with(2), &good, true), "ReLU");
        assert!(
            !is_supported(
                &Description {
                    transposed: [true, false],
                    ..PLAIN
                },
                &good,
                true
            ),
            "sizes"
        );

        let [a, b, c, d] = half;
        let wide = |l| Layout {
            storage: Storage::F32,
            ..l
        };

        assert!(is_supported(&PLAIN, &[a, b, wide(c), wide(d)], true));
        assert!(!is_supported(&PLAIN, &[a, wide(b), c, d], true));
        assert!(!is_supported(
            &PLAIN,
            &[a, b, c, Layout { stride: 1, ..d }],
            true
        ));
    }

    #[test]
    fn gelu_has_the_slope_that_it_says() {
        for i in -40..40 {
            let x = i as f32 * 0.1;
            let slope = (f64::from(gelu(x + 1e-2)) - f64::from(gelu(x - 1e-2))) / 2e-2;
            assert!((f64::from(gelu_slope(x)) - slope).abs() < 1e-4, "{x}");
        }
        assert!((gelu(1.0) - 0.841_192).abs() < 1e-6);
    }

    #[test]
    fn parts_of_sums_are_rounded_where_they_may_be() {
        let bits = |x: f32| half::bf16::from_f32(x).to_bits();
        let a = [bits(1.0); 4];
        let b = [256.0, 1.0, -256.0, 0.0].map(bits);
        let matrix = |rows, cols| Layout {
            storage: Storage::Bf16,
            rows,
            cols,
            stride: rows,
        };

        let layouts = [matrix(1, 4), matrix(4, 1), matrix(1, 1), matrix(1, 1)];
        for (sums, want) in [
            (Sums::Whole, 1.0),
            (Sums::InParts, 1.0),
            (Sums::InRoundedParts, 0.0),
        ] {
            let mut d = [0u16];
            let at = [
                a.as_ptr(),
                b.as_ptr(),
                d.as_ptr(),
                d.as_mut_ptr().cast_const(),
            ];
            let at = at.map(|p| p.expose_provenance() as u64);
            // SAFETY: arrays of this test, with the sizes of the layouts.
            unsafe {
                Product {
                    what: PLAIN,
                    layouts,
                    at,
                    alpha: 1.0,
                    beta: 0.0,
                    sums,
                }
                .run()
            };
            assert_eq!(half::bf16::from_bits(d[0]).to_f32(), want);
        }
    }
}
