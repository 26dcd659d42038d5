//! The whole file: top-level keys and small blocks.

use std::path::Path;

use serde_json::{Map, Value};
use zero_alloc::device::DType;
use zero_ckpt::files::{self, SMALL_FILE_BYTES};
use zero_optim::{LossScaling, LrSchedule};

use super::autotuning::{self, Autotuning};
use super::block::{Block, Key, keys, shortened};
use super::monitors::{self, Monitors};
use super::optimizer::{self, DsOptimizer};
use super::zero::{self, ZeroOptimization};
use super::{BatchKeys, ConfigFileError, json, precision};
use zero_optim::ParamGroup;

/// A DeepSpeed configuration. Missing keys have DeepSpeed's defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DsConfig {
    /// The three batch sizes.
    pub batch: BatchKeys,
    /// `sequence_parallel_size`: ranks that share each sequence.
    pub sequence_ranks: Option<u64>,
    /// `tensor_parallel.autotp_size`: ranks that have a part of each parameter.
    pub tensor_ranks: Option<u64>,
    /// `zero_optimization`.
    pub zero: ZeroOptimization,
    /// Whether the file has `zero_optimization.stage` with a number, or its old form, a flag.
    pub has_stage: bool,
    /// The type that `fp16` or `bf16` enables, or fp32 if both are disabled; `None` if neither
    /// decides.
    pub dtype: Option<DType>,
    /// The loss scaling of `fp16`, even if that is disabled; `None` without such a block.
    pub loss_scaling: Option<LossScaling>,
    /// Types of gradients in communication and of parameters, as `communication_data_type` and
    /// `data_types` have them.
    pub requested_types: Vec<(String, DType)>,
    /// Maximum norm of the gradient; 0 disables clipping. DeepSpeed's default is 1.
    pub gradient_clipping: Option<f64>,
    /// The optimizer; `None` lets the program choose.
    pub optimizer: Option<DsOptimizer>,
    /// `param_groups`, an extension of this program: rules of tensors by name, kind and dimensions.
    /// `None`: no such key.
    pub param_groups: Option<Vec<ParamGroup>>,
    /// The schedule; `None` is a constant rate. `total_num_steps` is `u64::MAX` for `"auto"`.
    pub schedule: Option<LrSchedule>,
    /// The block `activation_checkpointing`; its presence enables checkpointing.
    pub activation_checkpointing: Option<ActivationCheckpointing>,
    /// The block `aio`: requests to scratch files.
    pub aio: Aio,
    /// Steps between two progress lines.
    pub steps_per_print: Option<u64>,
    /// Whether to print the time of the parts of a step.
    pub wall_clock_breakdown: bool,
    /// `autotuning`, if it is enabled: a run tunes in place of training.
    pub autotuning: Option<Autotuning>,
    /// `tensorboard`, `csv_monitor` and the monitors of services.
    pub monitors: Monitors,
    /// The keys whose value is `"auto"`, with their blocks.
    pub autos: Vec<String>,
    /// Settings without effect, one line each.
    pub warnings: Vec<String>,
}

/// `activation_checkpointing`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActivationCheckpointing {
    /// Whether to shard the kept inputs over the ranks.
    pub partition_activations: bool,
    /// Whether to keep them in host memory.
    pub cpu_checkpointing: bool,
}

/// `aio`. `None` lets the program choose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Aio {
    /// Requests in flight to a file.
    pub queue_depth: Option<u64>,
    /// Bytes of one request: a multiple of 4096.
    pub block_bytes: Option<u64>,
}

/// Unsupported top-level keys that change at most speed, rounding or messages.
const IGNORED: &[Key] = keys! {
    "managed_gradient_accumulation" = Flag(true) => "gradient accumulation is always on",
    "prescale_gradients" = Flag(false) => "gradients are divided once, after the sum",
    "gradient_predivide_factor" = Number(1) => "gradients are divided once, after the sum",
    "disable_allgather" = Flag(false) => "parameters are always gathered by all_gather",
    "sparse_gradients" = Flag(false) => "the embedding's gradient is dense",
    "zero_allow_untested_optimizer" = Nothing => "the optimizer is always this program's",
    "zero_force_ds_cpu_optimizer" = Nothing => "the optimizer is always this program's",
    "memory_breakdown" = Flag(false) => "memory is in the final table and in --metrics",
    "dump_state" = Flag(false) => "the first lines of a run show its settings",
    "disable_python_gc" = Nothing => "this program has no Python",
    "dataloader_drop_last" = Nothing => "the data repeats without end",
    "vocabulary_size" = Nothing => "the model defines its vocabulary",
    "use_data_before_expert_parallelism" = Flag(false) => "the model has no experts",
    "log_level" = Nothing => "use the environment variable ZERO_LOG",
    "seq_parallel_communication_data_type" = Nothing =>
        "ranks that share sequences send activations in their own type",
    "timers" = Nothing => "times are in --metrics",
    "checkpoint" = Nothing =>
        "every rank writes its shard, and every checkpoint loads at every number of ranks",
    "pipeline" = Nothing => "the model has no pipeline stages",
};

