//! Launches of column_sums.cu: the gradients of biases.
//!
//! Why most sums over rows are not computed here: kernels that read or write the rows anyway take
//! them along. Attention's backward sums the gradient of qkv, that of layer norm the gradient of
//! the residual stream. Their blocks write their sums, which `sum_partials` adds up in order.

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{AnySlice, DType, DeviceSlice};
use zero_kernels::KernelError;

use super::dropout::Dropout;
use super::error::{OpError, check_len};
use super::launch::{Arg, OpKernels, Shape, columns, size};

/// Warps of a block (`WARPS` of the source).
const WARPS: u32 = 8;
/// Minimum rows of a chunk, so that the second stage is short.
const CHUNK_ROWS: usize = 128;
/// Maximum number of chunks. The bits of the results depend on it.
const MAX_CHUNKS: usize = 132;
/// Maximum outputs of [`sum_partials`].
const MAX_OUTPUTS: usize = 3;

/// The place of a sum over rows, computed in fp32: the gradient of a bias or a gain.
#[derive(Clone, Copy, Debug)]
pub enum SumOut {
    /// fp32 sums, to which the sum is added.
    Add(DeviceSlice<f32>),
    /// Elements in fp32, bf16 or fp16 that the sum overwrites, rounded once.
    Write(AnySlice),
}

impl From<DeviceSlice<f32>> for SumOut {
    fn from(sums: DeviceSlice<f32>) -> Self {
        Self::Add(sums)
    }
}

impl SumOut {
    pub(super) fn len(self) -> usize {
        match self {
            Self::Add(sums) => sums.len(),
            Self::Write(slice) => slice.len(),
        }
    }

    /// The address, and the kind (`SUM_ADD` and so on in the source).
    fn arg(self) -> Result<(Arg, u32), OpError> {
        let slice = match self {
            Self::Add(sums) => return Ok((sums.into(), 0)),
            Self::Write(slice) => slice,
        };
        let kind = match slice.dtype() {
            DType::F32 => 1,
            DType::Bf16 => 2,
            DType::F16 => 3,
            dtype => {
                return Err(KernelError::Unsupported {
                    what: "column sums: result",
                    dtype,
                }
                .into());
            }
        };
        Ok((slice.into(), kind))
    }
}

/// Elements of the workspace of [`sum_rows`].
pub fn workspace_elems(rows: usize, n: usize) -> usize {
    chunks(rows) * n
}

fn chunks(rows: usize) -> usize {
    rows.div_ceil(CHUNK_ROWS).clamp(1, MAX_CHUNKS)
}

/// The first `len` elements of a workspace.
pub(super) fn part(
    what: &'static str,
    all: DeviceSlice<f32>,
    len: usize,
) -> Result<DeviceSlice<f32>, OpError> {
    if all.len() < len {
        return Err(OpError::Length {
            what,
            expected: len,
            got: all.len(),
        });
    }
    Ok(all.slice(0..len))
}

/// Sums x `[rows, n]`, in the kernels' type, over its rows into `out` `[n]`, in an order that
/// depends only on the sizes.
///
/// # Errors
/// Lengths or types do not fit, or the stream failed.
pub fn sum_rows(
    ops: &OpKernels,
    stream: &CudaStream,
    out: SumOut,
    x: AnySlice,
    workspace: DeviceSlice<f32>,
) -> Result<(), OpError> {
    let n = out.len();
    let rows = x.len() / n.max(1);
    let chunks = chunks(rows);
    let columns = columns(n, &[x]);
    let partials = part("column sums: workspace", workspace, chunks * n)?;
    let args = [
        partials.into(),
        ops.stored("column sums: x", x, rows * n)?,
        size("column sums: rows", rows)?.into(),
        size("column sums: width", n)?.into(),
    ];
    let shape = shape(n, columns, chunks)?;
    let entry = format!("column_sums_{columns}");
    // SAFETY: the parameters of column_sums, whose lengths were checked.
    unsafe { ops.launch(stream, "column sums", &entry, shape, args) }?;

    sum_partials(ops, stream, &[out], partials, chunks)
}

/// Writes `y = dropout(x)` `[rows, n]`, and its sums over rows as [`sum_rows`] does.
///
/// # Errors
/// Lengths or types do not fit, or the stream failed.
pub fn drop_and_sum_rows(
    ops: &OpKernels,
    stream: &CudaStream,
    out: SumOut,
    y: AnySlice,
    x: AnySlice,
    dropout: Dropout,
    workspace: DeviceSlice<f32>,
) -> Result<(), OpError> {
    let n = out.len();
    let rows = x.len() / n.max(1);
    let chunks = chunks(rows);
    let columns = columns(n, &[y, x]);
    let partials = part("dropout: workspace", workspace, chunks * n)?;
    let [keys, dropout, first_row, seq] = Dropout::of_rows(Some(dropout), rows)?;
    let args = [
        partials.into(),
        ops.stored("dropout: y", y, rows * n)?,
        ops.stored("dropout: x", x, rows * n)?,
        keys,
        dropout,
        size("dropout: rows", rows)?.into(),
        first_row,
        seq,
        size("dropout: width", n)?.into(),
    ];
    let shape = shape(n, columns, chunks)?;
    let entry = format!("dropout_sums_{columns}");
    // SAFETY: the parameters of dropout_sums, whose lengths were checked.
    unsafe { ops.launch(stream, "dropout backward", &entry, shape, args) }?;

    sum_partials(ops, stream, &[out], partials, chunks)
}

/// The blocks of the first stage.
fn shape(n: usize, columns: usize, chunks: usize) -> Result<Shape, OpError> {
    let width = size("column sums: width", n.div_ceil(32 * columns))?;
    Ok(Shape {
        grid: [width, chunks as u32, 1],
        block: 32 * WARPS,
        shared_bytes: 0,
    })
}

/// Sums `partials` `[blocks, outs, n]` over the blocks into `outs`, up to three of n elements.
///
/// # Errors
/// Lengths or types do not fit, or the stream failed.
pub fn sum_partials(
    ops: &OpKernels,
    stream: &CudaStream,
    outs: &[SumOut],
    partials: DeviceSlice<f32>,
    blocks: usize,
) -> Result<(), OpError> {
    let n = outs.first().map_or(0, |out| out.len());
    if outs.len() > MAX_OUTPUTS {
        return Err(OpError::Size {
            what: "column sums: results",
            got: outs.len(),
            takes: "up to 3",
        });
    }

    check_len(
        "column sums: partials",
        partials.len(),
        blocks * outs.len() * n,
    )?;
    let mut places = [Arg::from(0u64); MAX_OUTPUTS];
    let mut kinds = 0;

    for (i, out) in outs.iter().enumerate() {
        check_len("column sums: result", out.len(), n)?;
        let (place, kind) = out.arg()?;
        places[i] = place;
        kinds |= kind << (8 * i);
    }

    let columns = size("column sums: width", outs.len() * n)?;
    let args = [
        places[0],
        places[1],
        places[2],
        kinds.into(),
        partials.into(),
        size("column sums: blocks", blocks)?.into(),
        (outs.len() as u32).into(),
        (n as u32).into(),
    ];

    let shape = Shape::blocks(columns.div_ceil(32).max(1), 32 * WARPS);
    // SAFETY: the parameters of sum_partials, whose lengths were checked.
    unsafe { ops.launch(stream, "column sums", "sum_partials", shape, args) }
}
