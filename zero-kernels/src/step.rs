//! The rules of a step: gradient norm, clipping, overflow, loss scale and step counts, as plain
//! data and arithmetic.
//!
//! [`advance_step`] is the only Rust version; zero-optim calls it on the host. The kernel in
//! cuda/step.cu has the same structs and the same operations in the same order, so its results are
//! equal bit for bit, and a step on a GPU needs no host wait. With `S` the loss scale of the step's
//! backward, `N` ranks and `A` micro-batches:
//!
//! ```text
//! grad_norm  = sqrt(sum over ranks of sum_sq) / (S * N * A)
//! clip       = max_grad_norm / (grad_norm + 1e-6)  if grad_norm > max_grad_norm, else 1
//! grad_scale = clip / (S * N * A)
//! ```
//!
//! A divisor of the caller replaces `N * A`. Parameter groups share all of
//! this; each set of rates has its own [`StepScalars`].
//!
//! A non-finite gradient on any rank skips the step on all ranks. The loss scale follows
//! DeepSpeed's `DynamicLossScaler` (0.19.8):
//!
//! - **overflow**: at hysteresis 1 the scale halves, but not below the minimum; a higher hysteresis
//!   decreases by one. With a hysteresis of 0 in the settings the scale never halves.
//! - **good step**: after `window` good steps since the last overflow, and every `window` after
//!   that, the scale doubles and the hysteresis is reset. With `consecutive_hysteresis` every good
//!   step resets it.
//!
//! The scale changes only here, after the gradients that used it were applied. DeepSpeed #2686 was
//! a scale that changed between backward and step.

/// Scalars of a step that a rule computes.
pub const RULE_SCALARS: usize = 6;

/// Sum of squares and non-finite count of a gradient. The gradient is still scaled and summed over
/// ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct GradStats {
    /// Sum of squares of the finite elements, in fp64, in an order fixed by the length alone.
    pub sum_sq: f64,
    /// Elements that are infinite or NaN.
    pub nonfinite: u64,
}

/// The scalars of a step's launches. They are in device memory, so that a step needs no host wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct StepScalars {
    /// Factor of every gradient: clip / (loss_scale x ranks x micro-batches).
    pub grad_scale: f32,
    /// [`UpdateRule::scalars`](crate::UpdateRule::scalars).
    pub of_rule: [f32; RULE_SCALARS],
    /// Nonzero if the step is skipped: the launches write nothing.
    pub skip: u32,
}

impl StepScalars {
    /// The scalars of a step that is not skipped.
    pub fn new(grad_scale: f64, of_rule: [f32; RULE_SCALARS]) -> Self {
        Self {
            grad_scale: grad_scale as f32,
            of_rule,
            skip: 0,
        }
    }

    /// The scalars of a skipped step.
    pub fn skipped() -> Self {
        Self {
            skip: 1,
            ..Self::default()
        }
    }
}

/// A rank's contribution to a step: gradient statistics of its shards, loss and flags. Plain bytes
/// for an all-gather.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct RankStats {
    /// Sum of squares over the rank's shards, added in unit order.
    pub sum_sq: f64,
    /// Non-finite elements of the rank's shards.
    pub nonfinite: u64,
    /// The first unit with a non-finite element; [`RankStats::NO_UNIT`] if all are finite.
    pub first_bad_unit: u64,
    /// The rank's part of the loss; parts are summed over ranks.
    pub loss: f64,
    /// Bits defined by the caller, reduced over ranks by OR and by AND.
    pub flags: u64,
}

impl RankStats {
    /// No unit has a non-finite element.
    pub const NO_UNIT: u64 = u64::MAX;

    /// Combines the statistics of a rank's units, in order, with its loss. The flags are 0.
    pub fn new(units: &[GradStats], loss: f64) -> Self {
        let mut stats = Self {
            sum_sq: 0.0,
            nonfinite: 0,
            first_bad_unit: Self::NO_UNIT,
            loss,
            flags: 0,
        };
        for (unit, of_unit) in units.iter().enumerate() {
            stats.sum_sq += of_unit.sum_sq;
            stats.nonfinite += of_unit.nonfinite;
            if of_unit.nonfinite > 0 && stats.first_bad_unit == Self::NO_UNIT {
                stats.first_bad_unit = unit as u64;
            }
        }
        stats
    }

    /// Whether the step must be skipped.
    pub(crate) fn is_bad(&self) -> bool {
        self.nonfinite > 0 || !self.sum_sq.is_finite()
    }
}