/// Unsupported blocks that do not change results, and the reason or remedy. Disabled ones need no
/// warning.
const OPTIONAL: &[Key] = keys! {
    "flops_profiler" = Nothing => "tokens/s are in --metrics",
    "comms_logger" = Nothing => "bytes sent are in --metrics",
    "compile" = Nothing => "the model is always compiled",
    "nebula" = Nothing => "use --checkpoint",
    "datastates_ckpt" = Nothing => "use --checkpoint",
    "hybrid_engine" = Nothing => "this program does not generate text",
};

/// Unsupported blocks that change the results if enabled.
const REFUSED: &[Key] = keys! {
    "amp" = Nothing => "use bf16 or fp16 instead",
    "torch_autocast" = Nothing => "use bf16 or fp16 instead",
    "data_efficiency" = Nothing => "remove the block and prepare --data instead",
    "curriculum_learning" = Nothing => "remove the block and prepare --data instead",
    "progressive_layer_drop" = Nothing => "remove the block to compute every layer in every step",
    "eigenvalue" = Nothing => "remove the block to train without quantization",
    "quantize_training" = Nothing => "remove the block to train without quantization",
    "weight_quantization" = Nothing => "remove the block to train without quantization",
    "compression_training" = Nothing =>
        "remove the block to train without quantization and pruning",
    "sparse_attention" = Nothing => "remove the block to train with dense attention",
    "elasticity" = Nothing => "remove the block and set train_batch_size",
    "expert_parallel" = Nothing => "remove the block: the model has no experts",
    "ulysses" = Nothing => "remove the block and set sequence_parallel_size",
};

impl DsConfig {
    /// Reads a configuration file.
    ///
    /// # Errors
    /// The file cannot be read, or an error of [`parse`](Self::parse), with the path.
    pub fn open(path: &Path) -> Result<Self, ConfigFileError> {
        Self::parse(&read(path)?).map_err(|source| ConfigFileError::In {
            path: path.to_owned(),
            source: Box::new(source),
        })
    }

    /// The keys of a configuration file as they are.
    ///
    /// # Errors
    /// The file cannot be read, or is no JSON object.
    pub fn document(path: &Path) -> Result<Value, ConfigFileError> {
        json::parse(&read(path)?).map(Value::Object)
    }

    /// Parses the text of a configuration file.
    ///
    /// # Errors
    /// Invalid JSON, a key that DeepSpeed rejects, a value of the wrong type, or an unsupported
    /// setting that would change the results.
    pub fn parse(text: &str) -> Result<Self, ConfigFileError> {
        let keys = json::parse(text)?;
        let mut autos = Vec::new();
        list_autos("", &keys, &mut autos);
        let mut root = Block::root(keys);
        let mut warnings = Vec::new();
        let warn = &mut warnings;

        let tensor_ranks = read_tensor_parallel(&mut root, warn)?;
        let (dtype, loss_scaling) = precision::read(&mut root, warn)?;
        let mut file = Self {
            batch: BatchKeys {
                train_batch_size: root.positive("train_batch_size")?,
                micro_batch: root.positive("train_micro_batch_size_per_gpu")?,
                grad_accum: root.positive("gradient_accumulation_steps")?,
            },
            sequence_ranks: root.positive("sequence_parallel_size")?,
            tensor_ranks,
            dtype,
            loss_scaling,
            gradient_clipping: root.number_in(
                "gradient_clipping",
                0.0..=f64::MAX,
                "a number, 0 (off) or above",
            )?,
            optimizer: optimizer::read_optimizer(&mut root, warn)?,
            schedule: optimizer::read_scheduler(&mut root, warn)?,
            param_groups: optimizer::read_param_groups(&mut root)?,
            has_stage: root.peek("zero_optimization").is_some_and(|zero| {
                zero.is_boolean() || zero.get("stage").is_some_and(|stage| stage != "auto")
            }),
            zero: zero::read(&mut root, warn)?,
            activation_checkpointing: read_activation_checkpointing(&mut root, warn)?,
            aio: read_aio(&mut root, warn)?,
            steps_per_print: root.count("steps_per_print")?,
            wall_clock_breakdown: root.flag("wall_clock_breakdown")?.unwrap_or(false),
            monitors: monitors::read(&mut root)?,
            autotuning: autotuning::read(&mut root, warn)?,
            requested_types: read_gradient_types(&mut root, warn)?,
            autos,
            warnings: Vec::new(),
        };

        root.refuse(keys! { "graph_harvesting" = Flag(false) => "DeepSpeed has removed it" })?;
        root.ignore(IGNORED, warn)?;
        read_optional_blocks(&mut root, warn)?;
        root.end_lenient(warn);
        file.warnings = warnings;
        Ok(file)
    }

