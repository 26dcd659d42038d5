//! The ranks with which a rank shares a model on the host: those of its sequences
//! ([`super::sequence`]) and those of its parameters ([`super::tensor`]).

use std::sync::Arc;

use zero_alloc::device::DeviceSlice;
use zero_alloc::host::{HostDevice, HostStream};
use zero_comm::{Communicator, ReduceOp};
use zero_trainer::ModelError;

use super::arch::HostArch;
use super::sequence_part::Exchanges;
use super::slices::ExchangeSlices;
use crate::ops::cross_entropy::{STATISTICS, VocabPart};
use crate::options::ModelOptions;
use crate::tensor::TensorRank;

/// The groups of a rank.
pub(super) struct Groups {
    /// `None` if the rank has all tokens of its sequences.
    pub(super) sequence: Option<SequenceGroup>,
    /// `None` if the rank has all parameters.
    pub(super) tensor: Option<TensorGroup>,
}

/// The ranks that share the sequences of a model on the host.
pub(super) struct SequenceGroup {
    pub(super) comm: Arc<dyn Communicator<HostDevice>>,
    pub(super) exchanges: Exchanges,
    pub(super) slices: ExchangeSlices,
}

impl SequenceGroup {
    pub(super) fn new(
        comm: &Arc<dyn Communicator<HostDevice>>,
        exchanges: Exchanges,
        slices: ExchangeSlices,
    ) -> Self {
        Self {
            comm: Arc::clone(comm),
            exchanges,
            slices,
        }
    }

    /// The block of pass `pass` in tokens, and in heads.
    pub(super) fn blocks<A: HostArch>(&self, block: A::Block, pass: usize) -> [A::Block; 2] {
        let elems = self.exchanges.qkv.tokens_elems();
        let layer = pass.saturating_sub(1).min(self.slices.attended.len() - 1);

        let mut in_tokens = block;
        *A::attention(&mut in_tokens)[0] = self.slices.recv.slice(0..elems);
        let mut in_heads = block;
        *A::attention(&mut in_heads)[1] = self.slices.attended[layer];
        [in_tokens, in_heads]
    }
}

/// The ranks of tensor parallelism of a model on the host.
pub(super) struct TensorGroup {
    pub(super) comm: Arc<dyn Communicator<HostDevice>>,
    pub(super) rank: TensorRank,
    /// Whether a rank's own rows are 1/M of all.
    pub(super) divides_rows: bool,
    /// Tokens of the micro-batch.
    tokens: usize,
    /// Of some rows of logits `[rows, STATISTICS]`: this rank's, and those of all ranks.
    pub(super) stats: DeviceSlice<f32>,
    pub(super) all_stats: DeviceSlice<f32>,
    /// Whole vocabulary.
    pub(super) vocab: usize,
}

impl TensorGroup {
    /// `stats` has the elements of [`Sizes::stats`](super::sizes::Sizes).
    pub(super) fn new(
        comm: &Arc<dyn Communicator<HostDevice>>,
        rank: TensorRank,
        stats: DeviceSlice<f32>,
        vocab: usize,
        options: &ModelOptions,
    ) -> Self {
        let own = stats.len() / (rank.ranks + 1);
        Self {
            comm: Arc::clone(comm),
            rank,
            divides_rows: options.sequence_parallel,
            tokens: options.tokens(),
            stats: stats.slice(0..own),
            all_stats: stats.slice(own..stats.len()),
            vocab,
        }
    }

    pub(super) fn part(&self) -> VocabPart {
        self.rank.vocab(self.vocab)
    }

    /// The first of this rank's own rows.
    pub(super) fn first_row(&self) -> usize {
        match self.divides_rows {
            true => self.tokens / self.rank.ranks * self.rank.rank,
            false => 0,
        }
    }

    /// The own rows of `rows`.
    pub(super) fn own(&self, rows: DeviceSlice<f32>) -> DeviceSlice<f32> {
        if !self.divides_rows {
            return rows;
        }
        let len = rows.len() / self.rank.ranks;
        rows.slice(self.rank.rank * len..(self.rank.rank + 1) * len)
    }

    /// Sums `values` over the ranks, in place.
    pub(super) fn sum(
        &self,
        stream: &HostStream,
        values: DeviceSlice<f32>,
    ) -> Result<(), ModelError> {
        if values.is_empty() {
            return Ok(());
        }
        let values = values.erase();
        Ok(self
            .comm
            .all_reduce(stream, values, values, ReduceOp::Sum)?)
    }

    /// Sums `rows` over the ranks, in place; the own rows have the sums.
    pub(super) fn sum_rows(
        &self,
        stream: &HostStream,
        rows: DeviceSlice<f32>,
    ) -> Result<(), ModelError> {
        if !self.divides_rows {
            return self.sum(stream, rows);
        }
        let own = self.own(rows).erase();
        Ok(self
            .comm
            .reduce_scatter(stream, rows.erase(), own, ReduceOp::Sum)?)
    }

    /// Gathers `rows` from the own rows of all ranks, in place.
    pub(super) fn gather_rows(
        &self,
        stream: &HostStream,
        rows: DeviceSlice<f32>,
    ) -> Result<(), ModelError> {
        if !self.divides_rows {
            return Ok(());
        }
        let own = self.own(rows).erase();
        Ok(self.comm.all_gather(stream, own, rows.erase())?)
    }

    /// Gathers the statistics of `rows` rows.
    pub(super) fn gather_stats(&self, stream: &HostStream, rows: usize) -> Result<(), ModelError> {
        let own = self.stats.slice(0..rows * STATISTICS).erase();
        let all = self.all_stats.slice(0..rows * STATISTICS * self.rank.ranks);
        Ok(self.comm.all_gather(stream, own, all.erase())?)
    }
}
