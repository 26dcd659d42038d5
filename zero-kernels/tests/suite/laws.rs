//! Property tests over lengths, alignments, splits and numbers of threads.

use half::{bf16, f16};
use proptest::prelude::*;
use zero_kernels::adam::{self, AdamSlices};
use zero_kernels::host::{self, Workers};
use zero_kernels::{AdamScalars, Float, GradStats, reference};

use crate::common::{assert_same, hyper, scalars, squares, values};

pub(crate) fn config(cases: u32) -> ProptestConfig {
    let factor = std::env::var("ZERO_PROPTEST_FACTOR")
        .ok()
        .and_then(|f| f.parse().ok())
        .unwrap_or(1);
    ProptestConfig {
        cases: cases.saturating_mul(factor),
        failure_persistence: None,
        ..Default::default()
    }
}

/// Runs `step` on the middle of new slices, and returns the whole slices, guards included.
fn adam_within<W: Float, M: Float, G: Float>(
    (before, len, after): (usize, usize, usize),
    seed: u64,
    step: impl FnOnce(AdamSlices<'_, W, M, G, bf16>),
) -> (Vec<W>, Vec<M>, Vec<M>) {
    let all = before + len + after;
    let mut w = values::<W>(all, seed, false);
    let mut m = values::<M>(all, seed + 1, false);
    let mut v = squares::<M>(all, seed + 2);
    let g = values::<G>(all, seed + 3, true);
    let range = before..before + len;
    step(AdamSlices {
        weights: &mut w[range.clone()],
        first_moment: &mut m[range.clone()],
        second_moment: &mut v[range.clone()],
        grad: &g[range.clone()],
        param_out: None,
    });
    (w, m, v)
}

fn check_adam<W: Float, M: Float, G: Float>(
    shape: (usize, usize, usize),
    seed: u64,
    decoupled: bool,
    lr: f32,
) {
    let scalars = scalars(lr, 0.5);
    let hyper = hyper(decoupled);
    let expected = adam_within::<W, M, G>(shape, seed, |s| {
        reference::adam(s, &scalars, &hyper).unwrap()
    });
    let ours = adam_within::<W, M, G>(shape, seed, |s| adam::adam(s, &scalars, &hyper).unwrap());
    assert_same("weights and guards", &ours.0, &expected.0);
    assert_same("first moment and guards", &ours.1, &expected.1);
    assert_same("second moment and guards", &ours.2, &expected.2);
}

#[test]
fn too_many_threads_are_refused() {
    let error = Workers::new(usize::MAX).unwrap_err().to_string();
    assert_eq!(
        error,
        format!(
            "failed to start {} threads: the maximum is 4096",
            usize::MAX
        )
    );
}

proptest! {
    #![proptest_config(config(48))]

    /// Adam has the plain loop's bits and writes nothing outside the range.
    #[test]
    fn adam_is_the_plain_loop(
        before in 0usize..20,
        len in 0usize..300,
        after in 0usize..20,
        seed: u64,
        decoupled: bool,
        lr in 1e-6f32..1.0,
    ) {
        let shape = (before, len, after);
        let seed = seed >> 8;
        check_adam::<f32, f32, f32>(shape, seed, decoupled, lr);
        check_adam::<f32, f32, bf16>(shape, seed, decoupled, lr);
        check_adam::<bf16, f32, bf16>(shape, seed, decoupled, lr);
        check_adam::<bf16, bf16, bf16>(shape, seed, decoupled, lr);
        check_adam::<f16, f16, f16>(shape, seed, decoupled, lr);
    }

    /// A gradient of zeros without decay, from zero moments, changes nothing.
    #[test]
    fn no_gradient_no_change(len in 0usize..200, seed: u64) {
        let start = values::<f32>(len, seed, false);
        let mut w = start.clone();
        let mut m = vec![0f32; len];
        let mut v = vec![0f32; len];
        let hyper = zero_kernels::AdamHyper { weight_decay: 0.0, ..hyper(true) };
        let slices = AdamSlices::<_, _, _, f32> {
            weights: &mut w[..],
            first_moment: &mut m[..],
            second_moment: &mut v[..],
            grad: &vec![0f32; len][..],
            param_out: None,
        };
        adam::adam(slices, &AdamScalars::new(1, 1e-2, &hyper, 1.0), &hyper).unwrap();
        prop_assert_eq!(w, start);
        prop_assert!(m.iter().chain(&v).all(|&x| x == 0.0));
    }

    /// Widening, scaling by a power of two, and the inverses of both are exact.
    #[test]
    fn casts_invert(len in 0usize..300, seed: u64) {
        let start = values::<bf16>(len, seed, false);
        let mut wide = vec![0f32; len];
        let mut back = vec![bf16::ZERO; len];
        host::cast(&start, &mut wide, 8.0).unwrap();
        host::cast(&wide, &mut back, 0.125).unwrap();
        prop_assert_eq!(back, start);
    }

    #[test]
    fn non_finite_values_are_all_counted(
        len in 1usize..20_000,
        places in prop::collection::btree_set(0usize..20_000, 0..20),
        seed: u64,
    ) {
        let mut grad = values::<f32>(len, seed, false);
        let places: Vec<usize> = places.into_iter().filter(|&i| i < len).collect();
        for (n, &i) in places.iter().enumerate() {
            grad[i] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][n % 3];
        }
        let stats = host::grad_stats(&grad);
        prop_assert_eq!(stats.nonfinite, places.len() as u64);
        places.iter().for_each(|&i| grad[i] = 0.0);
        prop_assert_eq!(host::grad_stats(&grad), GradStats { nonfinite: 0, ..stats });
    }
}

proptest! {
    #![proptest_config(config(12))]

    #[test]
    fn threads_change_no_bit(len in 0usize..400_000, threads in 1usize..6, seed: u64) {
        let workers = Workers::new(threads).unwrap();
        let grad = values::<bf16>(len, seed >> 8, true);
        let one = host::grad_stats(&grad);
        let many = workers.grad_stats(&grad);
        prop_assert_eq!((one.sum_sq.to_bits(), one.nonfinite), (many.sum_sq.to_bits(), many.nonfinite));
        let mut a = vec![0f32; len];
        let mut b = vec![0f32; len];
        host::accumulate(&grad, &mut a).unwrap();
        workers.accumulate(&grad, &mut b).unwrap();
        assert_same("accumulate", &a, &b);
    }
}