/// Settings that no step changes.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct StepConfig {
    /// Gradients with a greater norm are scaled down to this norm; 0 disables clipping.
    pub max_grad_norm: f64,
    /// The minimum loss scale.
    pub min_scale: f64,
    /// Good steps in a row until the loss scale doubles; at least 1.
    pub window: u64,
    /// Micro-batches summed in a step.
    pub micro_batches: u64,
    /// The schedule position of the first entry in the table of rates.
    pub first_position: u64,
    /// Nonzero if the loss scale is dynamic.
    pub dynamic: u32,
    /// Overflows until the loss scale halves; with 0 it never does.
    pub hysteresis: u32,
    /// Nonzero if every good step resets the hysteresis.
    pub consecutive_hysteresis: u32,
    /// Nonzero if an overflow at the minimum scale halts the run.
    pub fail_at_min: u32,
    /// The sums of gradients over ranks are divided by this, for example the step's tokens; 0: by
    /// ranks x micro-batches.
    pub divisor: f64,
}

/// What the launches of one set of scalars read at one position of the schedule.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct StepRates {
    /// Learning rate of the step.
    pub lr: f64,
    /// The scalars of the update rule ([`UpdateRule::scalars`](crate::UpdateRule::scalars)).
    pub of_rule: [f32; RULE_SCALARS],
}

/// The state that a step updates.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct StepState {
    /// The scale of the next backward.
    pub loss_scale: f64,
    /// Steps so far, skipped ones included.
    pub iteration: u64,
    /// The iteration after the last overflow; 0 before the first.
    pub since: u64,
    /// Steps applied: the update rule's `t` before the next step.
    pub adam_steps: u64,
    /// Position of the learning-rate schedule.
    pub schedule_position: u64,
    /// Steps that were skipped, of all so far.
    pub skipped_steps: u64,
    /// Overflows until the scale halves.
    pub hysteresis_left: u32,
    /// [`StepState::RUNNING`], [`StepState::AT_MINIMUM`] or [`StepState::NO_RATE`].
    pub halted: u32,
}

impl StepState {
    /// `halted`: the run is not halted.
    pub const RUNNING: u32 = 0;
    /// `halted`: gradients overflowed with the loss scale at its minimum.
    pub const AT_MINIMUM: u32 = 1;
    /// `halted`: the schedule's position is outside the table of rates.
    pub const NO_RATE: u32 = 2;

    /// The state before the first step.
    pub fn new(loss_scale: f64, hysteresis: u32) -> Self {
        Self {
            loss_scale,
            hysteresis_left: hysteresis,
            halted: Self::RUNNING,
            ..bytemuck::Zeroable::zeroed()
        }
    }

    /// Counts a step and updates the loss scale. Returns false, with nothing changed, if gradients
    /// overflowed at the minimum scale and [`StepConfig::fail_at_min`] is set.
    pub fn count_step(&mut self, config: &StepConfig, overflow: bool) -> bool {
        if config.dynamic != 0 {
            if overflow {
                if config.hysteresis == 0 {
                    // DeepSpeed's counter starts at 0 and only falls, so it never gets to 1.
                } else if self.hysteresis_left > 1 {
                    self.hysteresis_left -= 1;
                } else if self.loss_scale <= config.min_scale && config.fail_at_min != 0 {
                    return false;
                } else {
                    self.loss_scale = (self.loss_scale * 0.5).max(config.min_scale);
                }
                self.since = self.iteration + 1;
            } else {
                let good_steps = self.iteration - self.since;
                let grows = good_steps > 0 && good_steps.is_multiple_of(config.window);
                if config.consecutive_hysteresis != 0 || grows {
                    self.hysteresis_left = config.hysteresis;
                }
                if grows {
                    self.loss_scale *= 2.0;
                }
            }
        }

        self.iteration += 1;
        if overflow {
            self.skipped_steps += 1;
        } else {
            self.adam_steps += 1;
            self.schedule_position += 1;
        }

        true
    }
}

