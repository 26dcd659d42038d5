//! Training without fp32 masters: the parameter with its remainder, and stochastic rounding.

mod common;

use common::{LENGTHS, SPECIAL, assert_same, hyper, scalars, squares, values};
use half::{bf16, f16};
use zero_kernels::host::{
    AdamSlices, RemainderSlices, RoundingKey, StochasticSlices, adam, adam_remainder, adam_stochastic,
    cast_stochastic, join, round_stochastic, split,
};
use zero_kernels::{Float, StepScalars, random};

#[test]
fn parameter_and_remainder_are_the_weight_exactly_and_the_parameter_is_nearest() {
    let step = if cfg!(miri) { 331 } else { 1 };
    for high in (0..=u16::MAX).step_by(step) {
        for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let w = f32::from_bits((u32::from(high) << 16) | low);
            let (param, remainder) = split(w);
            let back = join(param, remainder);
            if w.is_nan() {
                assert!(param.is_nan() && back.is_nan(), "{:#x}", w.to_bits());
                continue;
            }
            assert_eq!(back.to_bits(), w.to_bits());
            let nearest = <bf16 as Float>::from_f32(w);
            if low == 0x8000 {
                assert_eq!(param.to_bits(), high.wrapping_add(1), "ties go away from zero");
            } else {
                assert_eq!(param.to_bits(), nearest.to_bits(), "{w:e}");
            }
        }
    }
}

fn check_remainder<G: Float>() {
    for (i, &len) in LENGTHS.iter().enumerate() {
        let (start, grad) = (values::<f32>(len, 1, false), values::<G>(len, 2, true));
        let (scalars, hyper) = (scalars(1e-2, 0.37), hyper(i % 2 == 0));
        let (mut m, mut v) = (values::<f32>(len, 3, false), squares::<f32>(len, 4));
        let (mut master, mut m2, mut v2) = (start.clone(), m.clone(), v.clone());
        let (mut param, mut remainder): (Vec<bf16>, Vec<i16>) = start.iter().map(|&w| split(w)).unzip();
        let slices = RemainderSlices {
            param: &mut param[..],
            remainder: &mut remainder[..],
            first_moment: &mut m[..],
            second_moment: &mut v[..],
            grad: &grad[..],
        };
        adam_remainder(slices, &scalars, &hyper).unwrap();
        let slices = AdamSlices::<_, _, _, f32> {
            weights: &mut master[..],
            first_moment: &mut m2[..],
            second_moment: &mut v2[..],
            grad: &grad[..],
            param_out: None,
        };
        adam(slices, &scalars, &hyper).unwrap();
        let joined: Vec<f32> = param.iter().zip(&remainder).map(|(&p, &r)| join(p, r)).collect();
        assert_same("weights", &joined, &master);
        assert_same("first moment", &m, &m2);
        assert_same("second moment", &v, &v2);
    }
}

#[test]
fn adam_with_a_remainder_is_adam_with_a_master_bit_for_bit() {
    check_remainder::<f32>();
    check_remainder::<bf16>();
    check_remainder::<f16>();
}

#[test]
fn stochastic_rounding_goes_to_a_neighbour_and_is_right_on_average() {
    let n = if cfg!(miri) { 200u32 } else { 100_000 };
    for x in [1.0f32 + 1.0 / 1024.0, -3.0 - 1.0 / 256.0, 1e-39, 0.1, 6.1e-5] {
        let (low, high) =
            (bf16::from_bits((x.to_bits() >> 16) as u16), bf16::from_bits((x.to_bits() >> 16) as u16 + 1));
        let key = random::key(5, 6);
        let ups = (0..n).filter(|&i| round_stochastic(x, random::bits(key, u64::from(i))) == high).count();
        let downs = (0..n).filter(|&i| round_stochastic(x, random::bits(key, u64::from(i))) == low).count();
        assert_eq!(ups + downs, n as usize, "only neighbours");
        let share = f64::from(x.to_bits() & 0xffff) / 65536.0;
        // Five standard deviations of a fair draw.
        let bound = 5.0 * (share * (1.0 - share) * f64::from(n)).sqrt();
        assert!((ups as f64 - share * f64::from(n)).abs() <= bound, "{x}: {ups} of {n}, expected {share}");
    }
}

#[test]
fn stochastic_rounding_leaves_what_is_exact_and_what_is_not_finite() {
    for random in [0, 1, 0x8000, 0xffff, u32::MAX] {
        for x in SPECIAL {
            let y = Float::to_f32(round_stochastic(x, random));
            let exact = x.to_bits() & 0xffff == 0;
            assert!(!exact || y.to_bits() == x.to_bits() || x.is_nan(), "{x}");
            assert_eq!(y.is_nan(), x.is_nan());
        }
        assert!(round_stochastic(f32::from_bits(u32::MAX), random).is_nan(), "a NaN of all ones");
    }
}

