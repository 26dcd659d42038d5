//! Parameter groups and frozen tensors at all stages: bits, bytes and resume.

use zero_alloc::device::DType;
use zero_trainer::param_groups::{GroupSettings, ParamGroup};

use super::identical::{all_same, same};
use super::resume::{continued, same_without_a_stop};
use super::support::Case;
use super::volumes::{peak_bytes, planned};

fn groups(json: &str, no_decay_1d: bool) -> GroupSettings {
    GroupSettings {
        groups: serde_json::from_str(json).unwrap(),
        no_decay_1d,
    }
}

/// A frozen block, a frozen tensor in a unit that trains, and three sets of rules within blocks.
pub(super) fn mixed() -> GroupSettings {
    let json = r#"[{"names": ["transformer.h.0.*", "*wpe*"], "trainable": false},
        {"kinds": ["bias"], "lr_scale": 0.5}, {"names": ["*mlp*"], "betas": [0.8, 0.9], "weight_decay": 0.3}]"#;
    groups(json, true)
}

/// Everything below the last block is frozen, the tied embedding included.
pub(super) fn upper() -> GroupSettings {
    groups(
        r#"[{"names": ["transformer.h.0.*", "*wpe*", "*wte*"], "trainable": false}]"#,
        false,
    )
}

fn is_frozen(groups: &GroupSettings, name: &str) -> bool {
    let frozen = groups
        .groups
        .iter()
        .filter(|group| group.trainable == Some(false));
    frozen
        .flat_map(|group| &group.names)
        .any(|pattern| name.contains(pattern.trim_matches('*')))
}

#[test]
fn stages_agree_to_the_bit() {
    for groups in [mixed(), upper()] {
        for (dtype, grad_accum, ranks) in
            [(DType::F32, 1, 2), (DType::Bf16, 2, 3), (DType::F16, 1, 1)]
        {
            let reduce_every_micro_batch = true;
            let sizes = Case {
                dtype,
                grad_accum,
                reduce_every_micro_batch,
                ranks,
                ..Case::default()
            };
            let base = Case {
                stage: 0,
                groups: groups.clone(),
                ..sizes
            };
            let at = |(stage, overlap)| Case {
                stage,
                overlap,
                ..base.clone()
            };
            let stages = (1..4).flat_map(|stage| [(stage, true), (stage, false)]);
            all_same([(0, true)].into_iter().chain(stages).map(at));
            // Local sums, with frozen units that have no storage.
            let local = base.with(|case| case.reduce_every_micro_batch = false);
            all_same([local.clone(), Case { stage: 1, ..local }]);
        }
    }
}

#[test]
fn rules_that_are_the_optimizers_change_nothing() {
    let json =
        r#"[{"kinds": ["bias"], "weight_decay": 0.0}, {"max_dims": 1, "betas": [0.9, 0.999]}]"#;
    for stage in [0, 2] {
        let case = Case::default().with(|case| case.stage = stage);
        let grouped = case.with(|case| case.groups = groups(json, false));
        same(&case.run_tiny(), &grouped.run_tiny(), "the same rules");
    }
}

#[test]
fn frozen_tensors_stay_as_they_are() {
    for (groups, dtype) in [
        (mixed(), DType::F32),
        (mixed(), DType::Bf16),
        (upper(), DType::F16),
    ] {
        for stage in 0..4 {
            let case = Case {
                stage,
                dtype,
                groups: groups.clone(),
                ..Case::default()
            };
            let short = case.with(|case| case.steps = 1).run_tiny();
            let long = case.run_tiny();
            let short = short.state();
            let long = long.state();
            for (name, bits) in &long {
                let (kind, param) = name.split_once('/').unwrap();
                let changed = short[name] != *bits;
                match is_frozen(&groups, param) {
                    true if kind == "master" => assert!(!changed, "{case:?}: {name}"),
                    true => assert!(bits.iter().all(|bits| *bits == 0), "{case:?}: {name}"),
                    false => assert!(changed, "{case:?}: {name}"),
                }
            }
        }
    }
}

