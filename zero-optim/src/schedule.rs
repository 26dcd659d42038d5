//! Learning-rate schedules, as functions of the position.
//!
//! The position is the number of steps applied so far: 0 at the first step. A skipped step does not
//! advance it. At position 0 DeepSpeed's schedules have the rate that their constructor sets; at
//! position `k`, the rate after the k-th `step()`. Names and parameters serialise as in a DeepSpeed
//! configuration (`{"type": "WarmupLR", "params": {...}}`) with DeepSpeed's defaults.
//!
//! Sources: `deepspeed/runtime/lr_schedules.py` of 0.19.8, traces in
//! tests/data/deepspeed_lr_schedules.json; transformers' `optimization.py` and nanoGPT's `get_lr`
//! for [`Decay`], traces in tests/data/torch_decays.json.

use std::f64::consts::PI;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::OptimError;

/// The learning rate over the steps. `base` below is
/// [`OptimizerConfig::lr`](crate::OptimizerConfig::lr).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", content = "params")]
#[non_exhaustive]
pub enum LrSchedule {
    /// `base` at every position.
    #[default]
    Constant,
    /// `base * (position + 1) / warmup_steps`, at most `base`.
    LinearWarmup {
        /// The first step at the full rate, counted from 1; 0 counts as 1.
        warmup_steps: u64,
    },
    /// Linear warm-up, a constant rate, and decay to a minimum rate.
    Decay(Decay),
    /// Warm-up from the minimum to the maximum rate, then constant.
    #[serde(rename = "WarmupLR")]
    Warmup(Warmup),
    /// Warm-up, then linear decay to 0.
    #[serde(rename = "WarmupDecayLR")]
    WarmupDecay(WarmupDecay),
    /// Warm-up from a fraction of `base` to `base`, then cosine decay.
    #[serde(rename = "WarmupCosineLR")]
    WarmupCosine(WarmupCosine),
    /// One cycle up and down (Smith, arXiv 1803.09820), then decay.
    OneCycle(OneCycle),
    /// Unbounded growth, to find the greatest rate at which training is stable.
    #[serde(rename = "LRRangeTest")]
    RangeTest(RangeTest),
}

/// The curve of a decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DecayCurve {
    /// A straight line.
    Linear,
    /// Half a period of the cosine.
    Cosine,
}

/// Parameters of [`LrSchedule::Decay`]: the schedules `linear`, `cosine` and `wsd` of `zero train`.
///
/// At position `k`, with `W` steps of warm-up and the decay over the last `D` of `T` steps:
///
/// ```text
/// k < W:          base * (k + 1) / W
/// W <= k < T - D: base
/// T - D <= k:     min_lr + (base - min_lr) * f(p), where p = (k - (T - D)) / D, at most 1
/// linear:         f(p) = 1 - p
/// cosine:         f(p) = (1 + cos(pi * p)) / 2
/// ```
///
/// The decay is that of transformers' `get_linear_schedule_with_warmup`,
/// `get_cosine_schedule_with_warmup` and `get_wsd_schedule` and of nanoGPT: the rate is `min_lr` at
/// position `T`, one step after the last. The warm-up is that of [`LrSchedule::LinearWarmup`];
/// transformers has `k / W`, which wastes the first step, and nanoGPT `(k + 1) / (W + 1)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decay {
    /// The curve.
    pub curve: DecayCurve,
    /// Steps of warm-up; 0 disables it.
    pub warmup_steps: u64,
    /// Steps of decay.
    pub decay_steps: u64,
    /// The position at which the rate is `min_lr`.
    pub total_steps: u64,
    /// The rate after the decay.
    pub min_lr: f64,
}

