//! Losses, norms and the final state are bit-identical at stages 0 to 3, with each tested switch,
//! if all reduce every micro-batch; stages 0 and 1, which by default reduce once a step, agree with
//! each other.

use proptest::prelude::*;
use zero_alloc::device::DType;
use zero_trainer::Home;

use super::on_ranks;
use super::support::{Case, Outcome, homes};
use super::toy::{Toy, toys};

pub(super) fn same(a: &Outcome, b: &Outcome, what: &str) {
    assert_eq!(a.curve(), b.curve(), "{what}: losses and norms");
    let a = a.state();
    let b = b.state();
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for (name, bits) in &a {
        assert!(bits == &b[name], "{what}: {name}");
    }
}

/// Asserts that all cases have the bits of the first, which is returned.
pub(super) fn all_same(cases: impl IntoIterator<Item = Case>) -> Outcome {
    all_same_with(cases, Case::run_tiny)
}

/// As [`all_same`], with other runs.
pub(super) fn all_same_with(
    cases: impl IntoIterator<Item = Case>,
    run: impl Fn(&Case) -> Outcome,
) -> Outcome {
    let mut cases = cases.into_iter();
    let first = run(&cases.next().unwrap());
    for case in cases {
        same(&first, &run(&case), &format!("{case:?}"));
    }
    first
}

/// Compares stage 0 and its default switches with every stage and each switch.
fn stages_agree(dtype: DType, grad_accum: usize, ranks: usize) {
    let base = Case {
        stage: 0,
        dtype,
        grad_accum,
        reduce_every_micro_batch: true,
        ranks,
        ..Case::default()
    };
    agree(&base, 0..4);
}

fn agree(base: &Case, stages: std::ops::Range<u64>) -> Outcome {
    let mut cases = vec![base.clone()];
    for stage in stages {
        let at_stage = base.with(|case| case.stage = stage);
        cases.push(at_stage.clone());
        cases.push(at_stage.with(|case| case.overlap = false));
        cases.push(at_stage.with(|case| case.activation_checkpointing = true));
        // Buckets that split units into odd pieces, and one that holds every unit whole.
        cases.push(at_stage.with(|case| case.bucket_elems = 1000));
        cases.push(at_stage.with(|case| case.bucket_elems = 1 << 20));
    }
    let reference = all_same(cases);
    assert!(
        reference.steps.iter().any(|s| !s.skipped),
        "nothing was trained"
    );
    reference
}

/// Micro-batches that are summed on each rank and reduced once: the same bits at stages 0 and 1,
/// and those of reducing each but for the order of a sum and, in 16 bits, for fewer roundings.
#[test]
fn local_sums_agree() {
    for (dtype, grad_accum, ranks, limit) in [
        (DType::F32, 3, 2, 1e-6),
        (DType::Bf16, 2, 3, 1e-3),
        (DType::Bf16, 3, 1, 1e-3),
    ] {
        let base = Case {
            stage: 0,
            dtype,
            grad_accum,
            ranks,
            ..Case::default()
        };
        let once = agree(&base, 0..2);
        let each = base
            .with(|case| case.reduce_every_micro_batch = true)
            .run_tiny();
        assert_ne!(
            once.curve(),
            each.curve(),
            "{dtype}: the sums have another order"
        );
        for (once, each) in once.steps.iter().zip(&each.steps) {
            let error = (once.loss - each.loss).abs() / each.loss;
            assert!(
                error < limit,
                "{dtype}, step {}: loss differs by {error:e}",
                once.step
            );
        }
    }
}

/// A sum of micro-batches that are finite in fp16 may be none, so each is reduced: the bits of all
/// stages are the same.
#[test]
fn micro_batches_in_fp16_are_reduced_one_by_one() {
    let base = Case {
        dtype: DType::F16,
        grad_accum: 3,
        reduce_every_micro_batch: false,
        ..Case::default()
    };
    agree(&base, 0..4);
}

/// Gradients that the model writes in the dtype of communication have the bits of those that it
/// adds to fp32 sums: in buckets that hold a unit and that do not, and on one rank, which needs no
/// bucket.
#[test]
fn written_gradients_agree() {
    let units = [vec![40, 3], vec![70], vec![], vec![9, 30], vec![5]];
    for (ranks, dtype, tied) in [
        (1, DType::F32, true),
        (1, DType::Bf16, false),
        (2, DType::Bf16, true),
        (3, DType::F32, false),
    ] {
        let adds = Toy::new(&units, tied);
        let writes = Toy::new(&units, tied).writing();
        for (bucket_elems, offload) in [
            (1 << 10, Home::Device),
            (50, Home::Device),
            (1 << 10, Home::Host),
        ] {
            let offload = homes(offload, Home::Device);
            let base = Case {
                ranks,
                dtype,
                bucket_elems,
                offload,
                stage: 0,
                ..Case::default()
            };
            let reference = base.run(&adds);
            for stage in 0..4 {
                for overlap in [true, false] {
                    let case = Case {
                        stage,
                        overlap,
                        ..base.clone()
                    };
                    same(&reference, &case.run(&writes), &format!("{case:?}"));
                }
            }
        }
    }
}

/// In any order that streams and events allow, no access to a gradient is unordered.
#[test]
fn no_wait_is_missing() {
    let units = [vec![40, 3], vec![70], vec![9, 30], vec![5]];
    for (writes, grad_accum) in [(true, 1), (false, 3)] {
        let toy = Toy::new(&units, true);
        let toy = if writes { toy.writing() } else { toy };
        for (stage, seed) in (0..4).flat_map(|stage| (0..3).map(move |seed| (stage, seed))) {
            for optimizer in [Home::Device, Home::Host] {
                let case = Case {
                    ranks: 1,
                    stage,
                    dtype: DType::Bf16,
                    grad_accum,
                    offload: homes(optimizer, Home::Device),
                    ..Case::default()
                };
                on_ranks::no_wait_is_missing(&case, &toy, seed);
            }
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
    let factor = std::env::var("ZERO_PROPTEST_FACTOR")
        .ok()
        .and_then(|f| f.parse().ok())
        .unwrap_or(1);
    ProptestConfig {
        cases: n.saturating_mul(factor),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases(6))]

    /// Units of any sizes: empty, smaller than the number of ranks, not divisible by it; parameters
    /// without elements.
    #[test]
    fn units_of_any_size(
        toy in toys(false),
        ranks in 1usize..7,
        grad_accum in 1usize..4,
        sixteen in any::<bool>(),
        bucket_elems in 1usize..200,
    ) {
        let dtype = if sixteen { DType::Bf16 } else { DType::F32 };
        let reduce_every_micro_batch = true;
        let base =
            Case { ranks, grad_accum, reduce_every_micro_batch, dtype, bucket_elems, stage: 0, ..Case::default() };
        let local = Case { reduce_every_micro_batch: false, ..base.clone() };
        same(&local.run(&toy), &Case { stage: 1, ..local }.run(&toy), "local sums");
        let at = |(stage, overlap)| Case { stage, overlap, ..base.clone() };
        let stages = (1..4).flat_map(|stage| [(stage, true), (stage, false)]);
        all_same_with([(0, true)].into_iter().chain(stages).map(at), |case| case.run(&toy));
    }
}
