//! The inputs of blocks in parts: ZeRO-R's partitioned activations (Pa, arXiv 1910.02054, section 6.1).
//!
//! All ranks of tensor parallelism have the same residual stream. Each keeps a part of every row
//! (the input of a block, or of the head), and a ring of [`RING`] whole rows for the pass under way.
//! Backward gathers a row before the pass that reads it.
//!
//! | buffer | elements | lifetime |
//! |---|---|---|
//! | `ring` | row, two | a pass and the next one |
//! | `parts` | row / ranks, one a row | written by forward, gathered in backward |

use std::sync::Arc;

use zero_alloc::device::{AnySlice, Device};
use zero_comm::Communicator;
use zero_trainer::ModelError;

/// Whole rows: one that a pass reads and one that it writes.
pub(crate) const RING: usize = 2;

/// The rows of a model. Row `i` is in place `i % RING` of the ring while it is whole.
pub(crate) struct PartRows<D: Device> {
    device: D,
    comm: Arc<dyn Communicator<D>>,
    ring: Vec<AnySlice>,
    /// The row in each place.
    whole: [Option<usize>; RING],
    parts: Vec<AnySlice>,
}

impl<D: Device> PartRows<D> {
    /// `ring` has [`RING`] rows, whose elements the ranks of `comm` divide.
    pub(crate) fn new(
        device: &D,
        comm: &Arc<dyn Communicator<D>>,
        ring: Vec<AnySlice>,
        parts: Vec<AnySlice>,
    ) -> Self {
        Self {
            device: device.clone(),
            comm: Arc::clone(comm),
            ring,
            whole: [None; RING],
            parts,
        }
    }

    /// After the pass that wrote `row`: keeps this rank's part.
    pub(crate) fn after_write(&mut self, stream: &D::Stream, row: usize) -> Result<(), ModelError> {
        self.whole[row % RING] = Some(row);
        let part = self.parts[row];
        let start = self.comm.rank() * part.len();
        let own = self.ring[row % RING].slice(start..start + part.len());
        Ok(self.device.copy(stream, own, part)?)
    }

    /// Before a pass that reads `row`: gathers it, unless it is whole.
    pub(crate) fn before_read(&mut self, stream: &D::Stream, row: usize) -> Result<(), ModelError> {
        if self.whole[row % RING] != Some(row) {
            let whole = self.ring[row % RING];
            self.comm.all_gather(stream, self.parts[row], whole)?;
            self.whole[row % RING] = Some(row);
        }
        Ok(())
    }
}
