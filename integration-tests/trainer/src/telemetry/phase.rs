//! The phases of a step: the timeline records with each operation the phase in which the host
//! enqueued it.
//!
//! Labels name kernels and collectives, and differ between the host and CUDA; phases name the part
//! of the step that an operation belongs to, on both.

use std::sync::Arc;

use zero_alloc::device::{AnySlice, Device, DeviceSlice};
use zero_alloc::host::{OpSpan, Timeline};

use crate::model::{Grad, Model, ModelError};
use crate::rank::Rank;

/// Kinds of passes, by their position: the first, the last, all others.
const KINDS: usize = 3;
/// Forward of the embedding, a block, the head.
pub(crate) const FORWARD: [&str; KINDS] = ["forward embedding", "forward block", "forward head"];
/// Backward of the embedding, a block, the head.
pub(crate) const BACKWARD: [&str; KINDS] =
    ["backward embedding", "backward block", "backward head"];
/// Zeroing, packing, reducing and storing gradients; gathering parameters.
pub(crate) const GRADIENTS: &str = "gradients";
/// Gradient statistics, their exchange, and the decision.
pub(crate) const DECISION: &str = "decision";
/// The update, and gathering the updated parameters.
pub(crate) const OPTIMIZER: &str = "optimizer";
/// A micro-batch that is replayed as one CUDA graph.
pub(crate) const GRAPH: &str = "graph";
/// Reading a batch and copying it to the device.
pub(crate) const DATA: &str = "data";
/// Copying the state for a checkpoint, and exchanging its receipts.
pub(crate) const CHECKPOINT: &str = "checkpoint";
/// The loss on the validation data.
pub(crate) const VALIDATION: &str = "validation";

/// Runs `work` on the host in `phase`, and records its span on the track `rank N host` of the
/// timeline.
pub(crate) fn run_in<D: Device, R>(
    rank: &Rank<D>,
    phase: &'static str,
    work: impl FnOnce() -> R,
) -> R {
    let Rank { timeline, comm, .. } = rank;
    let (before, start) = (timeline.set_phase(phase), timeline.now());
    let result = work();
    timeline.set_phase(before);
    let stream = host_track(comm.rank());
    timeline.push(OpSpan::new(phase, stream, start, timeline.now()).phase(phase));
    result
}

/// The name of the track of host work.
pub(crate) fn host_track(rank: usize) -> Arc<str> {
    format!("rank {rank} host").into()
}

/// A model whose passes set their phase.
pub(crate) struct Phased<'a, D: Device> {
    pub(crate) model: &'a mut dyn Model<D>,
    pub(crate) timeline: &'a Timeline,
    /// The number of passes.
    pub(crate) passes: usize,
}

impl<D: Device> Phased<'_, D> {
    fn run<R>(
        &mut self,
        phases: [&'static str; KINDS],
        pass: usize,
        run: impl FnOnce(&mut dyn Model<D>) -> R,
    ) -> R {
        let kind = if pass + 1 == self.passes {
            2
        } else {
            pass.min(1)
        };
        let before = self.timeline.set_phase(phases[kind]);
        // The passes of an evaluation are in its phase.
        if before == VALIDATION {
            self.timeline.set_phase(before);
        }
        let result = run(self.model);
        self.timeline.set_phase(before);
        result
    }
}

impl<D: Device> Model<D> for Phased<'_, D> {
    fn set_batch(
        &mut self,
        stream: &D::Stream,
        inputs: &[u32],
        targets: &[u32],
    ) -> Result<(), ModelError> {
        self.model.set_batch(stream, inputs, targets)
    }

    fn forward(
        &mut self,
        stream: &D::Stream,
        pass: usize,
        params: &[AnySlice],
    ) -> Result<(), ModelError> {
        self.run(FORWARD, pass, |model| model.forward(stream, pass, params))
    }

    fn backward(
        &mut self,
        stream: &D::Stream,
        pass: usize,
        params: &[AnySlice],
        grads: &[Grad],
        loss_scale: DeviceSlice<f64>,
    ) -> Result<(), ModelError> {
        self.run(BACKWARD, pass, |model| {
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

    unsafe fn loss(&self) -> DeviceSlice<f64> {
        // SAFETY: the caller's promise.
        unsafe { self.model.loss() }
    }
}