impl Decay {
    fn lr(&self, base: f64, position: u64) -> f64 {
        if position < self.warmup_steps {
            return linear_warmup(base, position, self.warmup_steps);
        }
        let since = position.saturating_sub(self.total_steps.saturating_sub(self.decay_steps));
        let done = (since as f64 / self.decay_steps.max(1) as f64).min(1.0);
        let left = match self.curve {
            DecayCurve::Linear => 1.0 - done,
            DecayCurve::Cosine => 0.5 * (1.0 + (PI * done).cos()),
        };
        self.min_lr + (base - self.min_lr) * left
    }
}

/// The curve of a warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WarmupType {
    /// `ln(i + 1) / ln(n)`.
    #[default]
    Log,
    /// `i / n`.
    Linear,
}

/// Parameters of `WarmupLR`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Warmup {
    /// The rate at the start of the warm-up.
    pub warmup_min_lr: f64,
    /// The rate at the end of the warm-up; by default `base`.
    pub warmup_max_lr: Option<f64>,
    /// Steps of warm-up; 1 counts as 2.
    pub warmup_num_steps: u64,
    /// The curve.
    pub warmup_type: WarmupType,
}

impl Default for Warmup {
    fn default() -> Self {
        Self {
            warmup_min_lr: 0.0,
            warmup_max_lr: None,
            warmup_num_steps: 1000,
            warmup_type: WarmupType::Log,
        }
    }
}

/// Parameters of `WarmupDecayLR`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WarmupDecay {
    /// The step at which the rate is 0.
    pub total_num_steps: u64,
    /// The rate at the start of the warm-up.
    #[serde(default)]
    pub warmup_min_lr: f64,
    /// The rate after the warm-up.
    #[serde(default = "default_max_lr")]
    pub warmup_max_lr: f64,
    /// Steps of warm-up; 1 counts as 2.
    #[serde(default = "default_warmup_steps")]
    pub warmup_num_steps: u64,
    /// The curve.
    #[serde(default)]
    pub warmup_type: WarmupType,
}

/// Parameters of `WarmupCosineLR`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WarmupCosine {
    /// The step at which the cosine ends.
    pub total_num_steps: u64,
    /// Fraction of `base` at the start.
    #[serde(default)]
    pub warmup_min_ratio: f64,
    /// Steps of warm-up; 1 counts as 2.
    #[serde(default = "default_warmup_steps")]
    pub warmup_num_steps: u64,
    /// Fraction of `base` at the end.
    #[serde(default = "default_cos_min_ratio")]
    pub cos_min_ratio: f64,
    /// The curve of the warm-up.
    #[serde(default)]
    pub warmup_type: WarmupType,
}

/// Parameters of `OneCycle`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OneCycle {
    /// The least rate.
    pub cycle_min_lr: f64,
    /// The greatest rate.
    pub cycle_max_lr: f64,
    /// Decay of the rate per interval after the cycle; 0 disables decay.
    #[serde(default)]
    pub decay_lr_rate: f64,
    /// Steps of the rising half.
    #[serde(default = "default_cycle_steps")]
    pub cycle_first_step_size: u64,
    /// Steps of the falling half; by default those of the rising half.
    #[serde(default)]
    pub cycle_second_step_size: Option<u64>,
    /// Stairs of the rising half; 0 means linear.
    #[serde(default)]
    pub cycle_first_stair_count: u64,
    /// Stairs of the falling half; by default those of the rising half.
    #[serde(default)]
    pub cycle_second_stair_count: Option<u64>,
    /// Steps per interval of decay; 0 disables decay.
    #[serde(default)]
    pub decay_step_size: u64,
    /// Whether beta1 changes inversely to the rate (and beta2 is 0.99).
    #[serde(default = "default_true")]
    pub cycle_momentum: bool,
    /// The least beta1.
    #[serde(default = "default_min_mom")]
    pub cycle_min_mom: f64,
    /// The greatest beta1.
    #[serde(default = "default_max_mom")]
    pub cycle_max_mom: f64,
    /// Growth of beta1 per interval after the cycle.
    #[serde(default)]
    pub decay_mom_rate: f64,
}