#[test]
fn stochastic_rounding_does_not_depend_on_how_a_range_is_cut() {
    let n = 301;
    let (src, grad) = (values::<f32>(n, 1, false), values::<bf16>(n, 2, false));
    let (scalars, hyper, key) = (scalars(1e-2, 0.5), hyper(true), random::key(9, 1));
    // The range starts just below 2^32 elements: both halves of the number count.
    let first_element = (1 << 32) - 100;
    let run = |cuts: &[usize]| {
        let mut weights: Vec<bf16> = src.iter().map(|&w| Float::from_f32(w)).collect();
        let (mut m, mut v, mut cast) = (values::<f32>(n, 3, false), squares::<f32>(n, 4), vec![bf16::NAN; n]);
        for pair in cuts.windows(2) {
            let range = pair[0]..pair[1];
            let key = RoundingKey { key, first_element: first_element + range.start as u64 };
            cast_stochastic(&src[range.clone()], &mut cast[range.clone()], 3.0, key).unwrap();
            let slices = StochasticSlices {
                weights: &mut weights[range.clone()],
                first_moment: &mut m[range.clone()],
                second_moment: &mut v[range.clone()],
                grad: &grad[range.clone()],
            };
            adam_stochastic(slices, &scalars, &hyper, key).unwrap();
        }
        (weights, m, v, cast)
    };
    let whole = run(&[0, n]);
    assert_eq!(run(&[0, 1, 8, 100, 117, n]), whole);
    // Element by element, plainly.
    for (i, &x) in src.iter().enumerate() {
        let bits = random::bits(key, first_element + i as u64);
        assert_eq!(whole.3[i], round_stochastic(x * 3.0, bits));
    }
}

#[test]
fn stochastic_adam_moves_weights_that_rounding_to_nearest_would_leave() {
    let (n, hyper) = (if cfg!(miri) { 400 } else { 40_000 }, hyper(true));
    let scalars = StepScalars::new(1, 1e-4, &hyper, 1.0);
    let grad = vec![1f32; n];
    let (mut weights, mut m, mut v) = (vec![bf16::ONE; n], vec![0f32; n], vec![0f32; n]);
    let slices = StochasticSlices {
        weights: &mut weights[..],
        first_moment: &mut m[..],
        second_moment: &mut v[..],
        grad: &grad[..],
    };
    adam_stochastic(slices, &scalars, &hyper, RoundingKey { key: random::key(1, 1), first_element: 0 }).unwrap();
    let mean = weights.iter().map(|w| f64::from(w.to_f32())).sum::<f64>() / n as f64;
    // The step is 1e-4 and the decay 1e-5; below 1 the neighbours are 2^-8 apart, so one in 36 weights moves.
    let deviation = (2f64.powi(-8) * 1.1e-4 / n as f64).sqrt();
    assert!((mean - (1.0 - 1.1e-4)).abs() < 5.0 * deviation, "{mean}");
}

#[test]
fn slices_of_different_lengths_are_refused_and_a_skipped_step_writes_nothing() {
    let (hyper, key) = (hyper(true), RoundingKey { key: 0, first_element: 0 });
    let (mut w, mut r, mut m, mut v, g) = ([bf16::ONE; 3], [5i16; 3], [1f32; 3], [1f32; 3], [1f32; 3]);
    let short = StochasticSlices { weights: &mut w, first_moment: &mut m[1..], second_moment: &mut v, grad: &g };
    assert!(adam_stochastic(short, &scalars(1e-3, 1.0), &hyper, key).is_err());
    let short = RemainderSlices {
        param: &mut w,
        remainder: &mut r[1..],
        first_moment: &mut m,
        second_moment: &mut v,
        grad: &g,
    };
    assert!(adam_remainder(short, &scalars(1e-3, 1.0), &hyper).is_err());
    assert!(cast_stochastic(&g, &mut w[1..], 1.0, key).is_err());
    let all = StochasticSlices { weights: &mut w, first_moment: &mut m, second_moment: &mut v, grad: &g };
    adam_stochastic(all, &StepScalars::skipped(), &hyper, key).unwrap();
    let all =
        RemainderSlices { param: &mut w, remainder: &mut r, first_moment: &mut m, second_moment: &mut v, grad: &g };
    adam_remainder(all, &StepScalars::skipped(), &hyper).unwrap();
    assert_eq!((w, r, m, v), ([bf16::ONE; 3], [5; 3], [1.0; 3], [1.0; 3]));
}
