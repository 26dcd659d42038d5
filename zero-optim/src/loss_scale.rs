//! The loss scale of fp16 training, by DeepSpeed's rules.
//!
//! fp16 gradients below 6e-8 vanish, so the loss is multiplied by a scale before backward and the
//! gradients are divided by it in the optimizer. The dynamic scale climbs until gradients overflow:
//!
//! - **overflow**: with hysteresis used up (1 left) the scale halves, never below the minimum; at the
//!   minimum it is an error; else one of the hysteresis is used up.
//! - **good step**: after `window` good steps in a row since the last overflow, and every `window` after
//!   that, the scale doubles and hysteresis is full again. With `consecutive_hysteresis` it is full again
//!   after every good step instead.
//!
//! Source: `DynamicLossScaler` of DeepSpeed 0.19.8; tests/data/deepspeed_loss_scaler.json holds its traces.

use serde::{Deserialize, Serialize};

use crate::OptimError;

/// How the loss is scaled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossScaling {
    /// The same scale always; 1 for fp32 and bf16.
    Static {
        /// The scale.
        scale: f64,
    },
    /// A scale that follows the gradients.
    Dynamic(DynamicScaling),
}

impl LossScaling {
    /// No scaling: fp32 and bf16.
    pub const NONE: Self = Self::Static { scale: 1.0 };

    fn check(&self) -> Result<(), OptimError> {
        let positive = |x: f64| x.is_finite() && x > 0.0;
        match self {
            &Self::Static { scale } => {
                OptimError::check(positive(scale), "loss_scale", scale, "a finite number above 0")
            }
            Self::Dynamic(d) => {
                let (power, initial) = (f64::from(d.initial_scale_power), two_to(d.initial_scale_power));
                OptimError::check(power <= 126.0, "initial_scale_power", power, "at most 126")?;
                OptimError::check(d.window > 0, "loss_scale_window", 0.0, "at least 1")?;
                OptimError::check(d.hysteresis > 0, "hysteresis", 0.0, "at least 1")?;
                let fits = positive(d.min_scale) && d.min_scale <= initial;
                OptimError::check(fits, "min_loss_scale", d.min_scale, "above 0, at most the initial scale")
            }
        }
    }
}

/// Settings of the dynamic loss scale. The defaults are DeepSpeed's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DynamicScaling {
    /// The first scale is 2 to this power.
    pub initial_scale_power: u32,
    /// Good steps in a row until the scale doubles.
    pub window: u64,
    /// Overflows that are endured before the scale halves, less one.
    pub hysteresis: u32,
    /// Whether every good step refills the hysteresis.
    pub consecutive_hysteresis: bool,
    /// The scale never goes below.
    pub min_scale: f64,
    /// Whether an overflow at the minimum is an error (DeepSpeed's `raise_error_at_min_scale`); if not, the
    /// scale stays there and steps are skipped.
    pub fail_at_min: bool,
}

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

/// The moving part of a loss scaler; what a checkpoint keeps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScalerState {
    /// The scale of the next backward.
    pub scale: f64,
    /// Steps since the scaler was made, skipped ones included.
    pub iteration: u64,
    /// Iteration after the last overflow; 0 before the first.
    pub since: u64,
    /// Overflows still endured, plus one.
    pub hysteresis_left: u32,
}

/// What a step did to the scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ScaleChange {
    /// Nothing.
    Kept,
    /// Enough good steps in a row: doubled.
    Doubled,
    /// Overflow: halved, or set to the minimum.
    Halved,
    /// Overflow, endured: so many are left until it halves.
    Endured {
        /// Hysteresis left.
        hysteresis_left: u32,
    },
}

/// An overflow at the minimum scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AtMinimum {
    /// The scale.
    pub scale: f64,
}

/// 2 to `power`, exactly (up to 2^1023).
fn two_to(power: u32) -> f64 {
    f64::from_bits((1023 + u64::from(power.min(1023))) << 52)
}

/// Keeps the loss scale.
#[derive(Clone, Debug, PartialEq)]
pub struct LossScaler {
    scaling: LossScaling,
    state: LossScalerState,
}

impl LossScaler {
    /// A scaler at its first scale.
    ///
    /// # Errors
    /// A setting is outside its range.
    pub fn new(scaling: LossScaling) -> Result<Self, OptimError> {
        scaling.check()?;
        let (scale, hysteresis_left) = match &scaling {
            LossScaling::Static { scale } => (*scale, 1),
            LossScaling::Dynamic(d) => (two_to(d.initial_scale_power), d.hysteresis),
        };
        Ok(Self { scaling, state: LossScalerState { scale, iteration: 0, since: 0, hysteresis_left } })
    }

    /// The scale of the next backward.
    pub fn scale(&self) -> f64 {
        self.state.scale
    }

    /// What a checkpoint keeps.
    pub fn state(&self) -> LossScalerState {
        self.state
    }

    /// Takes up where a checkpoint left off.
    ///
    /// # Errors
    /// The state cannot be one of a scaler with these settings.
    pub fn restore(&mut self, state: LossScalerState) -> Result<(), OptimError> {
        let refuse = |reason: String| Err(OptimError::Restore { what: "loss scale", reason });
        if !(state.scale.is_finite() && state.scale > 0.0) {
            return refuse(format!("a scale of {}", state.scale));
        }
        if state.since > state.iteration {
            return refuse(format!("an overflow at iteration {}, after {}", state.since, state.iteration));
        }
        match &self.scaling {
            LossScaling::Static { scale } if *scale != state.scale => {
                refuse(format!("it is {}, and this run's is static at {scale}", state.scale))
            }
            LossScaling::Static { .. } => {
                self.state = state;
                Ok(())
            }
            LossScaling::Dynamic(d) => {
                // A run may be resumed with other settings: what is left never exceeds them.
                let hysteresis_left = state.hysteresis_left.clamp(1, d.hysteresis);
                self.state = LossScalerState { scale: state.scale.max(d.min_scale), hysteresis_left, ..state };
                Ok(())
            }
        }
    }

    /// Counts a step. `overflow`: a gradient was not finite, and the step is skipped.
    ///
    /// # Errors
    /// Overflow with the scale at its minimum and hysteresis used up; nothing has changed then.
    pub fn update(&mut self, overflow: bool) -> Result<ScaleChange, AtMinimum> {
        let LossScaling::Dynamic(d) = &self.scaling else {
            self.state.iteration += 1;
            return Ok(ScaleChange::Kept);
        };
        let s = &mut self.state;
        let mut change = ScaleChange::Kept;
        if overflow {
            if s.hysteresis_left > 1 {
                s.hysteresis_left -= 1;
                change = ScaleChange::Endured { hysteresis_left: s.hysteresis_left };
            } else if s.scale <= d.min_scale && d.fail_at_min {
                return Err(AtMinimum { scale: s.scale });
            } else {
                s.scale = (s.scale / 2.0).max(d.min_scale);
                change = ScaleChange::Halved;
            }
            s.since = s.iteration + 1;
        } else {
            let good = s.iteration - s.since;
            let grows = good > 0 && good.is_multiple_of(d.window);
            if d.consecutive_hysteresis || grows {
                s.hysteresis_left = d.hysteresis;
            }
            if grows {
                s.scale *= 2.0;
                change = ScaleChange::Doubled;
            }
        }
        s.iteration += 1;
        Ok(change)
    }
}
