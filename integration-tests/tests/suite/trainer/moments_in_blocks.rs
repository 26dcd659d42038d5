//! Moments of 8 and 4 bits in the whole trainer: the same bits at all stages and homes, and after a
//! resume.

use integration_tests::{GPT2, LLAMA, QWEN2};
use zero_alloc::device::DType;
use zero_optim::{Masters, Moments, OptimizerConfig, StateFormat};
use zero_trainer::param_groups::GroupSettings;
use zero_trainer::{Home, OffloadSettings};

use super::groups::mixed;
use super::identical::same;
use super::offload::folder;
use super::support::{Case, home_at};

fn case(moments: Moments, dtype: DType) -> Case {
    let masters = match dtype {
        DType::Bf16 => Masters::Remainder,
        _ => Masters::Fp32,
    };
    let format = StateFormat::default().masters(masters).moments(moments);
    Case {
        dtype,
        steps: 4,
        optimizer: OptimizerConfig::default()
            .max_grad_norm(1.0)
            .sub_group_elems(3000),
        groups: mixed(),
        offload: OffloadSettings {
            format,
            ..OffloadSettings::default()
        },
        ..Case::default()
    }
}

#[test]
fn stages_and_homes_have_the_same_bits() {
    let dir = folder();
    for (moments, dtype) in [
        (Moments::EightBit, DType::F32),
        (Moments::FourBit, DType::Bf16),
    ] {
        for oracle in [GPT2, LLAMA, QWEN2] {
            let base = case(moments, dtype).with(|case| {
                case.oracle = oracle;
                if oracle != GPT2 {
                    case.groups = GroupSettings::default();
                }
            });
            let expected = base.run_tiny();
            for stage in 0..4 {
                for home in [Home::Device, Home::Host, Home::Nvme(dir.path().to_owned())] {
                    let run = base.with(|case| {
                        let format = case.offload.format;
                        case.stage = stage;
                        case.offload = home_at(stage, &home);
                        case.offload.format = format;
                    });
                    let what = format!("{moments} {oracle:?} stage {stage} {home}");
                    same(&expected, &run.run_tiny(), &what);
                }
            }
        }
    }
}

#[test]
fn resumed_runs_have_the_same_bits() {
    for moments in [Moments::EightBit, Moments::FourBit] {
        let whole = case(moments, DType::F32);
        let expected = whole.run_tiny();
        let half = whole.with(|case| case.steps = 2);
        for stage in [0, 1, 3] {
            let saved = half.with(|case| case.stage = stage).run_tiny();
            let resumed = whole.with(|case| case.stage = 3 - stage).resumed(&saved);
            let curve = expected.curve();
            assert_eq!(
                resumed.curve(),
                curve[curve.len() - 2..],
                "{moments} stage {stage}"
            );
            assert_eq!(resumed.state(), expected.state(), "{moments} stage {stage}");
        }
    }
}

/// The memory of the optimizer is that of the formula.
#[test]
fn memory_is_that_of_the_formula() {
    for (moments, ranks, stage) in [
        (Moments::EightBit, 2, 3),
        (Moments::EightBit, 3, 0),
        (Moments::FourBit, 4, 1),
    ] {
        let run = case(moments, DType::Bf16).with(|case| {
            case.ranks = ranks;
            case.stage = stage;
            case.groups = GroupSettings::default();
        });
        let outcome = run.run_tiny();
        let groups = outcome.settings.resolve_groups(&outcome.layout).unwrap();
        let widths = outcome.settings.widths();
        let formula = groups.state_bytes(&outcome.layout, outcome.settings.stage, &widths);
        let most = outcome.summaries.iter();
        let most = most
            .map(|rank| rank.last.as_ref().unwrap().memory.optimizer_bytes)
            .max();
        assert_eq!(
            most,
            Some(formula.unwrap().optimizer_bytes),
            "{moments} {ranks} {stage}"
        );
    }
}
