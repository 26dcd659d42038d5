//! A rank whose parameters differ from those of the others is named before its state is saved.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use zero_alloc::host::{HostDevice, HostStream};
use zero_comm::backend::{Checked, Wrapped};
use zero_comm::threads::World;
use zero_comm::{Collective, CommOptions, Communicator};
use zero_shard::Sharding;
use zero_trainer::{ReplicaChecks, RunOptions, StepMetrics, Workload, run_as_rank};

use super::support::{Case, groups_of, parts};
use super::toy::Toy;

/// Units of the model: the damaged one is in the middle.
const UNITS: usize = 3;
const DAMAGED: usize = 1;

/// A communicator whose link inverts the sign of a number in one result of this rank: the
/// `number`-th of a collective, of the split `of_split` if there is one.
fn damaged_link(
    inner: Arc<dyn Communicator<HostDevice>>,
    (damaged, number): (Collective, usize),
    of_split: Option<usize>,
) -> Wrapped<HostDevice> {
    let received = AtomicUsize::new(0);
    let enqueue = move |comm: &Wrapped<HostDevice>, stream: &HostStream, checked: Checked| {
        let call = checked.call();
        let counts = call.collective == damaged && !call.control;
        let recv = checked.recv();
        comm.inner().enqueue(stream, checked)?;
        let is_here = counts && comm.split_number() == of_split;
        if !is_here || received.fetch_add(1, Ordering::Relaxed) != number {
            return Ok(());
        }
        let sign = recv.as_ptr() as usize + 3;
        stream.enqueue("damage", move || {
            // SAFETY: the result of the collective, in host memory, used in the order of its
            // stream.
            unsafe { *(sign as *mut u8) ^= 0x80 };
            Ok(())
        })?;

        Ok(())
    };
    // SAFETY: the call is the inner communicator's; the damage is an operation of its stream.
    unsafe { Wrapped::new(inner, enqueue) }
}

/// Runs `case`; the link of `rank` damages the result `damaged`. Returns the results of all ranks.
fn run(
    case: &Case,
    options: &RunOptions,
    rank: usize,
    damaged: (Collective, usize),
) -> Vec<Result<(), String>> {
    run_workload(&toy(), case, options, rank, damaged, None)
}

fn toy() -> Toy {
    Toy::new(&[vec![40], vec![150], vec![100]], false)
}