/// Parameters of `LRRangeTest`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RangeTest {
    /// The initial rate.
    pub lr_range_test_min_lr: f64,
    /// Steps per interval.
    pub lr_range_test_step_size: u64,
    /// Growth per interval, as a fraction of the initial rate.
    pub lr_range_test_step_rate: f64,
    /// Whether the rate grows in one stair per interval instead of continuously.
    pub lr_range_test_staircase: bool,
}

impl Default for RangeTest {
    fn default() -> Self {
        Self {
            lr_range_test_min_lr: 1e-3,
            lr_range_test_step_size: 2000,
            lr_range_test_step_rate: 1.0,
            lr_range_test_staircase: false,
        }
    }
}

fn default_max_lr() -> f64 {
    1e-3
}
fn default_warmup_steps() -> u64 {
    1000
}
fn default_cos_min_ratio() -> f64 {
    1e-4
}
fn default_cycle_steps() -> u64 {
    2000
}
fn default_true() -> bool {
    true
}
fn default_min_mom() -> f64 {
    0.8
}
fn default_max_mom() -> f64 {
    0.9
}

impl LrSchedule {
    /// The learning rate of the step at `position`. `base` is
    /// [`OptimizerConfig::lr`](crate::OptimizerConfig::lr).
    pub fn lr(&self, base: f64, position: u64) -> f64 {
        // DeepSpeed's `last_batch_iteration`: -1 before the first step.
        let iteration = position.checked_sub(1);
        match self {
            Self::Constant => base,
            Self::LinearWarmup { warmup_steps } => linear_warmup(base, position, *warmup_steps),
            Self::Decay(d) => d.lr(base, position),
            Self::Warmup(w) => {
                let max = w.warmup_max_lr.unwrap_or(base);
                let gamma = |i| warmup(w.warmup_type, i, w.warmup_num_steps).unwrap_or(1.0);
                iteration.map_or(w.warmup_min_lr, |i| {
                    w.warmup_min_lr + (max - w.warmup_min_lr) * gamma(i)
                })
            }
            Self::WarmupDecay(w) => {
                let gamma = |i| match warmup(w.warmup_type, i, w.warmup_num_steps) {
                    Some(gamma) => gamma,
                    None => {
                        let (total, warm) =
                            (w.total_num_steps as f64, w.warmup_num_steps.max(2) as f64);
                        ((total - i as f64) / (total - warm).max(1.0)).max(0.0)
                    }
                };
                let delta = w.warmup_max_lr - w.warmup_min_lr;
                iteration.map_or(w.warmup_min_lr, |i| w.warmup_min_lr + delta * gamma(i))
            }
            Self::WarmupCosine(w) => iteration.map_or(0.0, |i| base * w.ratio(i)),
            Self::OneCycle(c) => c.lr(iteration),
            Self::RangeTest(r) => {
                let intervals = position as f64 / r.lr_range_test_step_size.max(1) as f64;
                let intervals = if r.lr_range_test_staircase {
                    intervals.floor()
                } else {
                    intervals
                };
                r.lr_range_test_min_lr * (1.0 + r.lr_range_test_step_rate * intervals)
            }
        }
    }

    /// beta1 and beta2 of the step at `position`, if the schedule changes them.
    pub fn betas(&self, position: u64) -> Option<(f64, f64)> {
        match self {
            Self::OneCycle(c) if c.cycle_momentum => {
                Some((c.momentum(position.checked_sub(1)), 0.99))
            }
            _ => None,
        }
    }

