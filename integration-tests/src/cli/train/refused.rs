//! What is refused before anything else is looked at.

use super::args::TrainArgs;
use crate::cli::CliError;
use crate::config::{DsConfig, OffloadDevice};

/// Refuses numbers with which no run makes sense.
pub(super) fn numbers(args: &TrainArgs, ranks: usize) -> Result<(), CliError> {
    if ranks == 0 || ranks > 1024 {
        return Err(CliError::Usage(format!("--ranks {ranks}: there must be at least 1 rank, and 1024 at most")));
    }
    if let Some(threads) = args.threads.filter(|threads| *threads == 0 || threads.saturating_mul(ranks) > 1024) {
        return Err(CliError::Usage(format!(
            "--threads {threads}: each of {ranks} ranks has at least 1 thread, and all together 1024 at most"
        )));
    }
    let not_zero = [
        ("--micro-batch", args.micro_batch == Some(0)),
        ("--grad-accum", args.grad_accum == Some(0)),
        ("--keep-last", args.keep_last == Some(0)),
        ("--time-limit", args.time_limit == 0),
    ];
    match not_zero.iter().find(|(_, is_zero)| *is_zero) {
        Some((flag, _)) => Err(CliError::Usage(format!("{flag} 0: at least 1"))),
        None => Ok(()),
    }
}

/// Micro-batches of a step, each of which stage 3 lists with its units.
const MOST_MICRO_BATCHES: u64 = 1 << 16;

/// Refuses a step that would not end.
pub(super) fn accumulation(grad_accum: u64) -> Result<(), CliError> {
    if grad_accum > MOST_MICRO_BATCHES {
        return Err(CliError::Usage(format!(
            "--grad-accum {grad_accum}: a step has {MOST_MICRO_BATCHES} micro-batches at most"
        )));
    }
    Ok(())
}

/// Refuses places of optimizer state and parameters that this build does not have.
pub(super) fn offload(args: &TrainArgs, file: Option<&DsConfig>, on_cuda: bool) -> Result<(), CliError> {
    let refuse = |what: &str| Err(CliError::Usage(format!("{what} is not in this version; see README.md")));
    // On the host, the device's memory is the host's.
    let check = |what: &str, device: &OffloadDevice| match device {
        OffloadDevice::Nvme(_) => refuse(&format!("{what} nvme")),
        OffloadDevice::Cpu if on_cuda => refuse(&format!("{what} cpu with --device cuda")),
        OffloadDevice::Cpu | OffloadDevice::None => Ok(()),
    };
    // Below stage 3 it has no meaning, as the file's warnings say.
    if let Some(file) = file.filter(|file| file.zero.stage == 3) {
        check("zero_optimization.offload_param: device", &file.zero.offload_param.device)?;
    }
    let Some(flag) = args.offload.as_deref() else {
        let device = file.map(|f| &f.zero.offload_optimizer.device);
        return device.map_or(Ok(()), |device| check("zero_optimization.offload_optimizer: device", device));
    };
    match flag {
        "none" => Ok(()),
        "cpu" => check("--offload", &OffloadDevice::Cpu),
        other if other.starts_with("nvme:") => refuse("--offload nvme"),
        other => Err(CliError::Usage(format!("--offload {other}: expected none, cpu or nvme:DIR"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_memory_is_another_place_on_a_gpu_alone() {
        let file = |what: &str| {
            DsConfig::parse(&format!(r#"{{"zero_optimization": {{"stage": 3, "{what}": {{"device": "cpu"}}}}}}"#))
                .unwrap()
        };
        let flag = |place: &str| TrainArgs { offload: Some(place.to_owned()), ..TrainArgs::default() };
        for what in ["offload_optimizer", "offload_param"] {
            offload(&TrainArgs::default(), Some(&file(what)), false).unwrap();
            let error = offload(&TrainArgs::default(), Some(&file(what)), true).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(what), "{error}");
            assert!(error.to_string().contains("cpu with --device cuda is not in this version"), "{error}");
        }
        let meaningless = r#"{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}"#;
        offload(&TrainArgs::default(), Some(&DsConfig::parse(meaningless).unwrap()), true).unwrap();
        // A flag wins over the file.
        offload(&flag("none"), Some(&file("offload_optimizer")), true).unwrap();
        offload(&flag("cpu"), None, false).unwrap();
        let error = offload(&flag("cpu"), None, true).unwrap_err().to_string();
        assert!(error.starts_with("--offload cpu with --device cuda"), "{error}");
    }
}
