//! Frozen units in blocks: the same bits at all stages, groups of ranks and after a resume, with
//! the memory of the formula.

use integration_tests::{GPT2, LLAMA};
use zero_alloc::device::DType;
use zero_models::param_kind;
use zero_optim::{OptimizerConfig, ParamKind};
use zero_shard::{BlockFormat, Sharding};
use zero_trainer::Home;
use zero_trainer::param_groups::{GroupSettings, ParamGroup};

use super::identical::same;
use super::support::{Case, Outcome, groups_of, homes};
use super::validation::every;

/// Two of three blocks are frozen.
fn case(format: BlockFormat) -> Case {
    let frozen = ParamGroup {
        names: ["*.h.0.*", "*.h.2.*"].map(str::to_owned).into(),
        trainable: Some(false),
        ..ParamGroup::default()
    };
    Case {
        quantised_frozen: Some(format),
        groups: GroupSettings {
            groups: vec![frozen],
            no_decay_1d: false,
        },
        optimizer: OptimizerConfig::default().max_grad_norm(1.0),
        validation: every(2, 4),
        ..Case::default()
    }
}

fn losses(outcome: &Outcome) -> Vec<u64> {
    let steps = outcome.steps.iter();
    let validated = steps.filter_map(|step| step.validation);
    validated
        .map(|validation| validation.loss.to_bits())
        .collect()
}

#[test]
fn stages_and_groups_have_the_same_bits() {
    for (format, dtype) in [
        (BlockFormat::Nf4, DType::F32),
        (BlockFormat::Nf4, DType::Bf16),
        (BlockFormat::Int8, DType::F16),
    ] {
        let base = case(format).with(|case| case.dtype = dtype);
        let expected = base.run_tiny();
        assert!(!losses(&expected).is_empty());
        for stage in 0..3 {
            let run = base.with(|case| case.stage = stage).run_tiny();
            same(
                &expected,
                &run,
                &format!("{format:?} {dtype} stage {stage}"),
            );
            assert_eq!(
                losses(&run),
                losses(&expected),
                "{format:?} {dtype} stage {stage}"
            );
        }
        let offloaded = base.with(|case| case.offload = homes(Home::Host, Home::Device));
        same(
            &expected,
            &offloaded.run_tiny(),
            &format!("{format:?} {dtype} offloaded"),
        );
    }

    let four = case(BlockFormat::Nf4).with(|case| case.ranks = 4);
    let expected = four.run_tiny();
    for sharding in [Sharding::Secondary, Sharding::Hybrid, Sharding::Replicated] {
        let grouped = four
            .with(|case| case.mesh = groups_of(2, sharding))
            .run_tiny();
        let masters = |outcome: &Outcome| {
            let mut state = outcome.state();
            state.retain(|name, _| name.contains(".h.0."));
            state
        };
        assert_eq!(masters(&grouped), masters(&expected), "{sharding:?}");
        let first = |outcome: &Outcome| outcome.steps[0].loss;
        assert!(
            (first(&grouped) - first(&expected)).abs() < 1e-6,
            "{sharding:?}"
        );
    }
}

#[test]
fn resumed_runs_have_the_same_bits() {
    let whole = case(BlockFormat::Nf4);
    let expected = whole.run_tiny();
    let half = whole.with(|case| case.steps = 2);
    for (stage, ranks) in [(0, 2), (3, 2), (1, 3)] {
        let saved = half.with(|case| case.stage = stage).run_tiny();
        let resumed = whole.with(|case| {
            case.stage = 3 - stage;
            case.ranks = ranks;
        });
        let resumed = resumed.resumed(&saved);
        let frozen = |outcome: &Outcome| {
            let mut state = outcome.state();
            state.retain(|name, _| name.contains(".h.2."));
            state
        };
        assert_eq!(frozen(&resumed), frozen(&expected), "stage {stage}");
        if ranks == 2 {
            assert_eq!(resumed.curve(), expected.curve()[2..], "stage {stage}");
        }
    }
}

/// Every matrix of a frozen block is the nearest one in the format; all else keeps its values.
#[test]
fn matrices_are_rounded_and_the_rest_is_not() {
    for format in [BlockFormat::Nf4, BlockFormat::Int8] {
        let run = case(format).with(|case| case.steps = 1);
        let plain = run
            .with(|case| case.quantised_frozen = None)
            .run_tiny()
            .state();
        let coded = run.run_tiny().state();
        let mut rounded = 0;
        for (name, values) in plain.iter().filter(|(name, _)| name.starts_with("master/")) {
            let is_frozen = name.contains(".h.0.") || name.contains(".h.2.");
            let param = name.trim_start_matches("master/");
            let holds = BlockFormat::holds(values.len() as u64);
            if !is_frozen {
                continue;
            }
            let mut expected: Vec<f32> = values.iter().map(|bits| f32::from_bits(*bits)).collect();
            if holds && param_kind(param) == ParamKind::Linear {
                let mut blocks = vec![0; format.bytes(expected.len())];
                format.encode(&expected, &mut blocks);
                format.decode(&blocks, &mut expected);
                rounded += 1;
            }
            let expected: Vec<u32> = expected.into_iter().map(f32::to_bits).collect();
            assert!(coded[name] == expected, "{format:?} {name}");
        }
        assert_eq!(rounded, 8, "{format:?}");
    }
}

#[test]
fn memory_is_that_of_the_formula() {
    for (ranks, stage, oracle) in [(2, 3, GPT2), (3, 0, GPT2), (2, 2, LLAMA)] {
        let run = case(BlockFormat::Nf4).with(|case| {
            case.ranks = ranks;
            case.stage = stage;
            case.oracle = oracle;
            case.validation = None;
            if oracle == LLAMA {
                case.groups.groups[0].names = vec!["model.layers.1.*".to_owned()];
            }
        });
        let bytes = |run: &Case| {
            let outcome = run.run_tiny();
            let groups = outcome.settings.resolve_groups(&outcome.layout).unwrap();
            let widths = outcome.settings.widths();
            let formula = groups.state_bytes(&outcome.layout, outcome.settings.stage, &widths);
            let ranks = outcome.summaries.iter();
            let most = ranks
                .map(|rank| rank.last.as_ref().unwrap().memory.params_bytes)
                .max();
            assert_eq!(most, Some(formula.unwrap().params_bytes), "{run:?}");
            most.unwrap()
        };
        let coded = bytes(&run);
        let plain = bytes(&run.with(|case| case.quantised_frozen = None));
        assert!(coded < plain, "{coded} bytes in place of {plain}");
    }
}

#[test]
fn what_cannot_be_in_blocks_is_refused() {
    let offloaded =
        case(BlockFormat::Nf4).with(|case| case.offload = homes(Home::Host, Home::Host));
    let error = offloaded.refusal();
    assert!(
        error.contains(
            "frozen units in blocks: offloaded parameters are not in blocks; use one of the two"
        ),
        "{error}"
    );
}
