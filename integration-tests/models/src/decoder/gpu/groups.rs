//! The ranks with which a rank shares a model on CUDA: those of its sequences
//! ([`super::sequence`]) and those of its parameters ([`super::tensor`]).

use std::sync::Arc;

use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, DeviceSlice};
use zero_comm::{CommError, Communicator, ReduceOp};
use zero_trainer::ModelError;

use super::slices::ExchangeSlices;
use crate::cuda::sequence::{self, Step};
use crate::cuda::{OpError, OpKernels};
use crate::decoder::sequence_part::Exchanges;
use crate::ops::cross_entropy::{STATISTICS, VocabPart};
use crate::ops::sequence::Exchange;
use crate::options::ModelOptions;
use crate::tensor::TensorRank;

/// The ranks that share the sequences of a model.
pub(super) struct SequenceGroup {
    comm: Arc<dyn Communicator<CudaDevice>>,
    pub(super) exchanges: Exchanges,
    slices: ExchangeSlices,
}

impl SequenceGroup {
    pub(super) fn new(
        comm: &Arc<dyn Communicator<CudaDevice>>,
        exchanges: Exchanges,
        slices: ExchangeSlices,
    ) -> Self {
        Self {
            comm: Arc::clone(comm),
            exchanges,
            slices,
        }
    }

    /// The queries, keys and values of this rank's tokens.
    pub(super) fn qkv_of_tokens(&self) -> AnySlice {
        let elems = self.exchanges.qkv.tokens_elems();
        self.slices.recv.slice(0..elems)
    }

    /// The output of attention, of this rank's heads.
    pub(super) fn attended(&self, layer: usize) -> AnySlice {
        self.slices.attended[layer.min(self.slices.attended.len() - 1)]
    }

    /// Exchanges this rank's tokens `from` for `heads`.
    pub(super) fn to_heads(
        &self,
        kernels: &OpKernels,
        stream: &CudaStream,
        exchange: Exchange,
        heads: AnySlice,
        from: AnySlice,
    ) -> Result<(), ModelError> {
        let [send, recv] = self.segments(exchange);
        sequence::run(kernels, stream, Step::PackTokens, send, from, exchange)?;
        self.comm.all_to_all(stream, send, recv)?;
        Ok(sequence::run(
            kernels,
            stream,
            Step::UnpackHeads,
            heads,
            recv,
            exchange,
        )?)
    }

    /// Exchanges this rank's heads `from` for `tokens`.
    pub(super) fn to_tokens(
        &self,
        kernels: &OpKernels,
        stream: &CudaStream,
        exchange: Exchange,
        tokens: AnySlice,
        from: AnySlice,
    ) -> Result<(), ModelError> {
        let [send, recv] = self.segments(exchange);
        sequence::run(kernels, stream, Step::PackHeads, send, from, exchange)?;
        self.comm.all_to_all(stream, send, recv)?;
        Ok(sequence::run(
            kernels,
            stream,
            Step::UnpackTokens,
            tokens,
            recv,
            exchange,
        )?)
    }

    fn segments(&self, exchange: Exchange) -> [AnySlice; 2] {
        let ExchangeSlices { send, recv, .. } = &self.slices;
        [send, recv].map(|buffer| buffer.slice(0..exchange.elems()))
    }
}

/// The ranks of tensor parallelism of a model on a GPU.
pub(crate) struct TensorGroup {
    comm: Arc<dyn Communicator<CudaDevice>>,
    pub(crate) rank: TensorRank,
    /// Whether a rank's own rows are 1/M of all, as on the host.
    pub(crate) divides_rows: bool,
    /// Tokens of the micro-batch.
    pub(super) tokens: usize,
    /// Tokens of the whole vocabulary.
    vocab: usize,
    /// Of some rows of logits `[rows, STATISTICS]`: this rank's, then those of all ranks.
    stats: DeviceSlice<f32>,
}

impl TensorGroup {
    /// `stats` has the elements of [`Sizes::stats`](super::sizes::Sizes).
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
    pub(super) fn own(&self, rows: AnySlice) -> AnySlice {
        let len = rows.len() / self.rank.ranks;
        rows.slice(self.rank.rank * len..(self.rank.rank + 1) * len)
    }

    /// Sums `rows` over the ranks; `own` receives the own rows of the sums.
    pub(super) fn reduce_scatter(
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
