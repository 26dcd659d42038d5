//! Parameter groups and frozen tensors at all stages: bits, bytes and resume.

use zero_alloc::device::DType;
use zero_trainer::RankBytes;
use zero_trainer::param_groups::{GroupSettings, ParamGroup};

use super::identical::same;
use super::support::{Case, Outcome};

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
            let local = Case {
                reduce_every_micro_batch: false,
                ..base
            };
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
        let case = Case {
            stage,
            ..Case::default()
        };
        let grouped = Case {
            groups: groups(json, false),
            ..case.clone()
        };
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
            let short = Case {
                steps: 1,
                ..case.clone()
            }
            .run_tiny();
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

fn resumed(from: &Outcome, case: &Case) -> Outcome {
    Case {
        resume: Some(from.dir.path().to_owned()),
        ..case.clone()
    }
    .run_tiny()
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
            let whole = case.run_tiny();
            let first = Case {
                steps: 2,
                ..case.clone()
            }
            .run_tiny();
            let rest = resumed(&first, &case);
            assert_eq!(
                whole.curve(),
                [first.curve(), rest.curve()].concat(),
                "{case:?}"
            );
            assert!(whole.state() == rest.state(), "{case:?}: final state");
        }
    }
}

/// The loaded state has the bits of the saved one, at other ranks, stages and groups.
#[test]
fn resume_across_ranks_stages_and_groups() {
    let all = [mixed(), upper(), GroupSettings::default()];
    let at = |ranks, stage, steps, groups: &GroupSettings| Case {
        ranks,
        stage,
        steps,
        micro_batch: 12 / ranks,
        groups: groups.clone(),
        ..Case::default()
    };

    let mut last = at(4, 3, 2, &all[0]).run_tiny();
    for (i, (ranks, stage)) in [(2, 1), (3, 2), (1, 0), (2, 3)].into_iter().enumerate() {
        let done = 2 * (i as u64 + 1);
        let only_loaded = resumed(&last, &at(ranks, stage, done, &all[0]));
        assert!(
            only_loaded.state() == last.state(),
            "{ranks} ranks, stage {stage}: state as loaded and saved again"
        );
        last = resumed(&only_loaded, &at(ranks, stage, done + 2, &all[0]));
    }

    for (i, groups) in all.iter().enumerate() {
        last = resumed(&last, &at(2, 2, 12 + i as u64, groups));
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
        let case = Case {
            groups,
            ..Case::default()
        };
        let error = case.try_run(&case.tiny()).err().unwrap().to_string();
        assert!(error.contains(part), "{error}");
    }
}
