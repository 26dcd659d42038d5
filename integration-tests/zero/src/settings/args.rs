//! The flags of `zero train`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use zero_comm::PrefetchOptions;
use zero_optim::{LossScaling, Masters, Moments};
use zero_trainer::Home;
use zero_trainer::param_groups::ParamGroup;

use super::lora_flags::LoraChoice;
use super::muon_flags::MuonArgs;
use super::outputs::OutputPaths;
use super::quantise::QuantiseArgs;
use super::stage_choice::{StageChoice, parse_stage};
use crate::flags::{DTypeFlag, model_help, parse_bytes, parse_whole};

/// Train a GPT-2, Llama, Mistral or Qwen with ZeRO
#[derive(Args, Clone, Debug, Default)]
pub struct TrainArgs {
    /// A DeepSpeed configuration file; flags override it
    #[arg(long, value_name = "DS.json")]
    pub config: Option<PathBuf>,
    /// A text file; a folder of texts, which is read whole; tokens (.bin of u16, .u32.bin, .npy, or
    /// with a header of llm.c); or examples: a .jsonl or .json file, or a folder of them, with
    /// `prompt` and `completion`, `messages`, `conversations` (ShareGPT), `instruction` and
    /// `output` (Alpaca) or `text`. `zero data inspect` shows what data is read as, and why
    /// [default: the texts in the current folder without hidden, git-ignored, built and large
    /// files]
    #[arg(long, value_name = "FILE|DIR|TOKENS.bin")]
    pub data: Option<PathBuf>,
    /// Train adapters on the frozen model (LoRA): r=16,alpha=32, also with dropout=X,
    /// targets=q_proj,v_proj (or all-linear) and rslora, or a folder of PEFT to start from.
    /// Checkpoints then hold the adapters alone, and `zero ckpt export` writes a folder of PEFT
    /// [default of a name: r=8, alpha=8, PEFT's targets for the model]
    #[arg(long, value_name = "r=R,...|DIR")]
    pub lora: Option<LoraChoice>,
    /// The model.
    #[arg(long, value_name = "PRESET|DIR", help = model_help("a Hugging Face folder (GPT-2, Llama, \
        Mistral, Qwen 2 or 3), or a folder of checkpoints (its weights only) [default: nano]"))]
    pub model: Option<String>,
    /// Ranks of the data-parallel group [default: 4; on CUDA one per GPU]
    #[arg(long, value_name = "N", value_parser = parse_whole::<usize>)]
    pub ranks: Option<usize>,
    /// ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also parameters;
    /// auto: of the stages that fit the memory, the one that sends the least; a resumed run keeps
    /// its stage [default: 3]
    #[arg(long, value_name = "0..3|auto", value_parser = parse_stage)]
    pub stage: Option<StageChoice>,
    /// Device to train on
    #[arg(long, value_enum, default_value_t)]
    pub device: DeviceChoice,
    /// Allow more ranks than GPUs, for tests: ranks then share GPUs and timings are not meaningful
    /// (NCCL 2.30 or later)
    #[arg(long)]
    pub share_gpus: bool,
    /// Use cuBLASLt's first choice of an algorithm for each matrix product, instead of measuring
    /// the candidates once and keeping the fastest in ZERO_MATMUL_CACHE or ~/.cache/zero-matmul; as
    /// ZERO_MATMUL_TIMING=0
    #[arg(long)]
    pub no_matmul_timing: bool,
    /// Communication between ranks
    #[arg(long, value_enum, default_value_t)]
    pub comm: CommChoice,
    /// Type of parameters and of gradients in communication [default: fp32]
    #[arg(long, value_enum)]
    pub dtype: Option<DTypeFlag>,
    /// Last step; a resumed run starts at the step of its checkpoint [default: 400, or that of
    /// --epochs]
    #[arg(long, value_name = "N", value_parser = parse_whole::<u64>)]
    pub steps: Option<u64>,
    /// Train for E epochs in place of --steps: an epoch goes through all rows once, in an order that
    /// --seed draws. Text and tokens are then cut into consecutive rows [default: 3 for examples]
    #[arg(long, value_name = "E")]
    pub epochs: Option<f64>,
    /// Put several examples into a row, with no attention between them, instead of padding each to
    /// a row [default: false]
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub pack: Option<bool>,
    /// Sequences per micro-batch and rank [default: 4]
    #[arg(long, value_name = "B", value_parser = parse_whole::<usize>)]
    pub micro_batch: Option<usize>,
    /// Micro-batches per step [default: 1]
    #[arg(long, value_name = "A", value_parser = parse_whole::<usize>)]
    pub grad_accum: Option<usize>,
    /// Tokens per sequence [default: 128, or the model's positions if fewer]
    #[arg(long, value_name = "T", value_parser = parse_whole::<usize>)]
    pub seq_len: Option<usize>,
    /// The optimizer.
    #[command(flatten)]
    pub muon: MuonArgs,
    /// Learning rate [default: 1e-3]
    #[arg(long, value_name = "X")]
    pub lr: Option<f64>,
    /// Decoupled weight decay [default: 0.01]
    #[arg(long, value_name = "X")]
    pub weight_decay: Option<f64>,
    /// No weight decay for tensors of fewer than two dimensions (biases, layer norms), as is usual
    /// for GPTs; a group of param_groups in --config may have its own [default: false]
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub no_decay_1d: Option<bool>,
    /// Clip the gradient to this norm; 0 disables clipping [default: 0; 1 for a --config without
    /// gradient_clipping, as DeepSpeed's]
    #[arg(long, value_name = "X")]
    pub clip: Option<f64>,
    /// Steps of learning-rate warmup [default: 0]
    #[arg(long, value_name = "N", value_parser = parse_whole::<u64>)]
    pub warmup_steps: Option<u64>,
    /// Seed of the initial weights and of the order of text data [default: 0]
    #[arg(long, value_name = "S", value_parser = parse_whole::<u64>)]
    pub seed: Option<u64>,
    /// Save a checkpoint here at the end; the folder must not hold checkpoints of another run
    /// [default: that of --resume; checkpoints/, or checkpoints-2/ and so on if that is in use]
    #[arg(long, value_name = "DIR")]
    pub checkpoint: Option<PathBuf>,
    /// Also save every N steps; 0 disables [default: 0]
    #[arg(long, value_name = "N", value_parser = parse_whole::<u64>)]
    pub checkpoint_every: Option<u64>,
    /// Compare the parameters that several ranks hold (stages 0 to 2, groups of ranks) every N steps
    /// and before each checkpoint, and fail if a card or a link has changed those of one rank; 0 disables
    /// [default: before each checkpoint]
    #[arg(long, value_name = "N", value_parser = parse_whole::<u64>)]
    pub check_replicas: Option<u64>,
    /// Keep only the newest K checkpoints
    #[arg(long, value_name = "K", value_parser = parse_whole::<usize>)]
    pub keep_last: Option<usize>,
    /// Resume from the newest whole checkpoint in this folder, or from DIR/step-N, with the
    /// settings of its run; flags and --config override them
    #[arg(long, value_name = "DIR")]
    pub resume: Option<PathBuf>,
    /// Fail if the newest checkpoint of --resume is damaged, instead of resuming from an older one
    #[arg(long, requires = "resume")]
    pub resume_exact: bool,
    /// Outputs besides checkpoints.
    #[command(flatten)]
    pub outputs: OutputPaths,
    /// Groups of ranks.
    #[command(flatten)]
    pub mesh: MeshArgs,
    /// Consecutive ranks of a machine, for --collectives and comm_bytes.between in --metrics [default: as the launcher
    /// tells; ranks of this process are on one machine]
    #[arg(long, value_name = "L", value_parser = parse_whole::<usize>)]
    pub ranks_per_node: Option<usize>,
    /// The offload.
    #[command(flatten)]
    pub offload: OffloadArgs,
    /// Quantised communication.
    #[command(flatten)]
    pub quantise: QuantiseArgs,
    /// Memory that the ranks of this process may use together, such as 8GiB: a run that needs more
    /// is refused before it starts [default: what the machine has free]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub memory_limit: Option<u64>,
    /// Keep only the input of each block and recompute its activations in backward [default: false]
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub activation_checkpointing: Option<bool>,
    /// Keep 1/M of the input of each checkpointed block on each of the M ranks of
    /// --tensor-parallel, and gather it in backward (ZeRO-R's Pa) [default: false]
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub partition_activations: Option<bool>,
    /// Divide the tokens among the ranks of --tensor-parallel where each would compute the same: the
    /// residual stream, norms and dropout (sequence parallelism). Less memory for about a quarter
    /// more bytes between them [default: false]
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub sequence_parallel: Option<bool>,
    /// Probability with which training drops an element, at all places of the model that have
    /// dropout: attention's probabilities and, in a GPT-2, the embedding and what is added to the
    /// residual stream. Masks depend only on the seed, the step and the row of the global batch
    /// [default: as the model's config.json says; 0 for presets]
    #[arg(long, value_name = "X", value_parser = parse_dropout)]
    pub dropout: Option<f32>,
    /// Recompute GELU's output in backward in place of keeping it, on a GPU: less memory for 1 to
    /// 2% of the time. In 16-bit types one gradient then has other low bits
    /// [default: where the memory of the GPU is too small otherwise, see zero plan]
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub recompute_gelu: Option<bool>,
    /// Reduce gradients over ranks after every micro-batch at stages 0 and 1, with the bits of
    /// stages 2 and 3, instead of summing micro-batches on each rank and reducing once a step;
    /// always in fp16 and with an offloaded optimizer [default: false]
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub reduce_every_micro_batch: Option<bool>,
    /// Elements of a gradient bucket [default: 524288; on GPUs those of the largest unit]
    #[arg(long, value_name = "ELEMS", value_parser = parse_whole::<usize>)]
    pub bucket_elems: Option<usize>,
    /// Do not overlap communication with compute [default: false]
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub no_overlap: Option<bool>,
    /// Record steps into CUDA graphs and replay them from the third step on: stages 0 to 2 on
    /// --device cuda [default: false]
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub cuda_graph: Option<bool>,
    /// Threads of each rank [default: cores / ranks]
    #[arg(long, value_name = "N", value_parser = parse_whole::<usize>)]
    pub threads: Option<usize>,
    /// Seconds that a rank waits for the others before the run fails
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = parse_whole::<u64>)]
    pub time_limit: u64,
    /// Tokenizer of text: a tokenizer.json, or a folder with it or with GPT-2's vocab.json and
    /// merges.txt [default: that of the model's folder; none for models of bytes, such as nano]
    #[arg(long, value_name = "FILE|DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Keep no tokens of --data for later runs; by default those of texts above 1 MiB are kept in
    /// ZERO_TOKEN_CACHE or ~/.cache/zero-tokens
    #[arg(long)]
    pub no_token_cache: bool,
    /// Save no checkpoint
    #[arg(long, conflicts_with_all = ["checkpoint", "checkpoint_every", "keep_last"])]
    pub no_checkpoint: bool,
    /// Add the wall time of each step by part (forward, backward, communication, data, ...) and the
    /// FLOPs utilization to the metrics and the final table; on CUDA two events are recorded for
    /// each operation, as for --report
    #[arg(long)]
    pub breakdown: bool,
    /// Learning rate after the warmup: constant, linear or cosine decay until --steps, or
    /// warmup-stable-decay [default: constant]
    #[arg(long, value_enum)]
    pub schedule: Option<ScheduleFlag>,
    /// Learning rate at the end of a decay [default: 0]
    #[arg(long, value_name = "X")]
    pub min_lr: Option<f64>,
    /// Steps of decay of --schedule wsd [default: a fifth of --steps]
    #[arg(long, value_name = "N", value_parser = parse_whole::<u64>)]
    pub decay_steps: Option<u64>,
    /// Adam's betas [default: 0.9,0.999]
    #[arg(long, value_name = "B1,B2", value_parser = parse_betas)]
    pub betas: Option<[f64; 2]>,
    /// Adam's epsilon [default: 1e-8]
    #[arg(long, value_name = "X")]
    pub eps: Option<f64>,
    /// Evaluate on this data, which is not trained on, and report loss and perplexity
    #[arg(long, value_name = "FILE|DIR|TOKENS.bin")]
    pub val_data: Option<PathBuf>,
    /// Evaluate on this fraction of the tokens of the data, its end, which is then not trained on
    #[arg(long, value_name = "FRACTION")]
    pub val_split: Option<f64>,
    /// Steps from one evaluation to the next; 0 evaluates only at the end
    /// [default: a tenth of --steps]
    #[arg(long, value_name = "N", value_parser = parse_whole::<u64>)]
    pub eval_every: Option<u64>,
    /// Evaluate on at most N tokens, the same each time
    /// [default: as many as cost a tenth of the steps between]
    #[arg(long, value_name = "N", value_parser = parse_whole::<u64>)]
    pub eval_tokens: Option<u64>,
    /// Print how the model continues --sample-prompt every N steps, and at the end; 0 only at the
    /// end. A token costs the forward of a micro-batch; training does not change [default: 0]
    #[arg(long, value_name = "N", value_parser = parse_whole::<u64>)]
    pub sample_every: Option<u64>,
    /// The text that the model continues, by the most likely tokens
    #[arg(long, value_name = "TEXT")]
    pub sample_prompt: Option<String>,
    /// Most tokens of a continuation [default: 32]
    #[arg(long, value_name = "N", value_parser = parse_whole::<usize>)]
    pub sample_tokens: Option<usize>,
    /// The ranks of the run that `--resume` continues; no flag.
    #[arg(skip)]
    pub recorded_ranks: Option<usize>,
    /// Settings without a flag.
    #[arg(skip)]
    pub unflagged: Unflagged,
}