/// Frozen units have no gradient, no optimizer state, and none of their communication.
#[test]
fn frozen_units_cost_nothing() {
    for groups in [mixed(), upper()] {
        for (stage, dtype) in [
            (0, DType::F32),
            (1, DType::F32),
            (2, DType::Bf16),
            (3, DType::F32),
        ] {
            let case = Case {
                stage,
                dtype,
                steps: 3,
                groups: groups.clone(),
                ..Case::default()
            };
            let workload = case.tiny();
            let outcome = case.run(&workload);
            let layout = &outcome.layout;
            let settings = &outcome.settings;
            let resolved = groups
                .resolve(layout, zero_models::param_kind, None)
                .unwrap();
            let held = resolved
                .state_bytes(layout, settings.stage, &settings.widths())
                .unwrap();
            // A rank's shard may be frozen: the most of any rank.
            let of_ranks = outcome.summaries.iter().map(|summary| {
                let memory = summary.last.as_ref().unwrap().memory;
                [
                    memory.params_bytes,
                    memory.grads_bytes,
                    memory.optimizer_bytes,
                ]
            });
            let most = of_ranks.reduce(|a, b| [0, 1, 2].map(|i| a[i].max(b[i])));
            let expected = [held.params_bytes, held.grads_bytes, held.optimizer_bytes];
            assert_eq!(most, Some(expected), "{case:?}");
            // Each unit that trains is sent once in each direction, to the one other rank.
            let trained = layout
                .units()
                .iter()
                .enumerate()
                .filter(|(i, _)| !resolved.is_frozen(*i));
            let shards: u64 = trained
                .map(|(_, unit)| unit.shard_elems * dtype.size_bytes() as u64)
                .sum();
            let sent = outcome.steps.last().unwrap().comm_bytes;
            match stage {
                0 => assert_eq!(sent.all_reduce, 2 * shards, "{case:?}"),
                1 | 2 => assert_eq!(
                    (sent.reduce_scatter, sent.all_gather),
                    (shards, shards),
                    "{case:?}"
                ),
                _ => assert_eq!(sent.reduce_scatter, shards, "{case:?}"),
            }
            let planned = planned(&workload, &outcome).total();
            // Losses, flags, statistics and scalars are a few KiB, as is the padding that is not
            // saved.
            let peak = peak_bytes(&outcome);
            assert!(
                peak < planned + (8 << 10),
                "{case:?}: {peak} bytes, planned {planned}"
            );
        }
    }
}

#[test]
fn resume_with_groups() {
    for dtype in [DType::F32, DType::Bf16] {
        for stage in 0..4 {
            let case = Case {
                stage,
                dtype,
                steps: 5,
                groups: mixed(),
                ..Case::default()
            };
            same_without_a_stop(&case);
        }
    }
}

/// The loaded state has the bits of the saved one, at other ranks, stages and groups.
#[test]
fn resume_across_ranks_stages_and_groups() {
    let all = [mixed(), upper(), GroupSettings::default()];
    let at = |(ranks, stage)| Case {
        ranks,
        stage,
        micro_batch: 12 / ranks,
        groups: all[0].clone(),
        ..Case::default()
    };
    let mut last = continued(&[(4, 3), (2, 1), (3, 2), (1, 0), (2, 3)].map(at), None);

    for (steps, groups) in (12..).zip(&all) {
        let other = Case {
            steps,
            groups: groups.clone(),
            ..at((2, 2))
        };
        last = other.resumed(&last);
        assert!(last.steps.iter().all(|step| step.loss.is_finite()));
    }
}

#[test]
fn bad_groups_are_refused() {
    let all = ParamGroup {
        trainable: Some(false),
        ..ParamGroup::default()
    };

    let nowhere = ParamGroup {
        names: vec!["layers.*".into()],
        ..ParamGroup::default()
    };

    for (group, part) in [
        (all, "nothing is left to train"),
        (nowhere, "param_groups[0] (layers.*: the optimizer's"),
    ] {
        let groups = GroupSettings {
            groups: vec![group],
            no_decay_1d: false,
        };
        let case = Case::default().with(|case| case.groups = groups);
        let error = case.refusal();
        assert!(error.contains(part), "{error}");
    }
}
