//! The decision of a step, apart from doing it: votes of all ranks in, what to multiply with out.
//!
//! Every rank decides for itself from the same votes in rank order, so all decide the same, bit for bit.
//! Gradients arrive scaled and summed; with `S` the loss scale that *their backward* used (not a later one:
//! DeepSpeed #2686), `N` ranks and `A` micro-batches:
//!
//! ```text
//! grad_norm  = sqrt(sum over ranks of sum_sq) / (S * N * A)
//! clip       = max_grad_norm / (grad_norm + 1e-6)  where grad_norm > max_grad_norm, else 1
//! grad_scale = clip / (S * N * A)
//! ```
//!
//! A gradient that is not finite, in any dtype, on any rank, skips the step everywhere: weights, moments,
//! Adam's step count and the schedule stay; only the loss scaler counts.

use serde::{Deserialize, Serialize};
use zero_kernels::step::{StepRates, StepReport, StepState};
use zero_kernels::{AdamHyper, RankStats, StepScalars};

use crate::{LossScaler, LossScalerState, LossScaling, LrSchedule, OptimError};

/// The loss scale that a step's backward used. Taken once, before the first micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BackwardScale(f64);

impl BackwardScale {
    /// The factor of the loss.
    pub fn get(self) -> f64 {
        self.0
    }
}

/// Settings of the optimizer that all ranks share.
#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerConfig {
    /// Constants of Adam.
    pub hyper: AdamHyper,
    /// The base learning rate.
    pub lr: f64,
    /// How the rate moves.
    pub schedule: LrSchedule,
    /// Gradients of a greater norm are scaled down to it; 0: off.
    pub max_grad_norm: f64,
    /// How the loss is scaled.
    pub loss_scaling: LossScaling,
}

impl Default for OptimizerConfig {
    /// PyTorch's AdamW at a constant rate of 1e-3, without decay, clipping or scaling.
    fn default() -> Self {
        Self {
            hyper: AdamHyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, decoupled: true },
            lr: 1e-3,
            schedule: LrSchedule::Constant,
            max_grad_norm: 0.0,
            loss_scaling: LossScaling::NONE,
        }
    }
}

impl OptimizerConfig {
    /// Refuses settings outside their ranges.
    ///
    /// # Errors
    /// Names the setting, its value and the rule.
    pub fn check(&self) -> Result<(), OptimError> {
        let from_zero =
            |name, x: f64| OptimError::check(x.is_finite() && x >= 0.0, name, x, "a finite number, 0 or above");
        let beta = |name, x: f64| OptimError::check((0.0..1.0).contains(&x), name, x, "at least 0, below 1");
        beta("beta1", self.hyper.beta1)?;
        beta("beta2", self.hyper.beta2)?;
        from_zero("eps", self.hyper.eps)?;
        from_zero("weight_decay", self.hyper.weight_decay)?;
        from_zero("lr", self.lr)?;
        from_zero("max_grad_norm", self.max_grad_norm)?;
        self.schedule.check()
    }

    /// What the schedule says at `position`.
    pub(crate) fn rates(&self, position: u64) -> StepRates {
        let AdamHyper { beta1, beta2, .. } = self.hyper;
        let (beta1, beta2) = self.schedule.betas(position).unwrap_or((beta1, beta2));
        StepRates { lr: self.schedule.lr(self.lr, position), beta1, beta2 }
    }
}

/// The most steps of a run: fp64 counts them exactly, and no count of them overflows.
const MOST_STEPS: u64 = 1 << 53;

/// The scalars that a checkpoint keeps of an optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps applied: Adam's `t` before the next step.
    pub adam_steps: u64,
    /// Position of the learning-rate schedule.
    pub schedule_position: u64,
    /// Steps skipped.
    pub skipped_steps: u64,
    /// The loss scaler's state.
    pub loss_scaler: LossScalerState,
}

/// Why a step was skipped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overflow {
    /// The first rank that saw a gradient that is not finite.
    pub rank: usize,
    /// The first unit there.
    pub unit: String,
    /// How many elements are not finite, over all ranks.
    pub nonfinite: u64,
}

/// What the ranks' flags come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flags {
    /// The bits that any rank has set.
    pub any: u64,
    /// The bits that all ranks have set.
    pub all: u64,
}

