//! The settings of a run from flags, configuration file and base, in this order of precedence.

use std::time::Duration;

use serde_json::{Value, json};
use zero_alloc::device::DType;
use zero_comm::PrefetchOptions;
use zero_kernels::AdamHyper;
use zero_optim::{DynamicScaling, LossScaling, LrSchedule, OptimizerConfig};
use zero_shard::{Layout, ZeroStage};

use super::args::TrainArgs;
use super::schedule;
use crate::error::CliError;
use crate::settings::offload::{self, MIN_SUB_GROUP_ELEMS, Offloaded};
use crate::config::{Batch, DsConfig, canonical};
use zero_models::gpt2::config::GptConfig;
use zero_models::gpt2::passes;
use zero_trainer::Pass;
use zero_trainer::param_groups::GroupSettings;
use zero_trainer::{AT_STAGE_3, OffloadSettings, Settings};

/// Default elements of a gradient bucket on the host: 2 MiB in fp32. On GPUs a bucket has room for
/// the largest unit.
pub(crate) const BUCKET_ELEMS: usize = 1 << 19;

/// The settings that apply where neither a flag nor the configuration file gives one, or where the
/// file has `"auto"`: the defaults, or those of the checkpoint that the run resumes.
#[derive(Clone, Debug)]
pub(crate) struct Base {
    /// `None`: 3, or DeepSpeed's default 0 with a configuration file.
    pub(crate) stage: Option<u64>,
    pub(crate) dtype: DType,
    pub(crate) hyper: AdamHyper,
    pub(crate) lr: f64,
    pub(crate) schedule: LrSchedule,
    /// 0 disables clipping. `None`: 0, or 1 with a configuration file, as in DeepSpeed and for
    /// `"auto"`.
    pub(crate) max_grad_norm: Option<f64>,
    pub(crate) loss_scaling: LossScaling,
    /// Sequences per micro-batch and rank.
    pub(crate) micro_batch: u64,
    /// Whether stages 0 and 1 reduce gradients after every micro-batch.
    pub(crate) reduce_every_micro_batch: bool,
    /// Elements of a gradient bucket. `None`: [`BUCKET_ELEMS`], on GPUs the largest trained unit.
    pub(crate) bucket_elems: Option<usize>,
    pub(crate) overlap: bool,
    pub(crate) prefetch: PrefetchOptions,
    /// Most elements of one launch of the optimizer.
    pub(crate) sub_group_elems: usize,
    /// Whether activations are recomputed in backward.
    pub(crate) activation_checkpointing: bool,
    /// Whether a GPU recomputes GELU's output in backward. `None`: where its memory is too small
    /// otherwise.
    pub(crate) recompute_gelu: Option<bool>,
    /// The offload.
    pub(crate) offload: OffloadSettings,
    /// Rules of tensors.
    pub(crate) groups: GroupSettings,
}

impl Default for Base {
    fn default() -> Self {
        Self {
            stage: None,
            dtype: DType::F32,
            // PyTorch's.
            hyper: AdamHyper {
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-8,
                weight_decay: 0.01,
                decoupled: true,
                bias_correction: true,
            },
            lr: 1e-3,
            schedule: LrSchedule::Constant,
            max_grad_norm: None,
            loss_scaling: LossScaling::NONE,
            micro_batch: 4,
            reduce_every_micro_batch: false,
            bucket_elems: None,
            overlap: true,
            prefetch: PrefetchOptions::default(),
            sub_group_elems: usize::MAX,
            activation_checkpointing: false,
            recompute_gelu: None,
            offload: OffloadSettings::default(),
            groups: GroupSettings::default(),
        }
    }
}

