//! Settings of the optimizer and of the groups of parameters.

use serde_json::json;
use zero_alloc::device::DType;
use zero_kernels::AdamHyper;
use zero_optim::{DynamicScaling, LossScaling, OptimizerConfig};
use zero_trainer::param_groups::GroupSettings;

use super::args::TrainArgs;
use super::muon::OptimizerChoice;
use super::schedule;
use super::sources::{RunSources, Sources};
use crate::error::CliError;

/// The rules of the optimizer of a run, without the elements of a launch.
///
/// # Errors
/// A flag for which the schedule has no place.
pub(crate) fn rules(
    run: &RunSources<'_>,
    from: &Sources,
    scaling: LossScaling,
    notices: &mut Vec<String>,
) -> Result<OptimizerConfig, CliError> {
    let lr = from.all.lr.unwrap_or(1e-3);
    let schedule = schedule::schedule(run, lr, notices)?;
    // As DeepSpeed's default, and for `"auto"`.
    let no_clip = if run.file.is_some() { 1.0 } else { 0.0 };
    Ok(OptimizerConfig::default()
        .hyper(hyper(&from.all))
        .lr(lr)
        .schedule(schedule)
        .max_grad_norm(from.all.clip.unwrap_or(no_clip))
        .loss_scaling(scaling))
}

/// The defaults are PyTorch's.
fn hyper(settings: &TrainArgs) -> AdamHyper {
    let [beta1, beta2] = settings.betas.unwrap_or([0.9, 0.999]);
    AdamHyper {
        beta1,
        beta2,
        eps: settings.eps.unwrap_or(1e-8),
        weight_decay: settings.weight_decay.unwrap_or(0.01),
        decoupled: match settings.muon.optimizer {
            Some(OptimizerChoice::Adam) => false,
            Some(OptimizerChoice::Adamw) => true,
            Some(OptimizerChoice::Muon) | None => settings.unflagged.decoupled.unwrap_or(true),
        },
        bias_correction: settings.unflagged.bias_correction.unwrap_or(true),
    }
}

/// The loss scaling of a run in `dtype`; the run that it resumes was in `earlier`. By default
/// dynamic in fp16, and none in other types.
pub(crate) fn loss_scaling(from: &Sources, dtype: DType, earlier: Option<DType>) -> LossScaling {
    if dtype != DType::F16 {
        return LossScaling::NONE;
    }
    if let Some(scaling) = &from.given.unflagged.loss_scaling {
        return scaling.clone();
    }
    if earlier == Some(dtype) {
        // Checkpoints of older versions have no record.
        let recorded = from.recorded.unflagged.loss_scaling.clone();
        return recorded.unwrap_or(LossScaling::NONE);
    }
    LossScaling::Dynamic(DynamicScaling::default())
}

/// The rules of tensors that differ from the optimizer's.
pub(crate) fn groups(settings: &TrainArgs) -> GroupSettings {
    GroupSettings {
        groups: settings.unflagged.groups.clone().unwrap_or_default(),
        no_decay_1d: settings.no_decay_1d.unwrap_or(false),
    }
}

/// Checks the rules; the error names the flag that gave the number.
///
/// # Errors
/// A number is out of range.
pub(crate) fn check(rules: &OptimizerConfig, flags: &TrainArgs) -> Result<(), CliError> {
    let numbers = [
        ("lr ", "--lr", flags.lr.is_some()),
        ("max_grad_norm ", "--clip", flags.clip.is_some()),
        (
            "weight_decay ",
            "--weight-decay",
            flags.weight_decay.is_some(),
        ),
        ("eps ", "--eps", flags.eps.is_some()),
        ("beta", "--betas", flags.betas.is_some()),
    ];
    rules.check().map_err(|error| {
        let error = error.to_string();
        for (number, flag, is_given) in numbers {
            if is_given && error.starts_with(number) {
                return usage!("{flag}: {error}");
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
