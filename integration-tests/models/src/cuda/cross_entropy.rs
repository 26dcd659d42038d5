//! Launches of cross_entropy.cu.

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{AnySlice, DeviceSlice};

use super::error::{OpError, check_len};
use super::launch::{Arg, OpKernels, Shape, size};
use crate::ops::cross_entropy::{STATISTICS, VocabPart};

/// Threads of a block (`CE_THREADS` of the source).
const BLOCK: u32 = 1024;
/// Threads of the one block that sums the losses.
const SUM_BLOCK: u32 = 1024;

/// Elements from one row of logits to the next, so that all rows are aligned to 128 bytes of a
/// 16-bit type.
pub fn stride_elems(vocab: usize) -> usize {
    vocab.next_multiple_of(64)
}

/// The factor of each token's gradient: the loss scale over the divisor of the loss.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// One element, read when the kernel runs.
    pub loss_scale: DeviceSlice<f64>,
    /// One element, read when the kernel runs.
    pub divisor: DeviceSlice<f64>,
}

/// Writes `losses[row] = -log softmax(logits)[target]` in nats. With a scale, replaces the first `vocab`
/// columns of `logits` `[rows, stride_elems]` by their gradient times `scale`, the others by 0; without,
/// leaves `logits` unchanged, and the losses have the same bits. Loss and gradient are 0 in rows whose
/// target is [`IGNORED`](zero_trainer::IGNORED). Targets were checked against the vocabulary when the data
/// was opened.
///
/// # Errors
/// Lengths or types do not fit, or the stream failed.
pub fn forward(
    ops: &OpKernels,
    stream: &CudaStream,
    logits: AnySlice,
    losses: DeviceSlice<f32>,
    targets: DeviceSlice<u32>,
    vocab: usize,
    scale: Option<Scale>,
) -> Result<(), OpError> {
    let rows = targets.len();
    let stride = stride_elems(vocab);
    check_len("cross entropy: losses", losses.len(), rows)?;
    check_aligned(logits)?;
    let [loss_scale, divisor] = scale_args(scale)?;

    let args = [
        ops.stored("cross entropy: logits", logits, rows * stride)?,
        losses.into(),
        targets.into(),
        size("cross entropy: vocabulary", vocab)?.into(),
        (stride as u64).into(),
        loss_scale,
        divisor,
    ];

    let shape = Shape::blocks(size("cross entropy: rows", rows)?, BLOCK);
    // SAFETY: the parameters of cross_entropy, whose lengths were checked.
    unsafe { ops.launch(stream, "cross entropy", "cross_entropy", shape, args) }
}

/// Writes the statistics `[rows, STATISTICS]` of rows of logits `[rows, stride_elems(part.len)]` of a
/// part of the vocabulary, for [`part_gradient`].
///
/// # Errors
/// Lengths or types do not fit, or the stream failed.
pub fn part_statistics(
    ops: &OpKernels,
    stream: &CudaStream,
    stats: DeviceSlice<f32>,
    logits: AnySlice,
    targets: DeviceSlice<u32>,
    part: VocabPart,
) -> Result<(), OpError> {
    let rows = targets.len();
    let stride = stride_elems(part.len);
    check_len("cross entropy: statistics", stats.len(), rows * STATISTICS)?;
    check_aligned(logits)?;
    let args = [
        stats.into(),
        ops.stored("cross entropy: logits", logits, rows * stride)?,
        targets.into(),
        size("cross entropy: first token", part.first)?.into(),
        size("cross entropy: vocabulary", part.len)?.into(),
        (stride as u64).into(),
    ];
    let shape = Shape::blocks(size("cross entropy: rows", rows)?, BLOCK);
    // SAFETY: the parameters of part_statistics, whose lengths were checked.
    unsafe { ops.launch(stream, "cross entropy", "part_statistics", shape, args) }
}

/// [`forward`] for a part of the vocabulary, from the statistics `[ranks, rows, STATISTICS]` of all
/// ranks.
///
/// # Errors
/// Lengths or types do not fit, or the stream failed.
#[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
pub fn part_gradient(
    ops: &OpKernels,
    stream: &CudaStream,
    logits: AnySlice,
    losses: DeviceSlice<f32>,
    stats: DeviceSlice<f32>,
    targets: DeviceSlice<u32>,
    part: VocabPart,
    scale: Option<Scale>,
) -> Result<(), OpError> {
    let rows = targets.len();
    let stride = stride_elems(part.len);
    let ranks = stats.len() / (rows * STATISTICS).max(1);
    check_len("cross entropy: losses", losses.len(), rows)?;
    check_len(
        "cross entropy: statistics",
        stats.len(),
        ranks * rows * STATISTICS,
    )?;
    check_aligned(logits)?;
    let [loss_scale, divisor] = scale_args(scale)?;
    let args = [
        ops.stored("cross entropy: logits", logits, rows * stride)?,
        losses.into(),
        stats.into(),
        targets.into(),
        size("cross entropy: ranks", ranks)?.into(),
        size("cross entropy: rows", rows)?.into(),
        size("cross entropy: first token", part.first)?.into(),
        size("cross entropy: vocabulary", part.len)?.into(),
        (stride as u64).into(),
        loss_scale,
        divisor,
    ];
    let shape = Shape::blocks(size("cross entropy: rows", rows)?, BLOCK);
    // SAFETY: the parameters of part_gradient, whose lengths were checked.
    unsafe { ops.launch(stream, "cross entropy", "part_gradient", shape, args) }
}

/// The parameters `loss_scale` and `divisor` of kernels; null addresses disable the gradient.
fn scale_args(scale: Option<Scale>) -> Result<[Arg; 2], OpError> {
    let Some(Scale {
        loss_scale,
        divisor,
    }) = scale
    else {
        return Ok([0u64.into(); 2]);
    };
    check_len("cross entropy: loss scale", loss_scale.len(), 1)?;
    check_len("cross entropy: divisor", divisor.len(), 1)?;
    Ok([loss_scale.into(), divisor.into()])
}

/// The kernels access 16 bytes at a time; [`stride_elems`] keeps every row aligned.
fn check_aligned(logits: AnySlice) -> Result<(), OpError> {
    check_len(
        "cross entropy: logits' address modulo 16",
        logits.as_ptr().addr() % 16,
        0,
    )
}

/// `loss[0] += sum of losses`, over `divisor[0]` if there is one, in fp64, in an order that depends only
/// on their number.
///
/// # Errors
/// Lengths do not fit, or the stream failed.
pub fn add(
    ops: &OpKernels,
    stream: &CudaStream,
    loss: DeviceSlice<f64>,
    losses: DeviceSlice<f32>,
    divisor: Option<DeviceSlice<f64>>,
) -> Result<(), OpError> {
    check_len("sum of losses: loss", loss.len(), 1)?;
    if let Some(divisor) = divisor {
        check_len("sum of losses: divisor", divisor.len(), 1)?;
    }
    let rows = size("sum of losses: losses", losses.len())?;
    let args = [
        loss.into(),
        losses.into(),
        rows.into(),
        divisor.map_or(0u64.into(), Into::into),
    ];
    let shape = Shape::blocks(1, SUM_BLOCK);
    // SAFETY: the parameters of add_losses.
    unsafe { ops.launch(stream, "sum of losses", "add_losses", shape, args) }
}
