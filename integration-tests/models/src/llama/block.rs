//! A block: `x + attention(norm x)`, then `mid + mlp(norm mid)`, with SwiGLU in the MLP.

use zero_alloc::device::DeviceSlice;

use super::config::LlamaConfig;
use crate::decoder::buffers::{ScratchView, views};
use crate::decoder::params::Flat;
use crate::decoder::{Backward, Forward};
use crate::ops::{Span, attention, linear, rms_norm, rope, swiglu};

views! {
    /// Activations of a block: `[M, C]` except for the statistics `[M]`, `qkv` `[M, (heads + 2
    /// kv_heads) d]`, after the rotation, `attended` `[M, heads d]`, `lse` `[batch, heads, seq]`,
    /// `gate_up` `[M, 2 F]` and `act` `[M, F]`. If queries and keys have norms, `raw` are they
    /// before them, with `raw_stats`.
    BlockSlices, BlockView {
        norm1, stats1, qkv, raw, raw_stats, attended, lse, mid, norm2, stats2, gate_up, act
    }
}

/// The sizes of a block's operations.
pub(super) struct Shape {
    pub(super) attention: attention::Shape,
    /// The rank's tokens of each sequence.
    span: Span,
    /// The first line of the dropout of attention.
    first_line: usize,
    heads: rms_norm::Heads,
    /// C
    pub(super) width: usize,
    /// F
    pub(super) inner: usize,
    pub(super) eps: f32,
    /// Probability that one of attention's is dropped.
    attention_dropout: f32,
    /// Elements of the parameters, as in [`super::config::BlockElems::in_order`].
    params: [usize; 11],
}

impl Shape {
    pub(super) fn new(
        config: &LlamaConfig,
        attention: attention::Shape,
        span: Span,
        first_line: usize,
    ) -> Self {
        Self {
            attention,
            span,
            first_line,
            heads: rms_norm::Heads {
                queries: config.heads,
                keys: config.kv_heads,
                d: config.head_dim,
                width: config.qkv_width(),
            },
            width: config.hidden,
            inner: config.intermediate,
            eps: config.rms_norm_eps,
            attention_dropout: config.attention_dropout,
            params: config.block_elems().in_order(),
        }
    }

    /// The gains and matrices of a block, by the order of its parameters.
    fn params<'a>(&self, flat: &'a [f32]) -> Params<&'a [f32]> {
        let mut rest = flat;
        Params::new(self.params.map(|elems| {
            let (param, tail) = rest.split_at(elems);
            rest = tail;
            param
        }))
    }

    /// Their gradients.
    fn grads<'a>(&self, flat: &'a mut [f32]) -> Params<&'a mut [f32]> {
        let mut rest = flat;
        Params::new(self.params.map(|elems| {
            let (param, tail) = std::mem::take(&mut rest).split_at_mut(elems);
            rest = tail;
            param
        }))
    }

    fn masks<'a>(&self, flat: &Flat<'a>) -> attention::Masks<'a> {
        let site = 1 + flat.layer as u32;
        let dropout = flat.draws.dropout(self.attention_dropout, site);
        attention::Masks {
            starts: &flat.whole.starts,
            dropout: dropout.map(|dropout| dropout.from_line(self.first_line)),
        }
    }

    fn rows(&self) -> rope::Rows {
        let heads = self.heads;
        rope::Rows {
            width: heads.width,
            turned: (heads.queries + heads.keys) * heads.d,
            d: heads.d,
        }
    }
}

/// The parameters of a block, or their gradients; those that it does not have are empty.
pub(super) struct Params<P> {
    pub(super) norm1: P,
    pub(super) qkv: P,
    pub(super) qkv_bias: P,
    pub(super) qk_norm: P,
    pub(super) output: P,
    pub(super) output_bias: P,
    pub(super) norm2: P,
    pub(super) gate_up: P,
    pub(super) gate_up_bias: P,
    pub(super) down: P,
    pub(super) down_bias: P,
}

impl<P> Params<P> {
    pub(super) fn new(in_order: [P; 11]) -> Self {
        let [
            norm1,
            qkv,
            qkv_bias,
            qk_norm,
            output,
            output_bias,
            norm2,
            gate_up,
            gate_up_bias,
            down,
            down_bias,
        ] = in_order;
        Self {
            norm1,
            qkv,
            qkv_bias,
            qk_norm,
            output,
            output_bias,
            norm2,
            gate_up,
            gate_up_bias,
            down,
            down_bias,
        }
    }
}

