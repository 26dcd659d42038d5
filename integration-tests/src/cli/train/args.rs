//! The flags of `zero train`. What is not given comes from `--config`, then from the defaults in
//! [`super::plan`].

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Train a GPT-2 with ZeRO.
#[derive(Args, Clone, Debug, Default)]
pub struct TrainArgs {
    /// A DeepSpeed configuration file, unchanged; flags win over it
    #[arg(long, value_name = "DS.json")]
    pub config: Option<PathBuf>,
    /// A text file, a folder of texts, or u16 tokens (.bin) [default: the text in the current folder]
    #[arg(long, value_name = "FILE|DIR|TOKENS.bin")]
    pub data: Option<PathBuf>,
    /// nano, gpt2-124m, gpt2-350m, gpt2-774m, gpt2-1.5b, or a Hugging Face GPT-2 folder [default: nano]
    #[arg(long, value_name = "PRESET|HF_DIR")]
    pub model: Option<String>,
    /// Ranks of the data-parallel group [default: 4; on CUDA one for each GPU]
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also parameters [default: 3]
    #[arg(long, value_name = "0..3")]
    pub stage: Option<u64>,
    /// Where to compute
    #[arg(long, value_enum, default_value_t)]
    pub device: DeviceChoice,
    /// Let more ranks than there are GPUs share them, for tests: speeds then mean nothing (NCCL 2.30 or later)
    #[arg(long)]
    pub share_gpus: bool,
    /// How ranks talk
    #[arg(long, value_enum, default_value_t)]
    pub comm: CommChoice,
    /// Type of parameters and travelling gradients [default: fp32]
    #[arg(long, value_enum)]
    pub dtype: Option<DTypeChoice>,
    /// The step to end at; a resumed run does what is left [default: 1000]
    #[arg(long, value_name = "N")]
    pub steps: Option<u64>,
    /// Sequences of a micro-batch on each rank [default: 4]
    #[arg(long, value_name = "B")]
    pub micro_batch: Option<usize>,
    /// Micro-batches of a step [default: 1]
    #[arg(long, value_name = "A")]
    pub grad_accum: Option<usize>,
    /// Tokens of a sequence [default: 128, or the model's positions if fewer]
    #[arg(long, value_name = "T")]
    pub seq_len: Option<usize>,
    /// Learning rate [default: 1e-3]
    #[arg(long, value_name = "X")]
    pub lr: Option<f64>,
    /// Decoupled weight decay, on every parameter [default: 0.01]
    #[arg(long, value_name = "X")]
    pub weight_decay: Option<f64>,
    /// Greatest norm of the gradient; 0 is off [default: 0]
    #[arg(long, value_name = "X")]
    pub clip: Option<f64>,
    /// Steps over which the learning rate rises from 0 [default: 0]
    #[arg(long, value_name = "N")]
    pub warmup_steps: Option<u64>,
    /// Seed of the initial weights and of the order of text data
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub seed: u64,
    /// Save here at the end [default: none, or checkpoints/ for a run without --data and --model]
    #[arg(long, value_name = "DIR")]
    pub checkpoint: Option<PathBuf>,
    /// Save also every N steps
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub checkpoint_every: u64,
    /// Keep only the newest K checkpoints
    #[arg(long, value_name = "K")]
    pub keep_last: Option<usize>,
    /// Go on from the newest whole checkpoint in this folder
    #[arg(long, value_name = "DIR")]
    pub resume: Option<PathBuf>,
    /// Write one JSON object a step
    #[arg(long, value_name = "FILE.jsonl")]
    pub metrics: Option<PathBuf>,
    /// Write the final table, all figures as JSON, the loss curve and a timeline of rank 0's last step here
    #[arg(long, value_name = "DIR")]
    pub report: Option<PathBuf>,
    /// Where the optimizer state lives: none (the device), cpu or nvme:DIR [default: none]
    #[arg(long, value_name = "none|cpu|nvme:DIR")]
    pub offload: Option<String>,
    /// Keep only the input of each block, and compute the rest again in backward
    #[arg(long)]
    pub activation_checkpointing: bool,
    /// Elements of a gradient bucket [default: 524288]
    #[arg(long, value_name = "ELEMS")]
    pub bucket_elems: Option<usize>,
    /// Let compute and communication wait for one another
    #[arg(long)]
    pub no_overlap: bool,
    /// Record steps into CUDA graphs, which the third and later steps replay: stages 0 to 2 on --device cuda
    #[arg(long)]
    pub cuda_graph: bool,
    /// Threads of each rank [default: cores / ranks]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Seconds that a rank waits for the others before the run ends with an error
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub time_limit: u64,
}

/// Devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DeviceChoice {
    /// What is there.
    #[default]
    Auto,
    /// The host.
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
}

/// Communicators.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum CommChoice {
    /// What fits the device.
    #[default]
    Auto,
    /// Threads of this process.
    Threads,
    /// NCCL.
    Nccl,
    /// MPI.
    Mpi,
}

/// Types of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DTypeChoice {
    /// IEEE single precision.
    Fp32,
    /// bfloat16 with fp32 masters.
    Bf16,
    /// IEEE half precision with fp32 masters and a dynamic loss scale.
    Fp16,
}
