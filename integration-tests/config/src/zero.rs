//! The block `zero_optimization` and its `offload_*` blocks.

use serde_json::Value;

use super::ConfigFileError;
use super::block::{Block, Key, keys, shortened};
use zero_shard::Home;

/// `zero_optimization`. Missing keys have DeepSpeed's defaults.
#[derive(Clone, Debug, PartialEq)]
pub struct ZeroOptimization {
    /// 0 to 3.
    pub stage: u8,
    /// Elements of a gradient bucket.
    pub reduce_bucket_elems: u64,
    /// Elements that stages 1 and 2 gather together.
    pub allgather_bucket_elems: u64,
    /// Whether communication overlaps compute; see [`Self::overlaps_at`].
    pub overlap_comm: Option<bool>,
    /// Maximum number of elements of one optimizer update; DeepSpeed's default is 10^9.
    pub sub_group_elems: Option<u64>,
    /// Maximum number of elements that stage 3 gathers ahead of their use.
    pub prefetch_bucket_elems: u64,
    /// Stage 3 does not shard parameters with fewer elements.
    pub persistence_threshold_elems: u64,
    /// Maximum number of gathered elements at stage 3.
    pub max_live_elems: u64,
    /// A parameter stays gathered if its next use is within this number of elements.
    pub max_reuse_elems: u64,
    /// Whether saving also writes whole 16-bit weights.
    pub gather_16bit_weights_on_save: bool,
    /// The place of the optimizer state.
    pub offload_optimizer: Home,
    /// `offload_optimizer.buffer_count`: sub-groups of optimizer state in host memory at once.
    pub offload_optimizer_buffers: Option<u64>,
    /// The place of the parameters at stage 3.
    pub offload_param: Home,
    /// Ranks of a group that shares the parameters of stage 3 (hpZ), if more than 1.
    pub hpz_ranks: Option<u64>,
    /// Ranks of a group that shares all states (MiCS), if above 0.
    pub mics_shard_ranks: Option<u64>,
    /// Whether parameters are gathered in 8 bits (qwZ).
    pub quantized_weights: bool,
    /// Whether gradients are reduced in few bits (qgZ).
    pub quantized_gradients: bool,
    /// Whether frozen weights are stored and gathered in 8 bits.
    pub quantized_frozen: bool,
    /// Error feedback of quantised gradients.
    pub loco: Option<LocoParams>,
}

/// `zeropp_loco_param`: error feedback of quantised gradients (arXiv 2407.04480).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocoParams {
    /// The part of the earlier error that stays.
    pub err_beta: f64,
    /// Steps from one reset of the errors to the next.
    pub reset_steps: u64,
}

impl Default for ZeroOptimization {
    fn default() -> Self {
        Self {
            stage: 0,
            reduce_bucket_elems: 500_000_000,
            allgather_bucket_elems: 500_000_000,
            overlap_comm: None,
            sub_group_elems: None,
            prefetch_bucket_elems: 50_000_000,
            persistence_threshold_elems: 100_000,
            max_live_elems: 1_000_000_000,
            max_reuse_elems: 1_000_000_000,
            gather_16bit_weights_on_save: false,
            offload_optimizer: Home::Device,
            offload_optimizer_buffers: None,
            offload_param: Home::Device,
            hpz_ranks: None,
            mics_shard_ranks: None,
            quantized_weights: false,
            quantized_gradients: false,
            quantized_frozen: false,
            loco: None,
        }
    }
}

impl ZeroOptimization {
    /// Whether communication overlaps compute at `stage`; by default only at stage 3.
    pub fn overlaps_at(&self, stage: u8) -> bool {
        self.overlap_comm.unwrap_or(stage == 3)
    }
}

/// Keys that have a second name with the prefix `stage3_`.
const STAGE3_NAMES: [&str; 9] = [
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
];

const UNITS: &str = "parameters are gathered by unit (embedding, block, head)";

