//! Bytes that a rank sends in a step.
//!
//! With Ψ elements over N ranks and A micro-batches per step, in elements, each term times (N-1)/N
//! (arXiv 1910.02054, section 7):
//!
//! | stage | reduce-scatter | all-gather | all-reduce | sum |
//! |---|---|---|---|---|
//! | 0 | | | 2AΨ | 2AΨ |
//! | 1, 2 | AΨ | Ψ | | (A+1)Ψ |
//! | 3 | AΨ | 2AΨ | | 3AΨ |
//!
//! The table is of gradients that are reduced after every micro-batch, as stages 2 and 3 must.
//! A quantised reduction is an all-to-all in place of the reduce-scatter, in blocks.
//! Stages 0 and 1 may sum micro-batches on each rank and reduce once: with A = 1, both send 2Ψ.
//! Stage 3 gathers each unit at most 2A times: a unit that stays gathered until its next use saves
//! one gather.

use crate::checked::{product, sum};
use crate::{Layout, ShardError, Widths, ZeroStage};

const WHAT: &str = "bytes sent in a step";

/// The format in which collectives transmit a shard, or a rank keeps state: in blocks of
/// `block_elems` elements, the last one perhaps shorter, of `block_bytes` bytes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct WireFormat {
    /// Elements of a block.
    pub block_elems: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
}

impl WireFormat {
    /// Elements of `bytes` bytes each.
    pub const fn plain(bytes: u64) -> Self {
        Self {
            block_elems: 1,
            block_bytes: bytes,
        }
    }

    /// [`Self::bytes`], or the error that names `what`.
    pub(crate) fn checked_bytes(self, what: &'static str, elems: u64) -> Result<u64, ShardError> {
        let bytes = self.bytes(elems);
        bytes.ok_or_else(|| ShardError::TooLarge { what: what.into() })
    }

    /// Bytes of a shard of `elems` elements; `None` if blocks have no elements, or if the bytes do
    /// not fit 64 bits.
    pub const fn bytes(self, elems: u64) -> Option<u64> {
        match self.block_elems {
            0 => None,
            block_elems => elems.div_ceil(block_elems).checked_mul(self.block_bytes),
        }
    }
}

/// Bytes that one rank sends in a step, by collective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct StepTraffic {
    /// By reduce-scatter: gradients, of [`Widths::comm_grad_bytes`].
    pub reduce_scatter_bytes: u64,
    /// By all-gather: parameters, in [`Widths::gathered`].
    pub all_gather_bytes: u64,
    /// By all-reduce: gradients of stage 0, of [`Widths::comm_grad_bytes`].
    pub all_reduce_bytes: u64,
    /// By all-to-all: gradients of quantised reductions, in [`Widths::reduced`].
    #[cfg_attr(feature = "serde", serde(default))]
    pub all_to_all_bytes: u64,
}

impl StepTraffic {
    /// The traffic of a model, with quantised reductions in one hop, whose shards have
    /// `shard_elems` elements on each of `world_size` ranks.
    ///
    /// # Errors
    /// A world without ranks, or a sum that does not fit 64 bits.
    pub fn of(
        stage: ZeroStage,
        widths: &Widths,
        shard_elems: u64,
        world_size: u64,
        grad_accum_steps: u64,
    ) -> Result<Self, ShardError> {
        let others = world_size.checked_sub(1).ok_or(ShardError::NoRanks)?;
        let shard_bytes = |format: WireFormat| format.checked_bytes(WHAT, shard_elems);
        let grad = shard_bytes(WireFormat::plain(widths.comm_grad_bytes))?;
        let param = shard_bytes(widths.gathered)?;
        let bytes = |times: &[u64]| product(WHAT, &[&[others], times].concat());
        let a = grad_accum_steps;
        let traffic = match stage {
            ZeroStage::Zero => Self {
                all_reduce_bytes: bytes(&[2, a, grad])?,
                ..Self::default()
            },
            ZeroStage::One | ZeroStage::Two => Self::sharded(bytes(&[a, grad])?, bytes(&[param])?),
            ZeroStage::Three => Self::sharded(bytes(&[a, grad])?, bytes(&[2, a, param])?),
        };
        let traffic = match widths.reduced {
            Some([format, _]) if stage.shards_optimizer() => {
                let grad = shard_bytes(format)?;
                traffic.with_all_to_all(bytes(&[a, grad])?)
            }
            _ => traffic,
        };
        sum(
            WHAT,
            &[
                traffic.reduce_scatter_bytes,
                traffic.all_gather_bytes,
                traffic.all_to_all_bytes,
            ],
        )?;
        Ok(traffic)
    }

    fn sharded(reduce_scatter_bytes: u64, all_gather_bytes: u64) -> Self {
        Self {
            reduce_scatter_bytes,
            all_gather_bytes,
            ..Self::default()
        }
    }

    /// With an all-to-all in place of the reduce-scatter.
    pub(crate) fn with_all_to_all(self, all_to_all_bytes: u64) -> Self {
        Self {
            reduce_scatter_bytes: 0,
            all_to_all_bytes,
            ..self
        }
    }

    /// The sum over the collectives.
    pub fn total_bytes(&self) -> u64 {
        self.reduce_scatter_bytes
            + self.all_gather_bytes
            + self.all_reduce_bytes
            + self.all_to_all_bytes
    }
}

impl Layout {
    /// Bytes that each rank sends in a step of `grad_accum_steps` micro-batches whose gradients are
    /// each reduced, padding included: exact at stages 0 to 2, an upper bound at stage 3.
    ///
    /// # Errors
    /// The sum does not fit 64 bits.
    pub fn step_traffic(
        &self,
        stage: ZeroStage,
        widths: &Widths,
        grad_accum_steps: u64,
    ) -> Result<StepTraffic, ShardError> {
        StepTraffic::of(
            stage,
            widths,
            self.shard_elems(),
            self.world_size(),
            grad_accum_steps,
        )
    }
}
