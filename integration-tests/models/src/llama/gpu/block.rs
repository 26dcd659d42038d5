//! A block on CUDA: `x + attention(norm x)`, then `mid + mlp(norm mid)`, as in the host's block.rs.
//! Matrices are `[out, in]`, as Hugging Face stores them.

use zero_alloc::device::{AnySlice, DeviceSlice};
use zero_trainer::{Grad, ModelError};

use super::{LlamaGpu, heads};
use crate::cuda::attention::Masks;
use crate::cuda::matmul::{Epilogue, Matrix, Product};
use crate::cuda::rope;
use crate::cuda::{OpError, SumOut, column_sums, dropout, rms_norm, swiglu};
use crate::decoder::gpu::pass_context::PassContext;
use crate::decoder::gpu::sequence::AttentionGrads;
use crate::decoder::gpu::slices::AttentionSlices;
use crate::llama::block::Params;

/// The activations of a block: `qkv` `[M, (heads + 2 kv_heads) d]`, after the rotation; `raw`
/// `[M, (heads + kv_heads) d]`, queries and keys before their norms, with `raw_stats`, or empty;
/// `attended` `[M, heads d]`; `lse` `[batch, heads, seq]`; `mid` `[M, C]`; `gate_up` `[M, 2 F]`, which
/// backward overwrites by its gradient; and the statistics `[M]` of the norms.
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
    pub(super) gate_up: AnySlice,
}

impl LlamaGpu {
    /// The parameters of a block; those that it does not have are empty.
    fn params(&self, cx: &PassContext<'_>) -> Params<AnySlice> {
        let places = self.config.block_elems().places(cx.tensor.is_some());
        Params::new(places.map(|range| cx.p.params[0].slice(range)))
    }

    /// The masks of a block's attention.
    fn masks(&self, cx: &PassContext<'_>) -> Masks {
        cx.masks(self.config.attention_dropout, 1 + cx.layer as u32)
    }

    /// Their gradients.
    fn grads(&self, cx: &PassContext<'_>) -> Params<Grad> {
        let places = self.config.block_elems().places(cx.tensor.is_some());
        Params::new(places.map(|range| cx.p.grads[0].slice(range)))
    }
}

impl BlockSlices {
    fn attention(&self) -> AttentionSlices {
        AttentionSlices {
            qkv: self.qkv,
            attended: self.attended,
            lse: self.lse,
        }
    }
}

/// Computes the block's activations from its input `x` `[M, C]`, up to those of the MLP.
pub(super) fn forward(
    arch: &LlamaGpu,
    cx: &PassContext<'_>,
    a: &BlockSlices,
    x: AnySlice,
) -> Result<(), ModelError> {
    let PassContext { ops, stream, s, .. } = *cx;
    let kernels = &ops.kernels;
    let p = arch.params(cx);
    let c = arch.config.hidden;
    let eps = arch.config.rms_norm_eps;

    let own = cx.own(s.normed);
    rms_norm::forward(kernels, stream, own, a.stats1, x, p.norm1, eps)?;
    cx.gather_rows(s.normed)?;
    let qkv = cx.qkv(a.attention());
    let product = linear(qkv, s.normed, [p.qkv, p.qkv_bias], c, None);
    ops.matmul.run(stream, &product)?;
    let heads = heads(&arch.config);
    let angles = cx.angles();
    if p.qk_norm.is_empty() {
        rope::forward(kernels, stream, qkv, angles, heads)?;
    } else {
        rope::norm_forward(
            kernels,
            stream,
            qkv,
            a.raw,
            a.raw_stats,
            p.qk_norm,
            angles,
            heads,
            eps,
        )?;
    }

    let attention = &arch.attention[cx.layer];
    cx.attend(attention, a.attention(), arch.masks(cx))?;
    let width = arch.config.q_width();
    let operands = [a.attended, p.output, p.output_bias];
    add_to_residual(cx, a.mid, x, operands, width)?;

    rms_norm::forward(kernels, stream, own, a.stats2, a.mid, p.norm2, eps)?;
    cx.gather_rows(s.normed)?;
    let product = linear(a.gate_up, s.normed, [p.gate_up, p.gate_up_bias], c, None);
    Ok(ops.matmul.run(stream, &product)?)
}

/// Computes the block's output `[M, C]`.
pub(super) fn output(
    arch: &LlamaGpu,
    cx: &PassContext<'_>,
    a: &BlockSlices,
    out: AnySlice,
) -> Result<(), OpError> {
    let PassContext { ops, stream, s, .. } = *cx;
    let p = arch.params(cx);
    let f = arch.config.intermediate;
    let act = s.wide.slice(0..a.gate_up.len() / 2);
    swiglu::forward(&ops.kernels, stream, act, a.gate_up, f)?;
    add_to_residual(cx, out, a.mid, [act, p.down, p.down_bias], f)
}

