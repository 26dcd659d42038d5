//! The whole file: its top-level keys and small blocks.

use std::fs;
use std::path::Path;

use serde_json::Value;
use zero_alloc::device::DType;
use zero_optim::{LossScaling, LrSchedule};

use super::block::{Block, Usual, shortened};
use super::optimizer::{self, DsOptimizer};
use super::zero::{self, ZeroOptimization};
use super::{BatchKeys, ConfigFileError, json, precision};

/// A DeepSpeed configuration, with DeepSpeed's defaults where the file is silent.
#[derive(Clone, Debug, PartialEq)]
pub struct DsConfig {
    /// The three batch sizes.
    pub batch: BatchKeys,
    /// `zero_optimization`.
    pub zero: ZeroOptimization,
    /// `fp16`, `bf16`, or fp32 where neither is enabled.
    pub dtype: DType,
    /// How `fp16` scales the loss; none otherwise.
    pub loss_scaling: LossScaling,
    /// Gradients of a greater norm are scaled down to it; 0 is off. DeepSpeed's default is 1.
    pub gradient_clipping: f64,
    /// The optimizer; none where the program chooses.
    pub optimizer: Option<DsOptimizer>,
    /// The schedule; none is a constant rate.
    pub schedule: Option<LrSchedule>,
    /// The block `activation_checkpointing`, where the file has one.
    pub activation_checkpointing: Option<ActivationCheckpointing>,
    /// How files are read and written where state is offloaded to them.
    pub aio: Aio,
    /// Steps between two lines of progress.
    pub steps_per_print: Option<u64>,
    /// Whether the time of the parts of a step is printed.
    pub wall_clock_breakdown: bool,
    /// What the file says and does not get, a line each.
    pub warnings: Vec<String>,
}

/// `activation_checkpointing`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActivationCheckpointing {
    /// Whether the ranks share what is kept.
    pub partition_activations: bool,
    /// Whether it is kept in host memory.
    pub cpu_checkpointing: bool,
}

/// `aio`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aio {
    /// Bytes of one request.
    pub block_size_bytes: u64,
    /// Requests in flight.
    pub queue_depth: u64,
    /// Threads that share one operation.
    pub intra_op_parallelism: u64,
    /// Whether requests are submitted one by one.
    pub single_submit: bool,
    /// Whether requests are submitted while others are in flight.
    pub overlap_events: bool,
}

impl Default for Aio {
    fn default() -> Self {
        let block_size_bytes = 1 << 20;
        Self { block_size_bytes, queue_depth: 8, intra_op_parallelism: 1, single_submit: false, overlap_events: true }
    }
}

/// Top-level keys that change speed, rounding, messages or nothing here.
const IGNORED: [(&str, Usual, &str); 18] = {
    use Usual::{Flag, Nothing, Number};
    [
        ("managed_gradient_accumulation", Flag(true), "accumulation is always managed"),
        ("prescale_gradients", Flag(false), "gradients are divided once, after the sum"),
        ("gradient_predivide_factor", Number(1), "gradients are divided once, after the sum"),
        ("disable_allgather", Flag(false), "parameters are always gathered by all_gather"),
        ("sparse_gradients", Flag(false), "the embedding's gradient is dense"),
        ("zero_allow_untested_optimizer", Nothing, "the optimizer is always this program's"),
        ("zero_force_ds_cpu_optimizer", Nothing, "the optimizer is always this program's"),
        ("memory_breakdown", Flag(false), "memory is in the final table and in --metrics"),
        ("dump_state", Flag(false), "what is used is in the first lines of the run"),
        ("disable_python_gc", Nothing, "there is no Python here"),
        ("dataloader_drop_last", Nothing, "the data goes around"),
        ("vocabulary_size", Nothing, "the model says its vocabulary"),
        ("use_data_before_expert_parallelism", Flag(false), "there are no experts"),
        ("log_level", Nothing, "say RUST_LOG"),
        ("seq_parallel_communication_data_type", Nothing, "sequences are not split over ranks"),
        ("timers", Nothing, "times are in --metrics"),
        ("checkpoint", Nothing, "every rank writes its shard, and every checkpoint loads at every number of ranks"),
        ("pipeline", Nothing, "there are no pipeline stages"),
    ]
};

