//! One process a rank, under `mpirun` (cargo feature `mpi`).

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
        _ => Ok(false),
    }
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

    use zero_comm::Communicator;
    use zero_comm::mpi::{MpiWorld, Options};

    use super::observe::Observer;
    use super::plan::Plan;
    use super::{cancelled_by_signals, close, failure, summary};
    use crate::cli::say::say;
    use crate::trainer::run_as_rank;

    let world = MpiWorld::init(Options { limit: Duration::from_secs(args.time_limit) }).map_err(CliError::failure)?;
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
