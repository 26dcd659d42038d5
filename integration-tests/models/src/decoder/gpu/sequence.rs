//! Attention of ranks that share sequences on CUDA: the exchanges around it, as on the host
//! ([`crate::decoder::sequence`], which has the table of the buffers).

use std::sync::Arc;

use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, DeviceSlice};
use zero_comm::Communicator;
use zero_trainer::ModelError;

use super::PassContext;
use crate::cuda::attention::{self, Attention, Gradients, Masks};
use crate::cuda::sequence::{self, Step};
use crate::cuda::{OpError, SumOut, column_sums};
use crate::decoder::sequence::Exchanges;
use crate::ops::sequence::Exchange;
use crate::options::ModelOptions;

/// The buffers of exchanges.
pub(super) struct ExchangeSlices {
    pub(super) send: AnySlice,
    pub(super) recv: AnySlice,
    /// One for each block with separate activations.
    pub(super) attended: Vec<AnySlice>,
}

/// The ranks that share the sequences of a model.
pub(super) struct SequenceGroup {
    comm: Arc<dyn Communicator<CudaDevice>>,
    exchanges: Exchanges,
    slices: ExchangeSlices,
}

/// The activations of a block that attention reads and writes.
#[derive(Clone, Copy)]
pub(crate) struct AttentionSlices {
    /// Between ranks that share sequences, of all tokens and this rank's heads.
    pub(crate) qkv: AnySlice,
    /// Of this rank's tokens and all heads.
    pub(crate) attended: AnySlice,
    /// `[batch, heads, seq]`: of this rank's heads and all tokens.
    pub(crate) lse: DeviceSlice<f32>,
}

/// Elements of the workspace of attention's backward with a bias of `width` elements.
pub(crate) fn workspace_elems(options: &ModelOptions, width: usize) -> usize {
    match options.sequence_ranks {
        1 => attention::workspace_elems(options.micro_batch, options.seq_len, width),
        _ => column_sums::workspace_elems(options.tokens(), width),
    }
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
    fn qkv_of_tokens(&self) -> AnySlice {
        let elems = self.exchanges.qkv.tokens_elems();
        self.slices.recv.slice(0..elems)
    }

    /// The output of attention, of this rank's heads.
    fn attended(&self, layer: usize) -> AnySlice {
        self.slices.attended[layer.min(self.slices.attended.len() - 1)]
    }

    /// Exchanges this rank's tokens `from` for `heads`.
    fn to_heads(
        &self,
        cx: &PassContext<'_>,
        exchange: Exchange,
        heads: AnySlice,
        from: AnySlice,
    ) -> Result<(), ModelError> {
        let [send, recv] = self.segments(exchange);
        self.run(cx, Step::PackTokens, send, from, exchange)?;
        self.comm.all_to_all(cx.stream, send, recv)?;
        Ok(self.run(cx, Step::UnpackHeads, heads, recv, exchange)?)
    }

    /// Exchanges this rank's heads `from` for `tokens`.
    fn to_tokens(
        &self,
        cx: &PassContext<'_>,
        exchange: Exchange,
        tokens: AnySlice,
        from: AnySlice,
    ) -> Result<(), ModelError> {
        let [send, recv] = self.segments(exchange);
        self.run(cx, Step::PackHeads, send, from, exchange)?;
        self.comm.all_to_all(cx.stream, send, recv)?;
        Ok(self.run(cx, Step::UnpackTokens, tokens, recv, exchange)?)
    }

    fn segments(&self, exchange: Exchange) -> [AnySlice; 2] {
        let ExchangeSlices { send, recv, .. } = &self.slices;
        [send, recv].map(|buffer| buffer.slice(0..exchange.elems()))
    }

    fn run(
        &self,
        cx: &PassContext<'_>,
        step: Step,
        out: AnySlice,
        x: AnySlice,
        exchange: Exchange,
    ) -> Result<(), OpError> {
        sequence::run(&cx.ops.kernels, cx.stream, step, out, x, exchange)
    }
}

impl PassContext<'_> {
    /// The place of the queries, keys and values of this rank's tokens, before [`Self::attend`].
    pub(crate) fn qkv(&self, a: AttentionSlices) -> AnySlice {
        self.group.map_or(a.qkv, SequenceGroup::qkv_of_tokens)
    }

    /// Computes what the heads attend to.
    pub(crate) fn attend(
        &self,
        attention: &Attention,
        a: AttentionSlices,
        masks: Masks,
    ) -> Result<(), ModelError> {
        let kernels = &self.ops.kernels;
        let stream: &CudaStream = self.stream;
        let Some(group) = self.group else {
            return Ok(attention.forward(kernels, stream, a.attended, a.lse, a.qkv, masks)?);
        };
        let Exchanges { qkv, attended } = group.exchanges;
        let of_heads = group.attended(self.layer);
        group.to_heads(self, qkv, a.qkv, group.qkv_of_tokens())?;
        attention.forward(kernels, stream, of_heads, a.lse, a.qkv, masks)?;
        group.to_tokens(self, attended, a.attended, of_heads)
    }

    /// Computes the gradient of queries, keys and values in `s.wide` from that of what the heads
    /// attend to, `dattended`, which it may overwrite, and returns it.
    pub(crate) fn attend_backward(
        &self,
        attention: &Attention,
        a: AttentionSlices,
        dattended: AnySlice,
        grads: AttentionGrads,
    ) -> Result<AnySlice, ModelError> {
        let kernels = &self.ops.kernels;
        let stream: &CudaStream = self.stream;
        let s = self.s;
        let dqkv = s.wide.slice(0..a.qkv.len());
        let AttentionGrads {
            dbias,
            rotated,
            masks,
        } = grads;
        let of_heads = Gradients {
            dqkv,
            dbias,
            angles: rotated.then(|| self.angles_of_sequences()),
            masks,
        };
        let Some(group) = self.group else {
            attention.backward(
                kernels, stream, of_heads, dattended, a.qkv, a.attended, a.lse, s.delta, s.partials,
            )?;
            return Ok(dqkv);
        };

        let Exchanges { qkv, attended } = group.exchanges;
        group.to_heads(self, attended, dattended, dattended)?;
        // The bias's gradient is that of this rank's tokens.
        let of_heads = Gradients {
            dbias: None,
            ..of_heads
        };
        let out = group.attended(self.layer);
        attention.backward(
            kernels, stream, of_heads, dattended, a.qkv, out, a.lse, s.delta, s.partials,
        )?;
        let of_tokens = s.wide.slice(0..qkv.tokens_elems());
        group.to_tokens(self, qkv, of_tokens, dqkv)?;
        if let Some(dbias) = dbias {
            column_sums::sum_rows(kernels, stream, dbias, of_tokens, s.partials)?;
        }
        Ok(of_tokens)
    }
}

/// The outputs and inputs of attention's backward besides the gradient of queries, keys and values.
pub(crate) struct AttentionGrads {
    /// The gradient of the bias that was added to queries, keys and values.
    pub(crate) dbias: Option<SumOut>,
    /// Whether queries and keys were rotated.
    pub(crate) rotated: bool,
    /// The masks that the forward pass had.
    pub(crate) masks: Masks,
}
