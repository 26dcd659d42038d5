//! Products by each kind of instructions that this CPU has, beside plain sums in fp64 of the
//! rounded operands.

use faer::MatMut;
use half::bf16;
use proptest::prelude::*;

use super::{Bf16Products, Elems, Operand};
use crate::ops::attention::{self, Masks, Shape};
use crate::ops::linear::{Linear, MatrixOrder, Weight};
use crate::ops::{Threads, linear};

/// Reproducible values in -1..1, some of them 0.
fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        let value = (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        if x.is_multiple_of(9) { 0.0 } else { value }
    };
    (0..n).map(|_| next()).collect()
}

fn rounded(x: &[f32]) -> Vec<bf16> {
    x.iter().map(|&x| bf16::from_f32(x)).collect()
}

/// An operand `[len, depth]` in memory, with elements between its lines.
#[derive(Debug)]
struct Stored {
    elems: Vec<f32>,
    rounded: Vec<bf16>,
    stride: usize,
    len: usize,
    depth: usize,
    is_transposed: bool,
    is_bf16: bool,
}

impl Stored {
    fn new(
        [len, depth]: [usize; 2],
        gap: usize,
        [is_transposed, is_bf16]: [bool; 2],
        seed: u64,
    ) -> Self {
        let [rows, cols] = if is_transposed {
            [depth, len]
        } else {
            [len, depth]
        };
        let stride = cols + gap;
        // Nothing is behind the last row.
        let elems = values((rows * stride).saturating_sub(gap), seed);
        Self {
            rounded: rounded(&elems),
            elems,
            stride,
            len,
            depth,
            is_transposed,
            is_bf16,
        }
    }

    fn operand(&self) -> Operand<'_> {
        let elems = match self.is_bf16 {
            true => Elems::Bf16(&self.rounded),
            false => Elems::F32(&self.elems),
        };
        match self.is_transposed {
            true => Operand::columns(elems, [self.depth, self.len], self.stride),
            false => Operand::rows(elems, [self.len, self.depth], self.stride),
        }
    }

    fn at(&self, line: usize, k: usize) -> f64 {
        let at = match self.is_transposed {
            true => k * self.stride + line,
            false => line * self.stride + k,
        };
        self.rounded[at].to_f64()
    }
}

/// The oracle: element `(i, j)` of `start + a b^T` in fp64, and a bound of its error in fp32: a
/// rounding for each product and addition (Higham, section 3.1), and denormal numbers.
fn plain(start: f32, a: &Stored, b: &Stored, i: usize, j: usize) -> [f64; 2] {
    let products = (0..a.depth).map(|k| a.at(i, k) * b.at(j, k));
    let start = f64::from(start);
    let sum: f64 = start + products.clone().sum::<f64>();
    let of_absolutes: f64 = start.abs() + products.map(f64::abs).sum::<f64>();
    let roundings = (a.depth + 2) as f64 / f64::from(1 << 24);
    let denormal = (a.depth + 1) as f64 * f64::from(f32::MIN_POSITIVE);
    [sum, 1.01 * roundings * of_absolutes + denormal]
}

fn on(threads: usize, work: impl FnOnce() + Send) {
    Threads::new(threads).unwrap().run(work);
}

proptest! {
    #[test]
    fn products_are_within_their_bound(
        m in 1usize..100, n in 1usize..100, k in 1usize..150, threads in 1usize..4, accumulate: bool,
        of_a: [bool; 2], of_b: [bool; 2], gaps in [0usize..3, 0usize..3, 0usize..3], seed in any::<u64>(),
    ) {
        let a = Stored::new([m, k], gaps[0], of_a, seed);
        let b = Stored::new([n, k], gaps[1], of_b, seed ^ 1);
        let stride = n + gaps[2];
        let start = values(m * stride, seed ^ 2);
        for products in Bf16Products::all() {
            let mut out = start.clone();
            let mut alone = start.clone();
            let view = |out| MatMut::from_row_major_slice_mut(out, m, stride).subcols_mut(0, n);
            on(threads, || {
                products.product(view(&mut out), accumulate, &a.operand(), &b.operand());
            });
            products.product_on_thread(view(&mut alone), accumulate, &a.operand(), &b.operand());
            prop_assert_eq!(&out, &alone, "the bits of {} threads and one", threads);

            for (at, (&got, &start)) in out.iter().zip(&start).enumerate() {
                let [i, j] = [at / stride, at % stride];
                if j >= n {
                    prop_assert_eq!(got, start, "between rows");
                    continue;
                }
                let [want, bound] = plain(if accumulate { start } else { 0.0 }, &a, &b, i, j);
                let error = (f64::from(got) - want).abs();
                prop_assert!(error <= bound, "{:?} ({}, {}): {} for {}, bound {:e}", products, i, j, got, want, bound);
            }
        }
    }
}

