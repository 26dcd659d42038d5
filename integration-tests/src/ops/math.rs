//! Elementary functions that loops can vectorize, and sums in a fixed order.

/// Lanes of a sum: wide enough for one AVX-512 register.
const LANES: usize = 16;

/// e^x within 3e-7 relative; 0 below -87.3, infinite above 88.7.
///
/// x = k ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 7 (remainder below 1e-8),
/// and 2^k by writing k into the exponent.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4; // few bits, so that k * LN2_HIGH is exact
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.3, 88.3);
    let k = (clamped * std::f32::consts::LOG2_E).round_ties_even();
    let r = clamped - k * LN2_HIGH - k * LN2_LOW;
    let p = 1.0 / 5040.0;
    let p = p * r + 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let p = p * r + 1.0;
    let p = p * r + 1.0;
    // k is within -126..=127 after the clamp, so the cast does not saturate.
    let scale = f32::from_bits((((k as i32) + 127) << 23) as u32);
    let y = p * scale;
    let y = if x < -87.3 { 0.0 } else { y };
    let y = if x > 88.3 { f32::INFINITY } else { y };
    if x.is_nan() { x } else { y }
}

/// Sum of `f(i)` over `0..n`, in lanes and then over the lanes: an order fixed by `n` alone.
#[inline(always)]
pub(super) fn sum_by(n: usize, f: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let whole = n / LANES * LANES;
    for i in (0..whole).step_by(LANES) {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += f(i + lane);
        }
    }
    let mut total: f32 = lanes.iter().sum();
    for i in whole..n {
        total += f(i);
    }
    total
}

/// The greatest element; -inf if `xs` is empty.
#[inline(always)]
pub(super) fn max(xs: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut chunks = xs.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (m, &x) in lanes.iter_mut().zip(chunk) {
            *m = if x > *m { x } else { *m };
        }
    }
    lanes.iter().chain(chunks.remainder()).fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_3e7_of_fp64() {
        let mut worst = 0.0f64;
        for i in -870_000..880_000 {
            let x = i as f32 * 1e-4;
            let want = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - want).abs() / want);
        }
        assert!(worst < 3e-7, "worst relative error {worst:e}");
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
            assert_eq!(sum_by(n, |i| xs[i]), xs.iter().sum::<f32>(), "integers sum exactly");
            assert_eq!(max(&xs), xs.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        }
    }
}
