//! The host side of a step: it converts settings and schedules to inputs of [`zero_kernels::step`],
//! which has the rules for host and device, and records to outcomes with unit names.
//!
//! Every rank computes the step from the same statistics in rank order, so all ranks agree bit for
//! bit.
//!
//! Why the norm has the same bits at all stages: each rank contributes the sum of squares of its
//! own shard, in fp64 and in an order fixed by the length; at stage 0, where it has all gradients,
//! that of the shard that it would own. The contributions are added in rank order.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use zero_alloc::device::DType;
use zero_kernels::step::{self, StepConfig, StepRates, StepRecord, StepState};
use zero_kernels::{AdamHyper, RankStats, StepPoint, StepScalars, UpdateRule};

use crate::groups::RateSet;
use crate::{LossScalerState, LossScaling, LrSchedule, OptimError, StateArrays, StateFormat};

/// Settings of the optimizer that all ranks share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OptimizerConfig {
    /// Hyperparameters of Adam, the update rule.
    pub hyper: AdamHyper,
    /// The base learning rate.
    pub lr: f64,
    /// The learning-rate schedule.
    pub schedule: LrSchedule,
    /// Gradients with a greater norm are scaled down to this norm; 0 disables clipping.
    pub max_grad_norm: f64,
    /// The loss scale.
    pub loss_scaling: LossScaling,
    /// The greatest number of elements that one launch updates; at least 1. It does not change the
    /// results.
    #[serde(skip, default = "no_limit")]
    pub sub_group_elems: usize,
}

fn no_limit() -> usize {
    usize::MAX
}

impl Default for OptimizerConfig {
    /// PyTorch's AdamW at a constant rate of 1e-3, without decay, clipping or scaling.
    fn default() -> Self {
        Self {
            hyper: AdamHyper::default(),
            lr: 1e-3,
            schedule: LrSchedule::Constant,
            max_grad_norm: 0.0,
            loss_scaling: LossScaling::NONE,
            sub_group_elems: usize::MAX,
        }
    }
}

zero_alloc::setters!(OptimizerConfig {
    hyper: AdamHyper,
    lr: f64,
    schedule: LrSchedule,
    max_grad_norm: f64,
    loss_scaling: LossScaling,
    sub_group_elems: usize,
});

impl OptimizerConfig {
    /// Sets the weight decay of `hyper`, decoupled unless it says otherwise.
    #[must_use]
    pub const fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.hyper.weight_decay = weight_decay;
        self
    }

    /// Sets the betas of `hyper`.
    #[must_use]
    pub const fn betas(mut self, [beta1, beta2]: [f64; 2]) -> Self {
        self.hyper.beta1 = beta1;
        self.hyper.beta2 = beta2;
        self
    }

    /// Sets the epsilon of `hyper`.
    #[must_use]
    pub const fn eps(mut self, eps: f64) -> Self {
        self.hyper.eps = eps;
        self
    }

    /// Checks every setting against its range.
    ///
    /// # Errors
    /// [`OptimError::Setting`] for the first setting out of range.
    pub fn check(&self) -> Result<(), OptimError> {
        self.hyper.check()?;
        OptimError::from_zero("lr", self.lr)?;
        OptimError::from_zero("max_grad_norm", self.max_grad_norm)?;
        OptimError::check(
            self.sub_group_elems > 0,
            "sub_group_elems",
            0.0,
            "at least 1",
        )?;
        self.schedule.check()?;

        self.loss_scaling.check()
    }

    /// The update rule: the only place that chooses one. An optimizer that is built may have
    /// [another](crate::OptimizerBuilder::rule).
    pub fn rule(&self) -> Arc<dyn UpdateRule> {
        Arc::new(self.hyper)
    }

    /// The arrays of the rule's state, in `format`, for parameters of `param_dtype`.
    pub fn arrays(&self, param_dtype: DType, format: StateFormat) -> StateArrays {
        StateArrays::new(&*self.rule(), param_dtype, format)
    }

    /// The settings as [`zero_kernels::step`] reads them, for a table of rates that starts at
    /// `first_position`.
    pub(crate) fn step_config(&self, divisor: Divisor, first_position: u64) -> StepConfig {
        let (micro_batches, divisor) = match divisor {
            Divisor::MicroBatches(n) => (n, 0.0),
            Divisor::Sum(divisor) => (1, divisor),
        };
        let (dynamic, scaling) = self.loss_scaling.dynamic();
        StepConfig {
            max_grad_norm: self.max_grad_norm,
            min_scale: scaling.min_scale,
            window: scaling.window,
            micro_batches: micro_batches as u64,
            first_position,
            dynamic: dynamic.into(),
            hysteresis: scaling.hysteresis,
            consecutive_hysteresis: scaling.consecutive_hysteresis.into(),
            fail_at_min: scaling.fail_at_min.into(),
            divisor,
        }
    }
}

