//! Sets the phase of what the host enqueues: of a model's passes, and of work of the host.

use zero_alloc::device::{AnySlice, Device, DeviceSlice};
use zero_alloc::host::{OpSpan, Timeline};

use crate::batch::Batch;
use crate::model::{Grad, Model, ModelError};
use crate::rank::Rank;
use crate::telemetry::phase::{Phase, UnitKind, host_track};

/// Runs `work` on the host in `phase`, and records its span on the track `rank N host` of the
/// timeline.
pub(crate) fn run_in<D: Device, R>(rank: &Rank<D>, phase: Phase, work: impl FnOnce() -> R) -> R {
    let Rank { timeline, comm, .. } = rank;
    let before = timeline.set_phase(phase.name());
    let start = timeline.now();

    let result = work();

    timeline.set_phase(before);
    let track = host_track(comm.rank());
    let span = OpSpan::new(phase.name(), track, start, timeline.now());
    timeline.push(span.phase(phase.name()));
    result
}

/// A model whose passes set their phase.
pub(crate) struct Phased<'a, D: Device> {
    model: &'a mut dyn Model<D>,
    timeline: &'a Timeline,
    /// The number of passes.
    passes: usize,
}

impl<'a, D: Device> Phased<'a, D> {
    pub(crate) fn new(model: &'a mut dyn Model<D>, rank: &'a Rank<D>) -> Self {
        Self {
            model,
            timeline: &rank.timeline,
            passes: rank.passes.len(),
        }
    }

    fn run<R>(
        &mut self,
        phase: fn(UnitKind) -> Phase,
        pass: usize,
        run: impl FnOnce(&mut dyn Model<D>) -> R,
    ) -> R {
        let phase = phase(UnitKind::of(pass, self.passes));
        let before = self.timeline.set_phase(phase.name());
        // The passes of an evaluation are in its phase.
        if before == Phase::Validation.name() {
            self.timeline.set_phase(before);
        }
        let result = run(self.model);
        self.timeline.set_phase(before);
        result
    }
}

// SAFETY: every call is the wrapped model's.
unsafe impl<D: Device> Model<D> for Phased<'_, D> {
    fn set_batch(&mut self, stream: &D::Stream, batch: &Batch) -> Result<(), ModelError> {
        self.model.set_batch(stream, batch)
    }

    fn forward(
        &mut self,
        stream: &D::Stream,
        pass: usize,
        params: &[AnySlice],
    ) -> Result<(), ModelError> {
        self.run(Phase::Forward, pass, |model| {
            model.forward(stream, pass, params)
        })
    }

    fn backward(
        &mut self,
        stream: &D::Stream,
        pass: usize,
        params: &[AnySlice],
        grads: &[Grad],
        loss_scale: DeviceSlice<f64>,
    ) -> Result<(), ModelError> {
        self.run(Phase::Backward, pass, |model| {
            model.backward(stream, pass, params, grads, loss_scale)
        })
    }

    fn writes_grad(&self, pass: usize, unit: usize) -> bool {
        self.model.writes_grad(pass, unit)
    }

    fn add_losses(
        &mut self,
        stream: &D::Stream,
        params: &[AnySlice],
        tokens: usize,
    ) -> Result<(), ModelError> {
        self.model.add_losses(stream, params, tokens)
    }

    fn token_logits(
        &mut self,
        stream: &D::Stream,
        params: &[AnySlice],
        token: usize,
    ) -> Result<AnySlice, ModelError> {
        self.model.token_logits(stream, params, token)
    }

    unsafe fn loss(&self) -> DeviceSlice<f64> {
        // SAFETY: the caller's promise.
        unsafe { self.model.loss() }
    }
}