/// What became of a step.
#[derive(Clone, Debug, PartialEq)]
pub enum StepOutcome {
    /// Weights and moments were updated.
    Applied {
        /// Norm of the mean gradient, before clipping.
        grad_norm: f64,
        /// What clipping multiplied it with; 1 if nothing.
        clip: f64,
        /// The learning rate.
        lr: f64,
        /// Sum of the votes' losses.
        loss: f64,
        /// The scale that the backward used.
        loss_scale: f64,
        /// Of the votes' flags.
        flags: Flags,
    },
    /// Nothing was updated.
    Skipped {
        /// What was seen, and where.
        overflow: Overflow,
        /// The learning rate that was not used.
        lr: f64,
        /// Sum of the votes' losses.
        loss: f64,
        /// The scale that the backward used.
        loss_scale: f64,
        /// The scale of the next backward.
        next_loss_scale: f64,
        /// Of the votes' flags.
        flags: Flags,
    },
}

impl StepOutcome {
    /// Whether the step was skipped.
    pub fn is_skipped(&self) -> bool {
        matches!(self, Self::Skipped { .. })
    }

    /// Sum of the votes' losses.
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

    /// Of the votes' flags.
    pub fn flags(&self) -> Flags {
        match self {
            Self::Applied { flags, .. } | Self::Skipped { flags, .. } => *flags,
        }
    }

    /// Norm of the mean gradient before clipping; `None` where it was not finite.
    pub fn grad_norm(&self) -> Option<f64> {
        match self {
            Self::Applied { grad_norm, .. } => Some(*grad_norm),
            Self::Skipped { .. } => None,
        }
    }
}

/// A step as decided.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// What the launches read.
    pub scalars: StepScalars,
    /// Constants of Adam in this step: the schedule may move the betas.
    pub hyper: AdamHyper,
    /// What became of the step.
    pub outcome: StepOutcome,
}

/// Decides steps; holds what moves from step to step.
#[derive(Clone, Debug)]
pub struct StepController {
    rules: OptimizerConfig,
    scaler: LossScaler,
    adam_steps: u64,
    schedule_position: u64,
    skipped_steps: u64,
}

impl StepController {
    /// A decider before the first step.
    ///
    /// # Errors
    /// A setting is outside its range.
    pub fn new(rules: OptimizerConfig) -> Result<Self, OptimError> {
        rules.check()?;
        let scaler = LossScaler::new(rules.loss_scaling.clone())?;
        Ok(Self { rules, scaler, adam_steps: 0, schedule_position: 0, skipped_steps: 0 })
    }

    /// The settings.
    pub fn rules(&self) -> &OptimizerConfig {
        &self.rules
    }

    /// The scale for all micro-batches of the next step.
    pub fn backward_scale(&self) -> BackwardScale {
        BackwardScale(self.scaler.scale())
    }

    /// What a checkpoint keeps.
    pub fn progress(&self) -> Progress {
        Progress {
            adam_steps: self.adam_steps,
            schedule_position: self.schedule_position,
            skipped_steps: self.skipped_steps,
            loss_scaler: self.scaler.state(),
        }
    }

    /// Takes up where a checkpoint left off.
    ///
    /// # Errors
    /// The loss scaler's state does not fit the settings, or a count is one that no run comes to.
    pub fn restore(&mut self, progress: &Progress) -> Result<(), OptimError> {
        let Progress { adam_steps, schedule_position, skipped_steps, loss_scaler } = *progress;
        let counts = [adam_steps, schedule_position, skipped_steps, loss_scaler.iteration];
        if let Some(steps) = counts.into_iter().find(|steps| *steps > MOST_STEPS) {
            let reason = format!("{steps} steps, and a run has {MOST_STEPS} at most");
            return Err(OptimError::Restore { what: "progress", reason });
        }
        self.scaler.restore(progress.loss_scaler)?;
        self.adam_steps = progress.adam_steps;
        self.schedule_position = progress.schedule_position;
        self.skipped_steps = progress.skipped_steps;
        Ok(())
    }