/// The divisor of the gradients' sums over ranks, besides the loss scale; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Divisor {
    /// Ranks times this number of micro-batches, which have equal weights.
    MicroBatches(usize),
    /// This number: for gradients of losses that are summed over tokens, the tokens of all ranks in
    /// the step.
    Sum(f64),
}

impl Divisor {
    pub(crate) fn check(self) -> Result<(), OptimError> {
        match self {
            Self::MicroBatches(n) => {
                let fits = (1..=u32::MAX as usize).contains(&n);
                OptimError::check(
                    fits,
                    "micro_batches",
                    n as f64,
                    "at least 1, at most 2^32 - 1",
                )
            }
            Self::Sum(x) => OptimError::check(
                x.is_finite() && x > 0.0,
                "divisor",
                x,
                "a finite number above 0",
            ),
        }
    }
}

/// The maximum number of steps of a run: fp64 is exact up to here, and sums of counts do not
/// overflow.
const MAX_STEPS: u64 = 1 << 53;

/// The optimizer's step counts and loss scaler, as saved in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Progress {
    /// Steps applied: `t` of the update rule before the next step.
    pub adam_steps: u64,
    /// Position of the learning-rate schedule.
    pub schedule_position: u64,
    /// Steps skipped.
    pub skipped_steps: u64,
    /// The loss scaler's state.
    pub loss_scaler: LossScalerState,
}

/// The non-finite gradients of a skipped step.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Overflow {
    /// The first rank with a non-finite gradient.
    pub rank: usize,
    /// The first unit with a non-finite gradient on that rank.
    pub unit: String,
    /// Non-finite elements over all ranks.
    pub nonfinite: u64,
}

/// The flags of all ranks, reduced by OR and by AND.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReducedFlags {
    /// OR: the bits set on at least one rank.
    pub any: u64,
    /// AND: the bits set on all ranks.
    pub all: u64,
}

/// The outcome of a step.
#[derive(Clone, Debug, PartialEq)]
pub enum StepOutcome {
    /// Weights and moments were updated.
    #[non_exhaustive]
    Applied {
        /// Norm of the mean gradient, before clipping.
        grad_norm: f64,
        /// Clipping factor; 1 without clipping.
        clip: f64,
        /// The learning rate.
        lr: f64,
        /// Sum of the ranks' losses.
        loss: f64,
        /// The scale that the backward used.
        loss_scale: f64,
        /// The ranks' flags.
        flags: ReducedFlags,
    },
    /// Nothing was updated.
    #[non_exhaustive]
    Skipped {
        /// The non-finite gradients.
        overflow: Overflow,
        /// The learning rate that the step would have used.
        lr: f64,
        /// Sum of the ranks' losses.
        loss: f64,
        /// The scale that the backward used.
        loss_scale: f64,
        /// The scale of the next backward.
        next_loss_scale: f64,
        /// The ranks' flags.
        flags: ReducedFlags,
    },
}

impl StepOutcome {
    /// Whether the step was skipped.
    pub fn is_skipped(&self) -> bool {
        matches!(self, Self::Skipped { .. })
    }

    /// Sum of the ranks' losses.
    pub fn loss(&self) -> f64 {
        match self {
            Self::Applied { loss, .. } | Self::Skipped { loss, .. } => *loss,
        }
    }

