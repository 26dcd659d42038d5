//! Evaluations: transformers' loss, the same bits at every stage, and no effect on training.

use std::sync::Arc;

use proptest::prelude::*;
use zero_alloc::device::DType;
use zero_ckpt::Reader;
use zero_data::{DataSource, Dataset};
use zero_optim::OptimizerConfig;
use zero_trainer::{Validation, ValidationOptions};

use super::support::{Case, Outcome};
use super::toy::{Toy, toys};
use super::volumes::memory_stays;
use integration_tests::data;

pub(super) fn every(every: u64, windows: u64) -> Option<ValidationOptions> {
    let data = Arc::new(Dataset::open(&DataSource::at(data("tokens.u16.bin"))).unwrap());
    Some(ValidationOptions {
        data,
        every,
        windows,
    })
}

fn results(outcome: &Outcome) -> Vec<(u64, Validation)> {
    outcome
        .steps
        .iter()
        .filter_map(|s| Some((s.step, s.validation?)))
        .collect()
}

/// The expected losses are those of transformers 5.23 in fp64: the mean of
/// `torch.nn.functional.cross_entropy` of
/// `GPT2LMHeadModel.from_pretrained("tests/data/gpt2-tiny/model").double()` over windows
/// `i * 240 // n`, for i below n, of 32 tokens each.
#[test]
fn loss_is_that_of_transformers() {
    for (windows, expected) in [(240, 5.57256823235488), (20, 5.569856212142456)] {
        // A learning rate of 0 keeps the weights.
        let optimizer = OptimizerConfig::default().lr(0.0);
        let case = Case {
            steps: 1,
            micro_batch: 4,
            optimizer,
            validation: every(1, windows),
            ..Case::default()
        };
        let (
            _,
            Validation {
                loss,
                perplexity,
                tokens,
            },
        ) = results(&case.run_tiny())[0];
        assert!(
            (loss - expected).abs() < 1e-6 * expected,
            "{loss}, {expected} expected"
        );
        assert!(
            (perplexity - expected.exp()).abs() < 1e-5 * perplexity,
            "{perplexity}"
        );
        assert_eq!(tokens, windows * 32);
    }
}

/// Rounds in which some ranks have fewer windows than others, or none.
#[test]
fn ranks_and_micro_batch_do_not_change_the_loss() {
    let run = |ranks, micro_batch, windows| {
        // The loss before any update.
        let optimizer = OptimizerConfig::default().lr(0.0);
        let validation = every(1, windows);
        let case = Case {
            ranks,
            micro_batch,
            steps: 1,
            optimizer,
            validation,
            ..Case::default()
        };
        results(&case.run_tiny())[0].1
    };

    for windows in [1, 5, 13] {
        let one = run(1, 1, windows);
        for (ranks, micro_batch) in [(1, 3), (2, 2), (3, 1), (4, 4)] {
            let other = run(ranks, micro_batch, windows);
            assert!(
                (other.loss - one.loss).abs() < 1e-6 * one.loss,
                "{ranks} ranks: {other:?}, {one:?}"
            );
            assert_eq!(other.tokens, windows * 32);
        }
    }
}

/// Losses, weights and moments are those of a run without evaluations, and an evaluation has the
/// same bits at each stage.
fn changes_nothing(dtype: DType, grad_accum: usize, ranks: usize) {
    let base = Case {
        dtype,
        grad_accum,
        reduce_every_micro_batch: true,
        ranks,
        steps: 5,
        ..Case::default()
    };

    let plain = base.run_tiny();
    let mut first = None;
    for stage in 0..4 {
        for (overlap, activation_checkpointing) in [(true, false), (false, true)] {
            let case = Case {
                stage,
                overlap,
                activation_checkpointing,
                validation: every(2, 7),
                ..base.clone()
            };
            let outcome = case.run_tiny();
            assert_eq!(outcome.curve(), plain.curve(), "{case:?}: losses and norms");
            assert!(outcome.state() == plain.state(), "{case:?}: state");
            let bits: Vec<_> = results(&outcome)
                .iter()
                .map(|(step, v)| (*step, v.loss.to_bits(), v.tokens))
                .collect();
            assert_eq!(bits.iter().map(|b| b.0).collect::<Vec<_>>(), [2, 4, 5]);
            assert_eq!(
                &bits,
                first.get_or_insert_with(|| bits.clone()),
                "{case:?}: evaluations"
            );
            for summary in &outcome.summaries {
                memory_stays(summary, &format!("{case:?}"));
            }
            for (step, plain) in outcome
                .steps
                .iter()
                .zip(&plain.steps)
                .filter(|_| stage == 3 && overlap)
            {
                // Saves of the best checkpoint add control traffic to later steps.
                assert_eq!(
                    step.comm_bytes.total(),
                    plain.comm_bytes.total(),
                    "bytes of the step"
                );
                assert_eq!(
                    step.memory.peak_bytes, plain.memory.peak_bytes,
                    "memory of the step"
                );
            }
        }
    }
}

#[test]
fn changes_nothing_in_fp32() {
    changes_nothing(DType::F32, 1, 2);
}

#[test]
fn changes_nothing_in_bf16_accumulating() {
    changes_nothing(DType::Bf16, 2, 3);
}

#[test]
fn changes_nothing_in_fp16() {
    changes_nothing(DType::F16, 1, 2);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn units_of_any_size(
        toy in toys(false),
        ranks in 1usize..6,
        grad_accum in 1usize..3,
        windows in 1u64..9,
    ) {
        let base = Case { ranks, grad_accum, reduce_every_micro_batch: true, stage: 0, ..Case::default() };
        let plain = base.run(&toy);
        let mut first = None;
        for stage in 0..4 {
            let outcome = Case { stage, validation: every(1, windows), ..base.clone() }.run(&toy);
            prop_assert_eq!(outcome.curve(), plain.curve());
            prop_assert!(outcome.state() == plain.state());
            let losses: Vec<u64> = results(&outcome).iter().map(|(_, v)| v.loss.to_bits()).collect();
            prop_assert_eq!(&losses, first.get_or_insert_with(|| losses.clone()));
        }
    }
}

#[test]
fn evaluates_only_at_the_end_without_an_interval() {
    let outcome = Case::default()
        .with(|case| case.validation = every(0, 1))
        .run_tiny();
    assert_eq!(
        results(&outcome).iter().map(|r| r.0).collect::<Vec<_>>(),
        [4]
    );
}

/// A request to stop saves at once: the toy cancels while the third forward runs.
#[test]
fn interrupted_run_does_not_evaluate() {
    let cancel = Arc::default();
    let mut toy = Toy::new(&[vec![64], vec![32]], false);
    toy.cancel = Some(Arc::clone(&cancel));
    // The third forward is that of step 3, because the first evaluation would follow it.
    let outcome = Case {
        cancel,
        steps: 6,
        validation: every(3, 4),
        ..Case::default()
    }
    .run(&toy);
    assert!(
        outcome.summaries.iter().all(|s| s.cancelled && s.step == 3),
        "{:?}",
        outcome.summaries
    );
    assert!(results(&outcome).is_empty());
    assert_eq!(Reader::open(outcome.dir.path()).unwrap().manifest().step, 3);
}
