//! The logits and the loss on CUDA.
//!
//! Forward computes only the head's norm. Backward computes the logits and their gradient, and an
//! evaluation the logits alone, as many rows at a time as fit the buffer.

use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, Device, DeviceSlice};

use super::pass_context::{Flat, Ops, PassContext};
use super::slices::{HeadSlices, ScratchSlices};
use crate::cuda::cross_entropy::{self, Scale};
use crate::cuda::matmul::{Matrix, Product};
use crate::cuda::{OpError, SumOut, norm};
use crate::decoder::config::DecoderConfig;
use crate::decoder::tensor_group::TensorGroup;
use zero_trainer::{Grad, ModelError};

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
    let product = Product::new(Matrix::new(x, c), Matrix::new(w, c).t(), out);
    ops.matmul.run(stream, &product)
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
    (vocab, tensor): (usize, Option<&TensorGroup<CudaDevice>>),
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
        loss_of_rows(ops, stream, (vocab, tensor), part, losses, targets, None)?;
    }
    Ok(())
}

/// The rows of logits, of `stride` elements, that are in memory at once: the same number on all ranks
/// of tensor parallelism, whose parts of the vocabulary may differ.
fn chunk_rows(s: &ScratchSlices, stride: usize, tensor: Option<&TensorGroup<CudaDevice>>) -> usize {
    match tensor {
        None => s.logits.len() / stride,
        Some(group) => group.rows(),
    }
}

/// The losses and, with a scale, the gradient of rows of logits, or of this rank's part of them.
fn loss_of_rows(
    ops: &Ops,
    stream: &CudaStream,
    (vocab, tensor): (usize, Option<&TensorGroup<CudaDevice>>),
    logits: AnySlice,
    losses: DeviceSlice<f32>,
    targets: DeviceSlice<u32>,
    scale: Option<Scale>,
) -> Result<(), OpError> {
    let kernels = &ops.kernels;
    let Some(group) = tensor else {
        return cross_entropy::forward(kernels, stream, logits, losses, targets, vocab, scale);
    };
    let part = group.part();
    let [own, stats] = group.stats(targets.len());
    cross_entropy::part_statistics(kernels, stream, own, logits, targets, part)?;
    group.gather_stats(stream, targets.len())?;
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
    (vocab, tensor): (usize, Option<&TensorGroup<CudaDevice>>),
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
    let len = group.vocab.div_ceil(group.rank.ranks);
    let start = cross_entropy::stride_elems(len);
    let all = s.logits.slice(start..start + len * group.rank.ranks);
    group.gather(stream, s.logits.slice(0..len), all)?;
    Ok(all.slice(0..group.vocab))
}

/// Writes the tokens' losses to `s.losses`, computes the gradients of their sum times `scale`,
/// writes that of `x` to `s.dres`, and adds the others, unless they are frozen, to the head's unit
/// and, if tied, to the embedding's.
pub(super) fn backward(
    config: &DecoderConfig,
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
    let vocab = cx.tensor.map_or(config.vocab, |tensor| tensor.part().len);
    let c = h.out.len() / targets.len().max(1);
    let (read, range) = p.head_matrix(vocab, c);
    let w = p.params[read].slice(range.clone());
    let trained = |grad: &Grad| grad.slice(range).sums(config.names.family);
    let dw = p.grads.get(read).map(trained).transpose()?;
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
        let of = (vocab, cx.tensor);
        loss_of_rows(ops, stream, of, part, losses, targets, Some(scale))?;
        let dlogits = Matrix::with_stride(part, w.len() / c, stride);
        let product = Product::new(dlogits, Matrix::new(w, c), Matrix::new(dout, c));
        ops.matmul.run(stream, &product)?;
        if let Some(dw) = dw {
            let sum = Matrix::new(dw.erase(), c);
            let product = Product::new(dlogits.t(), Matrix::new(out, c), sum).onto_out();
            ops.matmul.run(stream, &product)?;
        }
    }

    let dout = s.narrow.slice(0..h.out.len());
    cx.sum_rows(dout)?;
    let [dx, dout] = [s.dres, dout].map(|rows| cx.own(rows));
    ops.device.fill_zero(stream, dx)?;

    let norm = cx.last_norm(config);
    let mut outs = Vec::new();
    if let Some(grad) = p.grads.first() {
        let grads = p.ranges.norm.clone().map(|range| grad.slice(range));
        outs.extend(grads.map(SumOut::from).into_iter().take(norm.kind.params()));
    }
    let elems = if cx.divides_rows() { outs.len() * c } else { 0 };
    let places = (0..outs.len()).map(|i| match elems {
        0 => outs[i],
        _ => cx.partial(i * c..(i + 1) * c),
    });
    let places: Vec<_> = places.collect();
    let stats = cx.own_head(h).stats;
    let sums = &places;
    norm::backward(
        kernels, stream, norm, dx, sums, None, dout, x, stats, s.partials,
    )?;
    cx.sum_partials(elems)?;
    match elems {
        0 => Ok(()),
        _ => Ok(cx.finish_sums(&outs, 0..elems)?),
    }
}
