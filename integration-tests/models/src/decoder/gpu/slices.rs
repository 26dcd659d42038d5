//! Slices of the buffers of a model on CUDA, by their use in a pass.

use zero_alloc::device::{AnySlice, DeviceSlice};

/// The head's norm: `out` `[M, C]`, and its `stats`.
#[derive(Clone, Copy)]
pub(crate) struct HeadSlices {
    pub(crate) out: AnySlice,
    pub(crate) stats: DeviceSlice<f32>,
}

/// `normed` `[M, C]`, the output of a norm; gradients of activations: `dres` `[M, C]`, `narrow` and
/// `wide` of a block's inner widths, some rows of `logits`; `delta` `[batch, heads, seq]` of
/// attention; `losses` `[M]`; and the `partials` of sums over rows.
#[derive(Clone, Copy)]
pub(crate) struct ScratchSlices {
    pub(crate) normed: AnySlice,
    pub(crate) dres: AnySlice,
    pub(crate) narrow: AnySlice,
    pub(crate) wide: AnySlice,
    pub(crate) logits: AnySlice,
    pub(crate) delta: DeviceSlice<f32>,
    pub(crate) losses: DeviceSlice<f32>,
    pub(crate) partials: DeviceSlice<f32>,
    /// Gradients that are sums over the ranks of tensor parallelism.
    pub(crate) sums: DeviceSlice<f32>,
    /// The input of an adapter behind its dropout, or the gradient of that, `[M, inputs]`.
    pub(crate) dropped: AnySlice,
    /// The result of an adapter's A `[M, r]`; behind it the gradients of that, of each adapter of a
    /// layer.
    pub(crate) low_rank: AnySlice,
}

/// The buffers of exchanges.
pub(super) struct ExchangeSlices {
    pub(super) send: AnySlice,
    pub(super) recv: AnySlice,
    /// One for each block with separate activations.
    pub(super) attended: Vec<AnySlice>,
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

/// The activations of a block: `qkv` `[M, (heads + 2 kv_heads) d]`, after the rotation; `raw`
/// `[M, (heads + kv_heads) d]`, queries and keys before their norms, with `raw_stats`, or empty;
/// `attended` `[M, heads d]`; `lse` `[batch, heads, seq]`; `mid` `[M, C]`; `up`, what the MLP's first
/// matrix computes; `act` `[M, F]`; and the statistics of the norms.
#[derive(Clone, Copy)]
pub(super) struct BlockSlices {
    pub(super) stats1: DeviceSlice<f32>,
    pub(super) qkv: AnySlice,
    pub(super) raw: AnySlice,
    pub(super) raw_stats: DeviceSlice<f32>,
    pub(super) attended: AnySlice,
    pub(super) lse: DeviceSlice<f32>,
    pub(super) mid: AnySlice,
    pub(super) stats2: DeviceSlice<f32>,
    /// Of SwiGLU, backward overwrites it by its gradient.
    pub(super) up: AnySlice,
    /// If it is not kept it is the start of [`ScratchSlices::wide`], which backward must not write before
    /// its last read of this one.
    pub(super) act: AnySlice,
}