    /// Checks every parameter against its range.
    ///
    /// # Errors
    /// [`OptimError::Setting`] for the first parameter out of range.
    pub fn check(&self) -> Result<(), OptimError> {
        let steps = |name, n: u64| OptimError::check(n > 0, name, 0.0, "at least 1");
        let rate = OptimError::from_zero;

        match self {
            Self::Constant | Self::LinearWarmup { .. } => Ok(()),
            Self::Decay(d) => {
                rate("min_lr", d.min_lr)?;
                let fits = (1..=d.total_steps).contains(&d.decay_steps);
                OptimError::check(
                    fits,
                    "decay_steps",
                    d.decay_steps as f64,
                    "at least 1, at most the total steps",
                )
            }
            Self::Warmup(w) => {
                rate("warmup_min_lr", w.warmup_min_lr)?;
                rate("warmup_max_lr", w.warmup_max_lr.unwrap_or(0.0))?;
                steps("warmup_num_steps", w.warmup_num_steps)
            }
            Self::WarmupDecay(w) => {
                rate("warmup_min_lr", w.warmup_min_lr)?;
                rate("warmup_max_lr", w.warmup_max_lr)?;
                steps("warmup_num_steps", w.warmup_num_steps)
            }
            Self::WarmupCosine(w) => {
                rate("warmup_min_ratio", w.warmup_min_ratio)?;
                rate("cos_min_ratio", w.cos_min_ratio)?;
                steps("warmup_num_steps", w.warmup_num_steps)
            }
            Self::OneCycle(c) => {
                rate("cycle_min_lr", c.cycle_min_lr)?;
                rate("cycle_max_lr", c.cycle_max_lr)?;
                rate("decay_lr_rate", c.decay_lr_rate)?;
                OptimError::beta("cycle_min_mom", c.cycle_min_mom)?;
                OptimError::beta("cycle_max_mom", c.cycle_max_mom)?;
                steps("cycle_first_step_size", c.cycle_first_step_size)
            }
            Self::RangeTest(r) => {
                rate("lr_range_test_min_lr", r.lr_range_test_min_lr)?;
                rate("lr_range_test_step_rate", r.lr_range_test_step_rate)?;
                steps("lr_range_test_step_size", r.lr_range_test_step_size)
            }
        }
    }
}

fn linear_warmup(base: f64, position: u64, steps: u64) -> f64 {
    base * (position.saturating_add(1) as f64 / steps.max(1) as f64).min(1.0)
}

/// One line for a user.
impl fmt::Display for LrSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Constant => f.write_str("constant"),
            Self::LinearWarmup { warmup_steps } => {
                write!(f, "linear warm-up over {warmup_steps} steps, then constant")
            }
            Self::Decay(d) => {
                if d.warmup_steps > 0 {
                    write!(f, "linear warm-up over {} steps, then ", d.warmup_steps)?;
                }
                if d.warmup_steps.saturating_add(d.decay_steps) < d.total_steps {
                    f.write_str("constant, then ")?;
                }
                let curve = match d.curve {
                    DecayCurve::Linear => "linear",
                    DecayCurve::Cosine => "cosine",
                };
                write!(
                    f,
                    "{curve} decay to {} over {} steps, until step {}",
                    d.min_lr, d.decay_steps, d.total_steps
                )
            }
            Self::Warmup(w) => {
                write!(f, "WarmupLR from {} to ", w.warmup_min_lr)?;
                match w.warmup_max_lr {
                    Some(max) => write!(f, "{max}")?,
                    None => f.write_str("the learning rate")?,
                }
                write!(
                    f,
                    " over {} steps ({})",
                    w.warmup_num_steps,
                    w.warmup_type.name()
                )
            }
            Self::WarmupDecay(w) => write!(
                f,
                "WarmupDecayLR from {} to {} over {} steps ({}), then to 0 at step {}",
                w.warmup_min_lr,
                w.warmup_max_lr,
                w.warmup_num_steps,
                w.warmup_type.name(),
                w.total_num_steps
            ),
            Self::WarmupCosine(w) => write!(
                f,
                "WarmupCosineLR over {} steps ({}), then to {} of the learning rate at step {}",
                w.warmup_num_steps,
                w.warmup_type.name(),
                w.cos_min_ratio,
                w.total_num_steps
            ),
            Self::OneCycle(c) => {
                write!(f, "OneCycle from {} to {}", c.cycle_min_lr, c.cycle_max_lr)
            }
            Self::RangeTest(r) => write!(f, "LRRangeTest from {}", r.lr_range_test_min_lr),
        }
    }
}

