//! Every operation against its plain loop, bit for bit: all dtypes, lengths, misaligned starts,
//! special values, poisoned outputs, threads.

use half::{bf16, f16};
use zero_kernels::adam::{self, AdamSlices};
use zero_kernels::host::{self, Workers};
use zero_kernels::{AdamScalars, Float, reference};

use crate::common::{LENGTHS, assert_same, hyper, scalars, squares, values};

/// Elements before the range, which must stay unchanged.
const OFFSETS: [usize; 3] = [0, 1, 3];

fn workers() -> Vec<Workers> {
    let counts: &[usize] = if cfg!(miri) { &[1] } else { &[1, 2, 5] };
    counts.iter().map(|&n| Workers::new(n).unwrap()).collect()
}

#[derive(Clone)]
struct State<W, M, P> {
    weights: Vec<W>,
    first_moment: Vec<M>,
    second_moment: Vec<M>,
    param_out: Vec<P>,
}

impl<W: Float, M: Float, P: Float> State<W, M, P> {
    /// Finite weights and moments; the parameter output is poisoned.
    fn new(len: usize) -> Self {
        Self {
            weights: values(len, 1, false),
            first_moment: values(len, 2, false),
            second_moment: squares(len, 3),
            param_out: vec![P::from_f32(f32::NAN); len],
        }
    }

    fn slices<'a, G>(
        &'a mut self,
        grad: &'a [G],
        from: usize,
        with_param: bool,
    ) -> AdamSlices<'a, W, M, G, P> {
        AdamSlices {
            weights: &mut self.weights[from..],
            first_moment: &mut self.first_moment[from..],
            second_moment: &mut self.second_moment[from..],
            grad: &grad[from..],
            param_out: with_param.then_some(&mut self.param_out[from..]),
        }
    }

    fn assert_same(&self, what: &str, other: &Self) {
        macro_rules! same {
            ($($field:ident),*) => {
                $(
                    let field = stringify!($field);
                    assert_same(&format!("{what}: {field}"), &self.$field, &other.$field);
                )*
            };
        }
        same!(weights, first_moment, second_moment, param_out);
    }
}

fn check_adam<W: Float, M: Float, G: Float, P: Float>(with_param: bool) {
    let what = format!("{} {} {} {}", W::DTYPE, M::DTYPE, G::DTYPE, P::DTYPE);
    for (i, &len) in LENGTHS.iter().enumerate() {
        let from = OFFSETS[i % OFFSETS.len()];
        let (start, grad) = (
            State::<W, M, P>::new(len + from),
            values::<G>(len + from, 4, true),
        );
        let scalars = scalars(1e-2, 0.37);
        let hyper = hyper(i % 2 == 0);
        let mut expected = start.clone();
        reference::adam(expected.slices(&grad, from, with_param), &scalars, &hyper).unwrap();
        let mut ours = start.clone();
        adam::adam(ours.slices(&grad, from, with_param), &scalars, &hyper).unwrap();
        ours.assert_same(&what, &expected);
        for workers in workers() {
            let mut ours = start.clone();
            workers
                .adam(ours.slices(&grad, from, with_param), &scalars, &hyper)
                .unwrap();
            ours.assert_same(&format!("{what}, {} threads", workers.threads()), &expected);
        }
    }
}

#[test]
fn adam_with_fp32_masters() {
    check_adam::<f32, f32, f32, f32>(false);
    check_adam::<f32, f32, bf16, f32>(false);
    check_adam::<f32, f32, f16, f32>(false);
    check_adam::<f32, f32, f32, f32>(true);
    check_adam::<f32, f32, f32, bf16>(true);
    check_adam::<f32, f32, f32, f16>(true);
    check_adam::<f32, f32, bf16, f32>(true);
    check_adam::<f32, f32, bf16, bf16>(true);
    check_adam::<f32, f32, bf16, f16>(true);
    check_adam::<f32, f32, f16, f32>(true);
    check_adam::<f32, f32, f16, bf16>(true);
    check_adam::<f32, f32, f16, f16>(true);
}

