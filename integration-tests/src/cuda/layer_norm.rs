//! Launches of layer_norm.cu.
//!
//! Shapes: x, y, dx, dy `[rows, n]` and gain, bias `[n]` in the kernels' type; stats `[rows, 2]`, dgain, dbias `[n]`
//! in fp32.

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{AnySlice, DeviceSlice};

use super::column_sums::{self, SumOut};
use super::error::{OpError, check_len};
use super::launch::{OpKernels, Shape, columns, size};

/// Rows that a block computes at a time (`BATCH` of the source).
const BATCH: usize = 4;
/// Blocks of the backward pass: four on each multiprocessor of the largest device. The bits of results depend on it.
const BACKWARD_BLOCKS: usize = 4 * 132;
/// Blocks of the forward pass.
const FORWARD_BLOCKS: usize = 16 * 132;

/// Elements of the workspace of [`backward`].
pub fn workspace_elems(rows: usize, n: usize) -> usize {
    backward_blocks(rows) * 2 * n
}

fn backward_blocks(rows: usize) -> usize {
    rows.div_ceil(BATCH).min(BACKWARD_BLOCKS)
}

fn block(n: usize, columns: usize) -> Result<u32, OpError> {
    let (most, takes) = if columns == 8 { (512, "up to 4096") } else { (1024, "up to 1024 unless multiples of 8") };
    let threads = n.div_ceil(columns);
    if threads > most {
        return Err(OpError::Size { what: "layer norm: width", got: n, takes });
    }
    size("layer norm: width", threads.next_multiple_of(32))
}

/// `y = (x - mean) / sqrt(var + eps) * gain + bias`; `stats` is written for the backward pass.
///
/// # Errors
/// Lengths, types or sizes do not fit, or the stream failed.
#[allow(clippy::too_many_arguments)]
pub fn forward(
    ops: &OpKernels,
    stream: &CudaStream,
    y: AnySlice,
    stats: DeviceSlice<f32>,
    x: AnySlice,
    gain: AnySlice,
    bias: AnySlice,
    eps: f32,
) -> Result<(), OpError> {
    let n = gain.len();
    let rows = x.len() / n.max(1);
    check_len("layer norm: stats", stats.len(), 2 * rows)?;
    let columns = columns(n, &[y, x, gain, bias]);
    let args = [
        ops.stored("layer norm: y", y, rows * n)?,
        stats.into(),
        ops.stored("layer norm: x", x, rows * n)?,
        ops.stored("layer norm: gain", gain, n)?,
        ops.stored("layer norm: bias", bias, n)?,
        size("layer norm: rows", rows)?.into(),
        size("layer norm: width", n)?.into(),
        eps.into(),
    ];
    let shape = Shape::blocks(rows.div_ceil(BATCH).clamp(1, FORWARD_BLOCKS) as u32, block(n, columns)?);
    // SAFETY: the parameters of layer_norm_forward, whose lengths were checked.
    unsafe { ops.launch(stream, "layer norm", &format!("layer_norm_forward_{columns}"), shape, args) }
}

/// Adds the gradient of x to `dx`, and puts those of gain and bias into `dgain` and `dbias`.
///
/// # Errors
/// Lengths, types or sizes do not fit, or the stream failed.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    ops: &OpKernels,
    stream: &CudaStream,
    dx: AnySlice,
    [dgain, dbias]: [SumOut; 2],
    dy: AnySlice,
    x: AnySlice,
    stats: DeviceSlice<f32>,
    gain: AnySlice,
    workspace: DeviceSlice<f32>,
) -> Result<(), OpError> {
    let n = gain.len();
    let rows = x.len() / n.max(1);
    let (blocks, columns) = (backward_blocks(rows), columns(n, &[dx, dy, x, gain]));
    check_len("layer norm: stats", stats.len(), 2 * rows)?;
    let partials = column_sums::part("layer norm: workspace", workspace, blocks * 2 * n)?;
    let args = [
        ops.stored("layer norm: dx", dx, rows * n)?,
        partials.into(),
        ops.stored("layer norm: dy", dy, rows * n)?,
        ops.stored("layer norm: x", x, rows * n)?,
        stats.into(),
        ops.stored("layer norm: gain", gain, n)?,
        size("layer norm: rows", rows)?.into(),
        size("layer norm: width", n)?.into(),
    ];
    let shape = Shape::blocks(blocks.max(1) as u32, block(n, columns)?);
    let entry = format!("layer_norm_backward_{columns}");
    // SAFETY: the parameters of layer_norm_backward, whose lengths were checked.
    unsafe { ops.launch(stream, "layer norm backward", &entry, shape, args) }?;
    column_sums::sum_partials(ops, stream, &[dgain, dbias], partials, blocks)
}
