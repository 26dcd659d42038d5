//! Ranks in groups: the numbers of the flat run, and bytes by the formulas.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use proptest::prelude::*;
use zero_alloc::device::DType;
use zero_optim::{DynamicScaling, LossScaling, OptimizerConfig};
use zero_shard::Sharding;
use zero_trainer::{Home, MeshSettings};

use super::failures::death_ends_all;
use super::identical::{cases, same};
use super::on_ranks;
use super::resume::continued;
use super::support::{Case, Outcome, groups_of, home_at, homes};
use super::toy::{Toy, toys};
use super::volumes::held_and_sent_are_the_formulas;

/// Every stage with everything that may be sharded between groups. hpZ comes last: its sums have
/// another order.
fn shardings() -> impl Iterator<Item = (u64, Sharding)> {
    (1..4)
        .flat_map(|stage| [(stage, Sharding::Replicated), (stage, Sharding::Hybrid)])
        .chain([(3, Sharding::Secondary)])
}

/// Asserts that losses and norms differ by at most `limit`, relative.
pub(super) fn close(got: &Outcome, want: &Outcome, limit: f64, what: &str) {
    assert_eq!(got.steps.len(), want.steps.len(), "{what}");
    let within = |got: f64, want: f64, limit: f64| (got - want).abs() <= limit * want.abs();
    for (got, want) in got.steps.iter().zip(&want.steps) {
        let step = got.step;
        let loss = got.loss;
        let expected = want.loss;
        assert!(
            within(loss, expected, limit),
            "{what}, step {step}: loss {loss} for {expected}"
        );
        assert_eq!(got.skipped, want.skipped, "{what}, step {step}");
        if let (Some(got), Some(want)) = (got.grad_norm, want.grad_norm) {
            assert!(
                within(got, want, 10.0 * limit),
                "{what}, step {step}: norm {got} for {want}"
            );
        }
    }
}

/// A mesh has the losses of the flat run but for the order of a sum; all stages and every switch
/// have the same bits, HSDP those of HFSDP. `switches` has pairs of overlap and the place of the
/// optimizer state.
fn agrees(base: &Case, group: usize, limit: f64, switches: &[(bool, Home)]) {
    let flat = base.with(|case| case.stage = 2).run_tiny();
    let mut references: BTreeMap<bool, Outcome> = BTreeMap::new();
    for (stage, sharding) in shardings() {
        for (overlap, home) in switches {
            let case = Case {
                stage,
                overlap: *overlap,
                offload: home_at(stage, home),
                mesh: groups_of(group, sharding),
                ..base.clone()
            };
            let outcome = case.run_tiny();
            close(&outcome, &flat, limit, &format!("{case:?}"));
            match references.entry(sharding == Sharding::Secondary) {
                Entry::Occupied(first) => same(first.get(), &outcome, &format!("{case:?}")),
                Entry::Vacant(first) => drop(first.insert(outcome)),
            }
        }
    }
}

pub(super) fn case(ranks: usize, dtype: DType, grad_accum: usize) -> Case {
    Case {
        ranks,
        dtype,
        grad_accum,
        reduce_every_micro_batch: true,
        ..Case::default()
    }
}

const EVERY_SWITCH: [(bool, Home); 3] = [
    (true, Home::Device),
    (false, Home::Device),
    (true, Home::Host),
];

#[test]
fn two_groups_of_two_agree() {
    agrees(&case(4, DType::F32, 1), 2, 1e-6, &EVERY_SWITCH);
}

#[test]
fn three_groups_of_two_accumulating_agree() {
    let switches = [(true, Home::Device), (true, Home::Host)];
    agrees(&case(6, DType::F32, 3), 2, 1e-6, &switches);
}

#[test]
fn two_groups_of_four_in_bf16_agree() {
    agrees(&case(8, DType::Bf16, 2), 4, 3e-3, &[(true, Home::Device)]);
}

#[test]
fn two_groups_of_two_in_fp16_agree() {
    agrees(&case(4, DType::F16, 2), 2, 1e-3, &EVERY_SWITCH);
}

/// Replicas of one rank each: gradients are added in rank order, as those of the flat run.
#[test]
fn groups_of_one_have_the_bits_of_the_flat_run() {
    for grad_accum in [1, 3] {
        let base = case(3, DType::F32, grad_accum);
        let flat = base.with(|case| case.stage = 2).run_tiny();
        for (stage, sharding) in shardings() {
            let case = Case {
                stage,
                mesh: groups_of(1, sharding),
                ..base.clone()
            };
            let outcome = case.run_tiny();
            match grad_accum {
                1 => same(&flat, &outcome, &format!("{case:?}")),
                // Each replica sums its micro-batches first.
                _ => close(&outcome, &flat, 1e-6, &format!("{case:?}")),
            }
        }
    }
}

#[test]
fn bytes_held_and_sent() {
    // Every dtype and accumulation at one mesh; other sizes of groups with one of them.
    let formats = [
        (DType::Bf16, 2, false),
        (DType::F32, 1, false),
        (DType::Bf16, 1, false),
        (DType::Bf16, 2, true),
    ];
    for (ranks, group, formats) in [
        (4, 2, &formats[..]),
        (2, 1, &formats[..1]),
        (8, 2, &formats[..1]),
        (8, 4, &formats[..1]),
    ] {
        for (stage, sharding) in shardings() {
            for &(dtype, grad_accum, each) in formats {
                let case = Case {
                    stage,
                    steps: 3,
                    reduce_every_micro_batch: each,
                    mesh: groups_of(group, sharding),
                    ..case(ranks, dtype, grad_accum)
                };
                held_and_sent_are_the_formulas(&case, &case.run_tiny());
            }
        }
    }
}

