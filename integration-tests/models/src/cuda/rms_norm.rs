//! Launches of rms_norm.cu.
//!
//! Shapes: x, y, dx, dy `[rows, n]` and gain `[n]` in the kernels' type; stats `[rows]`, dgain
//! `[n]` in fp32.

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

/// The kernels for a range of widths: the numbers at the end of rms_norm.cu.
struct Variant {
    /// Neighbouring columns of a lane.
    columns: usize,
    /// Chunks of 32 `columns` in a row.
    chunks: usize,
    /// Warps of a block of the backward pass.
    warps: usize,
}

const VARIANTS: [Variant; 5] = [
    Variant {
        columns: 8,
        chunks: 4,
        warps: 4,
    },
    Variant {
        columns: 8,
        chunks: 8,
        warps: 4,
    },
    Variant {
        columns: 8,
        chunks: 16,
        warps: 2,
    },
    Variant {
        columns: 8,
        chunks: 32,
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
            "up to 8192"
        } else {
            "up to 1024 unless multiples of 8"
        };
        let mut all = VARIANTS.iter();
        all.find(|v| v.columns == columns && n <= 32 * columns * v.chunks)
            .ok_or(OpError::Size {
                what: "RMS norm: width",
                got: n,
                takes,
            })
    }

    fn entry(&self, pass: &str) -> String {
        format!("rms_norm_{pass}_{}_{}", self.columns, self.chunks)
    }

    /// Blocks of the backward pass.
    fn blocks(&self, rows: usize) -> usize {
        rows.div_ceil(self.warps).clamp(1, BACKWARD_BLOCKS)
    }
}

/// Maximum elements of the workspace of [`backward`].
pub fn workspace_elems(rows: usize, n: usize) -> usize {
    rows.clamp(1, BACKWARD_BLOCKS) * n
}

/// `y = x / sqrt(mean(x^2) + eps) * gain`; `stats` is written for the backward pass.
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
    eps: f32,
) -> Result<(), OpError> {
    let n = gain.len();
    let rows = x.len() / n.max(1);
    check_len("RMS norm: stats", stats.len(), rows)?;
    let variant = Variant::of(n, columns(n, &[y, x, gain]))?;
    let args = [
        ops.stored("RMS norm: y", y, rows * n)?,
        stats.into(),
        ops.stored("RMS norm: x", x, rows * n)?,
        ops.stored("RMS norm: gain", gain, n)?,
        size("RMS norm: rows", rows)?.into(),
        size("RMS norm: width", n)?.into(),
        eps.into(),
    ];
    let shape = Shape::blocks(
        rows.div_ceil(FORWARD_WARPS).max(1) as u32,
        32 * FORWARD_WARPS as u32,
    );
    // SAFETY: the parameters of rms_norm_forward, whose lengths were checked.
    unsafe { ops.launch(stream, "RMS norm", &variant.entry("forward"), shape, args) }
}

/// Adds the gradient of x to `dx`, and sums that of the gain into `dgain`. Writes the norm's output
/// again, with the bits of [`forward`], to `output` if it is not `None`. The order of every sum
/// depends only on the sizes.
///
/// # Errors
/// Lengths, types or sizes do not fit, or the stream failed.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    ops: &OpKernels,
    stream: &CudaStream,
    dx: AnySlice,
    dgain: SumOut,
    output: Option<AnySlice>,
    dy: AnySlice,
    x: AnySlice,
    stats: DeviceSlice<f32>,
    gain: AnySlice,
    workspace: DeviceSlice<f32>,
) -> Result<(), OpError> {
    let n = gain.len();
    let rows = x.len() / n.max(1);
    let variant = Variant::of(n, columns(n, &[dx, dy, x, gain, output.unwrap_or(dx)]))?;
    check_len("RMS norm: stats", stats.len(), rows)?;
    let blocks = variant.blocks(rows);
    let partials = column_sums::part("RMS norm: workspace", workspace, blocks * n)?;
    // A null address: the output is not computed.
    let normed = output.map_or(Ok(0u64.into()), |y| ops.stored("RMS norm: y", y, rows * n))?;

    let args = [
        ops.stored("RMS norm: dx", dx, rows * n)?,
        partials.into(),
        normed,
        ops.stored("RMS norm: dy", dy, rows * n)?,
        ops.stored("RMS norm: x", x, rows * n)?,
        stats.into(),
        ops.stored("RMS norm: gain", gain, n)?,
        size("RMS norm: rows", rows)?.into(),
        size("RMS norm: width", n)?.into(),
    ];

    let padded = n.next_multiple_of(32 * variant.columns);
    let shape = Shape {
        grid: [blocks as u32, 1, 1],
        block: 32 * variant.warps as u32,
        shared_bytes: (variant.warps * padded * size_of::<f32>()) as u32,
    };
    let entry = variant.entry("backward");
    // SAFETY: the parameters of rms_norm_backward, whose lengths were checked; the variant is for
    // rows of this width.
    unsafe { ops.launch(stream, "RMS norm backward", &entry, shape, args) }?;

    column_sums::sum_partials(ops, stream, &[dgain], partials, blocks)
}

// The sums of the widest rows fit the shared memory that every device has.
const _: () = {
    let mut i = 0;
    while i < VARIANTS.len() {
        let Variant {
            columns,
            chunks,
            warps,
        } = VARIANTS[i];
        assert!(warps * chunks * 32 * columns * size_of::<f32>() <= 48 << 10);
        i += 1;
    }
};
