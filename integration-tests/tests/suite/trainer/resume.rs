//! A resumed run is bit-identical to an uninterrupted one; at other ranks and stages the loaded
//! state is bit-identical.

use integration_tests::{GPT2, LLAMA, QWEN2};
use zero_alloc::device::DType;
use zero_optim::{DynamicScaling, LossScaling, OptimizerConfig};

use super::support::{Case, Outcome};

/// Each case trains two steps from the checkpoint of the one before it: the loaded state has the
/// bits of the saved one, and the losses are those of a run of `uninterrupted`, if there is one,
/// except for the order of sums. Returns the last run.
pub(crate) fn continued(cases: &[Case], uninterrupted: Option<&Case>) -> Outcome {
    let steps = 2 * cases.len() as u64;
    let whole = uninterrupted.map(|case| case.with(|case| case.steps = steps).run_tiny());
    let mut last = cases[0].with(|case| case.steps = 2).run_tiny();
    for (case, done) in cases[1..].iter().zip((2..).step_by(2)) {
        let until = |steps, from| case.with(|case| case.steps = steps).resumed(from);
        let only_loaded = until(done, &last);
        assert!(only_loaded.steps.is_empty(), "{case:?}");
        assert!(
            only_loaded.state() == last.state(),
            "{case:?}: as loaded and saved again"
        );

        last = until(done + 2, &only_loaded);
        assert_eq!(last.steps.len(), 2, "{case:?}");
        let wanted = whole.iter().flat_map(|whole| &whole.steps[done as usize..]);
        for (got, want) in last.steps.iter().zip(wanted) {
            let error = (got.loss - want.loss).abs() / want.loss;
            assert!(
                error < 1e-6,
                "{case:?}, step {}: loss differs by {error:e}",
                got.step
            );
        }
    }
    last
}

/// A run that is stopped after two steps and continued has the bits of one without a stop.
pub(crate) fn same_without_a_stop(case: &Case) {
    let whole = case.run_tiny();
    let first = case.with(|case| case.steps = 2).run_tiny();
    let rest = case.resumed(&first);
    assert_eq!(rest.steps.len() as u64, case.steps - 2);
    assert_eq!(
        whole.curve(),
        [first.curve(), rest.curve()].concat(),
        "{case:?}"
    );
    assert!(whole.state() == rest.state(), "{case:?}: final state");
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
            same_without_a_stop(&case);
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
        let rest = case(to, 3).resumed(&first);
        let anew = case(to, 1).run_tiny().steps[0].loss_scale;
        assert_eq!(rest.steps[0].loss_scale, anew, "{from} -> {to}");
        let whole = case(from, 3).run_tiny().steps[2].loss;
        let error = (rest.steps[0].loss - whole).abs() / whole;
        assert!(error < 1e-2, "{from} -> {to}: loss differs by {error:e}");
    }
}

/// 12 rows a step at any number of ranks, so that all runs train on the same data.
#[test]
fn across_ranks_and_stages() {
    for oracle in [GPT2, LLAMA, QWEN2] {
        let at = |(ranks, stage)| Case {
            oracle,
            ranks,
            stage,
            micro_batch: 12 / ranks,
            ..Case::default()
        };
        let cases = [(4, 3), (2, 1), (3, 2), (1, 0)].map(at);
        continued(&cases, Some(&cases[0]));
    }
}