/// Unsupported keys that change speed, memory or messages only.
const IGNORED: &[Key] = keys! {
    "contiguous_gradients" = Flag(true) => "gradients are always contiguous",
    "reduce_scatter" = Flag(true) => "gradients are always reduce-scattered from stage 2",
    "use_multi_rank_bucket_allreduce" = Flag(true) =>
        "a bucket always has the gradients of all ranks' shards",
    "allgather_partitions" = Flag(true) => "parameters are always gathered by all_gather",
    "load_from_fp32_weights" = Flag(true) => "a checkpoint's fp32 weights are always loaded",
    "elastic_checkpoint" = Flag(false) => "every checkpoint loads at every number of ranks",
    "ignore_unused_parameters" = Flag(true) => "every parameter of the model is used",
    "legacy_stage1" = Flag(false) => "this program has one stage 1",
    "round_robin_gradients" = Flag(false) => "gradients are in the order of the model",
    "parameter_alignment" = Flag(false) => "shards are always aligned",
    "memory_efficient_linear" = Flag(true) => "the model has its own linear layer",
    "pipeline_loading_checkpoint" = Flag(false) => "a checkpoint is read shard by shard",
    "override_module_apply" = Flag(true) => "the model has no modules to override",
    "log_trace_cache_warnings" = Flag(false) =>
        "the order of the units is known before the first step",
    "enable_sanity_checks" = Flag(false) => "sanity checks are always on",
    "save_muon_momentum_buffer_in_memory" = Flag(false) => "Muon's momentum is with the optimizer's state",
    "leaf_module" = Nothing => UNITS,
    "model_persistence_threshold" = Nothing => "only the threshold per parameter is used",
    "module_granularity_threshold" = Number(0) => UNITS,
    "use_all_reduce_for_fetch_params" = Flag(false) =>
        "parameters are always gathered by all_gather",
    "allgather_sequential" = Flag(false) => UNITS,
    "compute_grad_norm" = Flag(true) => "the norm is always computed",
    "cpu_offload_use_pin_memory" = Nothing => "use pin_memory of the offload blocks",
};

/// Unsupported keys that change the results.
const REFUSED: &[Key] = keys! {
    "zenflow" = Nothing => "updates are not deferred to later steps",
    "mics_hierarchical_params_gather" = Nothing => "DeepSpeed has removed it",
};

/// Reads `zero_optimization`: an object or, in old files, a flag.
pub(super) fn read(
    root: &mut Block,
    warnings: &mut Vec<String>,
) -> Result<ZeroOptimization, ConfigFileError> {
    let mut block = match root.take("zero_optimization") {
        None => return Ok(ZeroOptimization::default()),
        Some(Value::Bool(on)) => {
            return Ok(ZeroOptimization {
                stage: u8::from(on),
                ..ZeroOptimization::default()
            });
        }
        Some(Value::Object(keys)) => Block::named("zero_optimization", keys),
        Some(other) => {
            let (key, expected) = (
                "zero_optimization".to_owned(),
                "an object {..}, true or false",
            );
            return Err(ConfigFileError::WrongType {
                key,
                expected,
                got: shortened(&other),
            });
        }
    };

    for name in STAGE3_NAMES {
        block.rename(&format!("stage3_{name}"), name)?;
    }
    block.rename(
        "stage3_gather_fp16_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
    )?;
    block.ignore(IGNORED, warnings)?;
    block.refuse(REFUSED)?;

    let stage = block
        .number_in("stage", 0.0..=3.0, "0, 1, 2, 3 or \"auto\"")?
        .unwrap_or(0.0);

    if stage.fract() != 0.0 {
        let (key, expected) = (block.name("stage"), "0, 1, 2, 3 or \"auto\"");
        return Err(ConfigFileError::WrongType {
            key,
            expected,
            got: stage.to_string(),
        });
    }

    let stage = stage as u8;
    let (offload_optimizer, offload_optimizer_buffers) =
        read_offload_optimizer(&mut block, warnings)?;
    let offload_param = read_offload_param(&mut block, warnings)?;
    let mut zero = ZeroOptimization {
        stage,
        overlap_comm: block.flag("overlap_comm")?,
        sub_group_elems: block.count("sub_group_size")?,
        gather_16bit_weights_on_save: block
            .flag("gather_16bit_weights_on_model_save")?
            .unwrap_or(false),
        offload_optimizer,
        offload_optimizer_buffers,
        offload_param,
        hpz_ranks: block
            .count("zero_hpz_partition_size")?
            .filter(|ranks| *ranks > 1),
        mics_shard_ranks: read_mics(&mut block)?,
        quantized_weights: block.flag("zero_quantized_weights")?.unwrap_or(false),
        quantized_gradients: block.flag("zero_quantized_gradients")?.unwrap_or(false),
        quantized_frozen: block
            .flag("zero_quantized_nontrainable_weights")?
            .unwrap_or(false),
        loco: read_loco(&mut block)?,
        ..ZeroOptimization::default()
    };

    for (key, size) in [
        ("reduce_bucket_size", &mut zero.reduce_bucket_elems),
        ("allgather_bucket_size", &mut zero.allgather_bucket_elems),
        ("prefetch_bucket_size", &mut zero.prefetch_bucket_elems),
        (
            "param_persistence_threshold",
            &mut zero.persistence_threshold_elems,
        ),
        ("max_live_parameters", &mut zero.max_live_elems),
        ("max_reuse_distance", &mut zero.max_reuse_elems),
    ] {
        *size = block.count(key)?.unwrap_or(*size);
    }

    block.end_strict()?;
    Ok(zero)
}

