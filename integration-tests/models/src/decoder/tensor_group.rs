//! The ranks of tensor parallelism of a model, on the host or on GPUs; see [`super::tensor`].

use std::ops::Range;
use std::sync::Arc;

use zero_alloc::device::{AnySlice, Device, DeviceSlice};
use zero_comm::{CommError, Communicator, ReduceOp};

use crate::ops::cross_entropy::{STATISTICS, VocabPart};
use crate::options::ModelOptions;
use crate::tensor::TensorRank;

/// The ranks of tensor parallelism of a model.
pub(crate) struct TensorGroup<D: Device> {
    comm: Arc<dyn Communicator<D>>,
    pub(crate) rank: TensorRank,
    /// Whether a rank's own rows are 1/M of all.
    pub(crate) divides_rows: bool,
    /// Tokens of the micro-batch.
    pub(crate) tokens: usize,
    /// Tokens of the whole vocabulary.
    pub(crate) vocab: usize,
    /// Of some rows of logits `[rows, STATISTICS]`: this rank's, then those of all ranks.
    stats: DeviceSlice<f32>,
}

/// Elements of the statistics of `rows` rows of logits: this rank's, and those of all ranks.
pub(crate) fn stats_elems(ranks: usize, rows: usize) -> usize {
    match ranks {
        1 => 0,
        ranks => (ranks + 1) * rows * STATISTICS,
    }
}

impl<D: Device> TensorGroup<D> {
    /// `stats` has the elements of [`stats_elems`].
    pub(crate) fn new(
        comm: &Arc<dyn Communicator<D>>,
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

    /// The first of this rank's own rows.
    pub(crate) fn first_row(&self) -> usize {
        match self.divides_rows {
            true => self.tokens / self.rank.ranks * self.rank.rank,
            false => 0,
        }
    }

    /// The elements of the own rows, of rows of `len` elements.
    pub(crate) fn own(&self, len: usize) -> Range<usize> {
        if !self.divides_rows {
            return 0..len;
        }
        let own = len / self.rank.ranks;
        self.rank.rank * own..(self.rank.rank + 1) * own
    }

    /// Sums `values` over the ranks, in place.
    pub(crate) fn sum(&self, stream: &D::Stream, values: AnySlice) -> Result<(), CommError> {
        if values.is_empty() {
            return Ok(());
        }
        self.comm.all_reduce(stream, values, values, ReduceOp::Sum)
    }

    /// Sums `rows` over the ranks, in place; the own rows have the sums.
    pub(crate) fn sum_rows(&self, stream: &D::Stream, rows: AnySlice) -> Result<(), CommError> {
        match self.divides_rows {
            true => self.reduce_scatter(stream, rows, rows.slice(self.own(rows.len()))),
            false => self.sum(stream, rows),
        }
    }

    /// Sums `rows` over the ranks; `own` receives this rank's part of the sums.
    pub(crate) fn reduce_scatter(
        &self,
        stream: &D::Stream,
        rows: AnySlice,
        own: AnySlice,
    ) -> Result<(), CommError> {
        self.comm.reduce_scatter(stream, rows, own, ReduceOp::Sum)
    }

    /// Gathers `rows` from the own rows of all ranks, in place.
    pub(crate) fn gather_rows(&self, stream: &D::Stream, rows: AnySlice) -> Result<(), CommError> {
        match self.divides_rows {
            true => self.gather(stream, rows.slice(self.own(rows.len())), rows),
            false => Ok(()),
        }
    }

    /// Gathers parts of equal length, in rank order.
    pub(crate) fn gather(
        &self,
        stream: &D::Stream,
        own: AnySlice,
        all: AnySlice,
    ) -> Result<(), CommError> {
        self.comm.all_gather(stream, own, all)
    }

    /// Rows of logits whose statistics there is room for.
    pub(crate) fn rows(&self) -> usize {
        self.stats.len() / ((self.rank.ranks + 1) * STATISTICS)
    }

    /// The places of the statistics of `rows` rows: of this rank, and of all ranks.
    pub(crate) fn stats(&self, rows: usize) -> [DeviceSlice<f32>; 2] {
        let own = rows * STATISTICS;
        let start = self.stats.len() / (self.rank.ranks + 1);
        let all = self.stats.slice(start..start + self.rank.ranks * own);
        [self.stats.slice(0..own), all]
    }

    /// Gathers the statistics of `rows` rows of all ranks.
    pub(crate) fn gather_stats(&self, stream: &D::Stream, rows: usize) -> Result<(), CommError> {
        let [own, all] = self.stats(rows);
        self.gather(stream, own.erase(), all.erase())
    }
}