/// Raises a limit of live parameters that is too low for one pass of the model, and returns a note
/// about it.
pub(crate) fn raise_live_limit(
    settings: &mut Settings,
    layout: &Layout,
    config: &GptConfig,
) -> Option<String> {
    let elems = |unit: &usize| {
        layout
            .units()
            .get(*unit)
            .map_or(0, |u| u.padded_elems as usize)
    };
    let pass = |pass: &Pass| pass.forward_reads.iter().map(elems).sum::<usize>();
    let least = passes(config).iter().map(pass).max().unwrap_or(0);
    let limit = &mut settings.prefetch.max_live_elems;
    if !settings.stage.shards_params() || *limit >= least {
        return None;
    }
    let notice = format!(
        "stage3_max_live_parameters {limit} is less than one pass of the model reads; using {least}"
    );
    *limit = least;
    Some(notice)
}

/// The numbers of the run that the settings depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunShape {
    pub(crate) ranks: usize,
    /// Elements of the largest unit, with padding.
    pub(crate) largest_unit: u64,
    /// Whether the ranks are on GPUs.
    pub(crate) on_gpus: bool,
    /// The hidden size of the model.
    pub(crate) hidden: u64,
    /// The last step.
    pub(crate) steps: u64,
}

/// Whether the run recomputes activations in backward.
pub(crate) fn checkpoints_activations(
    args: &TrainArgs,
    file: Option<&DsConfig>,
    base: &Base,
) -> bool {
    let of_file = file.is_some_and(|f| f.activation_checkpointing.is_some());
    args.activation_checkpointing
        .unwrap_or(of_file || base.activation_checkpointing)
}

/// The ZeRO stage of a run.
pub(crate) fn stage(
    args: &TrainArgs,
    file: Option<&DsConfig>,
    base: &Base,
) -> Result<ZeroStage, CliError> {
    let of_file = file
        .filter(|f| f.has_stage || base.stage.is_none())
        .map(|f| u64::from(f.zero.stage));
    let stage = args.stage.or(of_file).or(base.stage).unwrap_or(3);
    ZeroStage::from_number(stage)
        .ok_or_else(|| CliError::Usage(format!("--stage {stage}: expected 0, 1, 2 or 3")))
}

