//! Launches of column_sums.cu: the gradients of biases.

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{AnySlice, DeviceSlice};

use super::error::{OpError, check_len};
use super::launch::{OpKernels, Shape, columns, size};

/// Warps of a block (`WARPS` of the source).
const WARPS: u32 = 8;
/// Minimum rows of a chunk, so that the second stage is short.
const CHUNK_ROWS: usize = 128;
/// Maximum number of chunks. The bits of the results depend on it.
const MAX_CHUNKS: usize = 132;

/// Elements of the workspace of [`add`].
pub fn workspace_elems(rows: usize, n: usize) -> usize {
    chunks(rows) * n
}

fn chunks(rows: usize) -> usize {
    rows.div_ceil(CHUNK_ROWS).clamp(1, MAX_CHUNKS)
}

/// The first `len` elements of a workspace.
pub(super) fn part(what: &'static str, all: DeviceSlice<f32>, len: usize) -> Result<DeviceSlice<f32>, OpError> {
    if all.len() < len {
        return Err(OpError::Length { what, expected: len, got: all.len() });
    }
    Ok(all.slice(0..len))
}

/// `out[j] += sum over rows of x[i, j]`: x `[rows, n]` in the kernels' type, out `[n]`.
///
/// # Errors
/// Lengths or types do not fit, or the stream failed.
pub fn add(
    ops: &OpKernels,
    stream: &CudaStream,
    out: DeviceSlice<f32>,
    x: AnySlice,
    workspace: DeviceSlice<f32>,
) -> Result<(), OpError> {
    let n = out.len();
    let rows = x.len() / n.max(1);
    let (chunks, columns) = (chunks(rows), columns(n, &[x]));
    let partials = part("column sums: workspace", workspace, chunks * n)?;
    let args = [
        partials.into(),
        ops.stored("column sums: x", x, rows * n)?,
        size("column sums: rows", rows)?.into(),
        size("column sums: width", n)?.into(),
    ];
    let grid = [size("column sums: width", n.div_ceil(32 * columns))?, chunks as u32, 1];
    let shape = Shape { grid, block: 32 * WARPS, shared_bytes: 0 };
    // SAFETY: the parameters of column_sums, whose lengths were checked.
    unsafe { ops.launch(stream, "column sums", &format!("column_sums_{columns}"), shape, args) }?;
    add_partials(ops, stream, [out, out.slice(n..n)], partials, chunks)
}

/// Adds `partials` `[blocks, n]` to `outs`, which together have n elements.
pub(super) fn add_partials(
    ops: &OpKernels,
    stream: &CudaStream,
    outs: [DeviceSlice<f32>; 2],
    partials: DeviceSlice<f32>,
    blocks: usize,
) -> Result<(), OpError> {
    let n = outs[0].len() + outs[1].len();
    check_len("column sums: partials", partials.len(), blocks * n)?;
    let args = [
        outs[0].into(),
        outs[1].into(),
        partials.into(),
        size("column sums: blocks", blocks)?.into(),
        size("column sums: width", n)?.into(),
        size("column sums: width", outs[0].len())?.into(),
    ];
    let shape = Shape::blocks(n.div_ceil(32).max(1) as u32, 32 * WARPS);
    // SAFETY: the parameters of sum_partials, whose lengths were checked.
    unsafe { ops.launch(stream, "column sums", "sum_partials", shape, args) }
}