    /// `zero_optimization` with accelerate's values for `"auto"`, for a model of `hidden` channels.
    pub fn zero_for(&self, hidden: u64) -> ZeroOptimization {
        let mut zero = self.zero.clone();
        let auto = |key: &str| self.is_auto(&format!("zero_optimization.{key}"));
        let square = hidden.saturating_mul(hidden);
        if auto("reduce_bucket_size") {
            zero.reduce_bucket_elems = square;
        }
        if auto("prefetch_bucket_size") {
            zero.prefetch_bucket_elems = (0.9 * square as f64) as u64;
        }
        if auto("param_persistence_threshold") {
            zero.persistence_threshold_elems = hidden.saturating_mul(10);
        }
        zero
    }

    /// Whether the value of `key` is `"auto"`. The prefix `stage3_` of a key may be missing.
    pub fn is_auto(&self, key: &str) -> bool {
        self.autos.iter().any(|auto| canonical(auto) == key)
    }
}

fn read(path: &Path) -> Result<String, ConfigFileError> {
    files::read_text(path, SMALL_FILE_BYTES).map_err(|source| ConfigFileError::Read {
        path: path.to_owned(),
        source,
    })
}

/// The name of a key that has two.
pub fn canonical(key: &str) -> String {
    key.replace(".stage3_", ".")
        .replace("_fp16_", "_16bit_")
        .replace("bfloat16.", "bf16.")
}

/// Appends the keys with the value `"auto"`, with their path. A whole precision block that is
/// `"auto"` counts as its key `enabled`.
fn list_autos(path: &str, keys: &Map<String, Value>, autos: &mut Vec<String>) {
    for (key, value) in keys {
        let name = if path.is_empty() {
            key.clone()
        } else {
            format!("{path}.{key}")
        };
        match value {
            Value::Object(keys) => list_autos(&name, keys, autos),
            Value::String(text) if text == "auto" => autos.push(match name.as_str() {
                "fp16" | "bf16" | "bfloat16" => format!("{name}.enabled"),
                _ => name,
            }),
            _ => {}
        }
    }
}

/// Returns the ranks of tensor parallelism; 0 in the file: none.
fn read_tensor_parallel(
    root: &mut Block,
    warnings: &mut Vec<String>,
) -> Result<Option<u64>, ConfigFileError> {
    let Some(mut block) = root.block("tensor_parallel")? else {
        return Ok(None);
    };
    let ranks = block.count("autotp_size")?;
    block.refuse(keys! {
        "tp_size" = Number(1) => "set autotp_size",
        "tp" = Nothing => "set autotp_size",
        "tensor_parallel" = Nothing => "set autotp_size",
    })?;
    block.end_lenient(warnings);
    Ok(ranks.map(|ranks| ranks.max(1)))
}

fn read_activation_checkpointing(
    root: &mut Block,
    warnings: &mut Vec<String>,
) -> Result<Option<ActivationCheckpointing>, ConfigFileError> {
    let Some(mut block) = root.block("activation_checkpointing")? else {
        return Ok(None);
    };
    let ignored = keys! {
        "number_checkpoints" = Nothing => "the input of each block is kept",
        "contiguous_memory_optimization" = Flag(false) => "all memory comes from one pool",
        "synchronize_checkpoint_boundary" = Flag(false) => "streams are ordered by events",
        "profile" = Flag(false) => "times are in --metrics",
    };

    block.ignore(ignored, warnings)?;
    let read = ActivationCheckpointing {
        partition_activations: block.flag("partition_activations")?.unwrap_or(false),
        cpu_checkpointing: block.flag("cpu_checkpointing")?.unwrap_or(false),
    };

    block.end_lenient(warnings);
    Ok(Some(read))
}