/// Blocks that do something only where they are enabled: what is not honoured then.
const OPTIONAL: [(&str, &str); 11] = [
    ("flops_profiler", "tokens/s are in --metrics"),
    ("comms_logger", "bytes sent are in --metrics"),
    ("tensorboard", "use --metrics"),
    ("wandb", "use --metrics"),
    ("comet", "use --metrics"),
    ("csv_monitor", "use --metrics"),
    ("autotuning", "see `zero plan`"),
    ("compile", "the model is compiled already"),
    ("nebula", "use --checkpoint"),
    ("datastates_ckpt", "use --checkpoint"),
    ("hybrid_engine", "there is no generation here"),
];

/// Blocks that change what is computed, where they are enabled.
const REFUSED: [(&str, &str); 14] = [
    ("amp", "use bf16 or fp16"),
    ("torch_autocast", "use bf16 or fp16"),
    ("data_efficiency", "the data is taken as --data says"),
    ("curriculum_learning", "the data is taken as --data says"),
    ("progressive_layer_drop", "every layer is computed"),
    ("eigenvalue", "weights are not quantized"),
    ("quantize_training", "weights are not quantized"),
    ("weight_quantization", "weights are not quantized"),
    ("compression_training", "weights are neither quantized nor pruned"),
    ("sparse_attention", "attention is dense"),
    ("elasticity", "say the batch size"),
    ("expert_parallel", "there are no experts"),
    ("tensor_parallel", "parameters are sharded by ZeRO alone"),
    ("ulysses", "sequences are not split over ranks"),
];

impl DsConfig {
    /// Reads a configuration file.
    ///
    /// # Errors
    /// As [`parse`](Self::parse)'s, with the file's path.
    pub fn open(path: &Path) -> Result<Self, ConfigFileError> {
        let text =
            fs::read_to_string(path).map_err(|source| ConfigFileError::Read { path: path.to_owned(), source })?;
        Self::parse(&text).map_err(|source| ConfigFileError::In { path: path.to_owned(), source: Box::new(source) })
    }

    /// Reads the text of a configuration file.
    ///
    /// # Errors
    /// Text that is not JSON with comments, a key that DeepSpeed refuses too, a value of another type, and
    /// what cannot be ignored without changing the results.
    pub fn parse(text: &str) -> Result<Self, ConfigFileError> {
        let mut root = Block::root(json::parse(text)?);
        let mut warnings = Vec::new();
        let warn = &mut warnings;

        let batch = BatchKeys {
            train_batch_size: root.positive("train_batch_size")?,
            micro_batch: root.positive("train_micro_batch_size_per_gpu")?,
            grad_accum: root.positive("gradient_accumulation_steps")?,
        };
        let (dtype, loss_scaling) = precision::read(&mut root, warn)?;
        let clipping = root.number_in("gradient_clipping", 0.0..=f64::MAX, "a number, 0 (off) or above")?;
        let optimizer = optimizer::read_optimizer(&mut root, warn)?;
        let schedule = optimizer::read_scheduler(&mut root, warn)?;
        let zero = zero::read(&mut root, warn)?;
        let activation_checkpointing = read_activation_checkpointing(&mut root, warn)?;
        let aio = read_aio(&mut root, warn)?;
        let steps_per_print = root.count("steps_per_print")?;
        let wall_clock_breakdown = root.flag("wall_clock_breakdown")?.unwrap_or(false);

        read_gradient_types(&mut root, dtype, warn)?;
        refuse_parallelism(&mut root)?;
        root.ignore(&IGNORED, warn)?;
        read_optional_blocks(&mut root, warn)?;
        root.end_lenient(warn);
        Ok(Self {
            batch,
            zero,
            dtype,
            loss_scaling,
            gradient_clipping: clipping.unwrap_or(1.0),
            optimizer,
            schedule,
            activation_checkpointing,
            aio,
            steps_per_print,
            wall_clock_breakdown,
            warnings,
        })
    }
}

fn read_activation_checkpointing(
    root: &mut Block,
    warnings: &mut Vec<String>,
) -> Result<Option<ActivationCheckpointing>, ConfigFileError> {
    let Some(mut block) = root.block("activation_checkpointing")? else { return Ok(None) };
    let ignored = [
        ("number_checkpoints", Usual::Nothing, "each block's input is kept"),
        ("contiguous_memory_optimization", Usual::Flag(false), "what is kept comes from the pool"),
        ("synchronize_checkpoint_boundary", Usual::Flag(false), "streams are ordered by events"),
        ("profile", Usual::Flag(false), "times are in --metrics"),
    ];
    block.ignore(&ignored, warnings)?;
    let read = ActivationCheckpointing {
        partition_activations: block.flag("partition_activations")?.unwrap_or(false),
        cpu_checkpointing: block.flag("cpu_checkpointing")?.unwrap_or(false),
    };
    block.end_lenient(warnings);
    Ok(Some(read))
}

