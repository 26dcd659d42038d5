//! The arguments of `zero plan`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};

use crate::flags::{DTypeFlag, model_help, parse_gpu_memory, parse_params, parse_whole};
use crate::settings::args::{MeshArgs, OffloadArgs, TrainArgs};
use crate::settings::lora_flags::LoraChoice;
use crate::settings::muon_flags::MuonArgs;
use crate::settings::quantise::QuantiseArgs;

/// The architectures that a shape can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Architecture {
    /// Layer norms, learned positions, GELU, as many key and value heads as heads
    Gpt2,
    /// RMSNorm, rotary positions, SwiGLU, key and value heads shared by groups of heads
    Llama,
}

/// Show the memory and traffic of each ZeRO stage, and which stages fit
#[derive(Args, Clone, Debug, Default)]
#[command(group(clap::ArgGroup::new("size").args(["model", "params", "layers", "predict"])))]
#[command(group(clap::ArgGroup::new("what").required(true).multiple(true)
    .args(["model", "params", "layers", "calibrate"])))]
pub struct PlanArgs {
    /// The model.
    #[arg(long, value_name = "PRESET|HF_DIR", help = model_help("or a Hugging Face folder"))]
    pub model: Option<String>,
    /// Train adapters on the frozen model, as `zero train --lora`: r=16,targets=q_proj, or a folder
    /// of PEFT
    #[arg(long, value_name = "r=R,...|DIR", requires = "model")]
    pub lora: Option<LoraChoice>,
    /// Number of parameters, such as 7.5e9 or 7.5B, of a transformer of typical shape
    #[arg(long, value_name = "COUNT", value_parser = parse_params)]
    pub params: Option<u64>,
    /// Layers of a model of any shape, with --hidden
    #[arg(long, value_name = "N", value_parser = parse_whole::<u64>, requires = "hidden")]
    pub layers: Option<u64>,
    /// Width of a layer
    #[arg(long, value_name = "N", value_parser = parse_whole::<u64>, requires = "layers",
        conflicts_with_all = ["model", "params"])]
    pub hidden: Option<u64>,
    /// Attention heads of a layer; they divide --hidden [default: --hidden / 64]
    #[arg(long, value_name = "N", value_parser = parse_whole::<u64>, requires = "layers",
        conflicts_with_all = ["model", "params"])]
    pub heads: Option<u64>,
    /// Key and value heads of a layer; they divide --heads [default: as many as --heads]
    #[arg(long, value_name = "N", value_parser = parse_whole::<u64>, requires = "layers",
        conflicts_with_all = ["model", "params"])]
    pub kv_heads: Option<u64>,
    /// Architecture of that shape [default: llama with fewer --kv-heads than --heads, else gpt2]
    #[arg(long, value_enum, requires = "layers", conflicts_with_all = ["model", "params"])]
    pub architecture: Option<Architecture>,
    /// Width within the feed-forward [default: 4 times --hidden]
    #[arg(long, value_name = "N", value_parser = parse_whole::<u64>, requires = "layers",
        conflicts_with_all = ["model", "params"])]
    pub ffn: Option<u64>,
    /// Tokens of the vocabulary [default: 50257, of a llama 32000]
    #[arg(long, value_name = "N", value_parser = parse_whole::<u64>, requires = "layers",
        conflicts_with_all = ["model", "params"])]
    pub vocab: Option<u64>,
    /// GPUs of all nodes, one rank each
    #[arg(long, value_name = "N", value_parser = parse_whole::<u64>,
        required_unless_present_any = ["hardware", "predict"])]
    pub gpus: Option<u64>,
    /// Memory of one GPU, such as 24GiB or 80GB (1 GB = 10^9 bytes; a card sold as 24 GB has about
    /// 24GiB)
    #[arg(long, value_name = "SIZE", value_parser = parse_gpu_memory)]
    pub gpu_memory: Option<u64>,
    /// Threads of each rank on the host of --hardware.
    #[arg(skip)]
    pub host_threads: Option<u64>,
    /// Nodes (machines) that hold the GPUs
    #[arg(long, value_name = "M", default_value_t = 1, value_parser = parse_whole::<u64>)]
    pub nodes: u64,
    /// A DeepSpeed configuration file; flags override it
    #[arg(long, value_name = "DS.json")]
    pub config: Option<PathBuf>,
    /// Type of parameters and of gradients in communication [default: bf16, on a host fp32]
    #[arg(long, value_enum)]
    pub dtype: Option<DTypeFlag>,
    /// Sequences per micro-batch and rank [default: 1]
    #[arg(long, value_name = "B", value_parser = parse_whole::<u64>)]
    pub micro_batch: Option<u64>,
    /// Micro-batches per step [default: 1]
    #[arg(long, value_name = "A", value_parser = parse_whole::<u64>)]
    pub grad_accum: Option<u64>,
    /// Tokens per sequence [default: 1024, or the model's positions]
    #[arg(long, value_name = "T", value_parser = parse_whole::<u64>)]
    pub seq_len: Option<u64>,
    /// Keep only the input of each block and recompute its activations in backward
    #[arg(long)]
    pub activation_checkpointing: bool,
    /// Keep 1/M of the input of each checkpointed block on each of the M GPUs of --tensor-parallel
    #[arg(long)]
    pub partition_activations: bool,
    /// Divide the tokens among the M GPUs of --tensor-parallel where each would compute the same
    #[arg(long)]
    pub sequence_parallel: bool,
    /// Recompute GELU's output in backward in place of keeping it, on GPUs
    /// [default: where it does not fit otherwise, with 1 GiB left for the CUDA context]
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub recompute_gelu: Option<bool>,
    /// Groups of ranks.
    #[command(flatten)]
    pub mesh: MeshArgs,
    /// The offload.
    #[command(flatten)]
    pub offload: OffloadArgs,
    /// The optimizer.
    #[command(flatten)]
    pub muon: MuonArgs,
    /// Quantised communication, at stages 1 to 3.
    #[command(flatten)]
    pub quantise: QuantiseArgs,
    /// Reduce gradients after every micro-batch at stages 0 and 1, too
    #[arg(long)]
    pub reduce_every_micro_batch: bool,
    /// Elements of a gradient bucket [default: those of the largest unit]
    #[arg(long, value_name = "ELEMS", value_parser = parse_whole::<u64>)]
    pub bucket_elems: Option<u64>,
    /// Speed of a GPU in TFLOP/s, for the bandwidth that hides transfers; 70 is what ZeRO-Infinity
    /// assumes of a V100
    #[arg(long, value_name = "TFLOPS", default_value_t = 70.0, value_parser = parse_above_0)]
    pub peak_tflops: f64,
    /// Terabytes that a drive is rated to write in its life (TBW of its data sheet)
    #[arg(long, value_name = "TB", default_value_t = 600.0, value_parser = parse_above_0)]
    pub drive_tbw: f64,
    /// Speed at which the drive of a node reads, and at which it writes, in GB/s: a step takes no
    /// less than its transfers
    #[arg(long, value_name = "GB/S", default_value_t = 7.0, value_parser = parse_above_0)]
    pub drive_gb_per_s: f64,
    /// Step times.
    #[command(flatten)]
    pub simulate: SimulateArgs,
    /// Print JSON, with exact bytes
    #[arg(long)]
    pub json: bool,
}

