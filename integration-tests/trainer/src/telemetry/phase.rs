//! The phases of a step: the timeline records with each operation the phase in which the host
//! enqueued it.
//!
//! Labels name kernels and collectives, and differ between the host and CUDA; phases name the part
//! of the step that an operation belongs to, on both.

use std::sync::Arc;

use zero_alloc::host::OpSpan;

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
    pub(crate) fn of(pass: usize, passes: usize) -> Self {
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

/// The name of the track of host work.
pub(crate) fn host_track(rank: usize) -> Arc<str> {
    format!("rank {rank} host").into()
}
