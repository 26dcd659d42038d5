//! The flags of measured trials.

use std::path::PathBuf;

use clap::Args;

use crate::flags::parse_whole;
use crate::settings::args::DeviceChoice;

/// Steps at the start of a trial that do not count: they allocate memory and fill caches.
pub(super) const WARM_UP: u64 = 3;

/// Measured trials.
#[derive(Args, Clone, Debug, Default)]
pub struct TrialArgs {
    /// Measure the best configurations on this machine: each trains a few steps on this data, which
    /// is that of zero train
    #[arg(long, value_name = "FILE|DIR|TOKENS.bin")]
    pub data: Option<PathBuf>,
    /// Tokenizer of text, as of zero train
    #[arg(long, value_name = "FILE|DIR", requires = "data")]
    pub tokenizer: Option<PathBuf>,
    /// Device of the trials [default: auto]
    #[arg(long, value_enum, requires = "data")]
    pub device: Option<DeviceChoice>,
    /// Ranks of the trials [default: those of --hardware, one per GPU, or on a host one per core]
    #[arg(long, value_name = "R", value_parser = parse_positive::<usize>, requires = "data")]
    pub ranks: Option<usize>,
    /// Configurations to measure [default: 5]
    #[arg(long, value_name = "K", value_parser = parse_positive::<usize>, requires = "data")]
    pub trials: Option<usize>,
    /// Steps of a trial: the first 3 do not count, and the median of the others is its time
    /// [default: 10]
    #[arg(long, value_name = "N", value_parser = parse_steps, requires = "data")]
    pub trial_steps: Option<u64>,
    /// Minutes after which a trial is stopped [default: 10]
    #[arg(long, value_name = "MINUTES", value_parser = parse_positive::<u64>, requires = "data")]
    pub trial_minutes: Option<u64>,
    /// Folder of the results, which the same command continues after an interruption
    /// [default: tune-results]
    #[arg(long, value_name = "DIR", requires = "data")]
    pub out: Option<PathBuf>,
}

fn parse_positive<T: std::str::FromStr + Default + PartialEq>(text: &str) -> Result<T, String> {
    match parse_whole(text)? {
        zero if zero == T::default() => Err("expected at least 1".to_owned()),
        number => Ok(number),
    }
}

fn parse_steps(text: &str) -> Result<u64, String> {
    match parse_whole(text)? {
        steps if steps > WARM_UP => Ok(steps),
        _ => Err(format!(
            "expected at least {}: the first {WARM_UP} do not count",
            WARM_UP + 1
        )),
    }
}