fn read_aio(root: &mut Block, warnings: &mut Vec<String>) -> Result<Aio, ConfigFileError> {
    let Some(mut block) = root.block("aio")? else {
        return Ok(Aio::default());
    };
    let threads = "the kernel serves queue_depth requests at once without threads";
    let ignored = keys! {
        "use_gds" = Flag(false) => "files are read through host memory",
        "thread_count" = Number(1) => threads,
        "intra_op_parallelism" = Number(1) => threads,
        "single_submit" = Flag(false) => "requests are submitted together",
        "overlap_events" = Flag(true) => "requests are submitted while earlier ones run",
    };

    block.ignore(ignored, warnings)?;
    let aio = Aio {
        queue_depth: block.count_in("queue_depth", "a whole number from 1 to 4096", |n| {
            (1..=4096).contains(&n)
        })?,
        block_bytes: block.count_in("block_size", "a multiple of 4096 up to 1073741824", |n| {
            (4096..=1 << 30).contains(&n) && n.is_multiple_of(4096)
        })?,
    };

    block.end_lenient(warnings);
    Ok(aio)
}

/// Checks the types of gradients, and returns those that must be the parameters' type: this program
/// sends gradients as that type, and sums them in fp32.
fn read_gradient_types(
    root: &mut Block,
    warnings: &mut Vec<String>,
) -> Result<Vec<(String, DType)>, ConfigFileError> {
    let known = |name: String, key: String| match name.to_ascii_lowercase().as_str() {
        "fp32" | "float32" => Ok(DType::F32),
        "fp16" | "float16" => Ok(DType::F16),
        "bf16" | "bfloat16" => Ok(DType::Bf16),
        _ => {
            let expected = "\"fp32\", \"fp16\" or \"bf16\"";
            Err(ConfigFileError::WrongType {
                key,
                expected,
                got: format!("{name:?}"),
            })
        }
    };

    let mut types = Vec::new();
    let sent = "communication_data_type".to_owned();
    if let Some(name) = root.text(&sent)? {
        types.push((sent.clone(), known(name, sent)?));
    }

    if let Some(mut block) = root.block("data_types")? {
        let mut read = |key| {
            let name = block.name(key);
            let set = block
                .text(key)?
                .map(|set| known(set, name.clone()))
                .transpose()?;
            Ok::<_, ConfigFileError>(set.map(|set| (name, set)))
        };
        if let Some((name, _)) = read("grad_accum_dtype")?.filter(|(_, set)| *set != DType::F32) {
            warnings.push(format!("{name} is ignored: it is fp32"));
        }
        types.extend(read("param_dtype")?);
        let buffers = "the model has no buffers";
        let ignored = keys! {
            "buffer_dtype" = Nothing => buffers,
            "keep_in_fp32_modules" = Nothing => buffers,
        };
        block.ignore(ignored, warnings)?;
        block.end_lenient(warnings);
    }

    if let Some(op) = root
        .take("gradient_allreduce_op")
        .filter(|v| v.as_str().map(str::to_ascii_lowercase) != Some("mean".into()))
    {
        let (key, got) = ("gradient_allreduce_op".to_owned(), shortened(&op));
        return Err(ConfigFileError::Unsupported {
            key,
            got,
            why: "gradients are averaged over ranks",
        });
    }

    Ok(types)
}

fn read_optional_blocks(
    root: &mut Block,
    warnings: &mut Vec<String>,
) -> Result<(), ConfigFileError> {
    for Key { name, why, .. } in OPTIONAL {
        if root.take(name).is_some_and(|block| is_on(&block)) {
            warnings.push(format!("{name} is ignored: {why}"));
        }
    }
    for Key { name, why, .. } in REFUSED {
        if let Some(block) = root.take(name).filter(is_on) {
            return Err(ConfigFileError::Unsupported {
                key: (*name).to_owned(),
                got: shortened(&block),
                why,
            });
        }
    }
    Ok(())
}

/// Whether a block has an effect. `enabled` decides (in compression_training, that of
/// `shared_parameters`); without it, any value does except false, an empty block and a size of at
/// most 1.
fn is_on(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Number(n) => n.as_f64().is_none_or(|n| n > 1.0),
        Value::Object(keys) => {
            let shared = || keys.get("shared_parameters")?.get("enabled");
            match keys.get("enabled").or_else(shared) {
                Some(enabled) => *enabled == true,
                None => keys.values().any(is_on),
            }
        }
        _ => true,
    }
}
