//! Launches of rope.cu: rotary positions, and the norms of the heads of queries and keys.
//!
//! Shapes: qkv, dqkv `[rows, (queries + 2 keys) d]` in the kernels' type, rows = batch x seq; raw
//! `[rows, queries + keys, d]`, gains `[2, d]` in the kernels' type; stats `[rows, queries + keys]`
//! in fp32.

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{AnySlice, DeviceSlice};

use super::column_sums::{self, SumOut};
use super::error::{OpError, at_least, check_len};
use super::launch::{Arg, OpKernels, Shape, columns, size};
use crate::ops::{Heads, Span};

/// Warps of a block of the kernels of norms (`WARPS` of the source).
const WARPS: usize = 8;
/// The widest head with a norm: two elements for each of `PAIRS` pairs of a lane.
const MAX_NORMED: usize = 256;
/// Maximum blocks of the kernels of norms. The bits of the gains' gradients depend on it.
const MAX_BLOCKS: usize = 4 * 132;

/// The angles of a batch's positions.
#[derive(Clone, Copy, Debug)]
pub struct Angles {
    /// `[seq, d]`: the cosines of a position's angles, then their sines.
    pub table: DeviceSlice<f32>,
    /// `[rows]`: the index in its sequence of the first token of each token's document, whose
    /// position is 0. `None`: a sequence is one document.
    pub starts: Option<DeviceSlice<u32>>,
    /// The tokens of each sequence that are rows.
    pub span: Span,
}

impl Angles {
    /// Table, starts, tokens of a sequence and the first of them, for `rows` rows of heads of `d`
    /// elements.
    fn args(&self, rows: usize, d: usize) -> Result<[Arg; 4], OpError> {
        let Span { tokens, first } = self.span;
        let last = (first + tokens) * d;
        at_least("rotary embedding: table", self.table.len(), last)?;
        check_len("rotary embedding: rows", rows % tokens.max(1), 0)?;
        check_len("rotary embedding: odd heads", d % 2, 0)?;
        if let Some(starts) = self.starts {
            check_len("rotary embedding: starts", starts.len(), rows)?;
        }
        Ok([
            self.table.into(),
            starts_arg(self.starts),
            size("rotary embedding: tokens", tokens)?.into(),
            size("rotary embedding: first token", first)?.into(),
        ])
    }
}

/// The address of the starts of documents; null if there are none.
pub(super) fn starts_arg(starts: Option<DeviceSlice<u32>>) -> Arg {
    starts.map_or(0u64.into(), Arg::from)
}

/// Rotates queries and keys in place by the angles of their positions.
///
/// # Errors
/// Lengths or types do not fit, or the stream failed.
pub fn forward(
    ops: &OpKernels,
    stream: &CudaStream,
    qkv: AnySlice,
    angles: Angles,
    heads: Heads,
) -> Result<(), OpError> {
    rotate(ops, stream, "rotary embedding", qkv, angles, heads, 1.0)
}

/// Rotates the gradients of queries and keys back in place.
///
/// # Errors
/// Lengths or types do not fit, or the stream failed.
pub fn backward(
    ops: &OpKernels,
    stream: &CudaStream,
    dqkv: AnySlice,
    angles: Angles,
    heads: Heads,
) -> Result<(), OpError> {
    let op = "rotary embedding backward";
    rotate(ops, stream, op, dqkv, angles, heads, -1.0)
}

fn rotate(
    ops: &OpKernels,
    stream: &CudaStream,
    op: &'static str,
    qkv: AnySlice,
    angles: Angles,
    heads: Heads,
    sign: f32,
) -> Result<(), OpError> {
    let d = heads.d;
    let rows = qkv.len() / heads.width().max(1);
    let [table, starts, seq, first] = angles.args(rows, d)?;
    let columns = columns(d / 2, &[qkv, angles.table.erase()]);
    let args = [
        ops.stored("rotary embedding: qkv", qkv, rows * heads.width())?,
        table,
        starts,
        size("rotary embedding: rows", rows)?.into(),
        seq,
        first,
        size("rotary embedding: width", heads.width())?.into(),
        size("rotary embedding: heads", heads.turned())?.into(),
        size("rotary embedding: head dimension", d)?.into(),
        sign.into(),
    ];
    let shape = Shape::over((rows * heads.turned() * d / 2 / columns) as u64);
    // SAFETY: the parameters of rope, whose lengths were checked.
    unsafe { ops.launch(stream, op, &format!("rope_{columns}"), shape, args) }
}