/// The settings of a run, and notes for the user: flags override `file`, which overrides `base`.
/// `"auto"` in the file has the value that accelerate and the Hugging Face Trainer give it.
pub(crate) fn settings(
    args: &TrainArgs,
    file: Option<&DsConfig>,
    base: &Base,
    shape: RunShape,
) -> Result<(Settings, Vec<String>), CliError> {
    let mut notices = Vec::new();
    let stage = stage(args, file, base)?;
    let dtype = args.dtype.map_or(
        file.and_then(|f| f.dtype).unwrap_or(base.dtype),
        DType::from,
    );
    for (key, requested) in file.map(|f| &f.requested_types[..]).unwrap_or_default() {
        if *requested != dtype {
            notices.push(format!(
                "{key} {requested} is ignored: it is {dtype}, the type of the parameters"
            ));
        }
    }
    let loss_scaling = match file.and_then(|f| f.loss_scaling.clone()) {
        _ if dtype != DType::F16 => LossScaling::NONE,
        Some(scaling) => scaling,
        None if base.dtype == dtype => base.loss_scaling.clone(),
        None => LossScaling::Dynamic(DynamicScaling::default()),
    };
    // A resumed run keeps its sizes and places unless the file has the block.
    let with_block = file.filter(|f| f.has_stage || base.stage.is_none());
    let checkpointing = checkpoints_activations(args, file, base);
    let run = Offloaded {
        stage,
        dtype,
        checkpointing,
    };
    let offload = offload::settings(&args.offload, with_block, &base.offload, run, &mut notices)?;
    let (lr, hyper) = adam(args, file, base);
    let schedule = schedule::schedule(args, file, base, lr, shape.steps, &mut notices)?;
    let rules = OptimizerConfig::default()
        .hyper(hyper)
        .lr(lr)
        .schedule(schedule)
        .max_grad_norm(
            args.clip
                .or(file.and_then(|f| f.gradient_clipping))
                .or(base.max_grad_norm)
                .unwrap_or(if file.is_some() { 1.0 } else { 0.0 }),
        )
        .loss_scaling(loss_scaling)
        .sub_group_elems(offload::sub_group_elems(
            with_block.map_or(base.sub_group_elems, |file| sub_group(file, &mut notices)),
            &offload,
        ));
    rules
        .check()
        .map_err(|error| CliError::Usage(name_flag(args, error.to_string())))?;
    let zero = with_block.map(|f| f.zero_for(shape.hidden));
    let zero = zero.as_ref();
    // A bucket holds gradients of at most one unit, so DeepSpeed's default of 5e8 elements is
    // reduced.
    let ranks = shape.ranks;
    let from_file = zero.map(|z| {
        z.reduce_bucket_elems
            .min(shape.largest_unit)
            .max(ranks as u64) as usize
    });
    let default = if shape.on_gpus {
        (shape.largest_unit as usize).max(ranks)
    } else {
        BUCKET_ELEMS
    };
    let chosen = args.bucket_elems.or(from_file);
    // Runs on the host record its default, and so did older versions on GPUs, where it is slow.
    let recorded = base
        .bucket_elems
        .filter(|&elems| !shape.on_gpus || elems != BUCKET_ELEMS);
    if chosen.or(recorded).is_none() && base.bucket_elems.is_some() && default != BUCKET_ELEMS {
        notices.push(format!(
            "the recorded run has buckets of {BUCKET_ELEMS} elements, the default of a host; on a GPU they have {default}: \
             pass --bucket-elems {BUCKET_ELEMS} to keep them"
        ));
    }
    let bucket = chosen.or(recorded).unwrap_or(default);
    if bucket < ranks {
        return Err(CliError::Usage(format!(
            "--bucket-elems {bucket}: expected at least one element for each of {ranks} ranks"
        )));
    }
    let overlap = args.no_overlap.map_or(
        zero.map_or(base.overlap, |z| z.overlaps_at(stage.number())),
        |no| !no,
    );
    let mut prefetch = zero.map_or(base.prefetch, |z| {
        PrefetchOptions::default()
            .ahead(if z.prefetch_bucket_elems == 0 {
                0
            } else {
                usize::MAX
            })
            .ahead_elems(z.prefetch_bucket_elems as usize)
            .max_live_elems(z.max_live_elems as usize)
            .persistence_threshold_elems(z.persistence_threshold_elems as usize)
    });
    if !overlap {
        prefetch.ahead = 0;
    }
    let limit = Duration::from_secs(args.time_limit);
    let settings = Settings {
        stage,
        dtype,
        grad_accum_steps: 1,
        reduce_every_micro_batch: args
            .reduce_every_micro_batch
            .unwrap_or(base.reduce_every_micro_batch),
        bucket_capacity_elems: bucket,
        overlap,
        prefetch,
        optimizer: rules,
        groups: GroupSettings {
            groups: file
                .and_then(|f| f.param_groups.as_ref())
                .unwrap_or(&base.groups.groups)
                .clone(),
            no_decay_1d: args.no_decay_1d.unwrap_or(base.groups.no_decay_1d),
        },
        kind_of: zero_models::gpt2::param_kind,
        graphs: args
            .cuda_graph
            .unwrap_or(args.recorded_graphs && stage != ZeroStage::Three && !offload.is_any()),
        offload,
        limit,
    };
    Ok((settings, notices))
}

/// Puts the flag that gave the number before an error of the optimizer.
fn name_flag(args: &TrainArgs, error: String) -> String {
    let flags = [
        ("lr ", "--lr", args.lr.is_some()),
        ("max_grad_norm ", "--clip", args.clip.is_some()),
        (
            "weight_decay ",
            "--weight-decay",
            args.weight_decay.is_some(),
        ),
        ("eps ", "--eps", args.eps.is_some()),
        ("beta", "--betas", args.betas.is_some()),
    ];
    match flags
        .into_iter()
        .find(|(name, _, given)| *given && error.starts_with(name))
    {
        Some((_, flag, _)) => format!("{flag}: {error}"),
        None => error,
    }
}