impl WarmupType {
    fn name(self) -> &'static str {
        match self {
            Self::Log => "log",
            Self::Linear => "linear",
        }
    }
}

/// The completed fraction of a warm-up of `steps` at iteration `i`; `None` after the warm-up.
fn warmup(kind: WarmupType, i: u64, steps: u64) -> Option<f64> {
    let steps = steps.max(2);
    (i < steps).then(|| match kind {
        WarmupType::Log => 1.0 / (steps as f64).ln() * ((i + 1) as f64).ln(),
        WarmupType::Linear => i as f64 / steps as f64,
    })
}

impl WarmupCosine {
    fn ratio(&self, i: u64) -> f64 {
        if let Some(done) = warmup(self.warmup_type, i, self.warmup_num_steps) {
            return self.warmup_min_ratio + done * (1.0 - self.warmup_min_ratio);
        }
        let warm = self.warmup_num_steps.max(2);
        let progress =
            (i - warm + 1) as f64 / self.total_num_steps.saturating_sub(warm).max(1) as f64;
        let cosine = (1.0 + (PI * progress.min(1.0)).cos()) / 2.0;
        (self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine).max(0.0)
    }
}

impl OneCycle {
    fn first(&self) -> f64 {
        self.cycle_first_step_size as f64
    }

    fn second(&self) -> f64 {
        self.cycle_second_step_size
            .unwrap_or(self.cycle_first_step_size) as f64
    }

    /// The relative height of the cycle: 0 at its ends, 1 at its peak.
    fn height(&self, i: u64) -> f64 {
        let total = self.first() + self.second();
        let ratio = self.first() / total;
        let batch = (i + 1) as f64;
        let cycle = (1.0 + batch / total).floor();
        let x = 1.0 + batch / total - cycle;
        let rising = x <= ratio;
        let stairs = if rising {
            self.cycle_first_stair_count
        } else {
            self.cycle_second_stair_count
                .unwrap_or(self.cycle_first_stair_count)
        } as f64;

        if stairs == 0.0 {
            return if rising {
                x / ratio
            } else {
                (x - 1.0) / (ratio - 1.0)
            };
        }

        // Computed from the integer batch number, so that rounding never skips a stair.
        let within = batch % total;
        let position = if within <= self.first() {
            within * stairs / self.first()
        } else {
            (total - within) * stairs / self.second()
        };

        position.floor() / stairs
    }

    /// Steps since the end of the cycle, counted from 1; `None` within it.
    fn after(&self, i: u64) -> Option<f64> {
        let total = self.first() + self.second();
        (i as f64 >= total).then_some(i as f64 - total + 1.0)
    }

    fn lr(&self, iteration: Option<u64>) -> f64 {
        let Some(i) = iteration else {
            return self.cycle_min_lr;
        };
        match self.after(i) {
            None => self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * self.height(i),
            Some(_) if self.decay_step_size == 0 || self.decay_lr_rate == 0.0 => self.cycle_min_lr,
            Some(steps) => {
                self.cycle_min_lr
                    / (1.0 + self.decay_lr_rate * (steps / self.decay_step_size as f64))
            }
        }
    }

    fn momentum(&self, iteration: Option<u64>) -> f64 {
        let Some(i) = iteration else {
            return self.cycle_min_mom;
        };
        match self.after(i) {
            None => self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * self.height(i),
            Some(_) if self.decay_step_size == 0 || self.decay_mom_rate == 0.0 => {
                self.cycle_max_mom
            }
            Some(steps) => {
                self.cycle_max_mom
                    * (1.0 + self.decay_mom_rate * (steps / self.decay_step_size as f64))
            }
        }
    }
}