/// A checkpoint of any mesh loads at any other one, with its bits.
#[test]
fn checkpoints_load_at_any_mesh() {
    use Sharding::{Hybrid, Replicated, Secondary};
    // 12 rows a step at any number of ranks.
    let at = |(ranks, stage, mesh)| Case {
        ranks,
        stage,
        mesh,
        micro_batch: 12 / ranks,
        ..Case::default()
    };
    let flat = MeshSettings::default();
    let cases = [
        (4, 3, groups_of(2, Hybrid)),
        (6, 2, groups_of(2, Replicated)),
        (4, 3, groups_of(1, Secondary)),
        (2, 1, flat),
        (6, 3, groups_of(3, Replicated)),
    ];
    continued(&cases.map(at), Some(&at((4, 3, flat))));
}

/// A group without anything that is sharded between groups is no group.
#[test]
fn flat_groups_are_none() {
    let flat = case(4, DType::F32, 1);
    let case = flat.with(|case| case.mesh = groups_of(2, Sharding::Flat));
    same(&flat.run_tiny(), &case.run_tiny(), "groups that share all");
}

/// Stages that have nothing to share in groups refuse them.
#[test]
fn groups_without_use_are_refused() {
    for (stage, sharding) in [(0, Sharding::Replicated), (2, Sharding::Secondary)] {
        let case = Case {
            stage,
            mesh: groups_of(2, sharding),
            ..case(4, DType::F32, 1)
        };
        let error = case.refusal();
        assert!(error.contains("groups of ranks do not fit"), "{error}");
    }
}

/// A loss scale that overflows falls on all ranks of all replicas in the same steps.
#[test]
fn overflow_skips_in_all_replicas() {
    let scaling = DynamicScaling::default()
        .initial_scale_power(20)
        .hysteresis(1);
    let scaling = LossScaling::Dynamic(scaling);
    let base = Case {
        steps: 8,
        optimizer: OptimizerConfig::default().loss_scaling(scaling),
        ..case(4, DType::F16, 1)
    };
    let flat = base.run_tiny();
    let skipped = |outcome: &Outcome| -> Vec<bool> {
        outcome.steps.iter().map(|step| step.skipped).collect()
    };
    assert!(skipped(&flat).contains(&true) && skipped(&flat).contains(&false));
    for (stage, sharding) in shardings() {
        let case = Case {
            stage,
            mesh: groups_of(2, sharding),
            ..base.clone()
        };
        let outcome = case.run_tiny();
        assert_eq!(skipped(&outcome), skipped(&flat), "{case:?}");
        for summary in &outcome.summaries {
            let last = summary.last.as_ref().unwrap();
            assert_eq!(last.loss_scale, flat.steps[7].loss_scale, "{case:?}");
        }
    }
}

/// A rank that dies in one replica ends all, and is named.
#[test]
fn death_in_one_replica_ends_all() {
    for (stage, sharding) in shardings() {
        death_ends_all(&Case {
            stage,
            mesh: groups_of(2, sharding),
            ..case(4, DType::F32, 1)
        });
    }
}

/// State on NVMe.
#[test]
fn offload_to_nvme_has_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let base = case(4, DType::Bf16, 2);
    for (stage, sharding) in shardings() {
        let offload = home_at(stage, &Home::Nvme(dir.path().to_owned()));
        let on_device = Case {
            stage,
            mesh: groups_of(2, sharding),
            ..base.clone()
        };
        let case = on_device.with(|case| case.offload = offload);
        match (stage, sharding) {
            // Sums of a micro-batch leave the device, and the replicas' sums with them.
            (3, Sharding::Replicated | Sharding::Hybrid) => {
                let what = format!("{case:?}");
                close(&case.run_tiny(), &on_device.run_tiny(), 3e-3, &what);
            }
            _ => same(
                &on_device.run_tiny(),
                &case.run_tiny(),
                &format!("{case:?}"),
            ),
        }
    }
}

/// In any order that streams and events allow, no access is unordered.
#[test]
fn no_wait_is_missing() {
    let toy = Toy::new(&[vec![40, 3], vec![70], vec![9, 30], vec![5]], true);
    for (stage, sharding) in shardings() {
        for (home, seed) in [(Home::Device, 0), (Home::Device, 1), (Home::Host, 2)] {
            let case = Case {
                stage,
                offload: homes(home, Home::Device),
                mesh: groups_of(1, sharding),
                ..case(2, DType::Bf16, 2)
            };
            on_ranks::no_wait_is_missing(&case, &toy, seed);
        }
    }
}

proptest! {
    #![proptest_config(cases(2))]

    /// Units of any sizes at any mesh: the stages and the places of the optimizer state have the
    /// same bits, and the flat run's losses.
    #[test]
    fn units_of_any_size(
        toy in toys(true),
        group in 1usize..4,
        replicas in 2usize..4,
        grad_accum in 1usize..3,
        bucket_elems in 1usize..200,
    ) {
        let base = Case { bucket_elems, ..case(group * replicas, DType::F32, grad_accum) };
        let flat = Case { stage: 2, ..base.clone() }.run(&toy);
        let mut reference: Option<Outcome> = None;
        for (stage, sharding) in shardings() {
            let case = Case { stage, mesh: groups_of(group, sharding), ..base.clone() };
            let outcome = case.run(&toy);
            close(&outcome, &flat, 1e-6, &format!("{case:?}"));
            match &reference {
                _ if sharding == Sharding::Secondary => {}
                Some(reference) => same(reference, &outcome, &format!("{case:?}")),
                None => reference = Some(outcome),
            }
        }
    }
}
