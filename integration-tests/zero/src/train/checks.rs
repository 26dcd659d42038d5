//! Checks of flags and configuration before anything else is read.

use super::launched::launched_ranks;
use crate::error::CliError;
use crate::flags::check_positive;
use crate::settings::args::TrainArgs;
use zero_config::DsConfig;

/// The highest number of threads of one process, those of all its ranks: each has a stack, and more
/// than a few for each core only wait.
const MAX_THREADS: usize = 1024;

/// The highest number of ranks that are processes. Every rank keeps the shards and the statistics
/// of all in tables, whose size this bounds.
const MAX_PROCESSES: usize = 1 << 16;

/// Rejects numbers that no run can use.
pub(crate) fn numbers(args: &TrainArgs, ranks: usize) -> Result<(), CliError> {
    let launched = launched_ranks(args)?;
    check_ranks(
        ranks,
        if launched > 1 {
            Ranks::Processes
        } else {
            Ranks::Threads
        },
        args.threads,
    )?;
    let flag = |value: Option<usize>| value.map(|n| n as u64);
    check_positive(&[
        ("--threads", flag(args.threads)),
        ("--micro-batch", flag(args.micro_batch)),
        ("--grad-accum", flag(args.grad_accum)),
        ("--keep-last", flag(args.keep_last)),
        ("--time-limit", Some(args.time_limit)),
    ])
}

/// Refuses a configuration whose monitor is a service.
pub(crate) fn monitors(file: Option<&DsConfig>) -> Result<(), CliError> {
    match file.and_then(|file| file.monitors.service) {
        None => Ok(()),
        Some(service) => Err(usage!(
            "{service}.enabled true is not supported, as this program sends nothing to services: \
             set it to false, and use --tensorboard DIR (the service can read its event files), \
             --csv FILE or --metrics FILE"
        )),
    }
}

/// The kind of ranks of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ranks {
    /// Threads of this process.
    Threads,
    /// Processes that a launcher has started.
    Processes,
}

/// Checks the number of ranks and of the threads of each.
fn check_ranks(ranks: usize, kind: Ranks, threads: Option<usize>) -> Result<(), CliError> {
    let (most, ranks_here) = match kind {
        Ranks::Threads => (MAX_THREADS, ranks),
        Ranks::Processes => (MAX_PROCESSES, 1),
    };

    if !(1..=most).contains(&ranks) {
        let hint = match kind {
            Ranks::Threads => {
                format!(
                    ", which are threads of this process; up to {MAX_PROCESSES} can be processes of mpirun or srun"
                )
            }
            Ranks::Processes => {
                ": every rank keeps tables of all ranks, and more are taken for a mistake"
                    .to_owned()
            }
        };
        return Err(usage!("--ranks {ranks}: expected 1 to {most}{hint}"));
    }

    match threads.filter(|threads| threads.saturating_mul(ranks_here) > MAX_THREADS) {
        Some(threads) => Err(usage!(
            "--threads {threads}: {ranks_here} ranks of a process may have {MAX_THREADS} threads together; expected at most {}",
            MAX_THREADS / ranks_here
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use integration_tests::Printed;

    use super::*;

    #[test]
    fn processes_may_be_more_than_threads() {
        let check =
            |ranks, kind, threads| check_ranks(ranks, kind, threads).map_err(|e| e.to_string());
        for ranks in [1, 1024] {
            check(ranks, Ranks::Threads, Some(1)).unwrap();
        }
        for ranks in [1, 1025, 65_536] {
            check(ranks, Ranks::Processes, Some(1024)).unwrap();
        }
        let error = check(1025, Ranks::Threads, None).unwrap_err();
        error.shows(&["--ranks 1025: expected 1 to 1024, which are threads of this process"]);
        let error = check(65_537, Ranks::Processes, None).unwrap_err();
        error.shows(&["--ranks 65537: expected 1 to 65536: every rank keeps tables"]);
        check(0, Ranks::Processes, None).unwrap_err();
        let error = check(4, Ranks::Threads, Some(257)).unwrap_err();
        assert!(error.ends_with("expected at most 256"), "{error}");
        check(4, Ranks::Processes, Some(1025)).unwrap_err();
    }
}
