//! Counter-based random numbers: number `i` of stream `key` is a pure function of both.
//!
//! There is no state between draws: a rank generates its part of a parameter, or its rows of a
//! batch, without the rest, and a resumed run draws the same numbers as an uninterrupted one.
//!
//! The function is Philox4x32 with 10 rounds (Salmon, Moraes, Dror and Shaw, "Parallel random
//! numbers: as easy as 1, 2, 3", SC 2011), tested against the authors' known answers.

/// A stream of random numbers, numbered from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter {
    key: [u32; 2],
}

impl Counter {
    /// The stream of `seed` for `purpose`; streams of different purposes are independent.
    pub fn new(seed: u64, purpose: &str) -> Self {
        // Seed and name pass through the generator, so that similar seeds have unrelated keys.
        let name = fnv1a(purpose.as_bytes());
        let seed_key = [seed as u32, (seed >> 32) as u32];
        let mixed = philox(
            [
                name as u32,
                (name >> 32) as u32,
                purpose.len() as u32,
                0x5a45_524f,
            ],
            seed_key,
        );
        Self {
            key: [mixed[0], mixed[1]],
        }
    }

    /// The key of Philox.
    pub(crate) fn key(&self) -> [u32; 2] {
        self.key
    }

    /// Four numbers, each uniform over all of `u32`, for the counter `(high, low)`.
    pub fn four(&self, high: u64, low: u64) -> [u32; 4] {
        philox(
            [
                low as u32,
                (low >> 32) as u32,
                high as u32,
                (high >> 32) as u32,
            ],
            self.key,
        )
    }

    /// The stream of number `low` of `high`; streams of different numbers are independent.
    pub fn stream(&self, high: u64, low: u64) -> Self {
        let [a, b, ..] = self.four(high, low);
        Self { key: [a, b] }
    }

    /// Writes the numbers of [`Self::four`] of [`BLOCK`] / 4 counters from `(high, low)` on.
    ///
    /// Two words of a counter are one u64, because that is what SIMD multiplies: an iteration has
    /// no branch and depends on no other, so the loop vectorizes for the target of the function
    /// that it is inlined into.
    #[inline(always)]
    pub(crate) fn block(&self, out: &mut [u32; BLOCK], high: u64, low: u64) {
        let mut key = self.key;
        let keys: [[u64; 2]; ROUNDS] = std::array::from_fn(|_| {
            let now = key;
            key = next_key(key);
            now.map(u64::from)
        });

        let mut pairs = [[0u64; 2]; BLOCK / 4];
        for (i, pair) in pairs.iter_mut().enumerate() {
            let mut left = low + i as u64;
            let mut right = high;
            for key in keys {
                let of_left = (left & LOW) * LEFT;
                let of_right = (right & LOW) * RIGHT;
                // The halves of a product trade places: the high one, which the key changes, is the
                // first word.
                left = of_right.rotate_left(32) ^ (left >> 32) ^ key[0];
                right = of_left.rotate_left(32) ^ (right >> 32) ^ key[1];
            }
            *pair = [left, right];
        }

        for (four, [left, right]) in out.as_chunks_mut::<4>().0.iter_mut().zip(pairs) {
            *four = [
                left as u32,
                (left >> 32) as u32,
                right as u32,
                (right >> 32) as u32,
            ];
        }
    }

    /// A number below `bound` (0 if `bound` is 0), uniform to within one part in 2^64 / `bound`.
    pub fn below(&self, bound: u64, high: u64, low: u64) -> u64 {
        let [a, b, ..] = self.four(high, low);
        let x = u64::from(a) | u64::from(b) << 32;
        ((u128::from(x) * u128::from(bound)) >> 64) as u64
    }

    /// Four independent standard normal numbers: elements `4 * group .. 4 * group + 4` of a
    /// sequence.
    pub fn four_normals(&self, group: u64) -> [f32; 4] {
        let [a, b, c, d] = self.four(0, group);
        let (x, y) = box_muller(a, b);
        let (z, w) = box_muller(c, d);
        [x, y, z, w]
    }

    /// The same of numbers that are uniform between -1 and 1.
    pub fn four_uniforms(&self, group: u64) -> [f32; 4] {
        self.four(0, group)
            .map(|n| (n as f32 + 0.5) * (2.0 / 4_294_967_296.0) - 1.0)
    }
}

