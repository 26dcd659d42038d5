//! A step.

use std::any::Any;
use std::error::Error;
use std::fmt;
use std::sync::Arc;

use zero_alloc::device::{AnySlice, Device, DeviceKind, Element};
use zero_comm::{PrefetchReport, PrefetchStep, Unsharded};
use zero_shard::UnitLayout;

use crate::StepOutcome;

use super::FrameworkError;
use super::core::Core;
use super::gradients::Grads;
use super::rank_calls::Losses;
use super::values::{Memory, Params};

/// A step: forward and backward of its micro-batches, then [`Self::end`]. If it is dropped before,
/// the run ends on all ranks, since the others wait for this rank's part.
#[must_use = "dropping it ends the run on all ranks"]
pub struct Step<'a, D: Device> {
    pub(super) core: &'a mut Core<D>,
    /// The gathers of stage 3.
    pub(super) gathers: Option<PrefetchStep<'a, D>>,
    pub(super) report: &'a mut PrefetchReport,
    /// Those of earlier micro-batches.
    pub(super) losses: Option<Losses>,
    /// The last error of a call that left the step as it was.
    pub(super) last_error: Option<String>,
}

/// An error of any type.
type Failure = Box<dyn Error + Send + Sync>;

impl<D: Device> fmt::Debug for Step<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Step({} of {:?})", self.core.steps, self.core.rank)
    }
}

/// The parameters of a unit during a call.
enum CallParams<D: Device> {
    Whole(AnySlice, Memory),
    Gathered(Arc<Unsharded<D>>),
}

impl<D: Device> CallParams<D> {
    fn params<'b>(&self, unit: &'b UnitLayout) -> Params<'b> {
        let (flat, memory) = match self {
            Self::Whole(flat, memory) => (*flat, Arc::clone(memory)),
            // SAFETY: it is only read, by the host after the gather, or on the compute stream; the
            // parameters keep the unit.
            Self::Gathered(unit) => (unsafe { unit.slice() }, Arc::clone(unit) as Memory),
        };
        Params { unit, flat, memory }
    }
}

