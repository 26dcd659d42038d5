//! A step.

use std::any::Any;
use std::error::Error;
use std::fmt;
use std::sync::Arc;

use zero_alloc::device::{AnySlice, Device, DeviceKind, Element};
use zero_comm::{PrefetchReport, PrefetchStep, Unsharded};
use zero_shard::{ParamId, UnitLayout};

use crate::StepOutcome;

use super::FrameworkError;
use super::core::{Core, Paused};
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

/// A unit that a step has made whole, until it is passed to [`Step::reshard`]. Dropping it frees
/// gathered parameters, too, but then no later use of the step can have them.
#[must_use = "pass it to Step::reshard"]
pub struct HeldUnit<D: Device> {
    index: usize,
    /// The number of the step.
    step: u64,
    params: CallParams<D>,
}

impl<D: Device> fmt::Debug for HeldUnit<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HeldUnit({})", self.index)
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
        let held = self.hold_for("forward", unit)?;
        let result = forward(&held.params.params(&self.core.layout.units()[held.index]));
        self.release(held, result)
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
        let held = self.hold_for("backward", unit)?;
        let mut grads = self.core.grads(held.index);
        let result = backward(&held.params.params(grads.unit), &mut grads);
        self.release(held, result)
    }

    /// Makes a unit whole until [`Self::reshard`], for a framework whose forward and backward are
    /// hooks instead of closures.
    ///
    /// # Errors
    /// There is no such unit, or a gather or a stream failed.
    pub fn unshard(&mut self, unit: &str) -> Result<HeldUnit<D>, FrameworkError> {
        self.hold_for("unshard", unit)
    }

    /// The parameters of a unit that this step has made whole.
    ///
    /// # Errors
    /// Another step has made it whole: its parameters may be old.
    pub fn params<'b>(&'b self, held: &'b HeldUnit<D>) -> Result<Params<'b>, FrameworkError> {
        let unit = &self.core.layout.units()[held.index];
        if held.step != self.core.begun {
            let unit = unit.name.clone();
            return Err(FrameworkError::Old { unit });
        }
        Ok(held.params.params(unit))
    }

    /// Ends a use of a unit. At stage 3 its memory is freed behind what the compute stream does with
    /// it.
    ///
    /// # Errors
    /// Tensors keep its parameters at stage 3.
    pub fn reshard(&mut self, held: HeldUnit<D>) -> Result<(), FrameworkError> {
        self.release(held, Ok::<_, FrameworkError>(()))
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

    /// Declares that a parameter gets no gradient in this micro-batch, as one that the loss does not
    /// depend on: it counts as zeros, without memory for them. On other ranks it may have one.
    ///
    /// # Errors
    /// There is no such parameter, or a stream failed.
    pub fn unused(&mut self, name: &str) -> Result<(), FrameworkError> {
        let id = self.named(name)?;
        self.core.grads(id.unit).leave_out(id.param)
    }

    fn named(&mut self, name: &str) -> Result<ParamId, FrameworkError> {
        self.core.check()?;
        self.core.param(name)
    }

    fn sink(&mut self, name: &str) -> Result<Grads<'_, D>, FrameworkError> {
        let unit = self.named(name)?.unit;
        Ok(self.core.grads(unit))
    }

    /// Keeps the step open without the guard, for a program that cannot borrow [`Zero`](super::Zero)
    /// until the end of the step. [`Zero::open_step`](super::Zero::open_step) goes on with it. A
    /// `Zero` that is dropped with an open step ends the run on all ranks.
    pub fn pause(mut self) {
        self.core.paused = Some(Paused {
            losses: self.losses.take(),
            last_error: self.last_error.take(),
        });
        if let Some(gathers) = self.gathers.take() {
            gathers.pause();
        }
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
        let core = &mut *self.core;
        core.gradients.next_micro_batch(&core.rank, &core.layout)?;
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
        let core = &mut *self.core;
        let outcome = core
            .gradients
            .end_micro_batches(&core.rank, &core.layout)
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
        let flat = held.params.params(&self.core.layout.units()[index]).flat;
        let values = self.core.read(flat);
        let values = self.core.or_fail(values);
        self.release(held, values)
    }

    fn hold_for(&mut self, call: &'static str, unit: &str) -> Result<HeldUnit<D>, FrameworkError> {
        self.core.check()?;
        let index = self.core.unit(unit)?;
        let held = self.hold(index);
        held.map_err(|error| error.at(|| format!("{call} of {unit}")))
    }

    fn hold(&mut self, index: usize) -> Result<HeldUnit<D>, FrameworkError> {
        Ok(HeldUnit {
            index,
            step: self.core.begun,
            params: self.call_params(index)?,
        })
    }

    fn call_params(&mut self, index: usize) -> Result<CallParams<D>, FrameworkError> {
        let core = &mut *self.core;
        let Some(gathers) = &mut self.gathers else {
            let ready = core
                .wait_for_params(index)
                .and_then(|()| core.gradients.free());
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
            core.gradients.free()?;
            Ok(CallParams::Gathered(Arc::new(unit)))
        });
        core.or_fail(gathered)
    }

    /// Ends a use; at stage 3 nothing may keep the unit. Returns `result`, the closure's.
    fn release<R, E: Into<Failure>>(
        &mut self,
        held: HeldUnit<D>,
        result: Result<R, E>,
    ) -> Result<R, FrameworkError> {
        let result = result.map_err(FrameworkError::of_closure);
        let result = result.inspect_err(|error| self.last_error = Some(error.to_string()));
        let HeldUnit { index, params, .. } = held;
        let (CallParams::Gathered(unit), Some(gathers)) = (params, &mut self.gathers) else {
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
        if self.core.in_step && self.core.paused.is_none() {
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
