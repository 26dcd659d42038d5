//! Ranks of tensor parallelism on GPUs: what `decoder/tensor.rs` says of the host, in the type of the
//! activations, on the stream of the passes.

use std::ops::Range;
use std::sync::Arc;

use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, DeviceSlice};
use zero_comm::{CommError, Communicator, ReduceOp};

use super::PassContext;
use crate::cuda::dropout::Dropout;
use crate::cuda::{OpError, SumOut, column_sums};
use crate::ops::cross_entropy::{STATISTICS, VocabPart};
use crate::options::ModelOptions;
use crate::tensor::TensorRank;

/// The ranks of tensor parallelism of a model on a GPU.
pub(crate) struct TensorGroup {
    comm: Arc<dyn Communicator<CudaDevice>>,
    pub(crate) rank: TensorRank,
    /// Whether a rank's own rows are 1/M of all, as on the host.
    pub(crate) divides_rows: bool,
    /// Tokens of the micro-batch.
    tokens: usize,
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
        options: &ModelOptions,
    ) -> Self {
        Self {
            comm: Arc::clone(comm),
            rank,
            divides_rows: options.sequence_parallel,
            tokens: options.tokens(),
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

    /// The own rows of `rows`.
    fn own(&self, rows: AnySlice) -> AnySlice {
        let len = rows.len() / self.rank.ranks;
        rows.slice(self.rank.rank * len..(self.rank.rank + 1) * len)
    }

    /// Sums `rows` over the ranks; `own` receives the own rows of the sums.
    fn reduce_scatter(
        &self,
        stream: &CudaStream,
        rows: AnySlice,
        own: AnySlice,
    ) -> Result<(), OpError> {
        let summed = self.comm.reduce_scatter(stream, rows, own, ReduceOp::Sum);
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

impl PassContext<'_> {
    /// The ranks, if each has some rows of the residual stream.
    fn dividing(&self) -> Option<&TensorGroup> {
        self.tensor.filter(|tensor| tensor.divides_rows)
    }

    /// The own rows of `rows`.
    pub(crate) fn own(&self, rows: AnySlice) -> AnySlice {
        self.dividing().map_or(rows, |tensor| tensor.own(rows))
    }

    /// Gathers `rows` from the own rows of all ranks, in place.
    pub(crate) fn gather_rows(&self, rows: AnySlice) -> Result<(), OpError> {
        self.dividing().map_or(Ok(()), |tensor| {
            tensor.gather(self.stream, tensor.own(rows), rows)
        })
    }

    /// Sums `rows` over the ranks, in place; the own rows have the sums.
    pub(crate) fn sum_rows(&self, rows: AnySlice) -> Result<(), OpError> {
        match self.dividing() {
            Some(tensor) => tensor.reduce_scatter(self.stream, rows, tensor.own(rows)),
            None => self.sum(rows),
        }
    }

    /// The place of all rows of this rank's part of a sum whose own rows go to `own`: the same slice, or
    /// with sequence parallelism a buffer of all rows.
    pub(crate) fn before_sum(&self, own: AnySlice) -> AnySlice {
        match self.dividing() {
            Some(_) => self.s.narrow.slice(0..self.s.dres.len()),
            None => own,
        }
    }

    /// Sums what [`Self::before_sum`] has, to `own`.
    pub(crate) fn sum_to(&self, own: AnySlice) -> Result<(), OpError> {
        match self.dividing() {
            Some(tensor) => tensor.reduce_scatter(self.stream, self.before_sum(own), own),
            None => self.sum(own),
        }
    }

    /// The dropout of the own rows, of one of all rows.
    pub(crate) fn of_own_rows(&self, dropout: Option<Dropout>) -> Option<Dropout> {
        let dropout = dropout?;
        Some(match self.dividing() {
            Some(tensor) => {
                let first = tensor.tokens / tensor.rank.ranks * tensor.rank.rank;
                dropout.from_row(first, tensor.tokens)
            }
            None => dropout,
        })
    }

    /// Whether norms have some rows of all, so that their gradients are partial sums.
    pub(crate) fn divides_rows(&self) -> bool {
        self.dividing().is_some()
    }

    /// The place of a partial sum, to be added to `out` by [`Self::finish_sums`]: elements of
    /// [`ScratchSlices::sums`](super::buffers::ScratchSlices::sums).
    pub(crate) fn partial(&self, range: Range<usize>) -> SumOut {
        SumOut::Write(self.s.sums.slice(range).erase())
    }

    /// Sums the first `len` partial sums over the ranks.
    pub(crate) fn sum_partials(&self, len: usize) -> Result<(), OpError> {
        match len {
            0 => Ok(()),
            len => self.sum(self.s.sums.slice(0..len).erase()),
        }
    }

    /// Adds partial sums to gradients, or writes them there: `range` has those of `outs`.
    pub(crate) fn finish_sums(&self, outs: &[SumOut], range: Range<usize>) -> Result<(), OpError> {
        let sums = self.s.sums.slice(range);
        column_sums::finish_sums(&self.ops.kernels, self.stream, outs, sums)
    }
}

/// Elements of the statistics of `rows` rows of logits.
pub(crate) fn stats_elems(ranks: usize, rows: usize) -> usize {
    match ranks {
        1 => 0,
        ranks => (ranks + 1) * rows * STATISTICS,
    }
}
