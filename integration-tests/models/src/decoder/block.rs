//! A block's forward on the host, with any linear layers: those of training read a flat parameter, and
//! those of generation matrices in fp32 or bf16.

use super::config::DecoderConfig;
use crate::ops::linear;
use crate::ops::lora::AdaptedLinear;
use crate::ops::norm::Norm;
use crate::ops::{Span, head_norm, rope};

/// A linear layer in forward.
pub(crate) trait Layer {
    /// `y = x w + bias`.
    fn forward(&self, y: &mut [f32], x: &[f32]);

    /// `y = x w`.
    fn product(&self, y: &mut [f32], x: &[f32]);

    /// Empty if there is none.
    fn bias(&self) -> &[f32];

    /// `y = residual + (sum + bias)`: rows of `n` elements.
    fn add_residual(&self, y: &mut [f32], residual: &[f32], sum: &[f32], n: usize) {
        linear::add_residual(y, residual, sum, self.bias(), n);
    }
}

impl Layer for AdaptedLinear<'_> {
    fn forward(&self, y: &mut [f32], x: &[f32]) {
        AdaptedLinear::forward(self, y, x);
    }

    fn product(&self, y: &mut [f32], x: &[f32]) {
        AdaptedLinear::product(self, y, x);
    }

    fn bias(&self) -> &[f32] {
        self.base.bias
    }
}

/// A block and its parameters.
pub(crate) struct Block<'a, L> {
    pub(crate) config: &'a DecoderConfig,
    pub(crate) norm1: Norm<'a>,
    pub(crate) qkv: L,
    /// The gains of the norms of queries and of keys `[2, d]`; empty if there are none.
    pub(crate) qk_norm: &'a [f32],
    pub(crate) output: L,
    pub(crate) norm2: Norm<'a>,
    pub(crate) up: L,
    pub(crate) down: L,
}

/// The positions of rows.
#[derive(Clone, Copy)]
pub(crate) struct Positions<'a> {
    /// The angles of the first positions; empty if there is no rotation.
    pub(crate) table: &'a [f32],
    pub(crate) starts: &'a [u32],
    pub(crate) span: Span,
}

impl<L: Layer> Block<'_, L> {
    /// Queries, keys and values of the first norm's output, as attention reads them. Those before their
    /// norms go to `raw`, with `raw_stats`.
    pub(crate) fn qkv(
        &self,
        [qkv, raw, raw_stats]: [&mut [f32]; 3],
        normed: &[f32],
        positions: Positions<'_>,
    ) {
        let config = self.config;
        let heads = config.qkv_heads();
        self.qkv.forward(qkv, normed);
        if config.qk_norm {
            head_norm::forward(qkv, raw, raw_stats, self.qk_norm, heads, config.eps);
        }
        if config.rope.is_some() {
            let Positions {
                table,
                starts,
                span,
            } = positions;
            rope::forward(qkv, table, starts, span, heads);
        }
    }

    /// The activations `act` that the MLP's second matrix reads, and `up`, which its backward reads.
    pub(crate) fn mlp(&self, act: &mut [f32], up: &mut [f32], normed: &[f32]) {
        let config = self.config;
        self.up.forward(up, normed);
        config.mlp.forward(act, up, config.inner);
    }
}
