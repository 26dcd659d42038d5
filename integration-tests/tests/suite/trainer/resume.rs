//! A resumed run is bit-identical to an uninterrupted one; at other ranks and stages the loaded
//! state is bit-identical.

use integration_tests::{GPT2, LLAMA, Oracle, QWEN2};
use zero_alloc::device::DType;
use zero_optim::{DynamicScaling, LossScaling, OptimizerConfig};

use super::support::{Case, Outcome};

fn resumed(from: &Outcome, case: &Case) -> Outcome {
    Case {
        resume: Some(from.dir.path().to_owned()),
        ..case.clone()
    }
    .run_tiny()
}

#[test]
fn the_same_bits_as_without_a_stop() {
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        for stage in 0..4 {
            let case = Case {
                stage,
                dtype,
                grad_accum: 2,
                steps: 6,
                ..Case::default()
            };
            let whole = case.run_tiny();
            let first = Case {
                steps: 2,
                ..case.clone()
            }
            .run_tiny();
            let rest = resumed(&first, &case);
            assert_eq!(rest.steps.len(), 4);
            assert_eq!(
                whole.curve(),
                [first.curve(), rest.curve()].concat(),
                "{case:?}"
            );
            assert!(whole.state() == rest.state(), "{case:?}: final state");
        }
    }
}

/// Weights, moments and step continue; the loss scale starts anew, because it is valid for its
/// dtype only.
#[test]
fn in_another_dtype() {
    let case = |dtype, steps| {
        let dynamic = LossScaling::Dynamic(DynamicScaling::default());
        let loss_scaling = if dtype == DType::F16 {
            dynamic
        } else {
            LossScaling::NONE
        };
        Case {
            dtype,
            steps,
            optimizer: OptimizerConfig::default().loss_scaling(loss_scaling),
            ..Case::default()
        }
    };

    for (from, to) in [
        (DType::F16, DType::Bf16),
        (DType::F16, DType::F32),
        (DType::F32, DType::F16),
    ] {
        let first = case(from, 2).run_tiny();
        let rest = resumed(&first, &case(to, 3));
        let anew = case(to, 1).run_tiny().steps[0].loss_scale;
        assert_eq!(rest.steps[0].loss_scale, anew, "{from} -> {to}");
        let whole = case(from, 3).run_tiny().steps[2].loss;
        let error = (rest.steps[0].loss - whole).abs() / whole;
        assert!(error < 1e-2, "{from} -> {to}: loss differs by {error:e}");
    }
}

/// (Ranks, stage) (4, 3) -> (2, 1) -> (3, 2) -> (1, 0): the loaded state has the bits of the saved
/// one, and the loss curve equals an uninterrupted run's except for the order of sums.
#[test]
fn across_ranks_and_stages() {
    for oracle in [GPT2, LLAMA, QWEN2] {
        resume_across_ranks_and_stages(oracle);
    }
}

fn resume_across_ranks_and_stages(oracle: Oracle) {
    // 12 rows a step at any number of ranks, so that all runs train on the same data.
    let at = |ranks, stage, steps| Case {
        oracle,
        ranks,
        stage,
        steps,
        micro_batch: 12 / ranks,
        ..Case::default()
    };

    let uninterrupted = at(4, 3, 8).run_tiny();
    let mut last = at(4, 3, 2).run_tiny();
    for (i, (ranks, stage)) in [(2, 1), (3, 2), (1, 0)].into_iter().enumerate() {
        let done = 2 * (i as u64 + 1);
        let only_loaded = resumed(&last, &at(ranks, stage, done));
        assert!(only_loaded.steps.is_empty());
        assert!(
            only_loaded.state() == last.state(),
            "{ranks} ranks, stage {stage}: state as loaded and saved again"
        );
        last = resumed(&only_loaded, &at(ranks, stage, done + 2));
        for (got, want) in last.steps.iter().zip(&uninterrupted.steps[done as usize..]) {
            let error = (got.loss - want.loss).abs() / want.loss;
            assert!(
                error < 1e-6,
                "{ranks} ranks, stage {stage}, step {}: loss differs by {error:e}",
                got.step
            );
        }
        assert_eq!(last.steps.len(), 2);
    }
}
