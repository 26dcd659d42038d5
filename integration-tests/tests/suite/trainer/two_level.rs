//! Collectives over all ranks in two levels: the numbers and the memory of one ring, the bytes
//! between machines by the formulas, and the latency of fewer neighbours.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use zero_alloc::device::DType;
use zero_alloc::host::{HostDevice, HostStream};
use zero_comm::backend::{Checked, Wrapped};
use zero_comm::{Collective, Communicator};
use zero_shard::{GridLayout, Routing, Sharding, ZeroStage};
use zero_trainer::{Home, MeshSettings, RankSummary};

use super::failures;
use super::identical::{all_same_with, cases, same};
use super::mesh::{case, close};
use super::on_ranks::{self, on_ranks, third_step_ms};
use super::resume::continued;
use super::support::{Case, Outcome, groups_of, home_at, levels_of};
use super::toy::{Toy, toys};
use super::volumes::held_and_sent_are_the_formulas;

/// The run over one ring.
fn flat(case: &Case) -> Outcome {
    Case {
        mesh: MeshSettings::default(),
        ..case.clone()
    }
    .run_tiny()
}

/// Asserts that the ranks have the memory of the other run.
fn same_memory(got: &Outcome, want: &Outcome, what: &str) {
    for (got, want) in got.summaries.iter().zip(&want.summaries) {
        let got = got.last.as_ref().unwrap().memory;
        let want = want.last.as_ref().unwrap().memory;
        assert_eq!(got.params_bytes, want.params_bytes, "{what}");
        assert_eq!(got.grads_bytes, want.grads_bytes, "{what}");
        assert_eq!(got.optimizer_bytes, want.optimizer_bytes, "{what}");
        assert_eq!(got.buckets_bytes, want.buckets_bytes, "{what}");
    }
    // Another rank has the last part of a unit, whose padding is not saved.
    let peaks = |outcome: &Outcome| {
        let of_rank = |summary: &RankSummary| summary.last.as_ref().unwrap().memory.peak_bytes;
        let mut peaks: Vec<u64> = outcome.summaries.iter().map(of_rank).collect();
        peaks.sort_unstable();
        peaks
    };
    assert_eq!(peaks(got), peaks(want), "{what}");
}

/// Two levels have the losses and the memory of one ring, at all stages the same bits.
fn agrees(base: &Case, level: usize, limit: f64, switches: &[(bool, Home)]) {
    let mut first: Option<Outcome> = None;
    for stage in 0..4 {
        for (overlap, home) in switches {
            let case = Case {
                stage,
                overlap: *overlap,
                offload: home_at(stage, home),
                mesh: levels_of(level),
                ..base.clone()
            };
            let what = format!("{case:?}");
            let outcome = case.run_tiny();
            let ring = flat(&case);
            close(&outcome, &ring, limit, &what);
            same_memory(&outcome, &ring, &what);
            match &first {
                // In 16 bits an all-reduce rounds another sum than a reduce-scatter.
                Some(first) => same(first, &outcome, &what),
                None => first = Some(outcome),
            }
        }
    }
}

#[test]
fn two_machines_of_two_agree() {
    let switches = [
        (true, Home::Device),
        (false, Home::Device),
        (true, Home::Host),
    ];
    agrees(&case(4, DType::F32, 1), 2, 1e-6, &switches);
}

#[test]
fn three_machines_of_two_accumulating_agree() {
    agrees(&case(6, DType::F32, 3), 2, 1e-6, &[(true, Home::Device)]);
}

#[test]
fn two_machines_of_three_agree() {
    agrees(&case(6, DType::F32, 1), 3, 1e-6, &[(true, Home::Device)]);
}

#[test]
fn two_machines_of_four_in_bf16_agree() {
    agrees(&case(8, DType::Bf16, 2), 4, 3e-3, &[(true, Home::Device)]);
}

/// Stages 0 and 1 sum micro-batches on each rank by default.
#[test]
fn local_sums_agree() {
    for stage in [0, 1] {
        let case = Case {
            stage,
            reduce_every_micro_batch: false,
            mesh: levels_of(2),
            ..case(4, DType::F32, 3)
        };
        close(&case.run_tiny(), &flat(&case), 1e-6, &format!("{case:?}"));
    }
}

#[test]
fn bytes_held_and_sent() {
    for (ranks, level) in [(4, 2), (6, 3), (8, 2)] {
        for stage in 0..4 {
            let case = Case {
                stage,
                steps: 3,
                mesh: levels_of(level),
                ..case(ranks, DType::Bf16, 2)
            };
            held_and_sent_are_the_formulas(&case, &case.run_tiny());
        }
    }
}

/// The bytes that leave a machine in a step.
#[test]
fn bytes_between_machines_are_the_formulas() {
    for (ranks, level) in [(4, 2), (6, 3), (8, 2), (8, 4)] {
        for stage in 0..4 {
            for (mesh, routing) in [
                (levels_of(level), Routing::TwoLevel),
                (MeshSettings::default(), Routing::Ring),
            ] {
                let case = Case {
                    stage,
                    steps: 3,
                    node_ranks: Some(level),
                    mesh,
                    ..case(ranks, DType::Bf16, 2)
                };
                let outcome = case.run_tiny();
                let expected = between_bytes(&outcome, stage, level, routing);
                let sent = outcome.steps[1].comm_bytes.between;
                println!("stage {stage}, {ranks} ranks, {level} a machine, {routing:?}: {sent}");
                if stage == 3 {
                    // Less by the gathers that stage 3 does not need.
                    assert!(sent <= expected, "{case:?}: {sent} of {expected}");
                } else {
                    assert_eq!(sent, expected, "{case:?}");
                }
                // M - 1 of M parts of a buffer leave a machine, or in one ring N - 1 of N.
                let of_rank = outcome.steps[1].comm_bytes.total();
                let expected = match routing {
                    Routing::TwoLevel => of_rank / (ranks - 1) as u64 * (ranks - level) as u64,
                    _ => of_rank,
                };
                assert_eq!(sent, expected, "{case:?}");
            }
        }
    }
}