/// Settings of a configuration file or of `run.json` that no flag has.
#[derive(Clone, Debug, Default)]
pub struct Unflagged {
    /// Whether weight decay is decoupled.
    pub decoupled: Option<bool>,
    /// Whether Adam corrects the bias of its moments.
    pub bias_correction: Option<bool>,
    /// The loss scaling in fp16.
    pub loss_scaling: Option<LossScaling>,
    /// Rules of tensors that differ from the optimizer's.
    pub groups: Option<Vec<ParamGroup>>,
    /// How stage 3 gathers units.
    pub prefetch: Option<PrefetchOptions>,
    /// Most elements of one launch of the optimizer.
    pub sub_group_elems: Option<usize>,
}

/// Sets each of these fields that `$own` does not have to that of `$other`.
macro_rules! fill {
    ($own:ident from $other:ident: $($($field:ident).+),+) => {
        $(if $own.$($field).+.is_none() {
            $own.$($field).+.clone_from(&$other.$($field).+);
        })+
    };
}

impl TrainArgs {
    /// These settings, and those of `other` that are missing. The stage, the place of the run's
    /// files and offload are resolved by themselves.
    #[must_use]
    pub(crate) fn or(&self, other: &Self) -> Self {
        let mut own = self.clone();
        if own.val_split.is_none() && own.val_data.is_none() {
            own.val_data.clone_from(&other.val_data);
            own.val_split = other.val_split;
        }
        fill!(own from other:
            dtype, steps, epochs, pack, micro_batch, grad_accum, seq_len,
            lr, betas, eps, weight_decay, clip, no_decay_1d,
            unflagged.decoupled, unflagged.bias_correction, unflagged.loss_scaling, unflagged.groups,
            activation_checkpointing, partition_activations, sequence_parallel, recompute_gelu,
            reduce_every_micro_batch, bucket_elems, no_overlap, cuda_graph,
            unflagged.prefetch, unflagged.sub_group_elems,
            mesh.shard_group, mesh.shard_optimizer, mesh.hpz, mesh.ulysses, mesh.tensor_parallel,
            muon.optimizer, muon.muon_lr, muon.muon_momentum, muon.muon_adjust, muon.ns_steps,
            muon.muon_heads,
            quantise.quantize_params, quantise.quantize_grads, quantise.quantize_frozen,
            quantise.error_feedback,
            quantise.error_feedback_beta, quantise.error_feedback_reset,
            checkpoint_every, keep_last, check_replicas,
            eval_every, eval_tokens, sample_every, sample_prompt, sample_tokens
        );
        own
    }
}