fn read_aio(root: &mut Block, warnings: &mut Vec<String>) -> Result<Aio, ConfigFileError> {
    let Some(mut block) = root.block("aio")? else { return Ok(Aio::default()) };
    let default = Aio::default();
    block.ignore(&[("use_gds", Usual::Flag(false), "files are read through host memory")], warnings)?;
    let aio = Aio {
        block_size_bytes: block.positive("block_size")?.unwrap_or(default.block_size_bytes),
        queue_depth: block.positive("queue_depth")?.unwrap_or(default.queue_depth),
        intra_op_parallelism: block.positive("intra_op_parallelism")?.unwrap_or(default.intra_op_parallelism),
        single_submit: block.flag("single_submit")?.unwrap_or(default.single_submit),
        overlap_events: block.flag("overlap_events")?.unwrap_or(default.overlap_events),
    };
    block.end_lenient(warnings);
    Ok(aio)
}

/// The types in which gradients travel and are summed: here always the parameters' and fp32.
fn read_gradient_types(root: &mut Block, dtype: DType, warnings: &mut Vec<String>) -> Result<(), ConfigFileError> {
    let known = |name: String, key: String| match name.to_ascii_lowercase().as_str() {
        "fp32" | "float32" => Ok(DType::F32),
        "fp16" | "float16" => Ok(DType::F16),
        "bf16" | "bfloat16" => Ok(DType::Bf16),
        _ => {
            let expected = "\"fp32\", \"fp16\" or \"bf16\"";
            Err(ConfigFileError::WrongType { key, expected, got: format!("{name:?}") })
        }
    };
    if let Some(name) = root.text("communication_data_type")? {
        let asked = known(name, "communication_data_type".into())?;
        if asked != dtype {
            let text = "communication_data_type is not honoured: gradients travel as the parameters do, as";
            warnings.push(format!("{text} {dtype} and not {asked}"));
        }
    }
    if let Some(mut block) = root.block("data_types")? {
        for (key, used) in [("grad_accum_dtype", DType::F32), ("param_dtype", dtype)] {
            let name = block.name(key);
            if let Some(asked) = block.text(key)?.map(|asked| known(asked, name.clone())).transpose()?
                && asked != used
            {
                warnings.push(format!("{name} is not honoured: {used} is used and not {asked}"));
            }
        }
        let buffers = "the model has no buffers";
        let ignored = [("buffer_dtype", Usual::Nothing, buffers), ("keep_in_fp32_modules", Usual::Nothing, buffers)];
        block.ignore(&ignored, warnings)?;
        block.end_lenient(warnings);
    }
    if let Some(op) =
        root.take("gradient_allreduce_op").filter(|v| v.as_str().map(str::to_ascii_lowercase) != Some("mean".into()))
    {
        let (key, got) = ("gradient_allreduce_op".to_owned(), shortened(&op));
        return Err(ConfigFileError::Unsupported { key, got, why: "gradients are averaged over ranks" });
    }
    Ok(())
}

/// Other kinds of parallelism change which rank has which rows.
fn refuse_parallelism(root: &mut Block) -> Result<(), ConfigFileError> {
    let why = "every rank is a data-parallel rank";
    root.refuse(&[
        ("sequence_parallel_size", Usual::Number(1), why),
        ("graph_harvesting", Usual::Flag(false), "DeepSpeed has removed it too"),
    ])
}

fn read_optional_blocks(root: &mut Block, warnings: &mut Vec<String>) -> Result<(), ConfigFileError> {
    for (key, why) in OPTIONAL {
        if root.take(key).is_some_and(|block| is_on(&block)) {
            warnings.push(format!("{key} is not honoured: {why}"));
        }
    }
    for (key, why) in REFUSED {
        if let Some(block) = root.take(key).filter(is_on) {
            return Err(ConfigFileError::Unsupported { key: key.to_owned(), got: shortened(&block), why });
        }
    }
    Ok(())
}

/// Whether a block asks for something: not where it is empty or false, or where its `enabled` is false (in
/// compression_training, that of its `shared_parameters`). A size of at most 1 asks for nothing either.
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
