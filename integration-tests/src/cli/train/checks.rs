//! Checks of flags and configuration before anything else is read.

use zero_shard::{Tier, ZeroStage};

use super::args::TrainArgs;
use crate::cli::CliError;
use crate::cli::flags::{check_positive, parse_offload};
use crate::config::DsConfig;

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

/// Rejects devices of optimizer state and parameters that this version does not support.
pub(super) fn offload(
    args: &TrainArgs,
    file: Option<&DsConfig>,
    stage: ZeroStage,
    on_cuda: bool,
) -> Result<(), CliError> {
    let check = |what: &str, tier: Tier| {
        let value = match tier {
            Tier::Nvme => "nvme",
            Tier::Host if on_cuda => "cpu with --device cuda",
            // On the host, device memory is host memory.
            Tier::Host | Tier::Device => return Ok(()),
        };
        Err(CliError::Usage(format!("{what} {value} is not supported in this version; use none")))
    };
    // Below stage 3 offload_param has no effect, and a note says so.
    if let Some(file) = file.filter(|_| stage.shards_params()) {
        check("zero_optimization.offload_param: device", file.zero.offload_param)?;
    }
    match (args.offload.as_deref(), file) {
        (Some(flag), _) => check("--offload", parse_offload(flag)?),
        (None, Some(file)) => check("zero_optimization.offload_optimizer: device", file.zero.offload_optimizer),
        (None, None) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_offload_is_rejected_on_cuda() {
        let file = |what: &str| {
            DsConfig::parse(&format!(r#"{{"zero_optimization": {{"stage": 3, "{what}": {{"device": "cpu"}}}}}}"#))
                .unwrap()
        };
        let (three, two) = (ZeroStage::Three, ZeroStage::Two);
        let flag = |value: &str| TrainArgs { offload: Some(value.to_owned()), ..TrainArgs::default() };
        for what in ["offload_optimizer", "offload_param"] {
            offload(&TrainArgs::default(), Some(&file(what)), three, false).unwrap();
            let error = offload(&TrainArgs::default(), Some(&file(what)), three, true).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(what), "{error}");
            assert!(error.to_string().contains("cpu with --device cuda is not supported in this version"), "{error}");
        }
        // The stage of the run counts, not that of the file.
        offload(&TrainArgs::default(), Some(&file("offload_param")), two, true).unwrap();
        // A flag overrides the file.
        offload(&flag("none"), Some(&file("offload_optimizer")), three, true).unwrap();
        offload(&flag("cpu"), None, three, false).unwrap();
        let error = offload(&flag("cpu"), None, three, true).unwrap_err().to_string();
        assert!(error.starts_with("--offload cpu with --device cuda"), "{error}");
    }
}