/// `y = residual + x w^T + bias`. With tensor parallelism the ranks' products are summed; only the first
/// rank adds the bias and, to all rows, the residual. With sequence parallelism each rank adds it to its
/// rows.
fn add_to_residual(
    cx: &PassContext<'_>,
    y: AnySlice,
    residual: AnySlice,
    [x, w, bias]: [AnySlice; 3],
    k: usize,
) -> Result<(), OpError> {
    let PassContext { ops, stream, .. } = *cx;
    let divides = cx.divides_rows();
    let add = (cx.is_first() && !divides).then_some(residual);
    let product = linear(cx.before_sum(y), x, [w, bias], k, add);
    let product = match cx.is_first() {
        true => product,
        false => Product {
            epilogue: Epilogue::None,
            ..product
        },
    };
    ops.matmul.run(stream, &product)?;
    cx.sum_to(y)?;
    if !divides {
        return Ok(());
    }
    let c = w.len() / k.max(1);
    dropout::add_residual(&ops.kernels, stream, y, Some(residual), c, None)
}

/// Computes the block's backward, which adds to or writes the unit's gradient. `s.dres` is the
/// gradient of the output on entry and of the input on return.
///
/// The backward of a norm also computes its output again, for the gradient of the matrix behind it.
pub(super) fn backward(
    arch: &LlamaGpu,
    cx: &PassContext<'_>,
    a: &BlockSlices,
    x: AnySlice,
) -> Result<(), ModelError> {
    let PassContext { ops, stream, s, .. } = *cx;
    let kernels = &ops.kernels;
    let p = arch.params(cx);
    let g = arch.grads(cx);
    let c = arch.config.hidden;
    let f = arch.config.intermediate;
    let narrow = s.narrow.slice(0..s.dres.len());
    let places = SumPlaces::new(arch, cx);
    let [dres, normed] = [s.dres, s.normed].map(|rows| cx.own(rows));

    cx.gather_rows(s.dres)?;
    // The MLP. `act` is its gradient until SwiGLU's backward.
    let act = s.wide.slice(0..a.gate_up.len() / 2);
    let product = input_gradient(act, s.dres, p.down, f);
    ops.matmul.run(stream, &product)?;
    swiglu::backward(kernels, stream, act, a.gate_up, f)?;
    weight_gradient(cx, [g.down, g.down_bias], act, s.dres, f)?;
    let product = input_gradient(narrow, a.gate_up, p.gate_up, c);
    ops.matmul.run(stream, &product)?;
    cx.sum_rows(narrow)?;
    rms_norm::backward(
        kernels,
        stream,
        dres,
        places.of_norm(cx, 1, g.norm2),
        Some(normed),
        cx.own(narrow),
        a.mid,
        a.stats2,
        p.norm2,
        s.partials,
    )?;
    cx.gather_rows(s.normed)?;
    let gate_up = [g.gate_up, g.gate_up_bias];
    weight_gradient(cx, gate_up, s.normed, a.gate_up, c)?;

    cx.gather_rows(s.dres)?;
    let dqkv = attention_backward(arch, cx, a, &places)?;
    let product = input_gradient(narrow, dqkv, p.qkv, c);
    ops.matmul.run(stream, &product)?;
    cx.sum_rows(narrow)?;
    rms_norm::backward(
        kernels,
        stream,
        dres,
        places.of_norm(cx, 0, g.norm1),
        Some(normed),
        cx.own(narrow),
        x,
        a.stats1,
        p.norm1,
        s.partials,
    )?;
    cx.gather_rows(s.normed)?;
    // Attention's backward has summed the gradient of the bias.
    let product = weight_product(g.qkv, s.normed, dqkv, c);
    ops.matmul.run(stream, &product)?;
    Ok(places.finish(cx, g.qk_norm, [g.norm1, g.norm2])?)
}

/// The places of the gradients of norms: elements of the partial sums where ranks of tensor parallelism
/// sum them, otherwise the gradients themselves.
struct SumPlaces {
    /// Elements of the partial sums of the norms of heads; 0 if they are not partial.
    of_heads: usize,
    /// Elements of each of the two norms; 0 if they are not partial.
    of_norm: usize,
}

impl SumPlaces {
    fn new(arch: &LlamaGpu, cx: &PassContext<'_>) -> Self {
        let config = &arch.config;
        Self {
            of_heads: match config.has_qk_norm() && cx.tensor.is_some() {
                true => 2 * config.head_dim,
                false => 0,
            },
            of_norm: match cx.divides_rows() {
                true => config.hidden,
                false => 0,
            },
        }
    }

    fn of_heads(&self, cx: &PassContext<'_>, grad: Grad) -> SumOut {
        match self.of_heads {
            0 => grad.into(),
            len => cx.partial(0..len),
        }
    }