impl PlanArgs {
    /// The settings that a plan has in common with `zero train`, but for offload.
    pub(super) fn settings(&self) -> TrainArgs {
        let given = |flag: bool| flag.then_some(true);
        TrainArgs {
            dtype: self.dtype,
            activation_checkpointing: given(self.activation_checkpointing),
            partition_activations: given(self.partition_activations),
            sequence_parallel: given(self.sequence_parallel),
            reduce_every_micro_batch: given(self.reduce_every_micro_batch),
            bucket_elems: self.bucket_elems.map(|elems| elems as usize),
            mesh: self.mesh,
            muon: self.muon,
            quantise: self.quantise,
            ..TrainArgs::default()
        }
    }

    /// GPUs of all nodes; 0 if neither `--gpus` nor `--hardware` says them.
    pub(super) fn gpus(&self) -> u64 {
        self.gpus.unwrap_or(0)
    }
}

/// Parses a finite number above 0.
fn parse_above_0(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|x: &f64| x.is_finite() && *x > 0.0)
        .ok_or_else(|| "expected a number above 0".to_owned())
}

/// Step times.
#[derive(Args, Clone, Debug, Default)]
pub struct SimulateArgs {
    /// Simulate a step of each stage on --hardware: its time, tokens/s and what bounds it
    #[arg(long, requires = "hardware")]
    pub simulate: bool,
    /// GPUs and nodes: a machine (v100-32g, a100-40g, a100-80g, h100-80g, h200-141g, b200-180g,
    /// rtx4090-24g, this for the machine at hand, or a file of zero measure) with GPUs of a node x
    /// nodes, such as h100-80g:8x64
    #[arg(long, value_name = "NAME:GPUSxNODES")]
    pub hardware: Option<String>,
    /// The parts of the machine's figures that a program reaches, from --save-efficiencies; without
    /// it those of our trainer on one H200
    #[arg(
        long,
        value_name = "FILE.toml",
        requires = "simulate",
        conflicts_with = "calibrate"
    )]
    pub efficiencies: Option<PathBuf>,
    /// Tokens of the whole training, such as 1.4T: days and GPU hours are printed
    #[arg(long, value_name = "COUNT", value_parser = parse_params, requires = "simulate")]
    pub tokens: Option<u64>,
    /// Also simulate other numbers of GPUs, doubling: gpus=8..16384, in whole nodes
    #[arg(long, value_name = "gpus=FROM..TO", requires = "simulate")]
    pub sweep: Option<Gpus>,
    /// Draw the curve of --sweep
    #[arg(long, value_name = "FILE.svg", requires = "sweep")]
    pub sweep_svg: Option<PathBuf>,
    /// Write the simulated steps of the fastest stage that fits as a timeline for Perfetto
    #[arg(long, value_name = "FILE.json", requires = "simulate")]
    pub timeline: Option<PathBuf>,
    /// A measured step to draw beside it: the trace.json of zero train --report
    #[arg(long, value_name = "TRACE.json", requires = "timeline")]
    pub timeline_beside: Option<PathBuf>,
    /// Measured steps to calibrate on: files of zero train --metrics, of runs on --hardware, of
    /// which GPUS is that of a node; or a CSV file with the columns of
    /// integration-tests/simulator/tests/data/steps.csv, of one machine and software
    #[arg(long, value_name = "FILE.jsonl|A.csv", num_args = 1..)]
    pub calibrate: Vec<PathBuf>,
    /// Steps to predict, in the same form: prints predictions and measurements, then the errors
    #[arg(long, value_name = "FILE.jsonl|B.csv", num_args = 1.., requires = "calibrate")]
    pub predict: Vec<PathBuf>,
    /// The rows of a CSV file that count: all, or at most eight by a rule that does not look at
    /// their times
    #[arg(long, value_enum, default_value_t, requires = "calibrate")]
    pub rows: CalibrationRows,
    /// Where to write the efficiencies that --calibrate finds
    #[arg(long, value_name = "FILE.toml", requires = "calibrate")]
    pub save_efficiencies: Option<PathBuf>,
}

/// The rows of a calibration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum CalibrationRows {
    /// All measured rows, of which each number of GPUs counts alike
    #[default]
    All,
    /// At most eight, by a rule that does not look at their times
    Rule,
}

/// Numbers of GPUs, doubling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpus {
    pub(super) from: u64,
    pub(super) to: u64,
}

impl FromStr for Gpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("{text}: expected gpus=FROM..TO, such as gpus=8..1024");
        let (from, to) = text
            .strip_prefix("gpus=")
            .and_then(|range| range.split_once(".."))
            .ok_or_else(expected)?;
        let number = |text: &str| text.parse::<u64>().map_err(|_| expected());
        let from = number(from)?;
        let to = number(to)?;
        if from == 0 || from > to || to > 1 << 20 {
            return Err(format!("{text}: expected 1 <= FROM <= TO <= 1048576"));
        }
        Ok(Self { from, to })
    }
}