/// Divides each head of queries and keys by the root of its mean square, times its gain, then
/// rotates it, in place. Keeps the input in `raw`, with `stats`, for [`norm_backward`].
///
/// # Errors
/// Lengths, types or sizes do not fit, or the stream failed.
#[allow(clippy::too_many_arguments)]
pub fn norm_forward(
    ops: &OpKernels,
    stream: &CudaStream,
    qkv: AnySlice,
    raw: AnySlice,
    stats: DeviceSlice<f32>,
    gains: AnySlice,
    angles: Angles,
    heads: Heads,
    eps: f32,
) -> Result<(), OpError> {
    let rows = check_norms(qkv, stats, heads)?;
    let [table, starts, seq, first] = angles.args(rows, heads.d)?;
    let [rows32, width, turned, queries, d] = norm_sizes(rows, heads)?;
    let args = [
        ops.stored("head norms: qkv", qkv, rows * heads.width())?,
        ops.stored("head norms: raw", raw, rows * heads.turned() * heads.d)?,
        stats.into(),
        ops.stored("head norms: gains", gains, 2 * heads.d)?,
        table,
        starts,
        rows32,
        seq,
        first,
        width,
        turned,
        queries,
        d,
        eps.into(),
    ];
    // SAFETY: the parameters of head_norm_forward, whose lengths were checked.
    unsafe {
        ops.launch(
            stream,
            "head norms",
            "head_norm_forward",
            norm_grid(rows, heads),
            args,
        )
    }
}

/// Replaces the gradient of the norms' output in `dqkv`, which is rotated back already, by that of
/// their input, and sums those of the gains into `dgains` `[2, d]` unless that is `None`.
///
/// # Errors
/// Lengths, types or sizes do not fit, or the stream failed.
#[allow(clippy::too_many_arguments)]
pub fn norm_backward(
    ops: &OpKernels,
    stream: &CudaStream,
    dqkv: AnySlice,
    dgains: Option<SumOut>,
    raw: AnySlice,
    stats: DeviceSlice<f32>,
    gains: AnySlice,
    heads: Heads,
    workspace: DeviceSlice<f32>,
) -> Result<(), OpError> {
    let rows = check_norms(dqkv, stats, heads)?;
    let shape = norm_grid(rows, heads);
    let blocks = shape.grid[0] as usize;
    let partials = column_sums::part("head norms: workspace", workspace, blocks * 2 * heads.d)?;
    let [rows32, width, turned, queries, d] = norm_sizes(rows, heads)?;
    // A null address: nothing is summed.
    let parts = dgains.map_or(0u64.into(), |_| partials.into());
    let args = [
        ops.stored("head norms: dqkv", dqkv, rows * heads.width())?,
        parts,
        ops.stored("head norms: raw", raw, rows * heads.turned() * heads.d)?,
        stats.into(),
        ops.stored("head norms: gains", gains, 2 * heads.d)?,
        rows32,
        width,
        turned,
        queries,
        d,
    ];
    let op = "head norms backward";
    // SAFETY: the parameters of head_norm_backward, whose lengths were checked.
    unsafe { ops.launch(stream, op, "head_norm_backward", shape, args) }?;
    match dgains {
        Some(dgains) => column_sums::sum_partials(ops, stream, &[dgains], partials, blocks),
        None => Ok(()),
    }
}

/// Maximum elements of the workspace of [`norm_backward`].
pub fn workspace_elems(rows: usize, heads: Heads) -> usize {
    blocks(rows, heads) * 2 * heads.d
}

fn blocks(rows: usize, heads: Heads) -> usize {
    (rows * heads.turned()).div_ceil(WARPS).clamp(1, MAX_BLOCKS)
}

fn norm_grid(rows: usize, heads: Heads) -> Shape {
    Shape::blocks(blocks(rows, heads) as u32, 32 * WARPS as u32)
}

/// Returns the rows.
fn check_norms(qkv: AnySlice, stats: DeviceSlice<f32>, heads: Heads) -> Result<usize, OpError> {
    if heads.d > MAX_NORMED {
        return Err(OpError::Size {
            what: "head norms: head dimension",
            got: heads.d,
            takes: "up to 256",
        });
    }
    let rows = qkv.len() / heads.width().max(1);
    check_len("head norms: stats", stats.len(), rows * heads.turned())?;
    Ok(rows)
}

/// Rows, width, heads, heads of queries, and the dimension.
fn norm_sizes(rows: usize, heads: Heads) -> Result<[Arg; 5], OpError> {
    Ok([
        size("head norms: rows", rows)?.into(),
        size("head norms: width", heads.width())?.into(),
        size("head norms: heads", heads.turned())?.into(),
        size("head norms: heads of queries", heads.queries)?.into(),
        size("head norms: head dimension", heads.d)?.into(),
    ])
}
