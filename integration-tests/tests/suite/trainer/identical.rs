//! Losses, norms and the final state are bit-identical at stages 0 to 3, with each tested switch.

use proptest::prelude::*;
use zero_alloc::device::DType;

use super::support::{Case, Outcome};
use super::toy::Toy;

pub(super) fn same(a: &Outcome, b: &Outcome, what: &str) {
    assert_eq!(a.curve(), b.curve(), "{what}: losses and norms");
    let (a, b) = (a.state(), b.state());
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for (name, bits) in &a {
        assert!(bits == &b[name], "{what}: {name}");
    }
}

/// Compares stage 0 and its default switches with every stage and each switch.
fn stages_agree(dtype: DType, grad_accum: usize, ranks: usize) {
    let base = Case { stage: 0, dtype, grad_accum, ranks, ..Case::default() };
    let reference = base.run_tiny();
    assert!(reference.steps.iter().any(|s| !s.skipped), "nothing was trained");
    for stage in 0..4 {
        for (overlap, activation_checkpointing) in [(true, false), (false, false), (true, true)] {
            let case = Case { stage, overlap, activation_checkpointing, ..base.clone() };
            same(&reference, &case.run_tiny(), &format!("{case:?}"));
        }
        // Buckets that split units into odd pieces, and one that holds every unit whole.
        for bucket_elems in [1000, 1 << 20] {
            let case = Case { stage, bucket_elems, ..base.clone() };
            same(&reference, &case.run_tiny(), &format!("{case:?}"));
        }
    }
}

#[test]
fn fp32() {
    stages_agree(DType::F32, 1, 2);
}

#[test]
fn fp32_accumulating() {
    stages_agree(DType::F32, 3, 3);
}

#[test]
fn bf16() {
    stages_agree(DType::Bf16, 1, 3);
}

#[test]
fn bf16_accumulating() {
    stages_agree(DType::Bf16, 3, 2);
}

#[test]
fn fp16_accumulating() {
    stages_agree(DType::F16, 2, 2);
}

/// Configuration of a property with `n` cases, times `ZERO_PROPTEST_FACTOR` if that is set.
pub(super) fn cases(n: u32) -> ProptestConfig {
    let factor = std::env::var("ZERO_PROPTEST_FACTOR").ok().and_then(|f| f.parse().ok()).unwrap_or(1);
    ProptestConfig { cases: n.saturating_mul(factor), failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(12))]

    /// Units of any sizes: empty, smaller than the number of ranks, not divisible by it; parameters without elements.
    #[test]
    fn units_of_any_size(
        units in prop::collection::vec(prop::collection::vec(0u64..40, 1..4), 1..6),
        ranks in 1usize..7,
        grad_accum in 1usize..4,
        sixteen in any::<bool>(),
        bucket_elems in 1usize..200,
        tied in any::<bool>(),
    ) {
        let toy = Toy::new(&units, tied);
        let dtype = if sixteen { DType::Bf16 } else { DType::F32 };
        let base = Case { ranks, grad_accum, dtype, bucket_elems, stage: 0, ..Case::default() };
        let reference = base.run(&toy);
        for stage in 1..4 {
            for overlap in [true, false] {
                let case = Case { stage, overlap, ..base.clone() };
                same(&reference, &case.run(&toy), &format!("{case:?}"));
            }
        }
    }
}