/// The record of one step. The kernel writes it to a ring, and the host reads it later. The step
/// that halts a run writes a record; later steps write none.
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct StepRecord {
    /// Norm of the mean gradient before clipping; 0 if skipped.
    pub grad_norm: f64,
    /// Clipping factor; 0 if skipped.
    pub clip: f64,
    /// The learning rate.
    pub lr: f64,
    /// Sum of the ranks' losses.
    pub loss: f64,
    /// OR of the ranks' flags.
    pub flags_any: u64,
    /// AND of the ranks' flags.
    pub flags_all: u64,
    /// The scale that the backward used.
    pub loss_scale: f64,
    /// Non-finite elements over all ranks.
    pub nonfinite: u64,
    /// The first rank with a non-finite gradient; `u64::MAX` if all are finite.
    pub bad_rank: u64,
    /// The first unit with a non-finite gradient on that rank; `u64::MAX` if all are finite.
    pub bad_unit: u64,
    /// The scale of the next backward.
    pub next_loss_scale: f64,
    /// Steps before this one, skipped ones included.
    pub iteration: u64,
    /// Nonzero if the update was skipped.
    pub skipped: u32,
    /// The reason why this step halted the run ([`StepState::AT_MINIMUM`], [`StepState::NO_RATE`]),
    /// or 0.
    pub halted: u32,
}

const _: () = assert!(size_of::<RankStats>() == 40 && size_of::<StepConfig>() == 64);
const _: () = assert!(
    size_of::<StepState>() == 56 && size_of::<StepRecord>() == 104 && size_of::<StepRates>() == 32
);

impl StepConfig {
    /// The factor by which the sum of all ranks' gradients exceeds their mean.
    fn divisor(&self, loss_scale: f64, ranks: usize) -> f64 {
        if self.divisor > 0.0 {
            loss_scale * self.divisor
        } else {
            loss_scale * ranks as f64 * self.micro_batches as f64
        }
    }

    /// The factor that clips a gradient of this norm.
    fn clip(&self, grad_norm: f64) -> f64 {
        let max = self.max_grad_norm;
        if max > 0.0 && grad_norm > max {
            max / (grad_norm + 1e-6)
        } else {
            1.0
        }
    }
}

/// Advances `state` by one step, given the statistics of all ranks in rank order, and writes the
/// `scalars` of the step's updates. Returns the step's record, or `None` if the run was
/// halted before.
///
/// `rates` holds the schedule's values from [`StepConfig::first_position`] on, since only the state
/// records which steps were skipped: for each position one entry for each element of `scalars`. The
/// first is that of the record's learning rate. Outside this table, and on an overflow at the
/// minimum scale, the run is *halted*: this step and all later ones are skipped.
pub fn advance_step(
    ranks: &[RankStats],
    config: &StepConfig,
    rates: &[StepRates],
    state: &mut StepState,
    scalars: &mut [StepScalars],
) -> Option<StepRecord> {
    scalars.fill(StepScalars::skipped());
    if state.halted != StepState::RUNNING {
        return None;
    }

    let sum_sq = ranks.iter().fold(0.0, |sum, r| sum + r.sum_sq);
    let bad_rank = ranks.iter().position(RankStats::is_bad);
    let mut record = StepRecord {
        loss: ranks.iter().fold(0.0, |sum, r| sum + r.loss),
        flags_any: ranks.iter().fold(0, |any, r| any | r.flags),
        flags_all: ranks.iter().fold(u64::MAX, |all, r| all & r.flags),
        loss_scale: state.loss_scale,
        nonfinite: ranks.iter().map(|r| r.nonfinite).sum(),
        bad_rank: bad_rank.map_or(u64::MAX, |r| r as u64),
        bad_unit: bad_rank.map_or(u64::MAX, |r| ranks[r].first_bad_unit),
        iteration: state.iteration,
        skipped: 1,
        ..StepRecord::default()
    };

    let index = state.schedule_position.checked_sub(config.first_position);
    let now = index.and_then(|i| {
        rates
            .chunks_exact(scalars.len().max(1))
            .nth(usize::try_from(i).ok()?)
    });

    if let Some(now) = now {
        record.lr = now[0].lr;
        if bad_rank.is_some() {
            if !state.count_step(config, true) {
                state.halted = StepState::AT_MINIMUM;
            }
        } else {
            let divisor = config.divisor(state.loss_scale, ranks.len());
            let grad_norm = sum_sq.sqrt() / divisor;
            let clip = config.clip(grad_norm);
            for (scalars, rates) in scalars.iter_mut().zip(now) {
                *scalars = StepScalars::new(clip / divisor, rates.of_rule);
            }
            record.grad_norm = grad_norm;
            record.clip = clip;
            record.skipped = 0;
            state.count_step(config, false);
        }
    } else {
        state.halted = StepState::NO_RATE;
    }

    record.next_loss_scale = state.loss_scale;
    record.halted = state.halted;
    Some(record)
}
