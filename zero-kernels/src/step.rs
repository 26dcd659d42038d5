//! The decision of a step as plain data, for a device that must not wait for the host: votes, settings and state in,
//! scalars out. Kernel twin: cuda/step.cu, the same structs and the same operations in the same order.
//!
//! zero-optim decides on the host with names, schedules and errors; its tests hold it to [`decide_step`], bit for
//! bit. Here the learning rates and betas of coming steps lie in a table, since only the device knows which steps were
//! skipped, and a run that cannot go on is *halted*: every later step is skipped until the host has looked. What
//! became of a step is told in a [`StepReport`], in a ring that the host reads when it likes.

use crate::{GradStats, StepScalars};

/// What a rank tells all others before a step. Plain bytes, to travel by all-gather.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct RankStats {
    /// Sum of squares of the gradients that the rank votes for: its units' sums, added in order.
    pub sum_sq: f64,
    /// How many of them are not finite.
    pub nonfinite: u64,
    /// The first unit that has such; [`RankStats::NO_UNIT`] if none.
    pub first_bad_unit: u64,
    /// This rank's part of the loss, whatever the caller sums over ranks.
    pub loss: f64,
    /// Whatever else the caller's ranks tell one another: of each bit all learn whether any and whether all have set
    /// it.
    pub flags: u64,
}

impl RankStats {
    /// No unit is bad.
    pub const NO_UNIT: u64 = u64::MAX;

    /// The vote of a rank from the statistics of its units, in order; without flags.
    pub fn new(units: &[GradStats], loss: f64) -> Self {
        let mut vote = Self { sum_sq: 0.0, nonfinite: 0, first_bad_unit: Self::NO_UNIT, loss, flags: 0 };
        for (unit, stats) in units.iter().enumerate() {
            vote.sum_sq += stats.sum_sq;
            vote.nonfinite += stats.nonfinite;
            if stats.nonfinite > 0 && vote.first_bad_unit == Self::NO_UNIT {
                vote.first_bad_unit = unit as u64;
            }
        }
        vote
    }

    /// Whether the step must be skipped.
    pub fn is_bad(&self) -> bool {
        self.nonfinite > 0 || !self.sum_sq.is_finite()
    }
}

/// What does not change from step to step.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct StepSettings {
    /// Gradients of a greater norm are scaled down to it; 0: off.
    pub max_grad_norm: f64,
    /// The loss scale never goes below.
    pub min_scale: f64,
    /// Good steps in a row until the loss scale doubles; at least 1.
    pub window: u64,
    /// Micro-batches summed in a step.
    pub micro_batches: u64,
    /// The schedule's position of the first rates in the table.
    pub first_position: u64,
    /// Not 0: the loss scale moves.
    pub dynamic: u32,
    /// Overflows until the loss scale halves; at least 1.
    pub hysteresis: u32,
    /// Not 0: every good step refills the hysteresis.
    pub consecutive_hysteresis: u32,
    /// Not 0: an overflow at the minimum scale halts the run.
    pub fail_at_min: u32,
}

/// What the schedule says for one of its positions.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct StepRates {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
}

/// What moves from step to step.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct StepState {
    /// The scale of the next backward.
    pub loss_scale: f64,
    /// Steps decided.
    pub iteration: u64,
    /// Iteration after the last overflow; 0 before the first.
    pub since: u64,
    /// Steps applied.
    pub adam_steps: u64,
    /// Position of the learning-rate schedule.
    pub schedule_position: u64,
    /// Steps skipped.
    pub skipped_steps: u64,
    /// Overflows still endured, plus one.
    pub hysteresis_left: u32,
    /// [`StepState::RUNNING`], [`StepState::AT_MINIMUM`] or [`StepState::NO_RATE`].
    pub halted: u32,
}

impl StepState {
    /// `halted`: the run goes on.
    pub const RUNNING: u32 = 0;
    /// `halted`: gradients overflowed with the loss scale at its minimum.
    pub const AT_MINIMUM: u32 = 1;
    /// `halted`: the schedule's position is outside the table of rates.
    pub const NO_RATE: u32 = 2;
}

/// What became of a step, for the host to read when it likes. The step at which a run is halted has a report; later
/// ones have none.
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct StepReport {
    /// Norm of the mean gradient before clipping; 0 if skipped.
    pub grad_norm: f64,
    /// What clipping multiplied it with; 0 if skipped.
    pub clip: f64,
    /// The learning rate.
    pub lr: f64,
    /// Sum of the votes' losses.
    pub loss: f64,
    /// The bits that any vote's flags have.
    pub flags_any: u64,
    /// The bits that all votes' flags have.
    pub flags_all: u64,
    /// The scale that the backward used.
    pub loss_scale: f64,
    /// Elements that are not finite, over all ranks.
    pub nonfinite: u64,
    /// The first rank that saw such; `u64::MAX` if none.
    pub bad_rank: u64,
    /// The first unit there; `u64::MAX` if none.
    pub bad_unit: u64,
    /// The scale of the next backward.
    pub next_loss_scale: f64,
    /// Steps decided before this one.
    pub iteration: u64,
    /// Not 0: Adam's update was skipped.
    pub skipped: u32,
    /// What halted the run at this step: [`StepState::AT_MINIMUM`], [`StepState::NO_RATE`], or 0.
    pub halted: u32,
}

