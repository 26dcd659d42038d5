//! The blocks `fp16` and `bf16`: parameter type and loss scaling.

use zero_alloc::device::DType;
use zero_optim::{DynamicScaling, LossScaling};

use super::ConfigFileError;
use super::block::{Block, keys};

/// Reads `fp16` and `bf16` (or `bfloat16`): the type that one of them enables, fp32 if they disable
/// it, or `None` if both are missing or one is `"auto"`; and the loss scaling of `fp16`, whether it
/// is enabled or not.
pub(super) fn read(
    root: &mut Block,
    warnings: &mut Vec<String>,
) -> Result<(Option<DType>, Option<LossScaling>), ConfigFileError> {
    let is_auto = ["fp16", "bf16", "bfloat16"]
        .iter()
        .any(|block| root.is_auto(block));
    let (fp16, scaling) = read_fp16(root, warnings)?.unzip();
    let bf16 = read_bf16(root, warnings)?;
    let dtype = match (fp16, bf16) {
        (Some(Enabled::Yes), Some(Enabled::Yes)) => {
            return Err(ConfigFileError::Conflict {
                one: "fp16.enabled".into(),
                other: "bf16.enabled".into(),
            });
        }
        (Some(Enabled::Yes), _) => Some(DType::F16),
        (_, Some(Enabled::Yes)) => Some(DType::Bf16),
        (None, None) | (Some(Enabled::Auto), _) | (_, Some(Enabled::Auto)) => None,
        _ if is_auto => None,
        _ => Some(DType::F32),
    };
    Ok((dtype, scaling))
}

/// `enabled` of a block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Enabled {
    Yes,
    No,
    Auto,
}

fn enabled(block: &mut Block) -> Result<Enabled, ConfigFileError> {
    Ok(match block.is_auto("enabled") {
        true => {
            block.take("enabled");
            Enabled::Auto
        }
        false if block.flag("enabled")? == Some(true) => Enabled::Yes,
        false => Enabled::No,
    })
}

/// Whether `fp16` is enabled, and its loss scaling.
fn read_fp16(
    root: &mut Block,
    warnings: &mut Vec<String>,
) -> Result<Option<(Enabled, LossScaling)>, ConfigFileError> {
    let Some(mut block) = root.block("fp16")? else {
        return Ok(None);
    };
    let enabled = enabled(&mut block)?;
    block.ignore(
        keys! { "auto_cast" = Flag(false) => "the model's inputs are token ids, which are not cast" },
        warnings,
    )?;
    block.refuse(keys! {
        "fp16_master_weights_and_grads" = Flag(false) =>
            "master weights and gradient sums are fp32",
    })?;
    let scale = block.number_in(
        "loss_scale",
        0.0..=f64::MAX,
        "0 (dynamic) or a scale above 0",
    )?;
    let scale = scale.unwrap_or(0.0);

    let small = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    let mut dynamic = DynamicScaling::default();
    if let Some(power) = block.count("initial_scale_power")? {
        dynamic.initial_scale_power = small(power);
    }
    if let Some(window) = block.positive("loss_scale_window")? {
        dynamic.window = window;
    }
    if let Some(hysteresis) = block.count("hysteresis")? {
        dynamic.hysteresis = small(hysteresis);
    }
    if let Some(consecutive) = block.flag("consecutive_hysteresis")? {
        dynamic.consecutive_hysteresis = consecutive;
    }
    if let Some(min_scale) = block.count("min_loss_scale")? {
        dynamic.min_scale = min_scale as f64;
    }

    block.end_strict()?;
    let scaling = if scale > 0.0 {
        LossScaling::Static { scale }
    } else {
        LossScaling::Dynamic(dynamic)
    };

    if dynamic.hysteresis == 0 && scale == 0.0 && enabled != Enabled::No {
        warnings.push("fp16.hysteresis 0: as in DeepSpeed, the loss scale never halves".to_owned());
    }
    Ok(Some((enabled, scaling)))
}

/// Whether `bf16` is enabled.
fn read_bf16(
    root: &mut Block,
    warnings: &mut Vec<String>,
) -> Result<Option<Enabled>, ConfigFileError> {
    let (new, old) = (root.block("bf16")?, root.block("bfloat16")?);
    if new.is_some() && old.is_some() {
        return Err(ConfigFileError::Conflict {
            one: "bf16".into(),
            other: "bfloat16".into(),
        });
    }

    let Some(mut block) = new.or(old) else {
        return Ok(None);
    };
    let enabled = enabled(&mut block)?;
    let ignored = keys! {
        "immediate_grad_update" = Nothing =>
            "gradients are reduced as soon as their unit's backward ends",
        "check_grad_overflow" = Flag(true) => "gradients are always checked",
    };

    block.ignore(ignored, warnings)?;
    let masters = "master weights, moments and gradient sums are fp32";
    let refused = keys! {
        "bf16_master_weights_and_grads" = Flag(false) => masters,
        "bf16_optimizer_states" = Flag(false) => masters,
    };
    block.refuse(refused)?;
    block.end_strict()?;

    Ok(Some(enabled))
}
