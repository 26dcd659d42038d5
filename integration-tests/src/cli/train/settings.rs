//! The settings of a run from flags, configuration file and base, in this order of precedence.

use std::time::Duration;

use zero_alloc::device::DType;
use zero_comm::PrefetchOptions;
use zero_kernels::AdamHyper;
use zero_optim::{DynamicScaling, LossScaling, LrSchedule, OptimizerConfig};
use zero_shard::{Layout, ZeroStage};

use super::args::TrainArgs;
use crate::cli::CliError;
use crate::config::DsConfig;
use crate::model::Pass;
use crate::model::config::GptConfig;
use crate::model::gpt2::passes;
use crate::trainer::{AT_STAGE_3, Settings};

/// Default elements of a gradient bucket for all models: 2 MiB in fp32.
const BUCKET_ELEMS: usize = 1 << 19;

/// The settings that apply where neither a flag nor the configuration file gives one: the defaults, or those of the
/// checkpoint that the run resumes.
#[derive(Clone, Debug)]
pub(super) struct Base {
    pub(super) stage: u64,
    pub(super) dtype: DType,
    pub(super) hyper: AdamHyper,
    pub(super) lr: f64,
    pub(super) schedule: LrSchedule,
    /// 0 disables clipping.
    pub(super) max_grad_norm: f64,
    pub(super) loss_scaling: LossScaling,
    /// Sequences per micro-batch and rank.
    pub(super) micro_batch: u64,
}

impl Default for Base {
    fn default() -> Self {
        Self {
            stage: 3,
            dtype: DType::F32,
            // PyTorch's.
            hyper: AdamHyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, decoupled: true },
            lr: 1e-3,
            schedule: LrSchedule::Constant,
            max_grad_norm: 0.0,
            loss_scaling: LossScaling::NONE,
            micro_batch: 4,
        }
    }
}

/// Raises a limit of live parameters that is too low for one pass of the model, and returns a note about it.
pub(super) fn raise_live_limit(settings: &mut Settings, layout: &Layout, config: &GptConfig) -> Option<String> {
    let elems = |unit: &usize| layout.units().get(*unit).map_or(0, |u| u.padded_elems as usize);
    let pass = |pass: &Pass| pass.forward_reads.iter().map(elems).sum::<usize>();
    let least = passes(config).iter().map(pass).max().unwrap_or(0);
    let limit = &mut settings.prefetch.max_live_elems;
    if !settings.stage.shards_params() || *limit >= least {
        return None;
    }
    let notice =
        format!("stage3_max_live_parameters {limit} is less than one pass of the model reads; using {least}");
    *limit = least;
    Some(notice)
}

/// The settings of a run: flags override `file`, which overrides `base`.
pub(super) fn settings(
    args: &TrainArgs,
    file: Option<&DsConfig>,
    base: &Base,
    ranks: usize,
    largest_unit: u64,
) -> Result<Settings, CliError> {
    let stage = args.stage.or(file.map(|f| u64::from(f.zero.stage))).unwrap_or(base.stage);
    let stage = ZeroStage::from_number(stage)
        .ok_or_else(|| CliError::Usage(format!("--stage {stage}: expected 0, 1, 2 or 3")))?;
    let dtype = args.dtype.map_or(file.map_or(base.dtype, |f| f.dtype), DType::from);
    let loss_scaling = match file {
        Some(f) if f.dtype == dtype => f.loss_scaling.clone(),
        None if base.dtype == dtype => base.loss_scaling.clone(),
        _ if dtype == DType::F16 => LossScaling::Dynamic(DynamicScaling::default()),
        _ => LossScaling::NONE,
    };
    let optimizer = file.and_then(|f| f.optimizer.as_ref());
    let mut hyper = optimizer.map_or(base.hyper, |o| o.hyper);
    if let Some(decay) = args.weight_decay {
        hyper.weight_decay = decay;
    }
    let schedule = match args.warmup_steps {
        Some(0) => LrSchedule::Constant,
        Some(warmup_steps) => LrSchedule::LinearWarmup { warmup_steps },
        None => file.map_or_else(|| base.schedule.clone(), |f| f.schedule.clone().unwrap_or_default()),
    };
    let rules = OptimizerConfig {
        hyper,
        lr: args.lr.or(optimizer.map(|o| o.lr)).unwrap_or(base.lr),
        schedule,
        max_grad_norm: args.clip.or(file.map(|f| f.gradient_clipping)).unwrap_or(base.max_grad_norm),
        loss_scaling,
    };
    rules.check().map_err(CliError::usage)?;
    // A bucket holds gradients of at most one unit, so DeepSpeed's default of 5e8 elements is reduced.
    let from_file = file.map(|f| f.zero.reduce_bucket_elems.min(largest_unit).max(ranks as u64) as usize);
    let bucket = args.bucket_elems.or(from_file).unwrap_or(BUCKET_ELEMS);
    if bucket < ranks {
        return Err(CliError::Usage(format!(
            "--bucket-elems {bucket}: expected at least one element for each of {ranks} ranks"
        )));
    }
    let overlap = !args.no_overlap && file.is_none_or(|f| f.zero.overlap_comm);
    let prefetch = PrefetchOptions {
        ahead: usize::from(overlap && file.is_none_or(|f| f.zero.prefetch_bucket_elems > 0)),
        max_live_elems: file.map_or(usize::MAX, |f| f.zero.max_live_elems as usize),
        persistence_threshold_elems: file.map_or(0, |f| f.zero.persistence_threshold_elems as usize),
    };
    let limit = Duration::from_secs(args.time_limit);
    Ok(Settings {
        stage,
        dtype,
        grad_accum_steps: 1,
        bucket_capacity_elems: bucket,
        overlap,
        prefetch,
        optimizer: rules,
        graphs: args.cuda_graph,
        limit,
    })
}

/// Rejects `--cuda-graph` for steps that cannot be recorded.
pub(super) fn check_graphs(settings: &Settings, on_cuda: bool) -> Result<(), CliError> {
    match settings.stage {
        _ if !settings.graphs => Ok(()),
        _ if !on_cuda => Err(CliError::Usage("--cuda-graph requires --device cuda".to_owned())),
        ZeroStage::Three => Err(CliError::Usage(format!("--cuda-graph: {AT_STAGE_3}"))),
        _ => Ok(()),
    }
}
