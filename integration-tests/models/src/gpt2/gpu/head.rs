//! The final layer norm, the logits and the loss on CUDA.
//!
//! Forward computes only the layer norm. Backward computes the logits and their gradient, and an
//! evaluation the logits alone, as many rows at a time as fit the buffer.

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{AnySlice, Device, DeviceSlice};

use super::buffers::{HeadSlices, ScratchSlices};
use super::{Flat, Ops};
use crate::cuda::OpError;
use crate::cuda::cross_entropy::{self, Scale};
use crate::cuda::layer_norm::{self, Sums};
use crate::cuda::matmul::{Epilogue, Matrix, Product};
use zero_trainer::ModelError;

/// `h.out = ln_f(x)`.
pub(super) fn forward(
    ops: &Ops,
    stream: &CudaStream,
    h: &HeadSlices,
    x: AnySlice,
    p: &Flat<'_>,
    eps: f32,
) -> Result<(), OpError> {
    let gain = p.get(0, "ln_f.weight");
    let bias = p.get(0, "ln_f.bias");
    layer_norm::forward(&ops.kernels, stream, h.out, h.stats, x, gain, bias, eps)
}

/// `out = x w^T`: x `[rows, c]`, w `[vocab, c]`, out `[rows, stride_elems(vocab)]`, whose columns
/// behind the vocabulary are undefined.
pub(super) fn logits(
    ops: &Ops,
    stream: &CudaStream,
    out: AnySlice,
    x: AnySlice,
    p: &Flat<'_>,
    vocab: usize,
) -> Result<(), OpError> {
    let stride = cross_entropy::stride_elems(vocab);
    let c = x.len() / (out.len() / stride).max(1);
    let (read, range) = p.head_matrix(vocab, c);
    let w = p.params[read].slice(range);
    let out = Matrix::with_stride(out, w.len() / c, stride);
    let left = Matrix::new(x, c);
    let right = Matrix::new(w, c).t();
    ops.matmul.run(
        stream,
        &Product {
            left,
            right,
            out,
            add: None,
            epilogue: Epilogue::None,
        },
    )
}

/// Writes the tokens' losses to `s.losses` after [`forward`]. Uses `s.logits`, and computes no
/// gradient.
pub(super) fn losses(
    ops: &Ops,
    stream: &CudaStream,
    s: &ScratchSlices,
    h: &HeadSlices,
    targets: DeviceSlice<u32>,
    p: &Flat<'_>,
    vocab: usize,
) -> Result<(), OpError> {
    let c = h.out.len() / targets.len().max(1);
    let stride = cross_entropy::stride_elems(vocab);
    let rows = s.logits.len() / stride;
    for start in (0..targets.len()).step_by(rows) {
        let end = targets.len().min(start + rows);
        let part = s.logits.slice(0..(end - start) * stride);
        logits(ops, stream, part, h.out.slice(start * c..end * c), p, vocab)?;
        let losses = s.losses.slice(start..end);
        let targets = targets.slice(start..end);
        cross_entropy::forward(&ops.kernels, stream, part, losses, targets, vocab)?;
    }
    Ok(())
}

/// Enqueues the logits of the tokens around `token` of `tokens` after [`forward`], in the shape of
/// [`losses`], and returns those of `token`. Uses `s.logits`.
pub(super) fn token_logits(
    ops: &Ops,
    stream: &CudaStream,
    s: &ScratchSlices,
    h: &HeadSlices,
    p: &Flat<'_>,
    vocab: usize,
    [token, tokens]: [usize; 2],
) -> Result<AnySlice, OpError> {
    let c = h.out.len() / tokens.max(1);
    let stride = cross_entropy::stride_elems(vocab);
    let rows = s.logits.len() / stride;
    let start = token / rows * rows;
    let end = tokens.min(start + rows);
    let part = s.logits.slice(0..(end - start) * stride);
    logits(ops, stream, part, h.out.slice(start * c..end * c), p, vocab)?;
    let row = (token - start) * stride;
    Ok(part.slice(row..row + vocab))
}

/// Writes the tokens' losses to `s.losses`, computes the gradients of their sum times `scale`,
/// writes that of `x` to `s.dres`, and adds the others to the head's unit and, if tied, to the
/// embedding's.
#[allow(clippy::too_many_arguments)]
pub(super) fn backward(
    ops: &Ops,
    stream: &CudaStream,
    s: &ScratchSlices,
    h: &HeadSlices,
    x: AnySlice,
    targets: DeviceSlice<u32>,
    p: &Flat<'_>,
    vocab: usize,
    scale: Scale,
) -> Result<(), ModelError> {
    let kernels = &ops.kernels;
    let c = x.len() / targets.len().max(1);
    let (read, range) = p.head_matrix(vocab, c);
    let w = p.params[read].slice(range.clone());
    let dw = p.grads[read].slice(range).sums("GPT-2's head")?;
    let stride = cross_entropy::stride_elems(vocab);
    let rows = s.logits.len() / stride;

    for start in (0..targets.len()).step_by(rows) {
        let end = targets.len().min(start + rows);
        let out = h.out.slice(start * c..end * c);
        let dout = s.narrow.slice(start * c..end * c);
        let part = s.logits.slice(0..(end - start) * stride);
        logits(ops, stream, part, out, p, vocab)?;
        let losses = s.losses.slice(start..end);
        let targets = targets.slice(start..end);
        cross_entropy::forward_backward(kernels, stream, part, losses, targets, vocab, scale)?;
        let dlogits = Matrix::with_stride(part, w.len() / c, stride);
        let right = Matrix::new(w, c);
        let out_matrix = Matrix::new(dout, c);
        let product = Product {
            left: dlogits,
            right,
            out: out_matrix,
            add: None,
            epilogue: Epilogue::None,
        };
        ops.matmul.run(stream, &product)?;
        let sum = Matrix::new(dw.erase(), c);
        let left = dlogits.t();
        let right = Matrix::new(out, c);
        let product = Product {
            left,
            right,
            out: sum,
            add: Some(sum),
            epilogue: Epilogue::None,
        };
        ops.matmul.run(stream, &product)?;
    }

    ops.device.fill_zero(stream, s.dres)?;
    let sums = Sums {
        gain: p.grad(0, "ln_f.weight").into(),
        bias: p.grad(0, "ln_f.bias").into(),
        residual: None,
    };

    let gain = p.get(0, "ln_f.weight");
    Ok(layer_norm::backward(
        kernels, stream, s.dres, sums, None, s.narrow, x, h.stats, gain, s.partials,
    )?)
}
