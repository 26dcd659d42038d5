//! The purpose of a block.

use crate::planner::Lifetime;

/// The purpose under which a block is accounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Purpose {
    /// Parameters, or this rank's shard of them.
    Params,
    /// Gradients kept between micro-batches, or this rank's shard of them.
    Grads,
    /// Master weights and moments.
    Optimizer,
    /// Communication buckets and gathered units.
    Buckets,
    /// Activations and their checkpoints.
    Activations,
    /// Scratch memory of operations.
    Workspace,
}

impl Purpose {
    /// The number of purposes.
    pub const COUNT: usize = 6;

    /// All purposes, in the order of [`Report::purposes`](super::Report::purposes).
    pub const ALL: [Self; Self::COUNT] = [
        Self::Params,
        Self::Grads,
        Self::Optimizer,
        Self::Buckets,
        Self::Activations,
        Self::Workspace,
    ];

    /// The expected lifetime: state lives as long as the model, the rest within a step.
    pub(super) fn lifetime(self) -> Lifetime {
        match self {
            Self::Params | Self::Grads | Self::Optimizer => Lifetime::Long,
            Self::Buckets | Self::Activations | Self::Workspace => Lifetime::Short,
        }
    }
}
