//! The contract between the engine and an architecture on CUDA.

use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::AnySlice;
use zero_shard::UnitSpec;
use zero_trainer::{Model, ModelError};

use super::pass_context::PassContext;
use super::sizes::Extent;
use super::slices::{BlockParts, HeadSlices, ScratchSlices};
use crate::cuda::{OpError, SumOut};

/// An architecture on CUDA: what a decoder enqueues between two points of the residual stream.
/// Shapes: `x`, `out` and gradients `[M, C]`.
pub(crate) trait GpuArch: Send + 'static {
    /// The activations of a block.
    type Block: Copy + Send;

    /// Its name in messages.
    const NAME: &'static str;

    /// The part of the embedding's name that no other parameter of its unit has.
    const EMBEDDING: &'static str;

    /// The units: the embedding, each block, the head.
    fn units(&self) -> Vec<UnitSpec>;

    /// Whether the head's matrix is the embedding's.
    fn tied(&self) -> bool;

    /// Tokens of the vocabulary.
    fn vocab(&self) -> usize;

    /// Sizes of the buffers.
    fn extent(&self) -> Extent;

    /// The activations of a block, in the order of [`Extent::block`].
    fn block(&self, parts: BlockParts, s: &ScratchSlices) -> Result<Self::Block, ModelError>;

    /// Writes the constants.
    fn fill_table(&self, table: &mut [f32]);

    /// Computes `out` of the batch's tokens.
    fn embed(&self, cx: &PassContext<'_>, out: AnySlice) -> Result<(), OpError>;

    /// Adds to the gradient of the embedding's unit; `dx` is that of its output.
    fn embed_backward(&self, cx: &PassContext<'_>, dx: AnySlice) -> Result<(), ModelError>;

    /// Computes a block's output, and the activations that its backward reads.
    fn forward(
        &self,
        cx: &PassContext<'_>,
        a: &Self::Block,
        x: AnySlice,
        out: AnySlice,
    ) -> Result<(), ModelError>;

    /// Computes again what forward did not keep.
    fn recompute(
        &self,
        cx: &PassContext<'_>,
        a: &Self::Block,
        x: AnySlice,
    ) -> Result<(), ModelError>;

    /// Computes the backward of a block, which adds to or writes the unit's gradient. `cx.s.dres`
    /// is the gradient of the output on entry and of the input on return.
    fn backward(
        &self,
        cx: &PassContext<'_>,
        a: &Self::Block,
        x: AnySlice,
    ) -> Result<(), ModelError>;

    /// Computes `h.out`, the head's norm of `x`.
    fn final_norm(&self, cx: &PassContext<'_>, h: &HeadSlices, x: AnySlice) -> Result<(), OpError>;

    /// The gradients of the head's norm, of C elements each.
    fn final_norm_sums(&self, cx: &PassContext<'_>) -> Vec<SumOut>;

    /// Adds the gradient of `x` to `dx`, and those of the norm to `sums`, as in
    /// [`Self::final_norm_sums`].
    fn final_norm_backward(
        &self,
        cx: &PassContext<'_>,
        h: &HeadSlices,
        x: AnySlice,
        dx_and_dout: [AnySlice; 2],
        sums: &[SumOut],
    ) -> Result<(), OpError>;
}

/// A model on a GPU, whose logits can be read.
///
/// # Safety
/// As for [`Model`]; it also writes to `out`.
pub unsafe trait GpuModel: Model<CudaDevice> {
    /// Enqueues the logits of this rank's tokens, `[tokens, stride_elems(vocab)]`, after a forward
    /// of every pass. See [`stride_elems`](crate::cuda::cross_entropy::stride_elems).
    ///
    /// # Errors
    /// The stream failed.
    fn logits(
        &self,
        stream: &CudaStream,
        params: &[AnySlice],
        out: AnySlice,
    ) -> Result<(), ModelError>;
}
