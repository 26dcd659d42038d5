//! `zero plan`: what each stage keeps and sends on a given number of GPUs, which stages fit their memory, and
//! what to change where none does. The arithmetic is zero-shard's; the activations are an estimate.

mod advice;
mod report;
mod request;
mod size;
mod table;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::cli::CliError;
use crate::cli::output::{note, say};
use report::Report;
use request::Request;
use size::{parse_bytes, parse_count};

/// Show what each ZeRO stage keeps in memory and sends, and which stages fit.
#[derive(Args, Clone, Debug, Default)]
#[command(group(clap::ArgGroup::new("size").required(true).args(["model", "params"])))]
pub struct PlanArgs {
    /// A preset (nano, gpt2-124m, gpt2-350m, gpt2-774m, gpt2-1.5b) or a Hugging Face GPT-2 folder
    #[arg(long, value_name = "PRESET|HF_DIR")]
    pub model: Option<String>,
    /// A transformer of this many parameters, such as 7.5e9 or 7.5B, of a usual shape
    #[arg(long, value_name = "COUNT", value_parser = parse_count)]
    pub params: Option<u64>,
    /// GPUs in all, a rank each
    #[arg(long, value_name = "N")]
    pub gpus: u64,
    /// Memory of one GPU, such as 24GiB or 80GB
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub gpu_memory: Option<u64>,
    /// Machines that the GPUs are in
    #[arg(long, value_name = "M", default_value_t = 1)]
    pub nodes: u64,
    /// A DeepSpeed configuration file, unchanged; flags win over it
    #[arg(long, value_name = "DS.json")]
    pub config: Option<PathBuf>,
    /// Type of parameters and travelling gradients [default: bf16]
    #[arg(long, value_enum)]
    pub dtype: Option<PlanDType>,
    /// Sequences of a micro-batch on each rank [default: 1]
    #[arg(long, value_name = "B")]
    pub micro_batch: Option<u64>,
    /// Micro-batches of a step [default: 1]
    #[arg(long, value_name = "A")]
    pub grad_accum: Option<u64>,
    /// Tokens of a sequence [default: 1024, or the model's positions]
    #[arg(long, value_name = "T")]
    pub seq_len: Option<u64>,
    /// Keep only the input of each block, and compute the rest again in backward
    #[arg(long)]
    pub activation_checkpointing: bool,
    /// Where the optimizer state lives: none (the GPU), cpu or nvme:DIR
    #[arg(long, value_name = "none|cpu|nvme:DIR")]
    pub offload: Option<String>,
    /// Elements of a gradient bucket [default: 524288]
    #[arg(long, value_name = "ELEMS")]
    pub bucket_elems: Option<u64>,
    /// Print JSON, with exact bytes
    #[arg(long)]
    pub json: bool,
}

/// Types of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PlanDType {
    /// IEEE single precision.
    Fp32,
    /// bfloat16 with fp32 masters.
    Bf16,
    /// IEEE half precision with fp32 masters.
    Fp16,
}

/// Runs `zero plan`.
///
/// # Errors
/// A model, a configuration or sizes that cannot be used.
pub fn run(args: &PlanArgs) -> Result<(), CliError> {
    let (report, notices) = plan(args)?;
    for notice in notices {
        note(format_args!("warning: {notice}"));
    }
    if args.json {
        say(serde_json::to_string_pretty(&report).map_err(CliError::failure)? + "\n")
    } else {
        say(table::text(&report))
    }
}

/// The report, and what the user should know besides.
fn plan(args: &PlanArgs) -> Result<(Report, Vec<String>), CliError> {
    let (request, notices) = Request::new(args)?;
    let report = Report::new(&request).map_err(usage)?;
    Ok((report, notices))
}

fn usage(error: impl std::fmt::Display) -> CliError {
    CliError::Usage(error.to_string())
}