#[test]
fn adam_on_sixteen_bit_weights() {
    check_adam::<bf16, f32, bf16, f32>(false);
    check_adam::<f16, f32, f16, f32>(false);
    check_adam::<bf16, bf16, bf16, f32>(false);
    check_adam::<f16, f16, f16, f32>(false);
}

#[test]
fn splits_change_no_bit_of_adam() {
    let len = if cfg!(miri) { 19 } else { 203 };
    let grad = values::<bf16>(len, 4, true);
    let (start, scalars, hyper) = (
        State::<f32, f32, bf16>::new(len),
        scalars(1e-2, 0.37),
        hyper(true),
    );
    let mut whole = start.clone();
    adam::adam(whole.slices(&grad, 0, true), &scalars, &hyper).unwrap();
    for cut in 0..=len {
        let mut parts = start.clone();
        let (a, b) = parts.slices(&grad, 0, true).split_at(cut);
        adam::adam(a, &scalars, &hyper).unwrap();
        adam::adam(b, &scalars, &hyper).unwrap();
        parts.assert_same(&format!("cut at {cut}"), &whole);
    }
}

#[test]
fn skipped_step_writes_nothing() {
    let grad = values::<bf16>(255, 4, true);
    let start = State::<f32, f32, bf16>::new(255);
    let mut after = start.clone();
    let skip = AdamScalars {
        skip: 1,
        ..scalars(1e-2, 1.0)
    };
    adam::adam(after.slices(&grad, 0, true), &skip, &hyper(true)).unwrap();
    after.assert_same("skipped", &start);
    reference::adam(after.slices(&grad, 0, true), &skip, &hyper(true)).unwrap();
    after.assert_same("skipped by the oracle", &start);
}

fn check_cast<S: Float, D: Float>() {
    for (i, &len) in LENGTHS.iter().enumerate() {
        let from = OFFSETS[i % OFFSETS.len()];
        for scale in [1.0, 0.125, 3.7e4] {
            let src = values::<S>(len + from, 5, true);
            let poison = vec![D::from_f32(f32::NAN); len + from];
            let mut expected = poison.clone();
            reference::cast(&src[from..], &mut expected[from..], scale).unwrap();
            let mut ours = poison.clone();
            host::cast(&src[from..], &mut ours[from..], scale).unwrap();
            assert_same(
                &format!("cast {} to {}", S::DTYPE, D::DTYPE),
                &ours,
                &expected,
            );
            for workers in workers() {
                let mut ours = poison.clone();
                workers
                    .cast(&src[from..], &mut ours[from..], scale)
                    .unwrap();
                assert_same("cast in threads", &ours, &expected);
            }
        }
    }
}

#[test]
fn cast_between_all_types() {
    check_cast::<f32, f32>();
    check_cast::<f32, bf16>();
    check_cast::<f32, f16>();
    check_cast::<bf16, f32>();
    check_cast::<bf16, bf16>();
    check_cast::<bf16, f16>();
    check_cast::<f16, f32>();
    check_cast::<f16, bf16>();
    check_cast::<f16, f16>();
}

fn check_accumulate<G: Float>() {
    for (i, &len) in LENGTHS.iter().enumerate() {
        let from = OFFSETS[i % OFFSETS.len()];
        let grad = values::<G>(len + from, 6, true);
        let start = values::<f32>(len + from, 7, false);
        let mut expected = start.clone();
        reference::accumulate(&grad[from..], &mut expected[from..]).unwrap();
        let mut ours = start.clone();
        host::accumulate(&grad[from..], &mut ours[from..]).unwrap();
        assert_same("accumulate", &ours, &expected);
        for workers in workers() {
            let mut ours = start.clone();
            workers
                .accumulate(&grad[from..], &mut ours[from..])
                .unwrap();
            assert_same("accumulate in threads", &ours, &expected);
        }
    }
}

#[test]
fn accumulate_from_all_types() {
    check_accumulate::<f32>();
    check_accumulate::<bf16>();
    check_accumulate::<f16>();
}