    /// The learning rate.
    pub fn lr(&self) -> f64 {
        match self {
            Self::Applied { lr, .. } | Self::Skipped { lr, .. } => *lr,
        }
    }

    /// The scale that the backward used.
    pub fn loss_scale(&self) -> f64 {
        match self {
            Self::Applied { loss_scale, .. } | Self::Skipped { loss_scale, .. } => *loss_scale,
        }
    }

    /// The ranks' flags.
    pub fn flags(&self) -> ReducedFlags {
        match self {
            Self::Applied { flags, .. } | Self::Skipped { flags, .. } => *flags,
        }
    }

    /// Norm of the mean gradient before clipping; `None` if the step was skipped.
    pub fn grad_norm(&self) -> Option<f64> {
        match self {
            Self::Applied { grad_norm, .. } => Some(*grad_norm),
            Self::Skipped { .. } => None,
        }
    }
}

/// The optimizer's settings and step state, without buffers or device.
#[derive(Clone, Debug)]
pub struct StepController {
    config: OptimizerConfig,
    state: StepState,
    /// The rates of parameter groups; the first are the optimizer's own.
    rates: Vec<RateSet>,
}

impl StepController {
    /// A controller before the first step.
    ///
    /// # Errors
    /// A setting is outside its range.
    pub fn new(config: OptimizerConfig) -> Result<Self, OptimError> {
        config.check()?;
        let state = StepState::new(
            config.loss_scaling.initial_scale(),
            config.loss_scaling.dynamic().1.hysteresis,
        );
        let rates = vec![RateSet::own(&config.rule())];
        Ok(Self {
            config,
            state,
            rates,
        })
    }

    /// Adds the rates of parameter groups.
    pub(crate) fn set_rates(&mut self, rates: Vec<RateSet>) {
        self.rates = rates;
    }

    /// Sets the base learning rate. It is a setting: a checkpoint's progress does not contain it.
    ///
    /// # Errors
    /// [`OptimError::Setting`]: the rate is negative or not finite.
    pub fn set_lr(&mut self, lr: f64) -> Result<(), OptimError> {
        let config = OptimizerConfig {
            lr,
            ..self.config.clone()
        };
        config.check()?;
        self.config = config;
        Ok(())
    }

    /// The number of sets of rates.
    pub(crate) fn rate_sets(&self) -> usize {
        self.rates.len()
    }