/// `zeropp_loco_param`, with DeepSpeed's defaults.
fn read_loco(zero: &mut Block) -> Result<Option<LocoParams>, ConfigFileError> {
    let Some(mut block) = zero.block("zeropp_loco_param")? else {
        return Ok(None);
    };
    let err_beta = block.number_in("err_beta", 0.0..=0.999_999, "at least 0 and below 1")?;
    let reset_steps = block.count("reset_T")?;
    block.end_strict()?;
    Ok(Some(LocoParams {
        err_beta: err_beta.unwrap_or(0.8),
        reset_steps: reset_steps.unwrap_or(1024),
    }))
}

/// `mics_shard_size`; not above 0, it is off.
fn read_mics(zero: &mut Block) -> Result<Option<u64>, ConfigFileError> {
    let expected = "a whole number";
    let ranks = zero.number_in("mics_shard_size", -1e9..=1e9, expected)?;
    match ranks {
        Some(ranks) if ranks.fract() != 0.0 => Err(ConfigFileError::WrongType {
            key: zero.name("mics_shard_size"),
            expected,
            got: ranks.to_string(),
        }),
        ranks => Ok(ranks.filter(|ranks| *ranks > 0.0).map(|ranks| ranks as u64)),
    }
}

/// The place of the optimizer state, and the number of buffers.
fn read_offload_optimizer(
    zero: &mut Block,
    warnings: &mut Vec<String>,
) -> Result<(Home, Option<u64>), ConfigFileError> {
    let old = old_flag(zero, "cpu_offload", "offload_optimizer")?;
    let Some(mut block) = zero.block("offload_optimizer")? else {
        return Ok((old, None));
    };
    let pipelined = "reads, updates and writes are always pipelined";

    let ignored = keys! {
        "pin_memory" = Flag(true) => PINNED,
        "pipeline_read" = Flag(true) => pipelined,
        "pipeline_write" = Flag(true) => pipelined,
        "fast_init" = Flag(false) => "state is initialized on its device",
        "super_offload" = Flag(false) => "only one kind of offload is supported",
        "cpuadam_cores_perc" = Nothing => "the step uses the threads of its rank",
    };

    block.ignore(ignored, warnings)?;
    block.number_in(
        "ratio",
        1.0..=1.0,
        "1: the whole optimizer state is offloaded",
    )?;
    let offload = (home(&mut block)?, block.positive("buffer_count")?);
    block.end_strict()?;

    Ok(offload)
}

fn read_offload_param(
    zero: &mut Block,
    warnings: &mut Vec<String>,
) -> Result<Home, ConfigFileError> {
    let old = old_flag(zero, "cpu_offload_param", "offload_param")?;
    let Some(mut block) = zero.block("offload_param")? else {
        return Ok(old);
    };
    let buffers = "buffers hold the units that are gathered ahead (stage3_prefetch_bucket_size)";
    let ignored = keys! {
        "pin_memory" = Flag(true) => PINNED,
        "buffer_count" = Number(5) => buffers,
        "buffer_size" = Number(100_000_000) => buffers,
        "max_in_cpu" = Number(1_000_000_000) => "with nvme, host memory holds the buffers alone",
    };
    block.ignore(ignored, warnings)?;
    let home = home(&mut block)?;
    block.end_strict()?;
    Ok(home)
}

/// Why `pin_memory` is ignored.
const PINNED: &str = "offloaded state is in pinned memory if the device is a GPU";

/// Reads `cpu_offload: true`, the old form of `offload_optimizer`.
fn old_flag(zero: &mut Block, old: &str, new: &str) -> Result<Home, ConfigFileError> {
    match zero.flag(old)? {
        Some(_) if zero.has(new) => Err(ConfigFileError::Conflict {
            one: zero.name(old),
            other: zero.name(new),
        }),
        Some(true) => Ok(Home::Host),
        _ => Ok(Home::Device),
    }
}

/// Reads `device` and `nvme_path`.
fn home(block: &mut Block) -> Result<Home, ConfigFileError> {
    let path = block.text("nvme_path")?.filter(|path| !path.is_empty());
    match (block.text("device")?.as_deref(), path) {
        (None | Some("none"), _) => Ok(Home::Device),
        (Some("cpu"), _) => Ok(Home::Host),
        (Some("nvme"), Some(path)) => Ok(Home::Nvme(path.into())),
        (Some("nvme"), None) => Err(ConfigFileError::Missing {
            key: "nvme_path",
            why: "the offload device is nvme",
        }),
        (Some(other), _) => {
            let (key, expected) = (block.name("device"), "\"none\", \"cpu\" or \"nvme\"");
            Err(ConfigFileError::WrongType {
                key,
                expected,
                got: format!("{other:?}"),
            })
        }
    }
}
