//! The integration tests of zero-alloc that need no GPU, and the conformance suite of all back
//! ends.

mod arena;
mod conformance;
mod host_streams;
mod other_devices;
mod planner_model;
mod pool;
mod schedule;
mod seeded;
#[cfg(all(target_os = "linux", not(miri)))]
mod swap;
#[cfg(all(target_os = "linux", not(miri)))]
mod swap_failures;
#[cfg(all(target_os = "linux", not(miri)))]
mod swap_ring;
mod threads;

use proptest::prelude::ProptestConfig;

/// `n` cases of a property, times `ZERO_PROPTEST_FACTOR`.
fn cases(n: u32) -> ProptestConfig {
    let factor = std::env::var("ZERO_PROPTEST_FACTOR")
        .ok()
        .and_then(|f| f.parse().ok())
        .unwrap_or(1);
    let cases = if cfg!(miri) { 1 } else { n * factor };
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// A splitmix64 generator.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}