    /// The values of all sets of rates, `ahead` applied steps from now.
    pub(crate) fn rates(&self, ahead: u64) -> impl Iterator<Item = StepRates> + '_ {
        let config = &self.config;
        let position = self.state.schedule_position + ahead;
        let own = StepPoint {
            t: self.state.adam_steps + 1 + ahead,
            lr: config.schedule.lr(config.lr, position),
            betas: config.schedule.betas(position).map(<[f64; 2]>::from),
        };
        self.rates.iter().map(move |set| set.at(&own))
    }

    /// The settings.
    pub fn config(&self) -> &OptimizerConfig {
        &self.config
    }

    /// The state, as [`zero_kernels::step`] updates it.
    pub fn state(&self) -> &StepState {
        &self.state
    }

    /// The loss scale for all micro-batches of the next step.
    pub fn loss_scale(&self) -> f64 {
        self.state.loss_scale
    }

    /// The step counts and the loss scaler's state, for a checkpoint.
    pub fn progress(&self) -> Progress {
        let s = &self.state;
        Progress {
            adam_steps: s.adam_steps,
            schedule_position: s.schedule_position,
            skipped_steps: s.skipped_steps,
            loss_scaler: LossScalerState {
                scale: s.loss_scale,
                iteration: s.iteration,
                since: s.since,
                hysteresis_left: s.hysteresis_left,
            },
        }
    }

    /// Restores the progress of a checkpoint.
    ///
    /// # Errors
    /// The loss scale is invalid or contradicts the settings, or a count is out of range. Nothing
    /// has changed then.
    pub fn restore(&mut self, progress: &Progress) -> Result<(), OptimError> {
        let Progress {
            adam_steps,
            schedule_position,
            skipped_steps,
            loss_scaler,
        } = *progress;

        let counts = [
            adam_steps,
            schedule_position,
            skipped_steps,
            loss_scaler.iteration,
        ];

        if let Some(steps) = counts.into_iter().find(|steps| *steps > MAX_STEPS) {
            let reason = format!("{steps} steps, above the maximum of {MAX_STEPS}");
            return Err(OptimError::Restore {
                what: "progress",
                reason,
            });
        }

        let LossScalerState {
            scale,
            iteration,
            since,
            hysteresis_left,
        } = self.config.loss_scaling.fit(loss_scaler)?;

        self.state = StepState {
            loss_scale: scale,
            iteration,
            since,
            adam_steps,
            schedule_position,
            skipped_steps,
            hysteresis_left,
            halted: StepState::RUNNING,
        };

        Ok(())
    }

    /// Advances by one step, from the statistics of all ranks in rank order. Returns the scalars of
    /// the step's updates, one for each set of rates, the optimizer's own first, and its
    /// outcome, which names units by `unit_names`.
    ///
    /// # Errors
    /// No statistics, an invalid divisor, or an overflow with the loss scale at its minimum.
    /// Nothing has changed then.
    pub fn advance(
        &mut self,
        ranks: &[RankStats],
        divisor: Divisor,
        unit_names: &[String],
    ) -> Result<(Vec<StepScalars>, StepOutcome), OptimError> {
        if ranks.is_empty() {
            return Err(OptimError::NoStats);
        }
        divisor.check()?;
        let position = self.state.schedule_position;
        let mut state = self.state;
        let config = self.config.step_config(divisor, position);
        let rates: Vec<StepRates> = self.rates(0).collect();
        let mut scalars = vec![StepScalars::default(); rates.len()];
        let record = step::advance_step(ranks, &config, &rates, &mut state, &mut scalars);
        // This state is never halted, so `advance_step` returns a record.
        let outcome = self.outcome(&record.unwrap_or_default(), unit_names)?;
        self.state = state;
        Ok((scalars, outcome))
    }

    /// Applies a device step's `record` to the host's state.
    ///
    /// # Errors
    /// The run was halted at this step.
    pub(crate) fn replay(
        &mut self,
        record: &StepRecord,
        unit_names: &[String],
    ) -> Result<StepOutcome, OptimError> {
        let outcome = self.outcome(record, unit_names)?;
        self.state.count_step(
            &self.config.step_config(Divisor::MicroBatches(1), 0),
            record.skipped != 0,
        );
        Ok(outcome)
    }

    /// Converts the record of the next step to its outcome.
    fn outcome(
        &self,
        record: &StepRecord,
        unit_names: &[String],
    ) -> Result<StepOutcome, OptimError> {
        let &StepRecord {
            grad_norm,
            clip,
            lr,
            loss,
            loss_scale,
            next_loss_scale,
            nonfinite,
            ..
        } = record;

        let flags = ReducedFlags {
            any: record.flags_any,
            all: record.flags_all,
        };

        if record.halted == StepState::NO_RATE {
            return Err(OptimError::NoRate {
                position: self.state.schedule_position,
            });
        }

        if record.skipped == 0 {
            return Ok(StepOutcome::Applied {
                grad_norm,
                clip,
                lr,
                loss,
                loss_scale,
                flags,
            });
        }

        let unit = usize::try_from(record.bad_unit)
            .ok()
            .and_then(|unit| unit_names.get(unit))
            .cloned();
        let rank = record.bad_rank as usize;
        let unit = unit.unwrap_or_else(|| "(unknown)".into());

        if record.halted == StepState::AT_MINIMUM {
            let step = self.state.adam_steps + self.state.skipped_steps;
            return Err(OptimError::LossScaleAtMinimum {
                step,
                scale: loss_scale,
                rank,
                unit,
            });
        }

        let overflow = Overflow {
            rank,
            unit,
            nonfinite,
        };

        Ok(StepOutcome::Skipped {
            overflow,
            lr,
            loss,
            loss_scale,
            next_loss_scale,
            flags,
        })
    }
}
