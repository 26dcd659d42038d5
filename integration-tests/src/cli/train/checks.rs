//! Checks of flags and configuration before anything else is read.

use super::args::TrainArgs;
use crate::cli::CliError;
use crate::cli::flags::check_positive;

/// The highest number of ranks, and of threads of all ranks.
const MAX_RANKS: usize = 1024;

/// Rejects numbers that no run can use.
pub(super) fn numbers(args: &TrainArgs, ranks: usize) -> Result<(), CliError> {
    if !(1..=MAX_RANKS).contains(&ranks) {
        return Err(CliError::Usage(format!("--ranks {ranks}: expected 1 to {MAX_RANKS}")));
    }
    let flag = |value: Option<usize>| value.map(|n| n as u64);
    check_positive(&[
        ("--threads", flag(args.threads)),
        ("--micro-batch", flag(args.micro_batch)),
        ("--grad-accum", flag(args.grad_accum)),
        ("--keep-last", flag(args.keep_last)),
        ("--time-limit", Some(args.time_limit)),
    ])?;
    match args.threads.filter(|threads| threads.saturating_mul(ranks) > MAX_RANKS) {
        Some(threads) => Err(CliError::Usage(format!(
            "--threads {threads}: {ranks} ranks may have {MAX_RANKS} threads together; expected at most {}",
            MAX_RANKS / ranks
        ))),
        None => Ok(()),
    }
}

/// The highest number of micro-batches per step; stage 3 lists the uses of units for each.
const MAX_MICRO_BATCHES: u64 = 1 << 16;

/// Checks the number of micro-batches per step.
pub(super) fn accumulation(grad_accum: u64) -> Result<(), CliError> {
    if grad_accum > MAX_MICRO_BATCHES {
        return Err(CliError::Usage(format!("--grad-accum {grad_accum}: expected at most {MAX_MICRO_BATCHES}")));
    }
    Ok(())
}
