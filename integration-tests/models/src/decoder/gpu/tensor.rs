//! Ranks of tensor parallelism on GPUs: what `decoder/tensor.rs` says of the host, in the type of the
//! activations, on the stream of the passes.

use std::sync::Arc;

use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, DeviceSlice};
use zero_comm::{CommError, Communicator, ReduceOp};

use crate::cuda::OpError;
use crate::ops::cross_entropy::{STATISTICS, VocabPart};
use crate::tensor::TensorRank;

/// The ranks of tensor parallelism of a model on a GPU.
pub(crate) struct TensorGroup {
    comm: Arc<dyn Communicator<CudaDevice>>,
    pub(crate) rank: TensorRank,
    /// Tokens of the whole vocabulary.
    vocab: usize,
    /// Of some rows of logits `[rows, STATISTICS]`: this rank's, then those of all ranks.
    stats: DeviceSlice<f32>,
}

impl TensorGroup {
    /// `stats` has the elements of [`stats_elems`].
    pub(crate) fn new(
        comm: &Arc<dyn Communicator<CudaDevice>>,
        rank: TensorRank,
        vocab: usize,
        stats: DeviceSlice<f32>,
    ) -> Self {
        Self {
            comm: Arc::clone(comm),
            rank,
            vocab,
            stats,
        }
    }

    /// This rank's part of the vocabulary.
    pub(crate) fn part(&self) -> VocabPart {
        self.rank.vocab(self.vocab)
    }

    /// Tokens of the whole vocabulary.
    pub(crate) fn vocab(&self) -> usize {
        self.vocab
    }

    /// Sums `values` over the ranks, in place.
    pub(crate) fn sum(&self, stream: &CudaStream, values: AnySlice) -> Result<(), OpError> {
        let summed = self.comm.all_reduce(stream, values, values, ReduceOp::Sum);
        summed.map_err(OpError::Comm)
    }

    /// Rows of logits whose statistics there is room for.
    pub(crate) fn rows(&self) -> usize {
        self.stats.len() / ((self.rank.ranks + 1) * STATISTICS)
    }

    /// The place of this rank's statistics of `rows` rows.
    pub(crate) fn own_stats(&self, rows: usize) -> DeviceSlice<f32> {
        self.stats.slice(0..rows * STATISTICS)
    }

    /// Gathers the statistics of `rows` rows of all ranks.
    pub(crate) fn gather_stats(
        &self,
        stream: &CudaStream,
        rows: usize,
    ) -> Result<DeviceSlice<f32>, OpError> {
        let own = self.own_stats(rows);
        let start = self.stats.len() / (self.rank.ranks + 1);
        let all = self.stats.slice(start..start + self.rank.ranks * own.len());
        let gathered = self.comm.all_gather(stream, own.erase(), all.erase());
        gathered.map_err(OpError::Comm)?;
        Ok(all)
    }

    /// Gathers parts of equal length, in rank order.
    pub(crate) fn gather(
        &self,
        stream: &CudaStream,
        own: AnySlice,
        all: AnySlice,
    ) -> Result<(), OpError> {
        let gathered: Result<(), CommError> = self.comm.all_gather(stream, own, all);
        gathered.map_err(OpError::Comm)
    }
}

/// Elements of the statistics of `rows` rows of logits.
pub(crate) fn stats_elems(ranks: usize, rows: usize) -> usize {
    match ranks {
        1 => 0,
        ranks => (ranks + 1) * rows * STATISTICS,
    }
}
