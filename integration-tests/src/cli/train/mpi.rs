//! One process a rank, under `mpirun` (cargo feature `mpi`).

use zero_comm::nccl::{Launcher, Ranks};

use super::CliError;
use super::args::{CommChoice, TrainArgs};

/// What Open MPI, MPICH and Slurm's PMI tell a process about the size of its world.
const WORLD_SIZE_VARIABLES: [&str; 2] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"];

/// Whether this process is a rank of an MPI world.
pub(super) fn asked_for(args: &TrainArgs) -> Result<bool, CliError> {
    let size = |name| std::env::var(name).ok()?.parse::<usize>().ok();
    let launched = WORLD_SIZE_VARIABLES.into_iter().filter_map(size).any(|size| size > 1);
    match args.comm {
        CommChoice::Threads => Ok(false),
        CommChoice::Mpi => Ok(true),
        // Otherwise every process of mpirun would train all by itself.
        CommChoice::Auto if launched && cfg!(feature = "mpi") => Ok(true),
        CommChoice::Auto if launched => Err(not_built()),
        // Variables that do not fit together are no launcher's.
        CommChoice::Auto => check_alone(Ranks::from_env().ok().flatten().as_ref()).map(|()| false),
        CommChoice::Nccl => Ok(false),
    }
}

/// A launcher that the host's ranks know nothing of would start the same whole run many times.
fn check_alone(launched: Option<&Ranks>) -> Result<(), CliError> {
    let Some(ranks) = launched.filter(|ranks| ranks.world_size > 1) else { return Ok(()) };
    let (rank, world_size) = (ranks.rank, ranks.world_size);
    let by = match ranks.launcher {
        Launcher::Torchrun => "torchrun (RANK, WORLD_SIZE)",
        Launcher::OpenMpi => "mpirun",
        Launcher::Slurm => "srun",
    };
    Err(CliError::Usage(format!(
        "{by} started this process as rank {rank} of {world_size}, but on the host it would not talk to the others: \
         start it once, with --ranks {world_size}, or under mpirun; with --comm threads each process trains by itself"
    )))
}

fn not_built() -> CliError {
    CliError::Usage(
        "this binary is built without MPI: build it with `--features mpi`, or say --comm threads for one process"
            .into(),
    )
}

#[cfg(not(feature = "mpi"))]
pub(super) fn run(_args: &TrainArgs) -> Result<(), CliError> {
    Err(not_built())
}

/// Trains as one rank; rank 0 prints.
#[cfg(feature = "mpi")]
pub(super) fn run(args: &TrainArgs) -> Result<(), CliError> {
    use std::time::Duration;

    use zero_comm::mpi::MpiWorld;
    use zero_comm::{CommOptions, Communicator};

    use super::observe::Observer;
    use super::plan::Plan;
    use super::{cancelled_by_signals, close, failure, summary};
    use crate::cli::output::say;
    use crate::trainer::run_as_rank;

    let world =
        MpiWorld::init(CommOptions { limit: Duration::from_secs(args.time_limit) }).map_err(CliError::failure)?;
    let comm = world.comm();
    let (rank, ranks) = (comm.rank(), comm.world_size());
    if args.ranks.is_some_and(|asked| asked != ranks) {
        return Err(CliError::Usage(format!("--ranks {}: mpirun started {ranks} ranks", args.ranks.unwrap_or(0))));
    }
    let mut plan = Plan::new(args, ranks, None)?;
    plan.options.cancel = cancelled_by_signals()?;
    let mut observer = if rank == 0 {
        say(summary::opening(&plan))?;
        Some(Observer::new(&plan)?)
    } else {
        None
    };
    let summary =
        run_as_rank(comm, plan.workload.threads, &plan.settings, &plan.workload, &plan.options, &mut |metrics| {
            observer.as_mut().map_or(Ok(()), |o| o.step(metrics))
        });
    if let Some(observer) = &observer {
        observer.finish();
    }
    let summary = summary.map_err(failure)?;
    observer.map_or(Ok(()), |observer| close(&plan, &observer, &[summary]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_of_another_launcher_does_not_train_alone_on_the_host() {
        let rank = |world_size, launcher| {
            let host = "127.0.0.1".to_owned();
            Ranks { rank: 0, world_size, local_rank: 0, host, port: 1, launcher }
        };
        for launcher in [Launcher::Torchrun, Launcher::Slurm] {
            let error = check_alone(Some(&rank(4, launcher))).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains("rank 0 of 4"), "{error}");
            assert!(error.to_string().contains("--ranks 4"), "{error}");
            check_alone(Some(&rank(1, launcher))).unwrap();
        }
        check_alone(None).unwrap();
    }
}