/// Learning rate and hyperparameters of Adam.
fn adam(args: &TrainArgs, file: Option<&DsConfig>, base: &Base) -> (f64, AdamHyper) {
    let (mut lr, mut hyper) = (base.lr, base.hyper);
    if let Some((file, optimizer)) = file.and_then(|f| Some((f, f.optimizer.as_ref()?))) {
        let auto = |key: &str| file.is_auto(&format!("optimizer.params.{key}"));
        let (of_file, default) = (optimizer.hyper, base.hyper);
        let or_base = |key: &str, value: f64, base: f64| if auto(key) { base } else { value };
        lr = or_base("lr", optimizer.lr, base.lr);
        hyper = AdamHyper {
            beta1: or_base("betas", of_file.beta1, default.beta1),
            beta2: or_base("betas", of_file.beta2, default.beta2),
            eps: or_base("eps", of_file.eps, default.eps),
            weight_decay: or_base("weight_decay", of_file.weight_decay, default.weight_decay),
            ..of_file
        };
    }
    if let Some([beta1, beta2]) = args.betas {
        (hyper.beta1, hyper.beta2) = (beta1, beta2);
    }
    hyper.eps = args.eps.unwrap_or(hyper.eps);
    hyper.weight_decay = args.weight_decay.unwrap_or(hyper.weight_decay);
    (args.lr.unwrap_or(lr), hyper)
}

fn sub_group(file: &DsConfig, notices: &mut Vec<String>) -> usize {
    let Some(elems) = file.zero.sub_group_elems else {
        return usize::MAX;
    };
    if elems < MIN_SUB_GROUP_ELEMS {
        notices.push(format!(
            "zero_optimization.sub_group_size {elems} is too small for one launch; using {MIN_SUB_GROUP_ELEMS}"
        ));
    }
    elems.max(MIN_SUB_GROUP_ELEMS) as usize
}

/// The values of the settings that the configuration has as `"auto"`, in its order.
pub(crate) fn resolved_autos(
    file: &DsConfig,
    settings: &Settings,
    batch: &Batch,
    shape: RunShape,
) -> Vec<(String, Value)> {
    let (optimizer, zero) = (&settings.optimizer, file.zero_for(shape.hidden));
    let (hyper, default) = (optimizer.hyper, "default");
    let value = |key: &str| match canonical(key).as_str() {
        "train_batch_size" => json!(batch.train_batch_size),
        "train_micro_batch_size_per_gpu" => json!(batch.micro_batch),
        "gradient_accumulation_steps" => json!(batch.grad_accum),
        "gradient_clipping" => json!(optimizer.max_grad_norm),
        "fp16.enabled" => json!(settings.dtype == DType::F16),
        "bf16.enabled" => json!(settings.dtype == DType::Bf16),
        "optimizer.params.lr" => json!(optimizer.lr),
        "optimizer.params.betas" => json!([hyper.beta1, hyper.beta2]),
        "optimizer.params.eps" => json!(hyper.eps),
        "optimizer.params.weight_decay" => json!(hyper.weight_decay),
        "zero_optimization.reduce_bucket_size" => json!(settings.bucket_capacity_elems),
        "zero_optimization.prefetch_bucket_size" => json!(zero.prefetch_bucket_elems),
        "zero_optimization.param_persistence_threshold" => json!(zero.persistence_threshold_elems),
        "zero_optimization.gather_16bit_weights_on_model_save" => json!(false),
        other => match other.strip_prefix("scheduler.params.") {
            Some(param) => schedule::parameter(&optimizer.schedule, param, optimizer.lr),
            None => json!(default),
        },
    };
    file.autos
        .iter()
        .map(|key| (key.clone(), value(key)))
        .collect()
}