    /// Takes the same step that a device has decided, from its report.
    ///
    /// # Errors
    /// The run was halted at this step.
    pub(crate) fn follow(&mut self, report: &StepReport, unit_names: &[String]) -> Result<StepOutcome, OptimError> {
        let &StepReport { grad_norm, clip, lr, loss, loss_scale, next_loss_scale, nonfinite, .. } = report;
        let flags = Flags { any: report.flags_any, all: report.flags_all };
        if report.halted == StepState::NO_RATE {
            return Err(OptimError::NoRate { position: self.schedule_position });
        }
        if report.skipped == 0 {
            // A good step cannot fail.
            let _ = self.scaler.update(false);
            self.adam_steps += 1;
            self.schedule_position += 1;
            return Ok(StepOutcome::Applied { grad_norm, clip, lr, loss, loss_scale, flags });
        }
        let (rank, unit) = (report.bad_rank as usize, unit_name(report.bad_unit, unit_names));
        if let Err(at) = self.scaler.update(true) {
            let step = self.adam_steps + self.skipped_steps;
            return Err(OptimError::LossScaleAtMinimum { step, scale: at.scale, rank, unit });
        }
        self.skipped_steps += 1;
        let overflow = Overflow { rank, unit, nonfinite };
        Ok(StepOutcome::Skipped { overflow, lr, loss, loss_scale, next_loss_scale, flags })
    }

    /// Decides the next step from the votes of all ranks, in rank order. `unit_names` names the units in
    /// reports; `micro_batches` were summed.
    ///
    /// # Errors
    /// No votes, no micro-batches, or an overflow with the loss scale at its minimum; nothing has changed then.
    pub fn decide(
        &mut self,
        votes: &[RankStats],
        backward_scale: BackwardScale,
        micro_batches: usize,
        unit_names: &[String],
    ) -> Result<Decision, OptimError> {
        if votes.is_empty() {
            return Err(OptimError::NoVotes);
        }
        OptimError::check(micro_batches > 0, "micro_batches", 0.0, "at least 1")?;
        let loss_scale = backward_scale.get();
        let divisor = loss_scale * votes.len() as f64 * micro_batches as f64;
        let sum_sq = votes.iter().fold(0.0, |sum, v| sum + v.sum_sq);
        let loss = votes.iter().fold(0.0, |sum, v| sum + v.loss);
        let any = votes.iter().fold(0, |any, v| any | v.flags);
        let flags = Flags { any, all: votes.iter().fold(u64::MAX, |all, v| all & v.flags) };
        let StepRates { lr, beta1, beta2 } = self.rules.rates(self.schedule_position);
        let hyper = AdamHyper { beta1, beta2, ..self.rules.hyper };

        let bad = votes.iter().position(RankStats::is_bad);
        if let Some(rank) = bad {
            let unit = unit_name(votes[rank].first_bad_unit, unit_names);
            if let Err(at) = self.scaler.update(true) {
                let step = self.adam_steps + self.skipped_steps;
                return Err(OptimError::LossScaleAtMinimum { step, scale: at.scale, rank, unit });
            }
            self.skipped_steps += 1;
            let overflow = Overflow { rank, unit, nonfinite: votes.iter().map(|v| v.nonfinite).sum() };
            let next_loss_scale = self.scaler.scale();
            return Ok(Decision {
                scalars: StepScalars::skipped(),
                hyper,
                outcome: StepOutcome::Skipped { overflow, lr, loss, loss_scale, next_loss_scale, flags },
            });
        }

        let grad_norm = sum_sq.sqrt() / divisor;
        let max = self.rules.max_grad_norm;
        let clip = if max > 0.0 && grad_norm > max { max / (grad_norm + 1e-6) } else { 1.0 };
        let scalars = StepScalars::new(self.adam_steps + 1, lr, &hyper, clip / divisor);
        // A good step cannot fail.
        let _ = self.scaler.update(false);
        self.adam_steps += 1;
        self.schedule_position += 1;
        Ok(Decision {
            scalars,
            hyper,
            outcome: StepOutcome::Applied { grad_norm, clip, lr, loss, loss_scale, flags },
        })
    }
}

fn unit_name(unit: u64, names: &[String]) -> String {
    let name = usize::try_from(unit).ok().and_then(|u| names.get(u)).cloned();
    name.unwrap_or_else(|| "(unknown)".into())
}
