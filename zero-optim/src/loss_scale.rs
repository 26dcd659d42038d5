//! The settings of the loss scale for fp16 training.
//!
//! fp16 gradients below 6e-8 vanish, so the loss is multiplied by a scale before backward, and the
//! optimizer divides the gradients by it. A dynamic scale grows until gradients overflow. Its rules
//! are in [`zero_kernels::step`] and are those of DeepSpeed's `DynamicLossScaler`.

use serde::{Deserialize, Serialize};

use crate::OptimError;

/// The loss scale.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum LossScaling {
    /// A constant scale; 1 for fp32 and bf16.
    Static { scale: f64 },
    /// A scale that grows until gradients overflow.
    Dynamic(DynamicScaling),
}

/// Settings of the dynamic loss scale. The defaults are DeepSpeed's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DynamicScaling {
    /// The initial scale is 2 to this power.
    pub initial_scale_power: u32,
    /// Good steps in a row until the scale doubles.
    pub window: u64,
    /// Overflows until the scale halves. With 0 it never halves, as in DeepSpeed.
    pub hysteresis: u32,
    /// Whether every good step resets the hysteresis.
    pub consecutive_hysteresis: bool,
    /// The minimum scale.
    pub min_scale: f64,
    /// Whether an overflow at the minimum is an error (DeepSpeed's `raise_error_at_min_scale`). If
    /// false, the scale stays at the minimum and steps are skipped.
    pub fail_at_min: bool,
}

zero_alloc::setters!(DynamicScaling {
    initial_scale_power: u32,
    window: u64,
    hysteresis: u32,
    consecutive_hysteresis: bool,
    min_scale: f64,
    fail_at_min: bool,
});

impl Default for DynamicScaling {
    fn default() -> Self {
        Self {
            initial_scale_power: 16,
            window: 1000,
            hysteresis: 2,
            consecutive_hysteresis: false,
            min_scale: 1.0,
            fail_at_min: true,
        }
    }
}

/// The loss scaler's state in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LossScalerState {
    /// The scale of the next backward.
    pub scale: f64,
    /// Steps so far, skipped ones included.
    pub iteration: u64,
    /// The iteration after the last overflow; 0 before the first.
    pub since: u64,
    /// Overflows until the scale halves.
    pub hysteresis_left: u32,
}

impl LossScaling {
    /// No scaling: fp32 and bf16.
    pub const NONE: Self = Self::Static { scale: 1.0 };

    /// Whether an overflow can lower the scale.
    pub fn can_fall(&self) -> bool {
        match self {
            Self::Static { .. } => false,
            Self::Dynamic(dynamic) => dynamic.hysteresis > 0,
        }
    }

    /// Checks every setting against its range.
    ///
    /// # Errors
    /// [`OptimError::Setting`] for the first setting out of range.
    pub(crate) fn check(&self) -> Result<(), OptimError> {
        let positive = |x: f64| x.is_finite() && x > 0.0;
        match self {
            &Self::Static { scale } => OptimError::check(
                positive(scale),
                "loss_scale",
                scale,
                "a finite number above 0",
            ),
            Self::Dynamic(d) => {
                let power = f64::from(d.initial_scale_power);
                OptimError::check(power <= 126.0, "initial_scale_power", power, "at most 126")?;
                OptimError::check(d.window > 0, "loss_scale_window", 0.0, "at least 1")?;
                let fits = positive(d.min_scale) && d.min_scale <= self.initial_scale();
                OptimError::check(
                    fits,
                    "min_loss_scale",
                    d.min_scale,
                    "above 0, at most the initial scale",
                )
            }
        }
    }

    pub(crate) fn initial_scale(&self) -> f64 {
        match self {
            Self::Static { scale } => *scale,
            // 2 to the power, exactly, up to 2^1023.
            Self::Dynamic(d) => {
                f64::from_bits((1023 + u64::from(d.initial_scale_power.min(1023))) << 52)
            }
        }
    }

    /// Whether the scale is dynamic, and its settings. The settings returned for a static scale
    /// have no effect.
    pub(crate) fn dynamic(&self) -> (bool, DynamicScaling) {
        match self {
            Self::Static { .. } => (
                false,
                DynamicScaling {
                    hysteresis: 1,
                    ..DynamicScaling::default()
                },
            ),
            Self::Dynamic(settings) => (true, *settings),
        }
    }

    /// Clamps a saved state to the range that these settings allow, since a run may resume with
    /// other settings.
    ///
    /// # Errors
    /// The state is invalid, or its scale differs from the static scale.
    pub(crate) fn fit(&self, state: LossScalerState) -> Result<LossScalerState, OptimError> {
        let refuse = |reason: String| {
            Err(OptimError::Restore {
                what: "loss scale",
                reason,
            })
        };

        if !(state.scale.is_finite() && state.scale > 0.0) {
            return refuse(format!("a scale of {}", state.scale));
        }
        if state.since > state.iteration {
            return refuse(format!(
                "an overflow at iteration {}, after {}",
                state.since, state.iteration
            ));
        }

        match self {
            Self::Static { scale } if *scale != state.scale => refuse(format!(
                "a scale of {}, but this run has a static scale of {scale}",
                state.scale
            )),
            Self::Static { .. } => Ok(state),
            Self::Dynamic(d) => {
                let hysteresis_left = state
                    .hysteresis_left
                    .clamp(d.hysteresis.min(1), d.hysteresis);
                Ok(LossScalerState {
                    scale: state.scale.max(d.min_scale),
                    hysteresis_left,
                    ..state
                })
            }
        }
    }
}
