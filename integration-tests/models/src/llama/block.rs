//! A block: `x + attention(norm x)`, then `mid + mlp(norm mid)`, with SwiGLU in the MLP.

use std::ops::Range;

use zero_alloc::device::DeviceSlice;

use super::config::LlamaConfig;
use crate::decoder::arch::{Backward, Branch, Forward};
use crate::decoder::params::{Flat, split_ranges};
use crate::decoder::slices::{ScratchView, views};
use crate::ops::{Span, attention, linear, rms_norm, rope, swiglu};
use crate::tensor::TensorRank;

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
    /// The ranges of the parameters, as in [`super::config::BlockElems::places`].
    params: [Range<usize>; 11],
    tensor: TensorRank,
    /// Whether the ranks of tensor parallelism divide the rows of norms.
    divides_rows: bool,
}

impl Shape {
    /// `config` is that of the rank's part.
    pub(super) fn new(
        config: &LlamaConfig,
        attention: attention::Shape,
        span: Span,
        first_line: usize,
        tensor: TensorRank,
        divides_rows: bool,
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
            params: config.block_elems().places(tensor.ranks > 1),
            tensor,
            divides_rows,
        }
    }

    /// The gains and matrices of a block, by the order of its parameters.
    fn params<'a>(&self, flat: &'a [f32]) -> Params<&'a [f32]> {
        Params::new(self.params.clone().map(|range| &flat[range]))
    }

    /// Their gradients.
    fn grads<'a>(&self, flat: &'a mut [f32]) -> Params<&'a mut [f32]> {
        Params::new(split_ranges(flat, &self.params))
    }

    /// The bias of a branch; empty if it has none.
    pub(super) fn bias<'a>(&self, branch: Branch, flat: &'a [f32]) -> &'a [f32] {
        let p = self.params(flat);
        match branch {
            Branch::Attention => p.output_bias,
            Branch::Mlp => p.down_bias,
        }
    }

    /// Places in the partial sums of the gains of the norms of heads, and of the two norms; empty
    /// where the gradient itself is added to.
    pub(super) fn partial(&self) -> [Range<usize>; 3] {
        let [_, _, _, qk_norm, ..] = &self.params;
        let heads = match self.tensor.ranks {
            1 => 0,
            _ => qk_norm.len(),
        };
        let norm = match self.divides_rows {
            true => self.width,
            false => 0,
        };
        [
            0..heads,
            heads..heads + norm,
            heads + norm..heads + 2 * norm,
        ]
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
        Forward::Norm1 => rms_norm::forward(a.norm1, a.stats1, x, p.norm1, shape.eps),
        Forward::Qkv => {
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
        Forward::Norm2 => rms_norm::forward(a.norm2, a.stats2, a.mid, p.norm2, shape.eps),
        Forward::Mlp => {
            let n = 2 * shape.inner;
            linear::forward_transposed(a.gate_up, a.norm2, p.gate_up, p.gate_up_bias, n);
            swiglu::forward(a.act, a.gate_up, shape.inner);
        }
    }
}

/// The input of a branch's product, its matrix and its bias.
fn operands<'a>(
    branch: Branch,
    a: &'a BlockView<'_>,
    flat: &'a [f32],
    shape: &Shape,
) -> [&'a [f32]; 3] {
    let p = shape.params(flat);
    match branch {
        Branch::Attention => [a.attended, p.output, p.output_bias],
        Branch::Mlp => [a.act, p.down, p.down_bias],
    }
}

/// `out = residual + x w^T + bias` of a branch.
pub(super) fn branch(
    branch: Branch,
    out: &mut [f32],
    residual: &[f32],
    a: &BlockView<'_>,
    flat: &[f32],
    shape: &Shape,
) {
    let [x, w, bias] = operands(branch, a, flat, shape);
    linear::forward_residual_transposed(out, residual, x, w, bias, shape.width);
}

/// `out = x w^T` of a branch.
pub(super) fn product(
    branch: Branch,
    out: &mut [f32],
    a: &BlockView<'_>,
    flat: &[f32],
    shape: &Shape,
) {
    let [x, w, _] = operands(branch, a, flat, shape);
    linear::product_transposed(out, x, w, shape.width);
}

/// Computes a part of the block's backward and adds to `grad`, the unit's gradient. `a.gate_up` is
/// overwritten by its gradient. From [`Backward::Attended`] on, `s.wide` has the gradient of
/// `attended`, and behind it that of `qkv`.
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
    let partial = split_ranges(s.logits, &shape.partial());
    let gains = [g.qk_norm, g.norm1, g.norm2];
    if part == Backward::PartialSums {
        for (gain, sums) in gains.into_iter().zip(partial) {
            gain.iter_mut()
                .zip(sums)
                .for_each(|(gain, sum)| *gain += *sum);
        }
        return;
    }

    let mut gains =
        gains.into_iter().zip(partial).map(
            |(gain, partial)| {
                if partial.is_empty() { gain } else { partial }
            },
        );
    let [dqk_norm, dnorm1, dnorm2] = std::array::from_fn(|_| gains.next().unwrap_or_default());
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
        Backward::Mlp | Backward::PartialSums => {}
        Backward::Norm2 => {
            rms_norm::backward(s.dres, dnorm2, s.narrow, a.mid, a.stats2, p.norm2);
        }
        Backward::Attended => {
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
                rms_norm::backward_heads(dqkv, dqk_norm, a.raw, a.raw_stats, p.qk_norm, heads);
            }
            linear::backward_weight_transposed(g.qkv, g.qkv_bias, a.norm1, dqkv, c);
            linear::product(s.narrow, dqkv, p.qkv, c);
        }
        Backward::Norm1 => {
            rms_norm::backward(s.dres, dnorm1, s.narrow, x, a.stats1, p.norm1);
        }
    }
}
