//! One process per rank, under `mpirun` (cargo feature `mpi`).

#[cfg(feature = "mpi")]
use std::sync::mpsc::{self, RecvTimeoutError};
#[cfg(feature = "mpi")]
use std::time::{Duration, Instant};

use zero_comm::world::{Launcher, Ranks};

use super::launched::mpi_ranks;
#[cfg(feature = "mpi")]
use super::launched::{OPEN_MPI_LIMIT, is_under_open_mpi, launched_rank};
use super::resume::Resumed;
use crate::error::CliError;
#[cfg(feature = "mpi")]
use crate::output::print_note;
use crate::settings::args::{CommChoice, TrainArgs};

/// Whether this process trains as a rank of an MPI world.
pub(crate) fn is_selected(args: &TrainArgs) -> Result<bool, CliError> {
    // With --comm threads what a launcher says does not matter.
    let processes = match args.comm {
        CommChoice::Threads => mpi_ranks().unwrap_or(1),
        _ => mpi_ranks()?,
    };
    let launched = processes > 1;
    if launched && args.comm != CommChoice::Threads && args.comm != CommChoice::Nccl {
        check_same(Ranks::from_env().ok().flatten().as_ref(), processes)?;
    }
    match args.comm {
        CommChoice::Threads if launched => {
            tracing::warn!(
                "--comm threads: a launcher started {processes} processes, and each of them trains the whole run by itself"
            );
            Ok(false)
        }
        CommChoice::Threads | CommChoice::Nccl => Ok(false),
        CommChoice::Mpi => Ok(true),
        // Without MPI every process of mpirun would train the whole run by itself.
        CommChoice::Auto if launched && cfg!(feature = "mpi") => Ok(true),
        CommChoice::Auto if launched => Err(not_built()),
        CommChoice::Auto => {
            let ranks = Ranks::from_env().map_err(CliError::usage)?;
            check_not_launched(ranks.as_ref()).map(|()| false)
        }
    }
}

/// Rejects variables of torchrun that contradict those of `mpirun`, which started `processes`.
fn check_same(ranks: Option<&Ranks>, processes: usize) -> Result<(), CliError> {
    let other = ranks
        .filter(|ranks| ranks.launcher == Launcher::Torchrun)
        .map(|ranks| ranks.world_size)
        .filter(|size| *size > 1 && *size != processes);
    match other {
        Some(size) => Err(usage!(
            "mpirun started {processes} processes, but WORLD_SIZE={size}: start the run by one launcher, or unset \
             RANK and WORLD_SIZE"
        )),
        None => Ok(()),
    }
}

/// Rejects processes of a launcher under which host ranks cannot communicate: each would train the
/// whole run.
fn check_not_launched(launched: Option<&Ranks>) -> Result<(), CliError> {
    let Some(ranks) = launched.filter(|ranks| ranks.world_size > 1) else {
        return Ok(());
    };
    let (rank, world_size) = (ranks.rank, ranks.world_size);
    let by = match ranks.launcher {
        Launcher::Torchrun => "torchrun (RANK, WORLD_SIZE)",
        Launcher::OpenMpi => "mpirun",
        Launcher::Slurm => "srun",
        _ => "another launcher",
    };
    Err(usage!(
        "{by} started this process as rank {rank} of {world_size}, but on the host ranks cannot communicate under it: \
         start one process with --ranks {world_size}, or use mpirun; with --comm threads each process trains by itself"
    ))
}

fn not_built() -> CliError {
    CliError::Usage(
        "this binary was built without MPI: build it with `--features mpi`, or pass --comm threads to train in one \
         process"
            .into(),
    )
}

#[cfg(not(feature = "mpi"))]
pub(crate) fn run(_args: &TrainArgs, _resumed: Option<&Resumed>) -> Result<(), CliError> {
    Err(not_built())
}

/// Time until the first note that a rank waits for the others to start, and between two of them.
#[cfg(feature = "mpi")]
const FIRST_NOTE: Duration = Duration::from_secs(10);
#[cfg(feature = "mpi")]
const NEXT_NOTE: Duration = Duration::from_secs(60);

