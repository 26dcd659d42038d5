//! The ranks that share the sequences of a model on CUDA; see [`super::sequence`].

use std::sync::Arc;

use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::AnySlice;
use zero_comm::Communicator;
use zero_trainer::ModelError;

use super::slices::ExchangeSlices;
use crate::cuda::OpKernels;
use crate::cuda::sequence::{self, PackStep};
use crate::decoder::sequence_part::Exchanges;
use crate::ops::sequence::HeadExchange;

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
        exchange: HeadExchange,
        heads: AnySlice,
        from: AnySlice,
    ) -> Result<(), ModelError> {
        let steps = [PackStep::PackTokens, PackStep::UnpackHeads];
        self.exchange(kernels, stream, exchange, steps, [heads, from])
    }

    /// Exchanges this rank's heads `from` for `tokens`.
    pub(super) fn to_tokens(
        &self,
        kernels: &OpKernels,
        stream: &CudaStream,
        exchange: HeadExchange,
        tokens: AnySlice,
        from: AnySlice,
    ) -> Result<(), ModelError> {
        let steps = [PackStep::PackHeads, PackStep::UnpackTokens];
        self.exchange(kernels, stream, exchange, steps, [tokens, from])
    }

    /// Packs `from`, sends the segments, and unpacks what arrives to `to`.
    fn exchange(
        &self,
        kernels: &OpKernels,
        stream: &CudaStream,
        exchange: HeadExchange,
        [pack, unpack]: [PackStep; 2],
        [to, from]: [AnySlice; 2],
    ) -> Result<(), ModelError> {
        let ExchangeSlices { send, recv, .. } = &self.slices;
        let [send, recv] = [send, recv].map(|buffer| buffer.slice(0..exchange.elems()));
        sequence::run(kernels, stream, pack, send, from, exchange)?;
        self.comm.all_to_all(stream, send, recv)?;
        Ok(sequence::run(kernels, stream, unpack, to, recv, exchange)?)
    }
}
