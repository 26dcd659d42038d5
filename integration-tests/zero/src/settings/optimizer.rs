//! Settings of the optimizer and of the groups of parameters.

use serde_json::json;
use zero_alloc::device::DType;
use zero_kernels::AdamHyper;
use zero_optim::{DynamicScaling, LossScaling, OptimizerConfig};
use zero_trainer::param_groups::{GroupSettings, ParamGroup};

use super::args::TrainArgs;
use super::row::{Row, Setting, Sources};
use super::schedule;
use crate::error::CliError;

const LR: Setting<f64, OptimizerConfig> = Setting {
    of_flags: |args| args.lr,
    of_file: |file| Some(file.optimizer.as_ref()?.lr),
    of_run: |run| Some(run.lr),
    ..Setting::new(
        Row::new("optimizer.lr", "--lr").key("optimizer.params.lr"),
        || 1e-3,
    )
};

const BETAS: Setting<[f64; 2], OptimizerConfig> = Setting {
    of_flags: |args| args.betas,
    of_file: |file| {
        let hyper = file.optimizer.as_ref()?.hyper;
        Some([hyper.beta1, hyper.beta2])
    },
    of_run: |run| Some([run.hyper.beta1, run.hyper.beta2]),
    ..Setting::new(BETA1.key("optimizer.params.betas"), || [0.9, 0.999])
};

const BETA1: Row = Row::new("optimizer.hyper.beta1", "--betas");
const BETA2: Row = Row::new("optimizer.hyper.beta2", "--betas");

const EPS: Setting<f64, OptimizerConfig> = Setting {
    of_flags: |args| args.eps,
    of_file: |file| Some(file.optimizer.as_ref()?.hyper.eps),
    of_run: |run| Some(run.hyper.eps),
    ..Setting::new(
        Row::new("optimizer.hyper.eps", "--eps").key("optimizer.params.eps"),
        || 1e-8,
    )
};

/// PyTorch's default.
const WEIGHT_DECAY: Setting<f64, OptimizerConfig> = Setting {
    of_flags: |args| args.weight_decay,
    of_file: |file| Some(file.optimizer.as_ref()?.hyper.weight_decay),
    of_run: |run| Some(run.hyper.weight_decay),
    ..Setting::new(
        Row::new("optimizer.hyper.weight_decay", "--weight-decay")
            .key("optimizer.params.weight_decay"),
        || 0.01,
    )
};

/// Whether weight decay is decoupled.
const DECOUPLED: Setting<bool, OptimizerConfig> = Setting {
    of_file: |file| Some(file.optimizer.as_ref()?.hyper.decoupled),
    of_run: |run| Some(run.hyper.decoupled),
    ..Setting::new(ALL, || true)
};

const BIAS_CORRECTION: Setting<bool, OptimizerConfig> = Setting {
    of_file: |file| Some(file.optimizer.as_ref()?.hyper.bias_correction),
    of_run: |run| Some(run.hyper.bias_correction),
    ..Setting::new(ALL, || true)
};

/// 0 disables clipping. By default 0, or 1 with a configuration file, as in DeepSpeed and for
/// `"auto"`.
const CLIP: Setting<Option<f64>, OptimizerConfig> = Setting {
    of_flags: |args| args.clip.map(Some),
    of_file: |file| file.gradient_clipping.map(Some),
    of_run: |run| Some(Some(run.max_grad_norm)),
    ..Setting::new(
        Row::new("optimizer.max_grad_norm", "--clip").key("gradient_clipping"),
        || None,
    )
};

/// By default dynamic in fp16, and 1 in other types.
const LOSS_SCALING: Setting<Option<LossScaling>, OptimizerConfig> = Setting {
    of_file: |file| file.loss_scaling.clone().map(Some),
    of_run: |run| Some(Some(run.loss_scaling.clone())),
    ..Setting::new(
        Row::new("optimizer.loss_scaling", "fp16 of --config"),
        || None,
    )
};

const GROUPS: Setting<Vec<ParamGroup>, GroupSettings> = Setting {
    of_file: |file| file.param_groups.clone(),
    of_run: |run| Some(run.groups.clone()),
    ..Setting::new(NO_DECAY_1D.row, Vec::new)
};

const NO_DECAY_1D: Setting<bool, GroupSettings> = Setting {
    of_flags: |args| args.no_decay_1d,
    of_run: |run| Some(run.no_decay_1d),
    ..Setting::new(
        Row::new("param_groups", "param_groups of --config, or --no-decay-1d"),
        || false,
    )
};

/// The settings that only a configuration file has.
const ALL: Row = Row::new("optimizer", "optimizer of --config");

