//! Random numbers that are a function of (seed, step, element): no state, so that neither the number of ranks nor
//! the cut of a range changes them. The kernels' twin is in cuda/prelude.cuh.

/// The key of a step: mixes seed and step, so that neighbouring ones have nothing in common.
pub fn key(seed: u64, step: u64) -> u64 {
    let mut x = seed.wrapping_add(step.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// 32 random bits for the element of this number in the whole model.
#[inline(always)]
pub fn bits(key: u64, element: u64) -> u32 {
    mix(mix(element as u32 ^ key as u32) ^ (element >> 32) as u32 ^ (key >> 32) as u32)
}

/// A permutation of 32-bit words in which every output bit depends on every input bit.
#[inline(always)]
fn mix(mut x: u32) -> u32 {
    x = (x ^ (x >> 16)).wrapping_mul(0x21f0_aaad);
    x = (x ^ (x >> 15)).wrapping_mul(0xd35a_2d97);
    x ^ (x >> 15)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 16 bits are what rounding uses: each of 16 ranges gets its share, for neighbouring elements, steps and seeds.
    #[test]
    fn the_low_bits_are_spread_evenly() {
        let n = if cfg!(miri) { 256 } else { 1u64 << 14 };
        for draw in [|i: u64| bits(key(1, 2), i), |i| bits(key(1, i), 7), |i| bits(key(i, 3), 1 << 33)] {
            let mut counts = [0u32; 16];
            (0..n).for_each(|i| counts[(draw(i) >> 12 & 15) as usize] += 1);
            let expected = n as f64 / 16.0;
            let chi2: f64 = counts.iter().map(|&c| (f64::from(c) - expected).powi(2) / expected).sum();
            // 15 degrees of freedom: above 44 once in 10,000 draws of keys; these keys are fixed.
            assert!(chi2 < 44.0, "{counts:?}");
        }
    }

    #[test]
    fn halves_of_the_number_matter() {
        let k = key(0, 0);
        assert_ne!(bits(k, 1), bits(k, 1 << 32));
        assert_ne!(bits(k, 0), bits(k ^ (1 << 40), 0));
    }
}
