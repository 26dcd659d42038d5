//! Weights as a bf16 parameter and a 16-bit remainder, without fp32 masters.

use half::{bf16, f16};
use zero_kernels::host::{AdamSlices, RemainderSlices, adam, adam_remainder, join, split};
use zero_kernels::{AdamScalars, Float};

use crate::common::{LENGTHS, assert_same, hyper, scalars, squares, values};

#[test]
fn parameter_and_remainder_are_the_weight() {
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
                assert_eq!(
                    param.to_bits(),
                    high.wrapping_add(1),
                    "ties go away from zero"
                );
            } else {
                assert_eq!(param.to_bits(), nearest.to_bits(), "{w:e}");
            }
        }
    }
}

fn check_remainder<G: Float>() {
    for (i, &len) in LENGTHS.iter().enumerate() {
        let start = values::<f32>(len, 1, false);
        let grad = values::<G>(len, 2, true);
        let scalars = scalars(1e-2, 0.37);
        let hyper = hyper(i % 2 == 0);
        let mut m = values::<f32>(len, 3, false);
        let mut v = squares::<f32>(len, 4);
        let mut master = start.clone();
        let mut m2 = m.clone();
        let mut v2 = v.clone();
        let (mut param, mut remainder): (Vec<bf16>, Vec<i16>) =
            start.iter().map(|&w| split(w)).unzip();
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
        let joined: Vec<f32> = param
            .iter()
            .zip(&remainder)
            .map(|(&p, &r)| join(p, r))
            .collect();
        assert_same("weights", &joined, &master);
        assert_same("first moment", &m, &m2);
        assert_same("second moment", &v, &v2);
    }
}

#[test]
fn remainder_and_master_have_equal_bits() {
    check_remainder::<f32>();
    check_remainder::<bf16>();
    check_remainder::<f16>();
}

#[test]
fn short_slices_are_refused() {
    let hyper = hyper(true);
    let (mut w, mut r, mut m, mut v, g) =
        ([bf16::ONE; 3], [5i16; 3], [1f32; 3], [1f32; 3], [1f32; 3]);
    let short = RemainderSlices {
        param: &mut w,
        remainder: &mut r[1..],
        first_moment: &mut m,
        second_moment: &mut v,
        grad: &g,
    };
    assert!(adam_remainder(short, &scalars(1e-3, 1.0), &hyper).is_err());
    let all = RemainderSlices {
        param: &mut w,
        remainder: &mut r,
        first_moment: &mut m,
        second_moment: &mut v,
        grad: &g,
    };
    adam_remainder(
        all,
        &AdamScalars {
            skip: 1,
            ..AdamScalars::default()
        },
        &hyper,
    )
    .unwrap();
    assert_eq!((w, r, m, v), ([bf16::ONE; 3], [5; 3], [1.0; 3], [1.0; 3]));
}
