//! `zero tune`: the fastest configurations that fit, by the exact memory model and simulated steps,
//! and with `--data` by measured ones.

mod args;
pub(crate) mod autotuning;
mod candidate;
mod child;
mod measured;
mod measured_table;
mod measured_tune;
mod merge;
mod outcome;
mod place;
mod search;
mod table;
mod trials;

use std::path::PathBuf;

use clap::Args;
use parse_size::Config;
use serde::Serialize;

use crate::error::CliError;
use crate::flags::{DTypeFlag, model_help, parse_tokens, parse_whole};
use crate::output::print_text;
use crate::plan::{Machines, PlanArgs};
pub use args::TrialArgs;
pub(crate) use candidate::{Candidate, UnitSizes};
#[cfg(test)]
pub(crate) use search::{Batches, candidates};

/// Configurations that are printed.
const BEST: usize = 5;

/// Find the fastest configurations of a training run that fit, and measure them with --data
#[derive(Args, Clone, Debug, Default)]
pub struct TuneArgs {
    /// The model.
    #[arg(long, value_name = "PRESET|HF_DIR", help = model_help("or a Hugging Face folder"))]
    pub model: String,
    /// GPUs and nodes, as of zero plan: h100-80g:8x64, or a file of zero measure
    /// [default with --data: this machine]
    #[arg(long, value_name = "NAME:GPUSxNODES", required_unless_present = "data")]
    pub hardware: Option<String>,
    /// Tokens of a step of all GPUs, such as 4M: what micro-batches and GPUs do not have,
    /// accumulation does. M is 10^6 where that is a whole number of sequences a GPU, else 2^20
    /// [default: one micro-batch a step]
    #[arg(long, value_name = "COUNT", value_parser = parse_batch_tokens)]
    pub batch_tokens: Option<BatchTokens>,
    /// Tokens per sequence [default: 1024, or the model's positions]
    #[arg(long, value_name = "T", value_parser = parse_whole::<u64>)]
    pub seq_len: Option<u64>,
    /// Type of parameters and of gradients in communication [default: bf16, on a host fp32]
    #[arg(long, value_enum)]
    pub dtype: Option<DTypeFlag>,
    /// The parts of the machine's figures that a program reaches, as of zero plan
    #[arg(long, value_name = "FILE.toml")]
    pub efficiencies: Option<PathBuf>,
    /// Measured trials.
    #[command(flatten)]
    pub measured: TrialArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A number of tokens, of which a suffix such as M has two readings.
#[derive(Clone, Copy, Debug)]
pub struct BatchTokens {
    decimal: u64,
    binary: u64,
}

impl BatchTokens {
    /// `tokens`, as they are.
    fn exactly(tokens: u64) -> Self {
        Self {
            decimal: tokens,
            binary: tokens,
        }
    }

    /// The readings, the first one first.
    fn readings(self) -> [u64; 2] {
        [self.decimal, self.binary]
    }
}

fn parse_batch_tokens(text: &str) -> Result<BatchTokens, String> {
    let decimal = parse_tokens(text)?;
    let binary = Config::new().with_binary().parse_size(text);
    Ok(BatchTokens {
        decimal,
        binary: binary.unwrap_or(decimal),
    })
}

/// A configuration that fits, with its simulated step.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Choice {
    pub(crate) stage: u8,
    pub(crate) step_ms: f64,
    pub(crate) step_ms_range: [f64; 2],
    pub(crate) tokens_per_s: f64,
    pub(crate) mfu: f64,
    pub(crate) exposed_ms: f64,
    pub(crate) bound: &'static str,
    pub(crate) gpu_bytes: u64,
    pub(crate) host_bytes: u64,
    /// The flags of `zero train`; a `--config deepspeed.json` among them is `deepspeed`.
    pub(crate) flags: Vec<String>,
    /// The same for DeepSpeed, as far as it has it.
    pub(crate) deepspeed: serde_json::Value,
    #[serde(skip)]
    pub(crate) candidate: Candidate,
}

/// The result of a candidate.
pub(crate) enum Tried {
    DoesNotFit,
    /// It fits, and is slower than the best.
    Slower,
    Fits(Box<Choice>),
}

/// The best configurations.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Tuned {
    pub(crate) model: String,
    pub(crate) gpus: u64,
    pub(crate) nodes: u64,
    /// Tokens per sequence.
    pub(crate) seq_len: u64,
    pub(crate) dtype: String,
    pub(crate) gpu_memory_bytes: u64,
    /// Tokens of a step of all GPUs; `None` without `--batch-tokens`.
    pub(crate) batch_tokens: Option<u64>,
    /// Configurations that were considered; some are slower than the best even without their
    /// communication, and were not simulated.
    pub(crate) candidates: usize,
    pub(crate) simulated: usize,
    pub(crate) did_not_fit: usize,
    /// Combinations that the trainer refuses.
    pub(crate) refused: usize,
    pub(crate) calibrated_on: Option<String>,
    #[serde(skip)]
    pub(crate) on_host: bool,
    pub(crate) extrapolated: bool,
    /// Fastest first.
    pub(crate) best: Vec<Choice>,
}

/// Runs `zero tune`.
///
/// # Errors
/// A model, a machine or a batch that cannot be used, nothing fits, or no trial could be measured.
pub fn run(args: &TuneArgs) -> Result<(), CliError> {
    if let Some(data) = &args.measured.data {
        return measured::run(args, data);
    }
    let tuned = tune(args)?;
    if args.json {
        print_text(serde_json::to_string_pretty(&tuned).map_err(CliError::failure)? + "\n")
    } else {
        print_text(table::text(&tuned, &args.model))
    }
}

/// The best configurations.
///
/// # Errors
/// As [`run`].
pub(crate) fn tune(args: &TuneArgs) -> Result<Tuned, CliError> {
    search_most(args, BEST)
}

/// The `most` best configurations.
fn search_most(args: &TuneArgs, most: usize) -> Result<Tuned, CliError> {
    let hardware = args.hardware.as_deref().unwrap_or("this:1x1");
    let base = PlanArgs::of_tune(
        &args.model,
        hardware,
        args.seq_len,
        args.dtype,
        args.efficiencies.clone(),
    );
    let machines = Machines::new(&base)?;
    let tuned = search::run(&machines, args.batch_tokens, most)?;
    if tuned.best.is_empty() {
        return Err(usage!(
            "{} fits in no configuration on {hardware}: {} were tried; use more GPUs or shorter sequences, or see zero plan for what the memory goes to",
            args.model,
            tuned.candidates
        ));
    }
    Ok(tuned)
}
