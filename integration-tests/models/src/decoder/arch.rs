//! The contract between the engine and an architecture on the host: the parts of a block, and what
//! computes them.

use zero_alloc::device::{AnySlice, DeviceSlice};
use zero_alloc::host::{HostDevice, HostStream};
use zero_shard::UnitSpec;
use zero_trainer::{Model, ModelError};

use super::params::{Flat, UnitParams};
use super::sizes::Sizes;
use super::slices::{HeadView, ScratchSlices, ScratchView};
use crate::ops::dropout::Draws;

/// A part of a block's forward. Between two parts, ranks that share a micro-batch exchange what the
/// first has computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Forward {
    /// The first norm's output.
    Norm1,
    /// Queries, keys and values, as attention reads them.
    Qkv,
    /// The output of attention.
    Attention,
    /// The second norm's output.
    Norm2,
    /// The activations that the output reads.
    Mlp,
}

/// A part of a block that is added to the residual stream: the product of activations and a second
/// matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Branch {
    Attention,
    Mlp,
}

/// A part of a block's backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backward {
    /// To `s.narrow`, the gradient of the second norm's output.
    Mlp,
    /// To `s.dres`, that of the residual stream behind attention.
    Norm2,
    /// The gradient of what the heads attend to.
    Attended,
    /// The gradient of queries, keys and values, as attention reads them.
    Attention,
    /// To `s.narrow`, that of the first norm's output.
    Qkv,
    /// To `s.dres`, that of the block's input.
    Norm1,
    /// Adds the partial sums ([`HostArch::partial_elems`]) to the unit's gradient.
    PartialSums,
}

/// An architecture with its batch: what a decoder computes between two points of the residual
/// stream. Shapes: `x`, `out` and gradients `[M, C]`.
pub(crate) trait HostArch: Send + Sync + 'static {
    /// The activations of a block.
    type Block: Copy + Send + 'static;

    /// Its name in messages.
    const NAME: &'static str;

    /// The units: the embedding, each block, the head.
    fn units(&self) -> Vec<UnitSpec>;

    /// Whether the head's matrix is the embedding's.
    fn tied(&self) -> bool;

    /// Tokens of the vocabulary.
    fn vocab(&self) -> usize;

    /// Elements of the buffers.
    fn sizes(&self) -> Sizes;

    /// The activations of a block as parts of `all`, as in [`Sizes::block`].
    fn cut(all: DeviceSlice<f32>, sizes: &[usize]) -> Self::Block;

    /// The residual stream behind attention.
    fn mid(block: Self::Block) -> DeviceSlice<f32>;

    /// Elements at the start of `s.logits` in which a block's backward adds gradients that ranks of
    /// tensor parallelism sum.
    fn partial_elems(&self) -> usize;

    /// The outputs of the two norms.
    fn norms(block: &mut Self::Block) -> [&mut DeviceSlice<f32>; 2];

    /// The activations of a block that attention reads and writes: `qkv` and `attended`.
    fn attention(block: &mut Self::Block) -> [&mut DeviceSlice<f32>; 2];

    /// The gradients of what the heads attend to, and of queries, keys and values, of the lengths
    /// that they have in `block`.
    fn attention_grads(s: ScratchSlices, block: Self::Block) -> [DeviceSlice<f32>; 2];

    /// Writes the constants.
    fn fill_table(&self, table: &mut [f32]);

    /// `x` of the batch, before its dropout.
    fn embed(&self, x: &mut [f32], p: &Flat<'_>);

    /// Applies the embedding's dropout to its output or the gradient of it: rows from `first` on.
    fn drop_embedding(&self, _x: &mut [f32], _first: usize, _p: &Flat<'_>) {}

    /// Adds to `grad`, the gradient of the unit with this layout.
    fn embed_backward(&self, grad: &mut [f32], unit: &UnitParams, dx: &[f32], p: &Flat<'_>);

    /// One part of a block's forward from its input `x`.
    fn forward(&self, part: Forward, block: Self::Block, x: &[f32], p: &Flat<'_>);

    /// `out = residual + dropout(x w + bias)` of a branch.
    fn branch(
        &self,
        branch: Branch,
        out: &mut [f32],
        residual: &[f32],
        block: Self::Block,
        p: &Flat<'_>,
    );

    /// `out = x w` of a branch: with tensor parallelism a part of the sum over its ranks.
    fn product(&self, branch: Branch, out: &mut [f32], block: Self::Block, p: &Flat<'_>);

    /// `out = residual + dropout(sum + bias)` of a branch: rows from `first` on.
    fn add_branch(
        &self,
        branch: Branch,
        out: &mut [f32],
        residual_and_sum: [&[f32]; 2],
        first: usize,
        p: &Flat<'_>,
    );

    /// The gradient of the input of a branch's dropout, `[M, C]`, which its backward reads:
    /// `s.dres` if nothing is dropped.
    fn before_dropout(
        &self,
        s: ScratchSlices,
        _branch: Branch,
        _draws: &Draws,
    ) -> DeviceSlice<f32> {
        s.dres
    }

    /// Computes that gradient, of rows from `first` on, from the gradient `dy` of a branch. Called
    /// if a branch has dropout.
    fn drop_gradient(
        &self,
        _branch: Branch,
        dx: &mut [f32],
        dy: &[f32],
        _first: usize,
        _p: &Flat<'_>,
    ) {
        dx.copy_from_slice(dy);
    }

    /// One part of a block's backward. Adds to `grad`, the unit's gradient. `s.dres` is the
    /// gradient of the output before [`Backward::Mlp`] and of the input after [`Backward::Norm1`].
    /// May overwrite the block's activations except for the norms' outputs.
    fn backward(
        &self,
        part: Backward,
        s: ScratchView<'_>,
        block: Self::Block,
        x: &[f32],
        p: &Flat<'_>,
        grad: &mut [f32],
    );

    /// `h.out`, the head's norm of `x`.
    fn final_norm(&self, h: &mut HeadView<'_>, x: &[f32], p: &Flat<'_>);

    /// Elements of the parameters of the head's norm.
    fn final_norm_elems(&self) -> usize;

    /// The gradient of the head's norm, a part of that of the head's unit.
    fn final_norm_grad<'g>(&self, grad: &'g mut [f32], p: &Flat<'_>) -> &'g mut [f32];

    /// Adds the gradient of `x` to `dx`, and those of the norm to `dnorm`, as in
    /// [`Self::final_norm_grad`].
    fn final_norm_backward(
        &self,
        dx: &mut [f32],
        dnorm: &mut [f32],
        dout: &[f32],
        x: &[f32],
        h: &HeadView<'_>,
        p: &Flat<'_>,
    );
}

/// A model on the host, whose logits can be read.
///
/// # Safety
/// As for [`Model`]; it also writes to `out`.
pub unsafe trait HostModel: Model<HostDevice> {
    /// Enqueues the logits of this rank's tokens, `[tokens, vocab]`, after a forward of every pass.
    ///
    /// # Errors
    /// The stream failed.
    fn logits(
        &self,
        stream: &HostStream,
        params: &[AnySlice],
        out: DeviceSlice<f32>,
    ) -> Result<(), ModelError>;
}