const _: () = assert!(size_of::<RankStats>() == 40 && size_of::<StepSettings>() == 56);
const _: () = assert!(size_of::<StepState>() == 56 && size_of::<StepReport>() == 104 && size_of::<StepRates>() == 24);

/// `base` to the power of `exponent` by squaring, from the highest bit down: the same products, so the same bits, on
/// every machine and device (a library's `pow` differs in the last place).
pub fn power(base: f64, exponent: u64) -> f64 {
    let mut result = 1.0;
    for bit in (0..u64::BITS - exponent.leading_zeros()).rev() {
        result *= result;
        if exponent >> bit & 1 == 1 {
            result *= base;
        }
    }
    result
}

/// Decides the next step from the votes of all ranks. `None` in place of a report: the run was halted before.
///
/// As in the kernel, the scale of the backward is the state's: it moves only here, after the gradients' step. `rates`
/// holds those of the schedule's positions from `first_position` on.
pub fn decide_step(
    votes: &[RankStats],
    settings: &StepSettings,
    rates: &[StepRates],
    state: &mut StepState,
) -> (StepScalars, Option<StepReport>) {
    let skipped = StepScalars::skipped();
    if state.halted != StepState::RUNNING {
        return (skipped, None);
    }
    let sum_sq = votes.iter().fold(0.0, |sum, v| sum + v.sum_sq);
    let bad_rank = votes.iter().position(RankStats::is_bad);
    let mut report = StepReport {
        loss: votes.iter().fold(0.0, |sum, v| sum + v.loss),
        flags_any: votes.iter().fold(0, |any, v| any | v.flags),
        flags_all: votes.iter().fold(u64::MAX, |all, v| all & v.flags),
        loss_scale: state.loss_scale,
        nonfinite: votes.iter().map(|v| v.nonfinite).sum(),
        bad_rank: bad_rank.map_or(u64::MAX, |r| r as u64),
        bad_unit: bad_rank.map_or(u64::MAX, |r| votes[r].first_bad_unit),
        iteration: state.iteration,
        skipped: 1,
        ..StepReport::default()
    };
    let position = state.schedule_position.checked_sub(settings.first_position);
    let rates = position.and_then(|p| rates.get(usize::try_from(p).ok()?));
    let mut scalars = skipped;
    if let Some(rates) = rates {
        report.lr = rates.lr;
        if bad_rank.is_some() {
            if update_scale(settings, state, true) {
                state.skipped_steps += 1;
            } else {
                state.halted = StepState::AT_MINIMUM;
            }
        } else {
            let divisor = state.loss_scale * votes.len() as f64 * settings.micro_batches as f64;
            let (grad_norm, max) = (sum_sq.sqrt() / divisor, settings.max_grad_norm);
            let clip = if max > 0.0 && grad_norm > max { max / (grad_norm + 1e-6) } else { 1.0 };
            let t = state.adam_steps + 1;
            scalars = StepScalars::with_rates(t, rates, clip / divisor);
            (report.grad_norm, report.clip, report.skipped) = (grad_norm, clip, 0);
            update_scale(settings, state, false);
            state.adam_steps += 1;
            state.schedule_position += 1;
        }
    } else {
        state.halted = StepState::NO_RATE;
    }
    (report.next_loss_scale, report.halted) = (state.loss_scale, state.halted);
    (scalars, Some(report))
}

/// Counts a step by DeepSpeed's rules; false at the minimum scale, where nothing has changed.
fn update_scale(settings: &StepSettings, state: &mut StepState, overflow: bool) -> bool {
    if settings.dynamic == 0 {
        state.iteration += 1;
        return true;
    }
    if overflow {
        if state.hysteresis_left > 1 {
            state.hysteresis_left -= 1;
        } else if state.loss_scale <= settings.min_scale && settings.fail_at_min != 0 {
            return false;
        } else {
            state.loss_scale = (state.loss_scale * 0.5).max(settings.min_scale);
        }
        state.since = state.iteration + 1;
    } else {
        let good = state.iteration - state.since;
        let grows = good > 0 && good.is_multiple_of(settings.window);
        if settings.consecutive_hysteresis != 0 || grows {
            state.hysteresis_left = settings.hysteresis;
        }
        if grows {
            state.loss_scale *= 2.0;
        }
    }
    state.iteration += 1;
    true
}

#[cfg(test)]
mod tests {
    use super::power;

    #[test]
    #[cfg_attr(miri, ignore = "Miri's powf is inexact on purpose")]
    fn powers_are_near_the_librarys() {
        for base in [0.9, 0.999, 0.95, 0.0, 1.0] {
            for t in (0..if cfg!(miri) { 5 } else { 200 }).chain([1000, 12345, 1 << 20, u64::MAX]) {
                let (ours, theirs): (f64, f64) = (power(base, t), base.powf(t as f64));
                // Each squaring doubles the relative error so far: about t roundings.
                let bound = t as f64 * f64::EPSILON * theirs;
                assert!(
                    (ours - theirs).abs() <= bound.min(1.0) + f64::MIN_POSITIVE,
                    "{base}^{t}: {ours} and {theirs}"
                );
            }
        }
    }
}