/// Calls `call`, which waits in MPI until all ranks have called it, however long that takes, and
/// prints notes meanwhile. Of the ranks the first two print, since one of them may be missing.
#[cfg(feature = "mpi")]
fn waiting<T>(name: &str, first: Duration, call: impl FnOnce() -> T) -> T {
    let rank = launched_rank();
    if rank.is_some_and(|rank| rank > 1) {
        return call();
    }
    let rank = rank.map_or_else(|| "this rank".to_owned(), |rank| format!("rank {rank}"));
    let begun = Instant::now();
    let (ended, has_ended) = mpsc::channel::<()>();

    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut next = first;
            while has_ended.recv_timeout(next) == Err(RecvTimeoutError::Timeout) {
                let seconds = begun.elapsed().as_secs_f64();
                print_note(format_args!(
                    "{rank} waits in {name} for the other ranks since {seconds:.1} s: all of them must start `zero train`"
                ));
                next = NEXT_NOTE;
            }
        });
        let result = call();
        drop(ended);
        result
    })
}

/// The effect of a signal to mpirun under Open MPI, unless a setting gives the ranks more time.
#[cfg(feature = "mpi")]
fn open_mpi_notice() -> Option<String> {
    (is_under_open_mpi() && std::env::var_os(OPEN_MPI_LIMIT).is_none()).then(|| {
        "after Ctrl-C or SIGTERM mpirun kills the ranks within 1 s, also while they save: to end this run with a save, send \
         SIGUSR1 to mpirun (kill -USR1 PID), or start it with --mca odls_base_sigkill_timeout SECONDS, longer than a step \
         and a save"
            .to_owned()
    })
}

/// Checks that `--ranks` is the number of processes that `mpirun` started.
#[cfg(feature = "mpi")]
fn check_ranks(args: &TrainArgs, started: usize) -> Result<(), CliError> {
    match args.ranks {
        Some(flag) if flag != started => {
            Err(usage!("--ranks {flag}: mpirun started {started} ranks"))
        }
        _ => Ok(()),
    }
}

/// Trains as one rank; rank 0 prints.
#[cfg(feature = "mpi")]
pub(crate) fn run(args: &TrainArgs, resumed: Option<&Resumed>) -> Result<(), CliError> {
    use zero_alloc::host::HostDevice;
    use zero_comm::mpi::MpiWorld;
    use zero_comm::{CommOptions, Communicator};
    use zero_trainer::run_as_rank;

    use super::process_rank::ProcessRank;
    use super::session::run_error;
    use super::setup::RunSetup;
    use crate::memory;

    let limit = Duration::from_secs(args.time_limit);
    let first = FIRST_NOTE.min(limit / 2);
    let world = waiting("MPI_Init", first, || {
        MpiWorld::init(CommOptions::default().limit(limit))
    })
    .map_err(CliError::failure)?;
    let comm = world.comm();
    let ranks = comm.world_size();

    let make = |args: &TrainArgs, resumed: Option<&Resumed>| {
        let setup = RunSetup::new(args, resumed, ranks, None)?;
        memory::check(&setup.memory(), 1, args.memory_limit)?;
        Ok(setup)
    };
    let rank = ProcessRank {
        args,
        resumed,
        device: HostDevice::new(),
        comm,
        notice: open_mpi_notice(),
    };
    rank.run(
        check_ranks(args, ranks).map(|()| None),
        make,
        |setup, comm, observe| {
            let threads = setup.workload.threads;
            let settings = &setup.settings;
            let workload = &setup.workload;
            run_as_rank(comm, threads, settings, workload, &setup.options, observe)
                .map_err(run_error)
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_rank_of_torchrun_is_rejected() {
        let rank = |world_size, launcher| {
            Ranks::new(0, world_size, 0, "127.0.0.1", 1)
                .launcher(launcher)
                .one_machine(true)
        };
        for launcher in [Launcher::Torchrun, Launcher::Slurm] {
            let error = check_not_launched(Some(&rank(4, launcher))).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains("rank 0 of 4"), "{error}");
            assert!(error.to_string().contains("--ranks 4"), "{error}");
            check_not_launched(Some(&rank(1, launcher))).unwrap();
        }
        check_not_launched(None).unwrap();

        for (size, fits) in [(1, true), (4, true), (2, false)] {
            let checked = check_same(Some(&rank(size, Launcher::Torchrun)), 4);
            assert_eq!(checked.is_ok(), fits, "{size}");
        }
        check_same(Some(&rank(2, Launcher::Slurm)), 4).unwrap();
    }
}
