//! Bytes of the state that a rank keeps between steps.
//!
//! With Ψ elements over N ranks, and p, g and K bytes per element for parameters, gradients and
//! optimizer state (arXiv 1910.02054, section 5, figure 1):
//!
//! | stage | params | grads | optimizer |
//! |---|---|---|---|
//! | 0 | pΨ | gΨ | KΨ |
//! | 1 | pΨ | gΨ | KΨ/N |
//! | 2 | pΨ | gΨ/N | KΨ/N |
//! | 3 | pΨ/N | gΨ/N | KΨ/N |
//!
//! Computed from a [`Layout`] the bytes are exact, padding included. Computed from Ψ alone, a
//! rank's share is rounded up to a whole element.

use crate::checked::{product, sum};
use crate::{Layout, ShardError, Widths, ZeroStage};

/// Bytes that one rank keeps, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct StateBytes {
    /// Parameters.
    pub params_bytes: u64,
    /// Gradients.
    pub grads_bytes: u64,
    /// Optimizer state, master weights included.
    pub optimizer_bytes: u64,
}

impl StateBytes {
    /// The state of a rank if the model has `whole_elems` elements and a rank's share is
    /// `shard_elems`.
    ///
    /// # Errors
    /// The sum does not fit 64 bits.
    pub fn of(
        stage: ZeroStage,
        widths: &Widths,
        whole_elems: u64,
        shard_elems: u64,
    ) -> Result<Self, ShardError> {
        let bytes = |sharded: bool, width: u64| {
            product(
                "bytes of a rank",
                &[if sharded { shard_elems } else { whole_elems }, width],
            )
        };
        let params_bytes = bytes(stage.shards_params(), widths.param_bytes)?;
        let grads_bytes = bytes(stage.shards_grads(), widths.grad_bytes)?;
        let updated = match stage.shards_optimizer() {
            true => shard_elems,
            false => whole_elems,
        };
        let optimizer_bytes = widths.optimizer.checked_bytes("bytes of a rank", updated)?;
        sum(
            "bytes of a rank",
            &[params_bytes, grads_bytes, optimizer_bytes],
        )?;
        Ok(Self {
            params_bytes,
            grads_bytes,
            optimizer_bytes,
        })
    }

    /// The state of a rank with Ψ = `numel_elems` elements over `world_size` ranks, without
    /// padding.
    ///
    /// # Errors
    /// A world without ranks, or a sum that does not fit 64 bits.
    pub fn of_elems(
        stage: ZeroStage,
        widths: &Widths,
        numel_elems: u64,
        world_size: u64,
    ) -> Result<Self, ShardError> {
        if world_size == 0 {
            return Err(ShardError::NoRanks);
        }
        Self::of(stage, widths, numel_elems, numel_elems.div_ceil(world_size))
    }

    /// The sum of the three kinds.
    pub fn total_bytes(&self) -> u64 {
        self.params_bytes + self.grads_bytes + self.optimizer_bytes
    }
}

impl Layout {
    /// The exact state of each rank at `stage`, padding included.
    ///
    /// # Errors
    /// The sum does not fit 64 bits.
    pub fn state_bytes(&self, stage: ZeroStage, widths: &Widths) -> Result<StateBytes, ShardError> {
        StateBytes::of(stage, widths, self.padded_elems(), self.shard_elems())
    }

    /// The elements that each rank updates at `stage`.
    pub fn updated_elems(&self, stage: ZeroStage) -> u64 {
        if stage.shards_optimizer() {
            self.shard_elems()
        } else {
            self.padded_elems()
        }
    }
}