/// Two uniform numbers to two normal ones (Box and Muller, 1958).
fn box_muller(a: u32, b: u32) -> (f32, f32) {
    // In (0, 1]: never 0, whose logarithm is infinite.
    let u = (a as f32 + 0.5) * (1.0 / 4_294_967_296.0);
    let angle = (b as f32) * (std::f32::consts::TAU / 4_294_967_296.0);
    let radius = (-2.0 * u.ln()).sqrt();
    let (sin, cos) = angle.sin_cos();
    (radius * cos, radius * sin)
}

/// FNV-1a, 64 bits.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, &b| {
        (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Rounds of Philox4x32-10.
const ROUNDS: usize = 10;

/// The factors of a round.
const LEFT: u64 = 0xd251_1f53;
const RIGHT: u64 = 0xcd9e_8d57;

/// The low word of a u64.
const LOW: u64 = 0xffff_ffff;

/// Numbers that [`Counter::block`] draws at once: enough independent ones for the multipliers of a
/// core.
pub(crate) const BLOCK: usize = 64;

/// Philox4x32-10.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        counter = round(counter, key);
        key = next_key(key);
    }
    counter
}

#[inline(always)]
fn round(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let left = u64::from(counter[0]) * LEFT;
    let right = u64::from(counter[2]) * RIGHT;
    [
        (right >> 32) as u32 ^ counter[1] ^ key[0],
        right as u32,
        (left >> 32) as u32 ^ counter[3] ^ key[1],
        left as u32,
    ]
}

#[inline(always)]
fn next_key(key: [u32; 2]) -> [u32; 2] {
    [
        key[0].wrapping_add(0x9e37_79b9),
        key[1].wrapping_add(0xbb67_ae85),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_of_random123() {
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn normals_have_the_right_moments() {
        let counter = Counter::new(7, "a parameter");
        let n = 100_000;
        let all: Vec<f64> = (0..n / 4)
            .flat_map(|g| counter.four_normals(g))
            .map(f64::from)
            .collect();
        let mean = all.iter().sum::<f64>() / n as f64;
        let moment = |k| all.iter().map(|x| (x - mean).powi(k)).sum::<f64>() / n as f64;
        // Four standard errors of each estimate: sqrt(Var / n) is 0.0032, 0.0045, 0.0077 and 0.031.
        assert!(mean.abs() < 0.013, "{mean}");
        assert!((moment(2) - 1.0).abs() < 0.018, "{}", moment(2));
        assert!(moment(3).abs() < 0.031, "{}", moment(3));
        assert!((moment(4) - 3.0).abs() < 0.124, "{}", moment(4));
    }

    #[test]
    fn extreme_inputs_give_finite_normals() {
        for a in [0, 1, u32::MAX - 1, u32::MAX] {
            for b in [0, 1, u32::MAX / 2, u32::MAX] {
                let (x, y) = box_muller(a, b);
                assert!(x.is_finite() && y.is_finite(), "{a} {b} -> {x} {y}");
            }
        }
    }

    #[test]
    fn streams_differ_by_seed_and_purpose() {
        let base = Counter::new(1, "wte").four(0, 0);
        assert_ne!(base, Counter::new(2, "wte").four(0, 0));
        assert_ne!(base, Counter::new(1 << 32, "wte").four(0, 0));
        assert_ne!(base, Counter::new(1, "wpe").four(0, 0));
        assert_eq!(base, Counter::new(1, "wte").four(0, 0));
    }

    #[test]
    fn block_has_the_numbers_of_its_counters() {
        let counter = Counter::new(5, "masks").stream(3, 9);
        assert_ne!(counter, Counter::new(5, "masks").stream(9, 3));
        let low = (7 << 32) - 3;
        let mut block = [0; BLOCK];
        counter.block(&mut block, 1 << 40, low);
        for (i, four) in block.chunks(4).enumerate() {
            assert_eq!(four, counter.four(1 << 40, low + i as u64));
        }
    }

    #[test]
    fn below_reaches_every_value() {
        let counter = Counter::new(3, "windows");
        let mut seen = [false; 7];
        for i in 0..200 {
            seen[counter.below(7, 0, i) as usize] = true;
        }
        assert_eq!(seen, [true; 7]);
        assert_eq!(counter.below(0, 0, 0), 0);
        assert_eq!(counter.below(1, 9, 9), 0);
    }
}