/// Schedules of the learning rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ScheduleFlag {
    /// The learning rate.
    Constant,
    /// A straight line to the minimum.
    Linear,
    /// Half a cosine to the minimum.
    Cosine,
    /// Constant, then a straight line to the minimum.
    Wsd,
}

impl ScheduleFlag {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Constant => "constant",
            Self::Linear => "linear",
            Self::Cosine => "cosine",
            Self::Wsd => "wsd",
        }
    }
}

/// Parses a probability below 1.
fn parse_dropout(text: &str) -> Result<f32, String> {
    let parsed = text.parse().ok();
    let valid = parsed.filter(|p| (0.0..1.0).contains(p));
    valid.ok_or_else(|| "expected at least 0 and below 1".to_owned())
}

/// Parses `0.9,0.95`.
fn parse_betas(text: &str) -> Result<[f64; 2], String> {
    let betas: Vec<f64> = text
        .split(',')
        .filter_map(|beta| beta.trim().parse().ok())
        .collect();
    match betas[..] {
        [one, two] if text.matches(',').count() == 1 => Ok([one, two]),
        _ => Err("expected two numbers, such as 0.9,0.95".to_owned()),
    }
}

/// Devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceChoice {
    /// CUDA if it is available, otherwise the host.
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
    /// NCCL on CUDA; on the host MPI under mpirun, processes under torchrun or srun, otherwise
    /// threads.
    #[default]
    Auto,
    /// Threads of this process.
    Threads,
    /// Processes of this machine over shared memory: those of a launcher, or --ranks new ones.
    Processes,
    /// NCCL.
    Nccl,
    /// MPI.
    Mpi,
}

