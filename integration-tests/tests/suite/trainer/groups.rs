//! Parameter groups and frozen tensors at all stages: bits, bytes and resume.

use zero_alloc::device::DType;
use zero_trainer::RankBytes;
use zero_trainer::param_groups::{GroupSettings, ParamGroup};

use super::identical::same;
use super::resume::{continued, same_without_a_stop};
use super::support::Case;

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
fn upper() -> GroupSettings {
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
            let reference = base.run_tiny();
            for stage in 1..4 {
                for overlap in [true, false] {
                    let case = Case {
                        stage,
                        overlap,
                        ..base.clone()
                    };
                    same(&reference, &case.run_tiny(), &format!("{case:?}"));
                }
            }
            // Local sums, with frozen units that have no storage.
            let local = base.with(|case| case.reduce_every_micro_batch = false);
            same(
                &local.run_tiny(),
                &Case { stage: 1, ..local }.run_tiny(),
                "local sums",
            );
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
            let resolved = groups.resolve(layout, zero_models::param_kind).unwrap();
            let held = resolved
                .state_bytes(layout, settings.stage, &settings.widths())
                .unwrap();
            let of_ranks = |of: &dyn Fn(&zero_trainer::StepMetrics) -> u64| {
                outcome
                    .summaries
                    .iter()
                    .map(|s| of(s.last.as_ref().unwrap()))
                    .max()
                    .unwrap()
            };
            assert_eq!(
                of_ranks(&|m| m.memory.params_bytes),
                held.params_bytes,
                "{case:?}"
            );
            assert_eq!(
                of_ranks(&|m| m.memory.grads_bytes),
                held.grads_bytes,
                "{case:?}"
            );
            assert_eq!(
                of_ranks(&|m| m.memory.optimizer_bytes),
                held.optimizer_bytes,
                "{case:?}"
            );
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
            let activations = workload.config.activations_bytes(&workload.options);
            let passes = workload.config.passes();
            let planned = RankBytes::new(settings, layout, &passes, activations, true)
                .unwrap()
                .total();
            // Losses, flags, statistics and scalars are a few KiB, as is the padding that is not
            // saved.
            let peak = outcome
                .steps
                .iter()
                .map(|step| step.memory.peak_bytes)
                .max()
                .unwrap();
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
        let error = case.try_run(&case.tiny()).err().unwrap().to_string();
        assert!(error.contains(part), "{error}");
    }
}
