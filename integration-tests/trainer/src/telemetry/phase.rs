//! The phases of a step: the timeline records with each operation the phase in which the host
//! enqueued it.
//!
//! Labels name kernels and collectives, and differ between the host and CUDA; phases name the part
//! of the step that an operation belongs to, on both.

use std::sync::Arc;

use zero_alloc::device::{AnySlice, Device, DeviceSlice};
use zero_alloc::host::{OpSpan, Timeline};

use crate::batch::Batch;
use crate::model::{Grad, Model, ModelError};
use crate::rank::Rank;

/// Kinds of units, by the position of their pass: the first, the last, all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum UnitKind {
    Embedding,
    Block,
    Head,
}

impl UnitKind {
    pub(crate) const ALL: [Self; 3] = [Self::Embedding, Self::Block, Self::Head];

    /// The kind of the unit of pass `pass` of `passes`.
    fn of(pass: usize, passes: usize) -> Self {
        match pass {
            _ if pass + 1 == passes => Self::Head,
            0 => Self::Embedding,
            _ => Self::Block,
        }
    }
}

/// A part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Forward(UnitKind),
    Backward(UnitKind),
    /// Zeroing, packing, reducing and storing gradients; gathering parameters.
    Gradients,
    /// Gradient statistics, their exchange, and the decision.
    Decision,
    /// The update, and gathering the updated parameters.
    Optimizer,
    /// A micro-batch that is replayed as one CUDA graph.
    Graph,
    /// Reading a batch and copying it to the device.
    Data,
    /// Copying the state for a checkpoint, and exchanging its receipts.
    Checkpoint,
    /// The loss on the validation data.
    Validation,
}

impl Phase {
    const ALL: [Self; 13] = [
        Self::Forward(UnitKind::Embedding),
        Self::Forward(UnitKind::Block),
        Self::Forward(UnitKind::Head),
        Self::Backward(UnitKind::Embedding),
        Self::Backward(UnitKind::Block),
        Self::Backward(UnitKind::Head),
        Self::Gradients,
        Self::Decision,
        Self::Optimizer,
        Self::Graph,
        Self::Data,
        Self::Checkpoint,
        Self::Validation,
    ];

    /// Its name in the timeline.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Forward(UnitKind::Embedding) => "forward embedding",
            Self::Forward(UnitKind::Block) => "forward block",
            Self::Forward(UnitKind::Head) => "forward head",
            Self::Backward(UnitKind::Embedding) => "backward embedding",
            Self::Backward(UnitKind::Block) => "backward block",
            Self::Backward(UnitKind::Head) => "backward head",
            Self::Gradients => "gradients",
            Self::Decision => "decision",
            Self::Optimizer => "optimizer",
            Self::Graph => "graph",
            Self::Data => "data",
            Self::Checkpoint => "checkpoint",
            Self::Validation => "validation",
        }
    }

    /// The phase in which an operation was enqueued; `None` outside of all.
    pub(crate) fn of(span: &OpSpan) -> Option<Self> {
        Self::ALL.into_iter().find(|p| p.name() == span.phase)
    }
}

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

/// The name of the track of host work.
pub(crate) fn host_track(rank: usize) -> Arc<str> {
    format!("rank {rank} host").into()
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