fn between_bytes(outcome: &Outcome, stage: u64, level: usize, routing: Routing) -> u64 {
    let settings = &outcome.settings;
    let layouts =
        GridLayout::of_parts(outcome.layout.clone(), level as u64, Sharding::Flat).unwrap();
    let stage = ZeroStage::from_number(stage).unwrap();
    let sent = layouts.step_traffic(stage, &settings.widths(), settings.reductions(), routing);
    sent.unwrap().group_egress_bytes
}

/// A checkpoint of two levels loads in one ring, and the reverse, with its bits.
#[test]
fn checkpoints_load_without_levels() {
    for stage in 1..4 {
        let at = |mesh| Case {
            stage,
            mesh,
            ..case(6, DType::F32, 1)
        };
        let ring = at(MeshSettings::default());
        let cases = [at(levels_of(2)), ring.clone(), at(levels_of(3))];
        continued(&cases, Some(&ring));
    }
}

/// The run fails before its first step.
#[test]
fn levels_that_do_not_fit_are_refused() {
    let refused = |mesh| {
        case(4, DType::F32, 1)
            .with(|case| case.mesh = mesh)
            .refusal()
    };
    let error = refused(levels_of(3));
    assert!(error.contains('3') && error.contains('4'), "{error}");
    let error = refused(MeshSettings {
        two_level: Some(2),
        ..groups_of(2, Sharding::Hybrid)
    });
    assert!(error.contains("MeshSettings::two_level to None"), "{error}");
}

/// A rank that dies ends all, and is named.
#[test]
fn death_ends_all() {
    for stage in 0..4 {
        failures::death_ends_all(&Case {
            stage,
            mesh: levels_of(2),
            ..case(4, DType::F32, 1)
        });
    }
}

/// In any order that streams and events allow, no access is unordered.
#[test]
fn no_wait_is_missing() {
    let toy = Toy::new(&[vec![40, 3], vec![70], vec![9, 30], vec![5]], true);
    for stage in 0..4 {
        for seed in 0..2 {
            let case = Case {
                stage,
                mesh: levels_of(2),
                ..case(4, DType::Bf16, 2)
            };
            on_ranks::no_wait_is_missing(&case, &toy, seed);
        }
    }
}

/// A communicator over rings: a collective takes one operation `hop` for each other rank, and an
/// all-reduce two.
fn rings(inner: Arc<dyn Communicator<HostDevice>>) -> Wrapped<HostDevice> {
    let enqueue = |comm: &Wrapped<HostDevice>, stream: &HostStream, checked: Checked| {
        let call = checked.call();
        let rounds = match call.collective {
            _ if call.control => 0,
            Collective::AllReduce => 2,
            _ => 1,
        };
        for _ in 0..rounds * (comm.world_size() - 1) {
            stream.enqueue("hop", || Ok(()))?;
        }
        comm.inner().enqueue(stream, checked)
    };
    // SAFETY: the call is the inner communicator's, on the same stream.
    unsafe { Wrapped::new(inner, enqueue) }
}

const UNITS: usize = 6;

/// Milliseconds of the third step of rank 0, from its first forward to that of the fourth, where
/// only hops take time: one millisecond each.
fn step_ms(stage: u64, mesh: MeshSettings) -> u128 {
    let case = Case {
        stage,
        steps: 5,
        mesh,
        ..case(8, DType::Bf16, 1)
    };
    let toy = Toy::new(&vec![vec![64]; UNITS], false);
    let spans = on_ranks(&case, &toy, |_, comm, train| {
        let device = HostDevice::modelled(|_, label| match label {
            "hop" => Duration::from_millis(1),
            _ => Duration::ZERO,
        });
        train(device.clone(), Arc::new(rings(comm)));
        device.modelled_spans()
    });

    third_step_ms(&spans[0], UNITS)
}

/// With 8 ranks, 4 a machine, a collective waits for 3 + 1 neighbours, in one ring for 7.
#[test]
fn latency_is_that_of_both_levels() {
    for stage in 0..4 {
        let ring = step_ms(stage, MeshSettings::default());
        let levels = step_ms(stage, levels_of(4));
        println!("stage {stage}: {levels} ms, {ring} ms in one ring");
        assert!(ring > 0, "stage {stage}");
        assert_eq!(levels * 7, ring * 4, "stage {stage}");
    }
}

proptest! {
    #![proptest_config(cases(2))]

    /// Units of any sizes on any machines: all stages have the same bits, and one ring's losses.
    #[test]
    fn units_of_any_size(
        toy in toys(true),
        level in 1usize..4,
        machines in 2usize..4,
        grad_accum in 1usize..3,
        bucket_elems in 1usize..200,
    ) {
        let base = Case { bucket_elems, ..case(level * machines, DType::F32, grad_accum) };
        let ring = Case { stage: 2, ..base.clone() }.run(&toy);
        let at = |stage| Case { stage, mesh: levels_of(level), ..base.clone() };
        let levels = all_same_with((0..4).map(at), |case| case.run(&toy));
        close(&levels, &ring, 1e-6, &format!("{base:?}"));
    }
}