pub(crate) const ROWS: &[Row] = &[
    NO_DECAY_1D.row,
    LR.row,
    BETAS.row,
    BETA2,
    EPS.row,
    WEIGHT_DECAY.row,
    Row::new(
        "optimizer.schedule",
        "--schedule, --warmup-steps, --min-lr or --decay-steps",
    ),
    CLIP.row,
    LOSS_SCALING.row,
    ALL,
];

/// The rules of the optimizer of a run of `steps` steps, without the elements of a launch.
///
/// # Errors
/// A flag for which the schedule has no place.
pub(crate) fn rules(
    from: &Sources<'_, OptimizerConfig>,
    scaling: LossScaling,
    steps: u64,
    notices: &mut Vec<String>,
) -> Result<OptimizerConfig, CliError> {
    let lr = from.value(&LR);
    let schedule = schedule::schedule(from, lr, steps, notices)?;
    let no_clip = if from.file.is_some() { 1.0 } else { 0.0 };
    Ok(OptimizerConfig::default()
        .hyper(hyper(from))
        .lr(lr)
        .schedule(schedule)
        .max_grad_norm(from.value(&CLIP).unwrap_or(no_clip))
        .loss_scaling(scaling))
}

fn hyper(from: &Sources<'_, OptimizerConfig>) -> AdamHyper {
    let [beta1, beta2] = from.value(&BETAS);
    AdamHyper {
        beta1,
        beta2,
        eps: from.value(&EPS),
        weight_decay: from.value(&WEIGHT_DECAY),
        decoupled: from.value(&DECOUPLED),
        bias_correction: from.value(&BIAS_CORRECTION),
    }
}

/// The loss scaling of a run in `dtype`; the run that it resumes was in `earlier`.
pub(crate) fn loss_scaling(
    from: &Sources<'_, OptimizerConfig>,
    dtype: DType,
    earlier: Option<DType>,
) -> LossScaling {
    if dtype != DType::F16 {
        return LossScaling::NONE;
    }
    if let Some(scaling) = from.given(&LOSS_SCALING).flatten() {
        return scaling;
    }
    if earlier == Some(dtype) {
        // Checkpoints of older versions have no record.
        let recorded = from.recorded(&LOSS_SCALING).flatten();
        return recorded.unwrap_or(LossScaling::NONE);
    }
    LossScaling::Dynamic(DynamicScaling::default())
}

/// The rules of tensors that differ from the optimizer's.
pub(crate) fn groups(from: &Sources<'_, GroupSettings>) -> GroupSettings {
    GroupSettings {
        groups: from.value(&GROUPS),
        no_decay_1d: from.value(&NO_DECAY_1D),
    }
}

/// Checks the rules; the error names the flag that gave the number.
///
/// # Errors
/// A number is out of range.
pub(crate) fn check(rules: &OptimizerConfig, args: &TrainArgs) -> Result<(), CliError> {
    let flags = [
        ("lr ", LR.row, args.lr.is_some()),
        ("max_grad_norm ", CLIP.row, args.clip.is_some()),
        (
            "weight_decay ",
            WEIGHT_DECAY.row,
            args.weight_decay.is_some(),
        ),
        ("eps ", EPS.row, args.eps.is_some()),
        ("beta", BETAS.row, args.betas.is_some()),
    ];
    rules.check().map_err(|error| {
        let error = error.to_string();
        for (number, row, is_given) in flags {
            if is_given && error.starts_with(number) {
                return CliError::Usage(format!("{}: {error}", row.flag));
            }
        }
        CliError::Usage(error)
    })
}

/// The optimizer as text.
pub(crate) fn describe(optimizer: &OptimizerConfig) -> String {
    let hyper = &optimizer.hyper;
    let name = if hyper.decoupled { "AdamW" } else { "Adam" };
    let uncorrected = if hyper.bias_correction {
        ""
    } else {
        ", no bias correction"
    };
    format!(
        "{name}, betas {} and {}, eps {}, weight decay {}{uncorrected}",
        hyper.beta1,
        hyper.beta2,
        // As in a configuration: 1e-8, not 0.00000001.
        json!(hyper.eps),
        hyper.weight_decay
    )
}

/// The loss scaling as text.
pub(crate) fn describe_loss_scaling(scaling: &LossScaling) -> String {
    match scaling {
        LossScaling::Static { scale } => format!("{scale}"),
        LossScaling::Dynamic(d) => format!(
            "dynamic from 2^{}, at least {}, doubled after {} good steps, {}",
            d.initial_scale_power,
            d.min_scale,
            d.window,
            match d.hysteresis {
                0 => "never halved".to_owned(),
                n => format!("halved after {n} overflows"),
            }
        ),
        other => format!("{other:?}"),
    }
}
