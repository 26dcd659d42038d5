//! Elementary functions that loops can vectorize, and sums in a fixed order.

/// Lanes of a sum: wide enough for one AVX-512 register.
const LANES: usize = 16;

/// e^x within 8e-8 relative; 0 below -87.69, infinite above 88.38.
///
/// x = k ln 2 + r with |r| <= ln 2 / 2; e^r by the polynomial 1 + r + r^2 q(r) of degree 6 with the
/// least relative error (3e-9), and 2^k by writing k + 127 into the exponent: 0 for k = -127,
/// infinite for k = 128. A CPU without fused multiply-add computes it in software: slowly, with the
/// same bits.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // 1.5 * 2^23 + 127: a sum with it is rounded to an integer, whose low bits are k + 127.
    const ROUND: f32 = 12_583_039.0;
    const LN2_HIGH: f32 = std::f32::consts::LN_2;
    const LN2_LOW: f32 = -1.904_654_3e-9;
    // A NaN stays a NaN.
    let x = x.clamp(-88.0, 89.0);
    let biased = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let k = biased - ROUND;
    let r = k.mul_add(-LN2_LOW, k.mul_add(-LN2_HIGH, x));
    let p = 0.001_381_454;
    let p = r.mul_add(p, 0.008_368_745);
    let p = r.mul_add(p, 0.041_668_39);
    let p = r.mul_add(p, 0.166_665_21);
    let p = r.mul_add(p, 0.499_999_94);
    let p = r.mul_add(p, 1.0);
    let p = r.mul_add(p, 1.0);
    p * f32::from_bits(biased.to_bits() << 23)
}

/// Replaces every x by e^(x - shift), and returns their sum in the order of [`sum_of`].
#[inline(always)]
pub(crate) fn exp_and_sum(xs: &mut [f32], shift: f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, rest) = xs.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for (sum, x) in lanes.iter_mut().zip(chunk) {
            *x = exp(*x - shift);
            *sum += *x;
        }
    }
    let mut total: f32 = lanes.iter().sum();
    for x in rest {
        *x = exp(*x - shift);
        total += *x;
    }
    total
}

/// Sum of `f` of the elements at each index of slices of equal length, in lanes and then over the
/// lanes: an order fixed by the length alone.
#[inline(always)]
pub(crate) fn sum_of<const N: usize>(slices: [&[f32]; N], f: impl Fn([f32; N]) -> f32) -> f32 {
    let n = slices[0].len();
    let slices = slices.map(|x| x[..n].as_chunks::<LANES>());
    let mut lanes = [0.0f32; LANES];
    for i in 0..n / LANES {
        let chunks = slices.map(|(chunks, _)| &chunks[i]);
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += f(chunks.map(|x| x[lane]));
        }
    }
    let mut total: f32 = lanes.iter().sum();
    for i in 0..n % LANES {
        total += f(slices.map(|(_, rest)| rest[i]));
    }
    total
}

/// The greatest element; -inf if `xs` is empty.
#[inline(always)]
pub(crate) fn max(xs: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut chunks = xs.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (m, &x) in lanes.iter_mut().zip(chunk) {
            *m = if x > *m { x } else { *m };
        }
    }
    lanes
        .iter()
        .chain(chunks.remainder())
        .fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_its_bound_of_fp64() {
        let mut worst = 0.0f64;
        for i in -870_000..880_000 {
            let x = i as f32 * 1e-4;
            let want = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - want).abs() / want);
        }
        assert!(worst < 8e-8, "worst relative error {worst:e}");
    }

    #[test]
    fn exp_at_the_ends() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e30), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn sums_and_maxima_of_any_length() {
        for n in 0..70 {
            let xs: Vec<f32> = (0..n).map(|i| (i as f32 * 37.0) % 11.0 - 5.0).collect();
            assert_eq!(
                sum_of([&xs], |[x]| x),
                xs.iter().sum::<f32>(),
                "integers sum exactly"
            );
            assert_eq!(
                max(&xs),
                xs.iter().copied().fold(f32::NEG_INFINITY, f32::max)
            );
        }
    }
}