/// Groups of ranks, as flags and in `run.json`.
#[derive(Args, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MeshArgs {
    /// Shard over groups of K consecutive ranks, such as those of a machine, and hold a copy in
    /// each group (HSDP, MiCS) [default: all ranks]
    #[arg(long, value_name = "K", value_parser = parse_whole::<usize>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard_group: Option<usize>,
    /// With --shard-group: the ranks that share the optimizer state, those of a group, or all
    /// (HFSDP: less memory, the same bytes between groups) [default: group]
    #[arg(long, value_enum, requires = "shard_group")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard_optimizer: Option<OptimizerRanks>,
    /// At stage 3, shard the parameters over groups of K consecutive ranks, gradients and optimizer
    /// state over all: gathers stay in a group (hpZ) [default: all ranks]
    #[arg(long, value_name = "K", value_parser = parse_whole::<usize>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hpz: Option<usize>,
    /// Share each sequence between S consecutive ranks, which divide its tokens, and the heads of
    /// attention by all-to-all (DeepSpeed-Ulysses): longer sequences fit [default: 1]
    #[arg(long, value_name = "S", value_parser = parse_whole::<usize>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ulysses: Option<usize>,
    /// Cut each parameter over M consecutive ranks, with attention's heads and the vocabulary, and
    /// sum what they compute (tensor parallelism, as Megatron-LM): states are then sharded over the
    /// other ranks [default: 1]
    #[arg(long, value_name = "M", value_parser = parse_whole::<usize>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor_parallel: Option<usize>,
    /// Route of collectives over all ranks without groups: flat, one ring; two-level, within
    /// machines and then between them, which needs no memory, sends less between machines and waits
    /// for fewer ranks, and sums in another order; or auto, two-level on several machines with
    /// several ranks each, by --ranks-per-node or the launcher [default: auto]
    #[arg(long, value_enum)]
    #[serde(skip)]
    pub collectives: Option<Collectives>,
    /// Data ranks of a machine, if collectives run in two levels; no flag.
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub two_level: Option<usize>,
}