fn check_stats<G: Float>() {
    for &len in LENGTHS {
        let grad = values::<G>(len, 8, true);
        let ours = host::grad_stats(&grad);
        let expected = reference::grad_stats(&grad);
        assert_eq!(ours.nonfinite, expected.nonfinite);
        // The rounding error of an fp64 sum of `len` nonnegative terms in two orders.
        let bound = len as f64 * f64::EPSILON * expected.sum_sq;
        assert!(
            (ours.sum_sq - expected.sum_sq).abs() <= bound,
            "{} and {}",
            ours.sum_sq,
            expected.sum_sq
        );
        for from in OFFSETS {
            // The same values at another alignment.
            let mut moved = vec![G::from_f32(1.0); from];
            moved.extend_from_slice(&grad);
            for workers in workers() {
                let again = workers.grad_stats(&moved[from..]);
                assert_eq!(
                    again.sum_sq.to_bits(),
                    ours.sum_sq.to_bits(),
                    "{} threads",
                    workers.threads()
                );
                assert_eq!(again.nonfinite, ours.nonfinite);
            }
        }
    }
}

#[test]
fn grad_stats_bits_are_reproducible() {
    check_stats::<f32>();
    check_stats::<bf16>();
    check_stats::<f16>();
}

/// The documented order of the sum, written out plainly. The CUDA kernel has the same order.
#[test]
fn grad_stats_follow_the_documented_order() {
    fn pairwise(mut lanes: Vec<f64>) -> f64 {
        while lanes.len() > 1 {
            let upper = lanes.split_off(lanes.len() / 2);
            lanes.iter_mut().zip(upper).for_each(|(a, b)| *a += b);
        }
        lanes[0]
    }

    fn lanes(values: impl Iterator<Item = f64>) -> Vec<f64> {
        let mut sums = vec![0f64; 256];
        values.enumerate().for_each(|(i, x)| sums[i % 256] += x);
        sums
    }
    fn strip(strip: &[f32]) -> f64 {
        let sums = lanes(strip.iter().map(|&x| f64::from(x) * f64::from(x)));
        pairwise(sums.chunks(8).map(|row| pairwise(row.to_vec())).collect())
    }
    fn chunk(chunk: &[f32]) -> f64 {
        let mut strips: Vec<_> = chunk.chunks(4096).map(strip).collect();
        strips.resize(8, 0.0);
        pairwise(strips)
    }
    // More chunks than the 256 lanes that add them.
    let long = if cfg!(miri) { 4097 } else { 257 * 32_768 + 5 };

    for len in LENGTHS.iter().copied().chain([long]) {
        let grad = values::<f32>(len, 8, false);
        let expected = pairwise(lanes(grad.chunks(32_768).map(chunk)));
        assert_eq!(
            host::grad_stats(&grad).sum_sq.to_bits(),
            expected.to_bits(),
            "{len}"
        );
    }
}

#[test]
fn sum_of_squares_keeps_extremes() {
    let huge = host::grad_stats(&[f32::MAX; 1000]);
    assert_eq!(huge.nonfinite, 0);
    let max = f64::from(f32::MAX);
    let least = f64::from(f32::from_bits(1));
    assert!((huge.sum_sq / (1000.0 * max * max) - 1.0).abs() < 1e-12);
    let tiny = host::grad_stats(&[f32::from_bits(1); 16]);
    assert_eq!(tiny.sum_sq, 16.0 * least * least);
}

#[test]
fn different_lengths_are_refused() {
    let mut w = [0f32; 4];
    let mut m = [0f32; 4];
    let mut v = [0f32; 4];
    let mut p = [bf16::ZERO; 3];
    let slices = AdamSlices {
        weights: &mut w[..],
        first_moment: &mut m[..],
        second_moment: &mut v[..],
        grad: &[0f32; 4][..],
        param_out: Some(&mut p[..]),
    };

    let error = adam::adam(slices, &scalars(1e-3, 1.0), &hyper(true)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "adam: param_out: expected 4 elements, got 3"
    );
    assert!(host::cast(&[1f32; 2], &mut [0f32; 3], 1.0).is_err());
    assert!(host::accumulate(&[1f32; 2], &mut [0f32; 3]).is_err());
    let workers = Workers::new(1).unwrap();
    assert!(workers.cast(&[1f32; 2], &mut [0f32; 3], 1.0).is_err());
    assert!(workers.accumulate(&[1f32; 2], &mut [0f32; 3]).is_err());
}
