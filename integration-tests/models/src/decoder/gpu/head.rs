//! The logits and the loss on CUDA.
//!
//! Forward computes only the head's norm. Backward computes the logits and their gradient, and an
//! evaluation the logits alone, as many rows at a time as fit the buffer.

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{AnySlice, Device, DeviceSlice};

use super::arch::GpuArch;
use super::groups::TensorGroup;
use super::pass_context::{Flat, Ops, PassContext};
use super::slices::{HeadSlices, ScratchSlices};
use crate::cuda::OpError;
use crate::cuda::cross_entropy::{self, Scale};
use crate::cuda::matmul::{Epilogue, Matrix, Product};
use zero_trainer::ModelError;

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
    (vocab, tensor): (usize, Option<&TensorGroup>),
) -> Result<(), OpError> {
    let c = h.out.len() / targets.len().max(1);
    let stride = cross_entropy::stride_elems(vocab);
    let rows = chunk_rows(s, stride, tensor);
    for start in (0..targets.len()).step_by(rows) {
        let end = targets.len().min(start + rows);
        let part = s.logits.slice(0..(end - start) * stride);
        logits(ops, stream, part, h.out.slice(start * c..end * c), p, vocab)?;
        let losses = s.losses.slice(start..end);
        let targets = targets.slice(start..end);
        match tensor {
            None => cross_entropy::forward(&ops.kernels, stream, part, losses, targets, vocab)?,
            Some(group) => loss_of_parts(ops, stream, group, part, losses, targets, None)?,
        }
    }
    Ok(())
}

/// The rows of logits, of `stride` elements, that are in memory at once: the same number on all ranks
/// of tensor parallelism, whose parts of the vocabulary may differ.
fn chunk_rows(s: &ScratchSlices, stride: usize, tensor: Option<&TensorGroup>) -> usize {
    match tensor {
        None => s.logits.len() / stride,
        Some(group) => group.rows(),
    }
}

/// The losses and, with a scale, the gradient of rows of this rank's part of the logits.
fn loss_of_parts(
    ops: &Ops,
    stream: &CudaStream,
    group: &TensorGroup,
    logits: AnySlice,
    losses: DeviceSlice<f32>,
    targets: DeviceSlice<u32>,
    scale: Option<Scale>,
) -> Result<(), OpError> {
    let kernels = &ops.kernels;
    let part = group.part();
    let stats = group.own_stats(targets.len());
    cross_entropy::part_statistics(kernels, stream, stats, logits, targets, part)?;
    let stats = group.gather_stats(stream, targets.len())?;
    cross_entropy::part_gradient(kernels, stream, logits, losses, stats, targets, part, scale)
}

/// Enqueues the logits of the tokens around `token` of `tokens` after [`forward`], in the shape of
/// [`losses`], and returns those of `token`. Uses `s.logits`.
pub(super) fn token_logits(
    ops: &Ops,
    stream: &CudaStream,
    s: &ScratchSlices,
    h: &HeadSlices,
    p: &Flat<'_>,
    (vocab, tensor): (usize, Option<&TensorGroup>),
    [token, tokens]: [usize; 2],
) -> Result<AnySlice, OpError> {
    let c = h.out.len() / tokens.max(1);
    let stride = cross_entropy::stride_elems(vocab);
    let rows = s.logits.len() / stride;
    let [start, end] = match tensor {
        None => [token / rows * rows, tokens.min(token / rows * rows + rows)],
        Some(_) => [token, token + 1],
    };
    let part = s.logits.slice(0..(end - start) * stride);
    logits(ops, stream, part, h.out.slice(start * c..end * c), p, vocab)?;
    let row = (token - start) * stride;
    let Some(group) = tensor else {
        return Ok(part.slice(row..row + vocab));
    };
    // Behind the logits of one row, which were computed alone, there is room for those of all ranks.
    let len = group.vocab().div_ceil(group.rank.ranks);
    let start = cross_entropy::stride_elems(len);
    let all = s.logits.slice(start..start + len * group.rank.ranks);
    group.gather(stream, s.logits.slice(0..len), all)?;
    Ok(all.slice(0..group.vocab()))
}

/// Writes the tokens' losses to `s.losses`, computes the gradients of their sum times `scale`,
/// writes that of `x` to `s.dres`, and adds the others to the head's unit and, if tied, to the
/// embedding's.
pub(super) fn backward<A: GpuArch>(
    arch: &A,
    cx: &PassContext<'_>,
    h: &HeadSlices,
    x: AnySlice,
    targets: DeviceSlice<u32>,
    scale: Scale,
) -> Result<(), ModelError> {
    let PassContext {
        ops, stream, s, p, ..
    } = *cx;
    let kernels = &ops.kernels;
    let vocab = cx.tensor.map_or(arch.vocab(), |tensor| tensor.part().len);
    let c = h.out.len() / targets.len().max(1);
    let (read, range) = p.head_matrix(vocab, c);
    let w = p.params[read].slice(range.clone());
    let dw = p.grads[read].slice(range).sums(A::NAME)?;
    let stride = cross_entropy::stride_elems(vocab);
    let rows = chunk_rows(s, stride, cx.tensor);

    for start in (0..targets.len()).step_by(rows) {
        let end = targets.len().min(start + rows);
        let out = h.out.slice(start * c..end * c);
        let dout = s.narrow.slice(start * c..end * c);
        let part = s.logits.slice(0..(end - start) * stride);
        logits(ops, stream, part, out, &p, vocab)?;
        let losses = s.losses.slice(start..end);
        let targets = targets.slice(start..end);
        match cx.tensor {
            None => cross_entropy::forward_backward(
                kernels, stream, part, losses, targets, vocab, scale,
            )?,
            Some(group) => loss_of_parts(ops, stream, group, part, losses, targets, Some(scale))?,
        }
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

    let dout = s.narrow.slice(0..h.out.len());
    cx.sum_rows(dout)?;
    let [dx, dout] = [s.dres, dout].map(|rows| cx.own(rows));
    ops.device.fill_zero(stream, dx)?;

    let outs = arch.final_norm_sums(cx);
    let elems = if cx.divides_rows() { outs.len() * c } else { 0 };
    let places = (0..outs.len()).map(|i| match elems {
        0 => outs[i],
        _ => cx.partial(i * c..(i + 1) * c),
    });
    let places: Vec<_> = places.collect();
    arch.final_norm_backward(cx, &cx.own_head(h), x, [dx, dout], &places)?;
    cx.sum_partials(elems)?;
    match elems {
        0 => Ok(()),
        _ => Ok(cx.finish_sums(&outs, 0..elems)?),
    }
}