/// Routes of collectives over all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Collectives {
    /// Two levels where machines have several ranks.
    #[default]
    Auto,
    /// One ring.
    Flat,
    /// Within machines, then between them.
    TwoLevel,
}

/// Ranks that share the optimizer state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerRanks {
    /// Those of a group.
    Group,
    /// All.
    World,
}

/// The offload.
#[derive(Args, Clone, Debug, Default)]
pub struct OffloadArgs {
    /// Place of the optimizer state: none (on the compute device), cpu (in host memory) or nvme:DIR
    /// (in a scratch file in DIR). Off the device, the host updates the parameters; the numbers are
    /// the same [default: none]
    #[arg(long, value_name = "none|cpu|nvme:DIR", value_parser = parse_home)]
    pub offload: Option<Home>,
    /// Place of the parameters between their uses, at stage 3: none, cpu or nvme:DIR
    /// [default: none]
    #[arg(long, value_name = "none|cpu|nvme:DIR", value_parser = parse_home)]
    pub offload_params: Option<Home>,
    /// Keep the checkpoints of activations in host memory; requires --activation-checkpointing
    /// [default: false]
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub offload_activations: Option<bool>,
    /// Master weights: fp32, or remainder, the 16 bits that a bf16 parameter lacks, which saves 2
    /// bytes a parameter. The masters are the same; one exactly midway between two parameters then
    /// rounds away from zero and not to even [default: fp32]
    #[arg(long, value_parser = format_parser::<Masters>(&[
        ("fp32", "fp32"),
        ("remainder", "The bf16 parameter and a 16-bit remainder"),
    ]))]
    pub masters: Option<Masters>,
    /// Moments of the optimizer: fp32; 8bit or 4bit, in blocks with a scale each, which changes the
    /// numbers slightly, and alike at all stages and numbers of ranks; or, of an offloaded
    /// optimizer, bf16 with stochastic rounding [default: fp32]
    #[arg(long, value_parser = format_parser::<Moments>(&[
        ("fp32", "fp32"),
        ("bf16", "bf16, of an offloaded optimizer"),
        ("8bit", "8 bits, in blocks of 256"),
        ("4bit", "4 bits, in blocks of 128"),
    ]))]
    pub moments: Option<Moments>,
}