/// Computes a part of the block's activations from its input `x` `[M, C]`.
pub(super) fn forward(
    part: Forward,
    a: &mut BlockView<'_>,
    x: &[f32],
    flat: &Flat<'_>,
    shape: &Shape,
) {
    let p = shape.params(flat.flats[0]);
    let masks = shape.masks(flat);
    match part {
        Forward::Qkv => {
            rms_norm::forward(a.norm1, a.stats1, x, p.norm1, shape.eps);
            let heads = shape.heads;
            linear::forward_transposed(a.qkv, a.norm1, p.qkv, p.qkv_bias, heads.width);
            if !p.qk_norm.is_empty() {
                let eps = shape.eps;
                rms_norm::forward_heads(a.qkv, a.raw, a.raw_stats, p.qk_norm, heads, eps);
            }
            let starts = &flat.batch.starts;
            rope::forward(a.qkv, flat.table, starts, shape.span, shape.rows());
        }
        Forward::Attention => {
            attention::forward(a.attended, a.lse, a.qkv, masks, shape.attention);
        }
        Forward::Mid => {
            let c = shape.width;
            linear::forward_residual_transposed(a.mid, x, a.attended, p.output, p.output_bias, c);
        }
        Forward::Mlp => {
            rms_norm::forward(a.norm2, a.stats2, a.mid, p.norm2, shape.eps);
            let n = 2 * shape.inner;
            linear::forward_transposed(a.gate_up, a.norm2, p.gate_up, p.gate_up_bias, n);
            swiglu::forward(a.act, a.gate_up, shape.inner);
        }
    }
}

/// Computes the block's output `[M, C]`.
pub(super) fn output(out: &mut [f32], a: &BlockView<'_>, flat: &[f32], shape: &Shape) {
    let p = shape.params(flat);
    linear::forward_residual_transposed(out, a.mid, a.act, p.down, p.down_bias, shape.width);
}

/// Computes a part of the block's backward and adds to `grad`, the unit's gradient. `a.gate_up` is
/// overwritten by its gradient. From [`Backward::Mid`] on, `s.wide` has the gradient of `attended`,
/// and behind it that of `qkv`.
pub(super) fn backward(
    part: Backward,
    s: ScratchView<'_>,
    a: &mut BlockView<'_>,
    x: &[f32],
    flat: &Flat<'_>,
    grad: &mut [f32],
    shape: &Shape,
) {
    let p = shape.params(flat.flats[0]);
    let masks = shape.masks(flat);
    let g = shape.grads(grad);
    let c = shape.width;
    if part == Backward::Mlp {
        let f = shape.inner;
        let dact = &mut s.wide[..a.act.len()];
        linear::backward_weight_transposed(g.down, g.down_bias, a.act, s.dres, f);
        linear::product(dact, s.dres, p.down, f);
        swiglu::backward(a.gate_up, dact, f);
        linear::backward_weight_transposed(g.gate_up, g.gate_up_bias, a.norm2, a.gate_up, c);
        linear::product(s.narrow, a.gate_up, p.gate_up, c);
        return;
    }

    let (dattended, dqkv) = s.wide.split_at_mut(a.attended.len());
    let dqkv = &mut dqkv[..a.qkv.len()];
    match part {
        Backward::Mlp => {}
        Backward::Mid => {
            rms_norm::backward(s.dres, g.norm2, s.narrow, a.mid, a.stats2, p.norm2);
            let q_width = shape.heads.queries * shape.heads.d;
            let bias = g.output_bias;
            linear::backward_weight_transposed(g.output, bias, a.attended, s.dres, q_width);
            linear::product(dattended, s.dres, p.output, q_width);
        }
        Backward::Attention => {
            let whole = shape.attention;
            attention::backward(dqkv, dattended, a.qkv, a.attended, a.lse, masks, whole);
        }
        Backward::Qkv => {
            let starts = &flat.batch.starts;
            rope::backward(dqkv, flat.table, starts, shape.span, shape.rows());
            if !p.qk_norm.is_empty() {
                let heads = shape.heads;
                rms_norm::backward_heads(dqkv, g.qk_norm, a.raw, a.raw_stats, p.qk_norm, heads);
            }
            linear::backward_weight_transposed(g.qkv, g.qkv_bias, a.norm1, dqkv, c);
            linear::product(s.narrow, dqkv, p.qkv, c);
        }
        Backward::Input => {
            rms_norm::backward(s.dres, g.norm1, s.narrow, x, a.stats1, p.norm1);
        }
    }
}
