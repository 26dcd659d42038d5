//! The outcome of a trial, from its exit status, its output and its metrics.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The steps of a trial.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrialSteps {
    /// Steps at the start that do not count.
    pub(crate) warm_up: u64,
    pub(crate) total: u64,
}

/// The outcome of a trial.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub(crate) enum Outcome {
    Measured {
        /// The median.
        step_ms: f64,
        /// Of rank 0.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        peak_bytes: Option<u64>,
    },
    OutOfMemory {
        message: String,
    },
    Failed {
        message: String,
    },
    TimedOut {
        minutes: u64,
    },
}

impl Outcome {
    /// The outcome of a process that has ended.
    pub(super) fn of(status: ExitStatus, log: &str, metrics: &str, steps: TrialSteps) -> Self {
        if status.success() {
            return measured(metrics, steps);
        }
        let message = match (error_of(log), status.signal(), status.code()) {
            (Some(error), _, _) => error,
            (None, Some(libc::SIGKILL), _) => {
                // The kernel kills a process so when memory runs out.
                return Self::OutOfMemory {
                    message: "killed by signal 9, as the system does when its memory runs out"
                        .to_owned(),
                };
            }
            (None, Some(signal), _) => format!("killed by signal {signal}"),
            (None, None, code) => format!(
                "exit code {} without an error message",
                code.unwrap_or_default()
            ),
        };
        match is_out_of_memory(&message) {
            true => Self::OutOfMemory { message },
            false => Self::Failed { message },
        }
    }

    /// Whether a trial of at most `minutes` minutes may end otherwise: it had less time.
    pub(super) fn had_less_than(&self, minutes: u64) -> bool {
        matches!(self, Self::TimedOut { minutes: had } if *had < minutes)
    }

    /// The failure in words; `None` of a measured trial.
    pub(super) fn failure(&self) -> Option<String> {
        match self {
            Self::Measured { .. } => None,
            Self::OutOfMemory { message } => Some(format!("out of memory: {message}")),
            Self::Failed { message } => Some(format!("failed: {message}")),
            Self::TimedOut { minutes } => Some(format!("stopped after {minutes} min")),
        }
    }
}

/// The first line of the error that the program printed.
fn error_of(log: &str) -> Option<String> {
    let line = log
        .lines()
        .rev()
        .find_map(|line| line.strip_prefix("error: "))?;
    Some(line.to_owned())
}

/// Whether an error of this program is about memory that ran out, on a device or on the host, or
/// that would.
fn is_out_of_memory(message: &str) -> bool {
    let message = message.to_ascii_lowercase().replace('_', " ");
    let would = (message.contains(" of memory (") || message.contains(" of address space ("))
        && message.contains(" free; try ");
    would
        || message.contains("out of memory")
        || message.contains("failed to allocate")
        || message.contains("was killed by signal 9")
}

/// The median of the steps that count.
fn measured(metrics: &str, steps: TrialSteps) -> Outcome {
    let lines = metrics
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut step_ms = Vec::new();
    let mut peak_bytes = None;
    for line in lines {
        step_ms.extend(line["step_ms"].as_f64());
        peak_bytes = peak_bytes.max(line["memory.peak_bytes"].as_u64());
    }

    let found = step_ms.len();
    if (found as u64) < steps.total {
        return Outcome::Failed {
            message: format!("its metrics have {found} of {} steps", steps.total),
        };
    }
    let mut counted = step_ms.split_off(steps.warm_up as usize);
    counted.sort_by(f64::total_cmp);
    Outcome::Measured {
        step_ms: counted[counted.len() / 2],
        peak_bytes: peak_bytes.filter(|bytes| *bytes > 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEPS: TrialSteps = TrialSteps {
        warm_up: 3,
        total: 6,
    };

    fn failed(log: &str) -> Outcome {
        Outcome::of(ExitStatus::from_raw(1 << 8), log, "", STEPS)
    }

    #[test]
    fn median_of_counted_steps() {
        let lines = [100.0, 90.0, 80.0, 3.0, 1.0, 2.0].map(|step_ms| {
            format!("{{\"step_ms\": {step_ms}, \"memory.peak_bytes\": {step_ms}}}\n")
                .replace(".0", "")
        });
        let outcome = Outcome::of(ExitStatus::default(), "", &lines.concat(), STEPS);
        let expected = Outcome::Measured {
            step_ms: 2.0,
            peak_bytes: Some(100),
        };
        assert_eq!(outcome, expected);
        let few = Outcome::of(ExitStatus::default(), "", &lines[..5].concat(), STEPS);
        let message = "its metrics have 5 of 6 steps".to_owned();
        assert_eq!(few, Outcome::Failed { message });
    }

    /// The errors of the pool, of the driver, of the heap, of the check before a run, of the launcher.
    #[test]
    fn errors_of_memory_are_recognized() {
        for error in [
            "rank 1: failed to allocate 1048576 bytes for Grads: the device is out of memory (x)",
            "failed to allocate 8 bytes: device out of memory (CUDA_ERROR_OUT_OF_MEMORY)",
            "cuBLASLt: CUDA_ERROR_OUT_OF_MEMORY",
            "failed to allocate 64 bytes: the system refused; raise its limit",
            "4 ranks at stage 0 need 8.00 GiB of memory (4.00 GiB for model state), but this machine has 1.00 GiB free; try a higher --stage",
            "rank 3 was killed by signal 9",
        ] {
            let outcome = failed(&format!("warning: x\nerror: {error}\n"));
            let message = error.to_owned();
            assert_eq!(outcome, Outcome::OutOfMemory { message });
        }
        let killed = Outcome::of(ExitStatus::from_raw(9), "step 1", "", STEPS);
        assert!(matches!(killed, Outcome::OutOfMemory { .. }));
    }

    #[test]
    fn other_failures_have_their_error() {
        let of = |log| failed(log).failure().unwrap();
        assert_eq!(
            of("a line\nerror: --data x: no such file\nmore"),
            "failed: --data x: no such file"
        );
        assert_eq!(of(""), "failed: exit code 1 without an error message");
        let ended = Outcome::of(ExitStatus::from_raw(15), "", "", STEPS);
        assert_eq!(ended.failure().unwrap(), "failed: killed by signal 15");
    }

    #[test]
    fn more_time_may_change_a_timeout() {
        let stopped = Outcome::TimedOut { minutes: 5 };
        assert!(stopped.had_less_than(6) && !stopped.had_less_than(5));
        let message = String::new();
        assert!(!Outcome::Failed { message }.had_less_than(6));
    }
}
