//! One process per rank, under `mpirun` (cargo feature `mpi`).

#[cfg(feature = "mpi")]
use std::sync::mpsc::{self, RecvTimeoutError};
#[cfg(feature = "mpi")]
use std::time::{Duration, Instant};

#[cfg(not(feature = "mpi"))]
use super::host_world::not_built;
#[cfg(feature = "mpi")]
use super::launched::{OPEN_MPI_LIMIT, is_under_open_mpi, launched_rank};
use super::resume::Resumed;
use crate::error::CliError;
#[cfg(feature = "mpi")]
use crate::output::print_note;
use crate::settings::args::TrainArgs;

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

    use super::process_rank::ProcessRank;

    let limit = Duration::from_secs(args.time_limit);
    let first = FIRST_NOTE.min(limit / 2);
    let world = waiting("MPI_Init", first, || {
        MpiWorld::init(CommOptions::default().limit(limit))
    })
    .map_err(CliError::failure)?;
    let comm = world.comm();
    let ranks = comm.world_size();

    let rank = ProcessRank {
        args,
        resumed,
        device: HostDevice::new(),
        comm,
        notice: open_mpi_notice(),
    };
    rank.run_on_host(check_ranks(args, ranks).map(|()| None))
}
