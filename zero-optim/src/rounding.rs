//! Stochastic rounding of moments to bf16.

use half::bf16;

/// Rounds up or down with probabilities by the distance, so that the mean is exact. Infinities and
/// NaNs stay so. The random bits follow from `seed` and the element's position, which counts from
/// `first`.
pub(crate) fn round_stochastically(wide: &[f32], narrow: &mut [bf16], seed: u64, first: u64) {
    for (i, (wide, narrow)) in wide.iter().zip(narrow).enumerate() {
        // The finalizer of SplitMix64 (Steele et al., 2014) of the element's position and the seed.
        let mut x = (first + i as u64).wrapping_add(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let bits = wide.to_bits();
        *narrow = match wide.is_finite() {
            true => {
                let rounded = (bits.wrapping_add((x >> 48) as u32) >> 16) as u16;
                let up = bf16::from_bits(rounded);
                if up.is_finite() {
                    up
                } else {
                    bf16::from_bits((bits >> 16) as u16)
                }
            }
            false => bf16::from_f32(*wide),
        };
    }
}