    /// The place of the gradient of norm `nth`, 0 or 1.
    fn of_norm(&self, cx: &PassContext<'_>, nth: usize, grad: Grad) -> SumOut {
        let start = self.of_heads + nth * self.of_norm;
        match self.of_norm {
            0 => grad.into(),
            len => cx.partial(start..start + len),
        }
    }

    /// Sums the partial sums over the ranks, and adds them to the gradients.
    fn finish(&self, cx: &PassContext<'_>, heads: Grad, norms: [Grad; 2]) -> Result<(), OpError> {
        let all = self.of_heads + 2 * self.of_norm;
        cx.sum_partials(all)?;
        if self.of_heads > 0 {
            cx.finish_sums(&[heads.into()], 0..self.of_heads)?;
        }
        if self.of_norm > 0 {
            cx.finish_sums(&norms.map(SumOut::from), self.of_heads..all)?;
        }
        Ok(())
    }
}

/// Computes the gradients of attention's parameters except for the first matrix, and returns the
/// gradient of qkv as the product wrote it.
fn attention_backward(
    arch: &LlamaGpu,
    cx: &PassContext<'_>,
    a: &BlockSlices,
    places: &SumPlaces,
) -> Result<AnySlice, ModelError> {
    let PassContext { ops, stream, s, .. } = *cx;
    let kernels = &ops.kernels;
    let p = arch.params(cx);
    let g = arch.grads(cx);
    let width = arch.config.q_width();

    let output = [g.output, g.output_bias];
    weight_gradient(cx, output, a.attended, s.dres, width)?;
    let dattended = s.narrow.slice(0..a.attended.len());
    let product = input_gradient(dattended, s.dres, p.output, width);
    ops.matmul.run(stream, &product)?;

    let has_bias = !p.qkv_bias.is_empty();
    let has_norm = !p.qk_norm.is_empty();
    let grads = AttentionGrads {
        // The norms are between the bias and the rotation.
        dbias: (has_bias && !has_norm).then(|| g.qkv_bias.into()),
        rotated: true,
        masks: arch.masks(cx),
    };
    let attention = &arch.attention[cx.layer];
    let dqkv = cx.attend_backward(attention, a.attention(), dattended, grads)?;

    if has_norm {
        rope::norm_backward(
            kernels,
            stream,
            dqkv,
            places.of_heads(cx, g.qk_norm),
            a.raw,
            a.raw_stats,
            p.qk_norm,
            heads(&arch.config),
            s.partials,
        )?;
        if has_bias {
            column_sums::sum_rows(kernels, stream, g.qkv_bias.into(), dqkv, s.partials)?;
        }
    }

    Ok(dqkv)
}

/// `y = x w^T + bias + add`: x `[m, k]`, w `[n, k]`; no bias if it is empty.
fn linear(
    y: AnySlice,
    x: AnySlice,
    [w, bias]: [AnySlice; 2],
    k: usize,
    add: Option<AnySlice>,
) -> Product {
    let n = w.len() / k.max(1);
    Product {
        left: Matrix::new(x, k),
        right: Matrix::new(w, k).t(),
        out: Matrix::new(y, n),
        add: add.map(|add| Matrix::new(add, n)),
        epilogue: if bias.is_empty() {
            Epilogue::None
        } else {
            Epilogue::Bias(bias)
        },
    }
}

/// `dx = dy w`: dy `[m, n]`, w `[n, k]`.
fn input_gradient(dx: AnySlice, dy: AnySlice, w: AnySlice, k: usize) -> Product {
    let n = w.len() / k.max(1);
    Product {
        left: Matrix::new(dy, n),
        right: Matrix::new(w, k),
        out: Matrix::new(dx, k),
        add: None,
        epilogue: Epilogue::None,
    }
}

/// Computes the gradients of a matrix `[n, k]` and of its bias, unless that is empty: x `[m, k]`, dy
/// `[m, n]`.
fn weight_gradient(
    cx: &PassContext<'_>,
    [dw, dbias]: [Grad; 2],
    x: AnySlice,
    dy: AnySlice,
    k: usize,
) -> Result<(), OpError> {
    let PassContext { ops, stream, s, .. } = *cx;
    if !dbias.elements().is_empty() {
        column_sums::sum_rows(&ops.kernels, stream, dbias.into(), dy, s.partials)?;
    }
    ops.matmul.run(stream, &weight_product(dw, x, dy, k))
}

/// `dw += dy^T x` or `dw = dy^T x`.
fn weight_product(dw: Grad, x: AnySlice, dy: AnySlice, k: usize) -> Product {
    let (out, adds) = match dw {
        Grad::Add(sums) => (sums.erase(), true),
        Grad::Write(grad) => (grad, false),
    };
    let n = out.len() / k.max(1);
    let out = Matrix::new(out, k);
    let add = adds.then_some(out);
    Product {
        left: Matrix::new(dy, n).t(),
        right: Matrix::new(x, k),
        out,
        add,
        epilogue: Epilogue::None,
    }
}
