//! Launches of layer_norm.cu.
//!
//! Shapes: x, y, dx, dy `[rows, n]` and gain, bias `[n]` in the kernels' type; stats `[rows, 2]`,
//! dgain, dbias `[n]` in fp32.
//!
//! Why a warp computes a row: it needs no barrier. Columns are summed in shared memory, because
//! registers would hold those of narrow rows only. Backward also writes the norm's output, which
//! the gradient of the weights reads, instead of a second forward.

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{AnySlice, DeviceSlice};

use super::column_sums::{self, SumOut};
use super::error::{OpError, check_len};
use super::launch::{OpKernels, Shape, columns, size};

/// Warps of a block of the forward pass.
const FORWARD_WARPS: usize = 4;
/// Blocks of the backward pass: four on each multiprocessor of the largest device. The bits of
/// results depend on it.
const BACKWARD_BLOCKS: usize = 4 * 132;
/// Maximum sums over rows of the backward pass.
const MAX_SUMS: usize = 3;

/// The kernels for a range of widths: the numbers at the end of layer_norm.cu.
struct Variant {
    /// Neighbouring columns of a lane.
    columns: usize,
    /// Chunks of 32 `columns` in a row.
    chunks: usize,
    /// Warps of a block of the backward pass.
    warps: usize,
}

const VARIANTS: [Variant; 6] = [
    Variant {
        columns: 8,
        chunks: 3,
        warps: 4,
    },
    Variant {
        columns: 8,
        chunks: 4,
        warps: 4,
    },
    Variant {
        columns: 8,
        chunks: 5,
        warps: 2,
    },
    Variant {
        columns: 8,
        chunks: 7,
        warps: 2,
    },
    Variant {
        columns: 8,
        chunks: 16,
        warps: 1,
    },
    Variant {
        columns: 1,
        chunks: 32,
        warps: 4,
    },
];

impl Variant {
    /// The first for rows of `n` elements of which a lane accesses `columns` at once.
    fn of(n: usize, columns: usize) -> Result<&'static Self, OpError> {
        let takes = if columns == 8 {
            "up to 4096"
        } else {
            "up to 1024 unless multiples of 8"
        };
        let mut all = VARIANTS.iter();
        all.find(|v| v.columns == columns && n <= 32 * columns * v.chunks)
            .ok_or(OpError::Size {
                what: "layer norm: width",
                got: n,
                takes,
            })
    }

    fn entry(&self, pass: &str) -> String {
        format!("layer_norm_{pass}_{}_{}", self.columns, self.chunks)
    }

    /// Blocks of the backward pass.
    fn blocks(&self, rows: usize) -> usize {
        rows.div_ceil(self.warps).clamp(1, BACKWARD_BLOCKS)
    }
}

/// Maximum elements of the workspace of [`backward`].
pub fn workspace_elems(rows: usize, n: usize) -> usize {
    rows.clamp(1, BACKWARD_BLOCKS) * MAX_SUMS * n
}

/// The sums over rows of [`backward`].
#[derive(Clone, Copy, Debug)]
pub struct Sums {
    /// The gradient of the gain.
    pub gain: SumOut,
    /// The gradient of the bias.
    pub bias: SumOut,
    /// The sums of `dx` as it is before the call: the gradient of a bias that was added after x. If
    /// `None`, they are not computed.
    pub residual: Option<SumOut>,
}

/// The norm's output, which [`backward`] computes again.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// The output, with the bits of [`forward`].
    pub y: AnySlice,
    /// The norm's bias.
    pub bias: AnySlice,
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
    let variant = Variant::of(n, columns(n, &[y, x, gain, bias]))?;
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
    let shape = Shape::blocks(
        rows.div_ceil(FORWARD_WARPS).max(1) as u32,
        32 * FORWARD_WARPS as u32,
    );
    // SAFETY: the parameters of layer_norm_forward, whose lengths were checked.
    unsafe { ops.launch(stream, "layer norm", &variant.entry("forward"), shape, args) }
}

/// Adds the gradient of x to `dx`, computes the sums over rows, and the norm's output again if
/// `output` is not `None`. The order of every sum depends only on the sizes.
///
/// # Errors
/// Lengths, types or sizes do not fit, or the stream failed.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    ops: &OpKernels,
    stream: &CudaStream,
    dx: AnySlice,
    sums: Sums,
    output: Option<Output>,
    dy: AnySlice,
    x: AnySlice,
    stats: DeviceSlice<f32>,
    gain: AnySlice,
    workspace: DeviceSlice<f32>,
) -> Result<(), OpError> {
    let n = gain.len();
    let rows = x.len() / n.max(1);
    let Output { y, bias } = output.unwrap_or(Output { y: dx, bias: gain });
    let variant = Variant::of(n, columns(n, &[dx, dy, x, gain, y, bias]))?;
    let outs: Vec<SumOut> = [sums.gain, sums.bias]
        .into_iter()
        .chain(sums.residual)
        .collect();
    check_len("layer norm: stats", stats.len(), 2 * rows)?;
    let blocks = variant.blocks(rows);
    let partials = column_sums::part("layer norm: workspace", workspace, blocks * outs.len() * n)?;
    let normed = ops.stored("layer norm: y", y, rows * n)?;

    let args = [
        ops.stored("layer norm: dx", dx, rows * n)?,
        partials.into(),
        // A null address: the output is not computed.
        if output.is_some() {
            normed
        } else {
            0u64.into()
        },
        ops.stored("layer norm: dy", dy, rows * n)?,
        ops.stored("layer norm: x", x, rows * n)?,
        stats.into(),
        ops.stored("layer norm: gain", gain, n)?,
        ops.stored("layer norm: bias", bias, n)?,
        size("layer norm: rows", rows)?.into(),
        size("layer norm: width", n)?.into(),
        (outs.len() as u32).into(),
    ];

    let padded = n.next_multiple_of(32 * variant.columns);
    let shared_bytes = (variant.warps * outs.len() * padded * size_of::<f32>()) as u32;
    let shape = Shape {
        grid: [blocks as u32, 1, 1],
        block: 32 * variant.warps as u32,
        shared_bytes,
    };

    // SAFETY: the parameters of layer_norm_backward, whose lengths were checked; the variant is for
    // rows of this width.
    unsafe {
        ops.launch(
            stream,
            "layer norm backward",
            &variant.entry("backward"),
            shape,
            args,
        )
    }?;

    column_sums::sum_partials(ops, stream, &outs, partials, blocks)
}

// Three sums of the widest rows fit the shared memory that every device has.
const _: () = {
    let mut i = 0;
    while i < VARIANTS.len() {
        let Variant {
            columns,
            chunks,
            warps,
        } = VARIANTS[i];
        assert!(warps * MAX_SUMS * chunks * 32 * columns * size_of::<f32>() <= 48 << 10);
        i += 1;
    }
};
