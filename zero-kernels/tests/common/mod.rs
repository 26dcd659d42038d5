//! Test inputs: values of every kind (normal, denormal, infinite, NaN), and lengths around vector
//! widths.
// Each test binary uses a part of it.
#![allow(unreachable_pub, dead_code)]

use zero_kernels::{AdamHyper, AdamScalars, Float};

/// Lengths around vector widths, and one that threads share.
pub const LENGTHS: &[usize] = if cfg!(miri) {
    &[0, 1, 37]
} else {
    &[0, 1, 7, 8, 9, 255, (1 << 20) + 3]
};

/// A SplitMix64 generator.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A value of magnitude 2^-20 to 2^3 and either sign.
    pub fn value(&mut self) -> f32 {
        let r = self.next();
        let magnitude =
            f32::from_bits(((107 + (r % 23) as u32) << 23) | (r >> 41) as u32 & 0x7f_ffff);
        if r & (1 << 40) == 0 {
            magnitude
        } else {
            -magnitude
        }
    }
}

/// Zeroes, infinities, NaN, denormals and the limits of fp16 and fp32.
pub const SPECIAL: [f32; 14] = [
    0.0,
    -0.0,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    1e-45,
    -1e-40,
    6e-8,
    65504.0,
    65520.0,
    f32::MAX,
    f32::MIN,
    f32::MIN_POSITIVE,
    1.0,
];

/// `len` random values; if `special`, about one in 16 is from [`SPECIAL`].
pub fn values<T: Float>(len: usize, seed: u64, special: bool) -> Vec<T> {
    let mut random = Random(seed);
    let mut next = || match random.next() {
        r if special && r.is_multiple_of(16) => SPECIAL[(r >> 8) as usize % SPECIAL.len()],
        _ => random.value(),
    };
    (0..len).map(|_| T::from_f32(next())).collect()
}

/// `len` random values that are not negative: second moments.
pub fn squares<T: Float>(len: usize, seed: u64) -> Vec<T> {
    values::<f32>(len, seed, false)
        .into_iter()
        .map(|x| T::from_f32(x * x))
        .collect()
}

/// Asserts equal bits, except for NaN payloads.
pub fn assert_same<T: Float>(what: &str, ours: &[T], theirs: &[T]) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
        let a = a.to_f32();
        let b = b.to_f32();
        assert!(
            a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()),
            "{what}: element {i} of {}: {a:e}, expected {b:e}",
            ours.len()
        );
    }
}

/// Step 3 of AdamW.
pub fn scalars(lr: f32, grad_scale: f32) -> AdamScalars {
    AdamScalars {
        grad_scale,
        lr,
        step_size: (f64::from(lr) / (1.0 - 0.9f64.powi(3))) as f32,
        bias_correction2_sqrt: (1.0 - 0.999f64.powi(3)).sqrt() as f32,
        one_minus_beta1: (1.0 - 0.9f64) as f32,
        beta2: 0.999,
        one_minus_beta2: (1.0 - 0.999f64) as f32,
        skip: 0,
    }
}

pub fn hyper(decoupled: bool) -> AdamHyper {
    AdamHyper {
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.1,
        decoupled,
        bias_correction: true,
    }
}