/// As [`run`], with damage of the link of a split if `of_split` is set.
fn run_workload(
    workload: &dyn Workload<HostDevice>,
    case: &Case,
    options: &RunOptions,
    rank: usize,
    damaged: (Collective, usize),
    of_split: Option<usize>,
) -> Vec<Result<(), String>> {
    let comms = World::new(case.ranks, CommOptions::default()).unwrap();
    std::thread::scope(|scope| {
        let train = |(index, comm)| {
            let mut link: Arc<dyn Communicator<HostDevice>> = Arc::new(comm);
            if index == rank {
                link = Arc::new(damaged_link(link, damaged, of_split));
            }
            let settings = case.settings();
            scope.spawn(move || {
                let mut observe = |_: &StepMetrics| Ok(());
                let run = run_as_rank(link, 1, &settings, workload, options, &mut observe);
                run.map(drop).map_err(|error| error.to_string())
            })
        };
        let ranks: Vec<_> = comms.into_iter().enumerate().map(train).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The result of the last step's collective for the damaged unit: its gradients at stage 0, its
/// parameters above.
fn of_last_step(stage: u64, steps: u64) -> (Collective, usize) {
    match stage {
        // Backward runs from the last unit to the first.
        0 => (
            Collective::AllReduce,
            (steps as usize - 1) * UNITS + (UNITS - 1 - DAMAGED),
        ),
        // The initial weights are gathered too.
        _ => (Collective::AllGather, steps as usize * UNITS + DAMAGED),
    }
}

#[test]
fn damaged_replica_is_named_and_not_saved() {
    for stage in 0..3 {
        for (ranks, rank, named) in [(2, 0, 1), (3, 0, 0), (3, 2, 2), (4, 1, 1)] {
            let dir = tempfile::tempdir().unwrap();
            let case = Case {
                stage,
                ranks,
                steps: 3,
                ..Case::default()
            };
            let options = case.options(Some(dir.path()));
            let context = format!("stage {stage}, {ranks} ranks, rank {rank} damaged");

            let results = run(&case, &options, rank, of_last_step(stage, 3));

            for result in results {
                let error = result.expect_err(&context);
                assert!(
                    error.contains(&format!(
                        "step 3: rank {named} holds other parameters than rank"
                    )),
                    "{context}: {error}"
                );
                assert!(error.contains("unit u1 first"), "{context}: {error}");
            }
            assert!(
                !dir.path().join("latest").exists(),
                "{context}: a checkpoint was saved"
            );
        }
    }
}

/// At stage 3 the replicas of a shard are compared: a sum of gradients, or a gather of parameters,
/// that one of them received with an error.
#[test]
fn damaged_shard_is_named_and_not_saved() {
    // The second split is that of the replicas.
    const REPLICAS: Option<usize> = Some(1);
    // Without the last unit's gradient, which comes first.
    let of_gradients = (Collective::AllReduce, 2 * UNITS + (UNITS - 1 - DAMAGED));
    let of_params = (Collective::AllGather, 3 * UNITS + DAMAGED);
    for (sharding, damaged) in [
        (Sharding::Replicated, of_gradients),
        (Sharding::Hybrid, of_params),
        (Sharding::Secondary, of_params),
    ] {
        for (ranks, rank, reference, named) in [(4, 3, 1, 3), (6, 2, 0, 2)] {
            let dir = tempfile::tempdir().unwrap();
            let case = Case {
                stage: 3,
                ranks,
                steps: 3,
                mesh: groups_of(2, sharding),
                ..Case::default()
            };
            let options = case.options(Some(dir.path()));
            let results = run_workload(&toy(), &case, &options, rank, damaged, REPLICAS);

            let context = format!("{sharding:?}, {ranks} ranks, rank {rank} damaged");
            let text = format!("step 3: rank {named} holds other parameters than rank {reference}");
            for result in results {
                let error = result.expect_err(&context);
                assert!(error.contains(&text), "{context}: {error}");
            }
            assert!(!dir.path().join("latest").exists(), "{context}");
        }
    }
}

/// Ranks of tensor parallelism compare the parameters that all of them have: here those of the last
/// norm, after a sum of the head's backward that one of them received with an error.
#[test]
fn damaged_part_is_named_and_not_saved() {
    // The first split is that of the data ranks.
    const PARTS: Option<usize> = Some(1);
    for stage in [1, 3] {
        let dir = tempfile::tempdir().unwrap();
        let case = Case {
            stage,
            ranks: 4,
            steps: 2,
            mesh: parts(2),
            ..Case::default()
        };
        let options = case.options(Some(dir.path()));
        // A step sums the embedding, two in each of three blocks, then the head, and two in each block.
        let damaged = (Collective::AllReduce, 14 + 7);
        let results = run_workload(&case.tiny(), &case, &options, 3, damaged, PARTS);
        // Its gradient is in the sums of rank 1, too, which has the same part.
        let texts = [[1, 0], [3, 2]].map(|[rank, other]| {
            format!("step 2: rank {rank} holds other parameters than rank {other}")
        });
        for result in results {
            let error = result.unwrap_err();
            let is_named = texts.iter().any(|text| error.contains(text));
            assert!(is_named, "stage {stage}: {error}");
        }
        assert!(!dir.path().join("latest").exists(), "stage {stage}");
    }
}

#[test]
fn replicas_are_compared_at_intervals() {
    let case = Case {
        stage: 2,
        ranks: 3,
        steps: 6,
        ..Case::default()
    };

    let damaged = of_last_step(2, 4);
    let checked = |check_replicas| {
        let options = RunOptions {
            check_replicas,
            ..case.options(None)
        };
        run(&case, &options, 2, damaged)
    };

    let errors = checked(ReplicaChecks::Every(2));
    assert!(
        errors
            .iter()
            .all(|result| result.as_ref().is_err_and(|e| e.contains("step 4: rank 2"))),
        "{errors:?}"
    );
    // Without a check nothing notices, and without a checkpoint none is due.
    assert!(checked(ReplicaChecks::Never).iter().all(Result::is_ok));
    assert!(checked(ReplicaChecks::AtSaves).iter().all(Result::is_ok));
}