/// Multiples of 1/8 in -1..1, whose sums of products are exact.
fn eighths(n: usize, seed: u64) -> Vec<f32> {
    let values = values(n, seed);
    values
        .into_iter()
        .map(|x| (x * 8.0).round() / 8.0)
        .collect()
}

/// The root of the mean square of the differences, relative to that of `want`.
fn distance(got: &[f32], want: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let of_differences: f64 = got.iter().zip(want).map(|(a, b)| square(a - b)).sum();
    let of_want: f64 = want.iter().map(|&x| square(x)).sum();
    (of_differences / of_want).sqrt()
}

proptest! {
    #[test]
    fn linear_layers_are_those_in_fp32(
        m in 1usize..70, k in 1usize..70, n in 1usize..70, outputs_first: bool, biased: bool, threads in 1usize..4,
        seed in any::<u64>(),
    ) {
        let x = eighths(m * k, seed);
        let dy = eighths(m * n, seed ^ 1);
        let w = eighths(k * n, seed ^ 2);
        let w_bf16 = rounded(&w);
        let bias = eighths(if biased { n } else { 0 }, seed ^ 3);
        let order = if outputs_first { MatrixOrder::OutputsFirst } else { MatrixOrder::InputsFirst };
        let all = |weight| {
            let layer = Linear { weight, bias: &bias, outputs: n, order };
            let [mut y, mut product, mut residual] = [(); 3].map(|()| vec![f32::NAN; m * n]);
            let mut dx = vec![f32::NAN; m * k];
            let mut dw = vec![1.0; k * n];
            let mut dbias = vec![1.0; bias.len()];
            on(threads, || {
                layer.forward(&mut y, &x);
                layer.product(&mut product, &x);
                layer.forward_residual(&mut residual, &dy, &x);
                layer.input_gradient(&mut dx, &dy);
                layer.weight_gradient([&mut dw, &mut dbias], &x, &dy);
            });
            [y, product, residual, dx, dw, dbias]
        };
        let want = all(Weight::F32(&w));
        for products in Bf16Products::all() {
            prop_assert_eq!(&all(Weight::Bf16(&w_bf16, products)), &want, "{:?}", products);
        }
        let product = |products| {
            let mut y = vec![f32::NAN; m * n];
            on(threads, || linear::product(&mut y, &x, &w, n, products));
            y
        };
        for products in Bf16Products::all() {
            prop_assert_eq!(product(Some(products)), product(None), "{:?}", products);
        }
    }

    #[test]
    fn attention_is_near_that_in_fp32(
        seq in 40usize..140, kv_heads in 1usize..3, group in 1usize..4, d in 4usize..40, scale in 0.1f32..1.0,
        window in prop_oneof![Just(usize::MAX), 20usize..70], threads in 1usize..4, seed in any::<u64>(),
    ) {
        let heads = kv_heads * group;
        let width = (heads + 2 * kv_heads) * d;
        let qkv = values(seq * width, seed);
        let dout = values(seq * heads * d, seed ^ 1);
        let all = |products| {
            let window = window.min(seq);
            let shape = Shape { batch: 1, seq, heads, kv_heads, d, window, scale, products };
            let mut out = vec![f32::NAN; dout.len()];
            let mut lse = vec![f32::NAN; heads * seq];
            let mut dqkv = vec![f32::NAN; qkv.len()];
            on(threads, || {
                attention::forward(&mut out, &mut lse, &qkv, Masks::default(), shape);
                attention::backward(&mut dqkv, &dout, &qkv, &out, &lse, Masks::default(), shape);
            });
            let part = |heads: std::ops::Range<usize>| -> Vec<f32> {
                let rows = dqkv.chunks(width);
                rows.flat_map(|row| row[heads.start * d..heads.end * d].to_vec()).collect()
            };
            let [keys, values] = [heads, heads + kv_heads];
            [part(0..keys), part(keys..values), part(values..values + kv_heads), out, lse]
        };
        let want = all(None);
        for products in Bf16Products::all() {
            for (part, (got, want)) in all(Some(products)).iter().zip(&want).enumerate() {
                let distance = distance(got, want);
                prop_assert!(distance < 0.02, "{:?}, part {}: {}", products, part, distance);
            }
        }
    }
}

