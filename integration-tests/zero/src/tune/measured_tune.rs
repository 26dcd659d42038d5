//! The result of measured trials.

use std::path::PathBuf;

use serde::Serialize;

use super::{Choice, Tuned};

/// A choice with its trial.
#[derive(Clone, Debug, Serialize)]
pub(super) struct MeasuredChoice {
    /// By the metric; `None`: it failed.
    pub(super) rank: Option<usize>,
    pub(super) simulated_ms: f64,
    pub(super) measured_ms: Option<f64>,
    /// Of the simulation.
    pub(super) error_percent: Option<f64>,
    pub(super) tokens_per_s: Option<f64>,
    pub(super) peak_bytes: Option<u64>,
    /// Why it failed.
    pub(super) failure: Option<String>,
    /// The flags of the choice.
    pub(super) flags: Vec<String>,
    /// All arguments of `zero`, to train with the choice.
    pub(super) command: Vec<String>,
    /// The number of its files in the folder of results.
    pub(super) trial: u64,
    /// Whether an earlier tune measured it.
    pub(super) earlier: bool,
    #[serde(skip)]
    pub(super) choice: Choice,
}

/// The result of a measured tune.
#[derive(Clone, Debug, Serialize)]
pub(super) struct MeasuredTune {
    pub(super) model: String,
    pub(super) data: String,
    pub(super) machine: String,
    pub(super) ranks: usize,
    pub(super) steps: u64,
    pub(super) counted_steps: u64,
    pub(super) out: PathBuf,
    /// The measured ones by rank, then those that failed.
    pub(super) trials: Vec<MeasuredChoice>,
    /// How far the simulation was off, in percent of the measured steps.
    pub(super) mean_error_percent: f64,
    pub(super) worst_error_percent: f64,
    pub(super) search: Tuned,
}

/// The arguments as a line for a shell.
pub(super) fn shell_line(args: &[String]) -> String {
    let quoted = args.iter().map(|arg| match arg.chars().all(is_plain) {
        true if !arg.is_empty() => arg.clone(),
        _ => format!("'{}'", arg.replace('\'', r"'\''")),
    });
    let words: Vec<_> = std::iter::once("zero".to_owned()).chain(quoted).collect();
    words.join(" ")
}

fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || "-_./,:=+@".contains(c)
}
