//! Attention of ranks that share sequences on CUDA: the exchanges around it, as on the host
//! ([`crate::decoder::sequence`], which has the table of the buffers).

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::AnySlice;
use zero_trainer::ModelError;

use super::pass_context::PassContext;
use super::sequence_group::SequenceGroup;
use super::slices::AttentionSlices;
use crate::cuda::attention::{Attention, Gradients, Masks};
use crate::cuda::{SumOut, column_sums};
use crate::decoder::sequence_part::Exchanges;

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
        group.to_heads(kernels, stream, qkv, a.qkv, group.qkv_of_tokens())?;
        attention.forward(kernels, stream, of_heads, a.lse, a.qkv, masks)?;
        group.to_tokens(kernels, stream, attended, a.attended, of_heads)
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
        group.to_heads(kernels, stream, attended, dattended, dattended)?;
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
        group.to_tokens(kernels, stream, qkv, of_tokens, dqkv)?;
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