/// Depths above a panel's, and more lines than are shared.
#[test]
fn large_products_are_within_their_bound() {
    for [m, n, k] in [[5, 40, 1500], [1100, 1030, 40], [40, 5, 641]] {
        let a = Stored::new([m, k], 0, [false, false], 1);
        let b = Stored::new([n, k], 0, [true, true], 2);
        for products in Bf16Products::all() {
            let mut out = vec![f32::NAN; m * n];
            let view = MatMut::from_row_major_slice_mut(&mut out, m, n);
            on(2, || {
                products.product(view, false, &a.operand(), &b.operand());
            });
            for at in (0..m * n).step_by(7) {
                let [want, bound] = plain(0.0, &a, &b, at / n, at % n);
                assert!(
                    (f64::from(out[at]) - want).abs() <= bound,
                    "{products:?} {m} x {n} x {k} at {at}"
                );
            }
        }
    }
}

/// The orders of sums in the table of the module, to the bit.
#[test]
fn sums_have_the_order_of_the_instructions() {
    use super::{DEPTH, Instructions};

    let k = 131;
    let a = values(k, 1);
    let b = values(k, 2);
    let pairs: Vec<[f32; 2]> = rounded(&a)
        .iter()
        .zip(rounded(&b))
        .map(|(a, b)| [a.to_f32(), b.to_f32()])
        .collect();
    let add = |sum: f32, pair: &[f32; 2]| pair[0].mul_add(pair[1], sum);
    for products in Bf16Products::all() {
        let mut got = [0.5];
        products.product_on_thread(
            MatMut::from_row_major_slice_mut(&mut got, 1, 1),
            true,
            &Operand::rows(Elems::F32(&a), [1, k], k),
            &Operand::rows(Elems::F32(&b), [1, k], k),
        );
        let want = match products.0 {
            Instructions::Amx => pairs.chunks(DEPTH).fold(0.5, |sum, pairs| {
                let even = pairs.iter().step_by(2).fold(0.0, add);
                let odd = pairs.iter().skip(1).step_by(2).fold(0.0, add);
                sum + (even + odd)
            }),
            Instructions::Avx512 => pairs
                .chunks(2)
                .fold(0.5, |sum, pairs| pairs.iter().rev().fold(sum, add)),
        };
        assert_eq!(got, [want], "{products:?}");
    }
}

/// A sum over parts of k is the sum over all of it, if they are whole tiles.
#[test]
fn parts_of_the_depth_add_up_to_the_bit() {
    let [m, n, k] = [33, 50, 160];
    let a = values(m * k, 1);
    let b = values(n * k, 2);
    let part = |x: &[f32], first: usize, depth: usize| -> Vec<f32> {
        x.chunks(k)
            .flat_map(|row| row[first..first + depth].to_vec())
            .collect()
    };
    for products in Bf16Products::all() {
        let sum = |splits: &[usize]| {
            let mut out = vec![0.0; m * n];
            let mut first = 0;
            for &depth in splits {
                let [a, b] = [&a, &b].map(|x| part(x, first, depth));
                products.product_on_thread(
                    MatMut::from_row_major_slice_mut(&mut out, m, n),
                    true,
                    &Operand::rows(Elems::F32(&a), [m, depth], depth),
                    &Operand::rows(Elems::F32(&b), [n, depth], depth),
                );
                first += depth;
            }
            out
        };
        assert_eq!(sum(&[160]), sum(&[32, 96, 32]));
    }
}

#[test]
fn infinities_and_nans_reach_the_output() {
    for (value, k) in [(f32::INFINITY, 3), (f32::NAN, 40), (f32::NEG_INFINITY, 31)] {
        let mut a = vec![1.0; 2 * 41];
        a[k] = value;
        let b = vec![2.0; 3 * 41];
        for products in Bf16Products::all() {
            let mut out = [0.0; 6];
            products.product_on_thread(
                MatMut::from_row_major_slice_mut(&mut out, 2, 3),
                false,
                &Operand::rows(Elems::F32(&a), [2, 41], 41),
                &Operand::rows(Elems::F32(&b), [3, 41], 41),
            );
            let [row, other] = [&out[..3], &out[3..]];
            assert!(
                row.iter()
                    .all(|x| x.is_nan() == value.is_nan() && !x.is_finite())
            );
            assert_eq!(other, [82.0; 3]);
        }
    }
}

#[test]
fn an_empty_sum_is_zero() {
    for products in Bf16Products::all() {
        let mut out = [1.0; 4];
        let empty = Operand::rows(Elems::F32(&[]), [2, 0], 0);
        products.product_on_thread(
            MatMut::from_row_major_slice_mut(&mut out, 2, 2),
            false,
            &empty,
            &empty,
        );
        assert_eq!(out, [0.0; 4]);
    }
}