/// The parser of a format of state, with its names and their help.
fn format_parser<T>(names: &[(&'static str, &'static str)]) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err = String> + Clone + Send + Sync + 'static,
{
    let values = names.iter();
    let values = values.map(|&(name, help)| PossibleValue::new(name).help(help));
    PossibleValuesParser::new(values).try_map(|name| name.parse())
}

fn parse_home(text: &str) -> Result<Home, String> {
    text.parse()
}

/// The settings of these flags.
#[cfg(test)]
pub(crate) fn parsed(flags: &str) -> TrainArgs {
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: TrainArgs,
    }
    let words = std::iter::once("train").chain(flags.split_whitespace());
    <Line as clap::Parser>::try_parse_from(words).unwrap().args
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn homes_are_parsed() {
        for (text, home) in [
            ("none", Home::Device),
            ("cpu", Home::Host),
            ("nvme:/a b", Home::Nvme("/a b".into())),
        ] {
            assert_eq!(parse_home(text).as_ref(), Ok(&home));
            assert_eq!(home.to_string(), text);
        }
        for text in ["", "CPU", "nvme", "nvme:", "disk:/a", "/a"] {
            assert_eq!(
                parse_home(text),
                Err("expected none, cpu or nvme:DIR".to_owned()),
                "{text}"
            );
        }
    }
}