impl<D: Device> Step<'_, D> {
    /// Calls `forward` with the parameters of a unit; at stage 3 they are gathered for the call,
    /// and meanwhile the next unit's. May also be called in backward, to read them again.
    ///
    /// # Errors
    /// There is no such unit; `forward` returned the error, after which the step may go on; a gather
    /// or a stream failed; or tensors outside of the call keep parameters at stage 3.
    pub fn forward<R, E: Into<Failure>>(
        &mut self,
        unit: &str,
        forward: impl FnOnce(&Params<'_>) -> Result<R, E>,
    ) -> Result<R, FrameworkError> {
        let (index, held) = self.hold_for("forward", unit)?;
        let result = forward(&held.params(&self.core.layout.units()[index]));
        self.release(index, held, result)
    }

    /// Calls `backward` with the parameters of a unit and the sink of its gradients. Gradients that
    /// it does not pass are passed to [`Self::grad`].
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn backward<R, E: Into<Failure>>(
        &mut self,
        unit: &str,
        backward: impl FnOnce(&Params<'_>, &mut Grads<'_, D>) -> Result<R, E>,
    ) -> Result<R, FrameworkError> {
        let (index, held) = self.hold_for("backward", unit)?;
        let mut grads = self.core.grads(index);
        let result = backward(&held.params(grads.unit), &mut grads);
        self.release(index, held, result)
    }

    /// Takes the gradient of a parameter by its full name, outside of [`Self::backward`]: for tapes
    /// that return all gradients at once.
    ///
    /// # Errors
    /// As [`Grads::set`].
    pub fn grad<T: Element>(
        &mut self,
        name: &str,
        values: impl Into<Vec<T>>,
    ) -> Result<(), FrameworkError> {
        let set = self.sink(name).and_then(|mut sink| sink.set(name, values));
        set.inspect_err(|error| self.last_error = Some(error.to_string()))
    }

    /// As [`Self::grad`], in memory of the framework, without a copy.
    ///
    /// # Safety
    /// As for [`Grads::set_slice`].
    ///
    /// # Errors
    /// As [`Grads::set`].
    pub unsafe fn grad_slice(
        &mut self,
        name: &str,
        slice: AnySlice,
        owner: impl Any + Send,
    ) -> Result<(), FrameworkError> {
        // SAFETY: the caller's promise.
        let set = |mut sink: Grads<'_, D>| unsafe { sink.set_slice(name, slice, owner) };
        let set = self.sink(name).and_then(set);
        set.inspect_err(|error| self.last_error = Some(error.to_string()))
    }

    fn sink(&mut self, name: &str) -> Result<Grads<'_, D>, FrameworkError> {
        self.core.check()?;
        let index = self.core.param(name)?.unit;
        Ok(self.core.grads(index))
    }

    /// Ends the run on all ranks, for an adapter that finds that the step must not go on, such as a
    /// tensor that still uses parameters: every later call returns `why`, and nothing is updated.
    pub fn fail(&mut self, why: &str) {
        self.core.fail(why);
    }

    /// The factor that the loss is multiplied by before backward; 1 unless the run is in fp16.
    pub fn loss_scale(&self) -> f64 {
        self.core.optim.loss_scale()
    }

    /// Ends a micro-batch with its mean loss (not scaled), before the forward of the next one.
    ///
    /// # Errors
    /// A parameter has no gradient, there are no more micro-batches, or an earlier loss had a
    /// weight; then nothing has changed.
    pub fn next_micro_batch(&mut self, loss: f64) -> Result<(), FrameworkError> {
        self.next(Losses::Means(loss))
    }

    /// As [`Self::next_micro_batch`], for a loss that is a sum of weight `weight`, such as tokens.
    ///
    /// # Errors
    /// As [`Self::next_micro_batch`], but an earlier loss had no weight.
    pub fn next_micro_batch_of(&mut self, loss: f64, weight: f64) -> Result<(), FrameworkError> {
        self.next(Losses::Sums { loss, weight })
    }

    fn next(&mut self, losses: Losses) -> Result<(), FrameworkError> {
        self.core.check()?;
        let losses = self.losses_with(losses)?;
        self.core.gradients.next_micro_batch(&self.core.layout)?;
        self.losses = Some(losses);
        Ok(())
    }

    /// The losses of the step with those of this micro-batch.
    fn losses_with(&self, losses: Losses) -> Result<Losses, FrameworkError> {
        match self.losses {
            None => Ok(losses),
            Some(earlier) => earlier.and(losses),
        }
    }

    /// Ends the step with the mean loss of this rank's last micro-batch (not scaled): statistics,
    /// update, and at stages 1 and 2 the gather. Gradients, and the loss of the outcome, are means
    /// over ranks and micro-batches.
    ///
    /// # Errors
    /// A parameter has no gradient, micro-batches are missing, ranks differ in the order of units,
    /// the learning rate or the kind of losses, or a rank failed: nothing was updated. Or the
    /// update failed. The run has then ended on all ranks.
    pub fn end(self, loss: f64) -> Result<StepOutcome, FrameworkError> {
        self.end_with(Losses::Means(loss))
    }

    /// As [`Self::end`], for losses that are sums: gradients, and the loss of the outcome, are the
    /// sums over ranks and micro-batches, divided by the sum of all weights, such as tokens.
    ///
    /// # Errors
    /// As [`Self::end`], or the weights of all ranks are 0.
    pub fn end_of(self, loss: f64, weight: f64) -> Result<StepOutcome, FrameworkError> {
        self.end_with(Losses::Sums { loss, weight })
    }

    fn end_with(mut self, losses: Losses) -> Result<StepOutcome, FrameworkError> {
        self.core.check()?;
        let losses = self.losses_with(losses);
        if let Some(gathers) = self.gathers.take() {
            *self.report = gathers.end();
        }
        let outcome = self
            .core
            .gradients
            .check_end(&self.core.layout)
            .and(losses)
            .and_then(|losses| self.core.update(losses))
            .map_err(|error| error.at(|| "end of the step".to_owned()));
        let outcome = self.core.or_fail(outcome);
        self.core.in_step = false;
        outcome
    }

    /// Ends a step of validation, without gradients, and returns the mean of `loss` over ranks. It
    /// does not count as a step.
    ///
    /// # Errors
    /// As [`Self::end_without_update`], or a rank failed.
    pub fn end_validation(mut self, loss: f64) -> Result<f64, FrameworkError> {
        self.end_unused()?;
        let mean = self.core.mean(loss);
        self.core.or_fail(mean)
    }

    /// Ends a step without gradients. It does not count as a step.
    ///
    /// # Errors
    /// A gradient has arrived, so that the other ranks wait for an update: the run has then ended
    /// on all ranks.
    pub fn end_without_update(mut self) -> Result<(), FrameworkError> {
        self.end_unused()
    }

    fn end_unused(&mut self) -> Result<(), FrameworkError> {
        self.core.check()?;
        // The order of use stays that of the steps with an update.
        self.gathers = None;
        let none = match self.core.gradients.is_empty() {
            true => Ok(()),
            false => Err(FrameworkError::Setting(
                "a step with gradients ends with an update; call Step::end".into(),
            )),
        };
        let none = self.core.or_fail(none);
        self.core.in_step = false;
        none
    }

    /// The whole parameters of a unit in fp32, in host memory.
    pub(super) fn read_unit(&mut self, index: usize) -> Result<Vec<f32>, FrameworkError> {
        let held = self.hold(index)?;
        let flat = held.params(&self.core.layout.units()[index]).flat;
        let values = self.core.read(flat);
        let values = self.core.or_fail(values);
        self.release(index, held, values)
    }

    fn hold_for(
        &mut self,
        call: &'static str,
        unit: &str,
    ) -> Result<(usize, CallParams<D>), FrameworkError> {
        self.core.check()?;
        let index = self.core.unit(unit)?;
        let held = self.hold(index);
        let held = held.map_err(|error| error.at(|| format!("{call} of {unit}")))?;
        Ok((index, held))
    }

    fn hold(&mut self, index: usize) -> Result<CallParams<D>, FrameworkError> {
        let core = &mut *self.core;
        let Some(gathers) = &mut self.gathers else {
            let ready = core.wait_for_params(index);
            core.or_fail(ready)?;
            let unit = &core.params[index];
            return Ok(CallParams::Whole(unit.held, Arc::clone(&unit.memory)));
        };

        core.gradients.note(true, index);
        let limit = core.rank.limit;
        let is_host = core.rank.pool.device().kind() == DeviceKind::Host;
        let gathered = gathers.unshard(index).map_err(FrameworkError::from);
        let gathered = gathered.and_then(|unit| {
            if is_host {
                unit.synchronize(limit)?;
            }
            Ok(CallParams::Gathered(Arc::new(unit)))
        });
        core.or_fail(gathered)
    }

    /// Ends a use; at stage 3 nothing may keep the unit. Returns `result`, the closure's.
    fn release<R, E: Into<Failure>>(
        &mut self,
        index: usize,
        held: CallParams<D>,
        result: Result<R, E>,
    ) -> Result<R, FrameworkError> {
        let result = result.map_err(FrameworkError::of_closure);
        let result = result.inspect_err(|error| self.last_error = Some(error.to_string()));
        let (CallParams::Gathered(unit), Some(gathers)) = (held, &mut self.gathers) else {
            return result;
        };
        match Arc::try_unwrap(unit) {
            Ok(unit) => {
                gathers.reshard(unit);
                result
            }
            Err(_) => {
                let unit = self.core.layout.units()[index].name.clone();
                let kept = self.core.or_fail(Err(FrameworkError::Kept { unit }));
                result.and(kept)
            }
        }
    }
}

impl<D: Device> Drop for Step<'_, D> {
    fn drop(&mut self) {
        if self.core.in_step {
            let rank = self.core.rank.comm.rank();
            let why = match std::thread::panicking() {
                true => "panicked in a step",
                false => "dropped a step before its end",
            };
            let after = self.last_error.take();
            let after = after.map_or(String::new(), |error| format!(", after: {error}"));
            self.core.fail(&format!("rank {rank} {why}{after}"));
        }
    }
}