/// Rejects `--cuda-graph` for steps that cannot be recorded.
pub(crate) fn check_graphs(settings: &Settings, on_cuda: bool) -> Result<(), CliError> {
    match settings.stage {
        _ if !settings.graphs => Ok(()),
        _ if !on_cuda => Err(CliError::Usage("--cuda-graph requires --device cuda".to_owned())),
        ZeroStage::Three => Err(CliError::Usage(format!("--cuda-graph: {AT_STAGE_3}"))),
        _ if settings.offload.is_any() => Err(CliError::Usage(
            "--cuda-graph: steps with offload wait for the host and cannot be recorded; use --offload none, or \
             --cuda-graph=false"
                .to_owned(),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::OffloadArgs;
    use zero_trainer::Home;

    const SHAPE: RunShape = RunShape {
        ranks: 2,
        largest_unit: 1000,
        on_gpus: false,
        hidden: 8,
        steps: 10,
    };

    fn of(args: &TrainArgs, file: Option<&str>) -> Settings {
        let file = file.map(|text| DsConfig::parse(text).unwrap());
        settings(args, file.as_ref(), &Base::default(), SHAPE)
            .unwrap()
            .0
    }

    #[test]
    fn graphs_and_offload_exclude_each_other() {
        let cpu = || OffloadArgs {
            offload: Some(Home::Host),
            ..OffloadArgs::default()
        };
        let flag = TrainArgs {
            cuda_graph: Some(true),
            stage: Some(2),
            offload: cpu(),
            ..TrainArgs::default()
        };
        let error = check_graphs(&of(&flag, None), true)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("--cuda-graph: steps with offload"),
            "{error}"
        );
        // A resumed run that recorded graphs records none.
        let resumed = TrainArgs {
            recorded_graphs: true,
            stage: Some(2),
            offload: cpu(),
            ..TrainArgs::default()
        };
        assert!(!of(&resumed, None).graphs);
        let without = TrainArgs {
            recorded_graphs: true,
            stage: Some(2),
            ..TrainArgs::default()
        };
        assert!(of(&without, None).graphs);
    }

    #[test]
    fn bucket_of_gpus_has_room_for_the_largest_unit() {
        let file =
            DsConfig::parse(r#"{"zero_optimization": {"stage": 2, "reduce_bucket_size": 700}}"#)
                .unwrap();
        let flag = TrainArgs {
            bucket_elems: Some(500),
            ..TrainArgs::default()
        };
        let recorded = Base {
            bucket_elems: Some(600),
            ..Base::default()
        };
        let elems = |on_gpus, args: &TrainArgs, file, base: &Base| {
            settings(args, file, base, RunShape { on_gpus, ..SHAPE })
                .unwrap()
                .0
                .bucket_capacity_elems
        };
        let (none, base) = (TrainArgs::default(), Base::default());
        assert_eq!(
            (
                elems(true, &none, None, &base),
                elems(false, &none, None, &base)
            ),
            (1000, 1 << 19)
        );
        let hosts = Base {
            bucket_elems: Some(1 << 19),
            ..Base::default()
        };
        assert_eq!(
            (
                elems(true, &none, None, &hosts),
                elems(false, &none, None, &hosts)
            ),
            (1000, 1 << 19)
        );
        for on_gpus in [true, false] {
            assert_eq!(elems(on_gpus, &none, None, &recorded), 600);
            assert_eq!(elems(on_gpus, &none, Some(&file), &base), 700);
            assert_eq!(elems(on_gpus, &flag, Some(&file), &recorded), 500);
        }
    }

    #[test]
    fn offload_cuts_sub_groups() {
        let file = |keys: &str| {
            format!(
                r#"{{"zero_optimization": {{"stage": 2, "offload_optimizer": {{"device": "cpu"}}{keys}}}}}"#
            )
        };
        let elems = |text: &str| {
            of(&TrainArgs::default(), Some(text))
                .optimizer
                .sub_group_elems
        };
        assert_eq!(elems(&file("")), 1 << 20);
        assert_eq!(elems(&file(r#", "sub_group_size": 1e9"#)), 1_000_000_000);
        assert_eq!(elems(r#"{"zero_optimization": {"stage": 2}}"#), usize::MAX);
    }
}
