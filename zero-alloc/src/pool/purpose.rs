//! What a block is held for.

use crate::planner::Lifetime;

/// What a block is held for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Purpose {
    /// Parameters, or this rank's shard of them.
    Params,
    /// Gradients kept between micro-batches, or this rank's shard of them.
    Grads,
    /// Master weights and moments.
    Optimizer,
    /// Communication buckets and gathered units.
    Buckets,
    /// Activations and the checkpoints of them.
    Activations,
    /// Scratch of operations.
    Workspace,
}

impl Purpose {
    /// All of them, in the order of [`Report::purposes`](super::Report::purposes).
    pub const ALL: [Self; 6] =
        [Self::Params, Self::Grads, Self::Optimizer, Self::Buckets, Self::Activations, Self::Workspace];
}

impl Purpose {
    /// How long blocks of this purpose live: state as long as the model, the rest comes and goes within a step.
    pub(super) fn lifetime(self) -> Lifetime {
        match self {
            Self::Params | Self::Grads | Self::Optimizer => Lifetime::Long,
            Self::Buckets | Self::Activations | Self::Workspace => Lifetime::Short,
        }
    }
}
