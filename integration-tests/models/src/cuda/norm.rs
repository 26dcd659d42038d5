//! Launches of layer_norm.cu and rms_norm.cu.
//!
//! Shapes: x, y, dx, dy `[rows, n]` and gain, bias `[n]` in the kernels' type; stats `[rows, 2]` of
//! layer norm and `[rows]` of RMS norm, and sums over rows `[n]`, in fp32.
//!
//! Why a warp computes a row: it needs no barrier. Columns are summed in shared memory, because
//! registers would hold those of narrow rows only. Backward also writes the norm's output, which
//! the gradient of the weights reads, instead of a second forward.

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{AnySlice, DeviceSlice};

use super::column_sums::{self, SumOut};
use super::error::{OpError, check_len};
use super::launch::{OpKernels, Shape, columns, size};
use crate::ops::norm::NormKind;

/// Warps of a block of the forward pass.
const FORWARD_WARPS: usize = 4;
/// Blocks of the backward pass: four on each multiprocessor of the largest device. The bits of
/// results depend on it.
const BACKWARD_BLOCKS: usize = 4 * 132;

/// A norm and its parameters.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// What is computed.
    pub kind: NormKind,
    /// The factors.
    pub gain: AnySlice,
    /// Added to the product; RMS norm has none, and it is empty.
    pub bias: AnySlice,
    /// Added to the variance or to the mean square.
    pub eps: f32,
}

/// The kernels of a file.
struct Kernels {
    /// The start of their names.
    file: &'static str,
    /// The operations in timelines.
    forward: &'static str,
    backward: &'static str,
    /// The width in messages, and the widest rows of multiples of 8 elements.
    width: &'static str,
    widest: &'static str,
    /// Maximum sums over rows of the backward pass.
    max_sums: usize,
    variants: &'static [Variant],
}

/// The kernels for a range of widths: the numbers at the end of a file.
struct Variant {
    /// Neighbouring columns of a lane.
    columns: usize,
    /// Chunks of 32 `columns` in a row.
    chunks: usize,
    /// Warps of a block of the backward pass.
    warps: usize,
}

const fn variant(columns: usize, chunks: usize, warps: usize) -> Variant {
    Variant {
        columns,
        chunks,
        warps,
    }
}

const LAYER_NORM: Kernels = Kernels {
    file: "layer_norm",
    forward: "layer norm",
    backward: "layer norm backward",
    width: "layer norm: width",
    widest: "up to 4096",
    max_sums: 3,
    variants: &[
        variant(8, 3, 4),
        variant(8, 4, 4),
        variant(8, 5, 2),
        variant(8, 7, 2),
        variant(8, 16, 1),
        variant(1, 32, 4),
    ],
};

const RMS_NORM: Kernels = Kernels {
    file: "rms_norm",
    forward: "RMS norm",
    backward: "RMS norm backward",
    width: "RMS norm: width",
    widest: "up to 8192",
    max_sums: 1,
    variants: &[
        variant(8, 4, 4),
        variant(8, 8, 4),
        variant(8, 16, 2),
        variant(8, 32, 1),
        variant(1, 32, 4),
    ],
};

impl Kernels {
    fn of(kind: NormKind) -> &'static Self {
        match kind {
            NormKind::Layer => &LAYER_NORM,
            NormKind::Rms => &RMS_NORM,
        }
    }

    /// The first variant for rows of `n` elements of which a lane accesses `columns` at once.
    fn variant(&self, n: usize, columns: usize) -> Result<&'static Variant, OpError> {
        let takes = match columns {
            8 => self.widest,
            _ => "up to 1024 unless multiples of 8",
        };
        let mut all = self.variants.iter();
        all.find(|v| v.columns == columns && n <= 32 * columns * v.chunks)
            .ok_or(OpError::Size {
                what: self.width,
                got: n,
                takes,
            })
    }

    fn entry(&self, pass: &str, variant: &Variant) -> String {
        let Variant {
            columns, chunks, ..
        } = variant;
        format!("{}_{pass}_{columns}_{chunks}", self.file)
    }

    /// Whether the sums of the widest rows fit the shared memory that every device has.
    const fn fits(&self) -> bool {
        let mut i = 0;
        while i < self.variants.len() {
            let v = &self.variants[i];
            let columns = 32 * v.columns * v.chunks;
            if v.warps * self.max_sums * columns * size_of::<f32>() > 48 << 10 {
                return false;
            }
            i += 1;
        }
        true
    }
}

const _: () = assert!(LAYER_NORM.fits() && RMS_NORM.fits());

/// Maximum elements of the workspace of [`backward`].
pub fn workspace_elems(kind: NormKind, rows: usize, n: usize) -> usize {
    rows.clamp(1, BACKWARD_BLOCKS) * Kernels::of(kind).max_sums * n
}

/// `y` is the norm of x; `stats` is written for the backward pass.
///
/// # Errors
/// Lengths, types or sizes do not fit, or the stream failed.
pub fn forward(
    ops: &OpKernels,
    stream: &CudaStream,
    norm: Norm,
    y: AnySlice,
    stats: DeviceSlice<f32>,
    x: AnySlice,
) -> Result<(), OpError> {
    let n = norm.gain.len();
    let rows = x.len() / n.max(1);
    check_len("norm: stats", stats.len(), norm.kind.stats() * rows)?;
    let kernels = Kernels::of(norm.kind);
    let variant = kernels.variant(n, columns(n, &[y, x, norm.gain, norm.read_bias()]))?;
    let entry = kernels.entry("forward", variant);
    let shape = Shape::blocks(
        rows.div_ceil(FORWARD_WARPS).max(1) as u32,
        32 * FORWARD_WARPS as u32,
    );

    let y = ops.stored("norm: y", y, rows * n)?;
    let stats = stats.into();
    let x = ops.stored("norm: x", x, rows * n)?;
    let gain = ops.stored("norm: gain", norm.gain, n)?;
    let rows = size("norm: rows", rows)?.into();
    let width = size(kernels.width, n)?.into();
    let eps = norm.eps.into();
    match norm.kind {
        NormKind::Layer => {
            let bias = ops.stored("norm: bias", norm.bias, n)?;
            let args = [y, stats, x, gain, bias, rows, width, eps];
            // SAFETY: the parameters of layer_norm_forward, whose lengths were checked.
            unsafe { ops.launch(stream, kernels.forward, &entry, shape, args) }
        }
        NormKind::Rms => {
            let args = [y, stats, x, gain, rows, width, eps];
            // SAFETY: the parameters of rms_norm_forward, whose lengths were checked.
            unsafe { ops.launch(stream, kernels.forward, &entry, shape, args) }
        }
    }
}

impl Norm {
    /// The bias, if there is one, for the alignment of what kernels read.
    fn read_bias(&self) -> AnySlice {
        match self.kind {
            NormKind::Layer => self.bias,
            NormKind::Rms => self.gain,
        }
    }
}

/// Adds the gradient of x to `dx`. Sums those of the gain and, of a layer norm, of the bias over
/// the rows into `sums`; a third place of a layer norm receives the sums of `dx` as it is before
/// the call: the gradient of a bias that was added after x. Without places nothing is summed.
/// Writes the norm's output again, with the bits of [`forward`], to `output` if it is not `None`.
/// The order of every sum depends only on the sizes.
///
/// # Errors
/// Lengths, types or sizes do not fit, or the stream failed.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    ops: &OpKernels,
    stream: &CudaStream,
    norm: Norm,
    dx: AnySlice,
    sums: &[SumOut],
    output: Option<AnySlice>,
    dy: AnySlice,
    x: AnySlice,
    stats: DeviceSlice<f32>,
    workspace: DeviceSlice<f32>,
) -> Result<(), OpError> {
    let n = norm.gain.len();
    let rows = x.len() / n.max(1);
    let kernels = Kernels::of(norm.kind);
    if !sums.is_empty() {
        let most = kernels.max_sums;
        let expected = sums.len().clamp(norm.kind.params(), most);
        check_len("norm: sums", expected, sums.len())?;
    }
    check_len("norm: stats", stats.len(), norm.kind.stats() * rows)?;
    let accessed = [dx, dy, x, norm.gain, output.unwrap_or(dx), norm.read_bias()];
    let variant = kernels.variant(n, columns(n, &accessed))?;
    let blocks = rows.div_ceil(variant.warps).clamp(1, BACKWARD_BLOCKS);
    let partials = column_sums::part("norm: workspace", workspace, blocks * sums.len() * n)?;

    let dx = ops.stored("norm: dx", dx, rows * n)?;
    // A null address: the output is not computed.
    let y = output.map_or(Ok(0u64.into()), |y| ops.stored("norm: y", y, rows * n))?;
    let dy = ops.stored("norm: dy", dy, rows * n)?;
    let x = ops.stored("norm: x", x, rows * n)?;
    let gain = ops.stored("norm: gain", norm.gain, n)?;
    let height = size("norm: rows", rows)?.into();
    let width = size(kernels.width, n)?.into();
    // A null address: nothing is summed.
    let parts = match sums {
        [] => 0u64.into(),
        _ => partials.into(),
    };
    let stats = stats.into();

    let padded = n.next_multiple_of(32 * variant.columns);
    let shape = Shape {
        grid: [blocks as u32, 1, 1],
        block: 32 * variant.warps as u32,
        shared_bytes: (variant.warps * sums.len() * padded * size_of::<f32>()) as u32,
    };
    let entry = kernels.entry("backward", variant);
    match norm.kind {
        NormKind::Layer => {
            let bias = ops.stored("norm: bias", norm.bias, n)?;
            let count = (sums.len() as u32).into();
            let args = [dx, parts, y, dy, x, stats, gain, bias, height, width, count];
            // SAFETY: the parameters of layer_norm_backward, whose lengths were checked; the variant
            // is for rows of this width.
            unsafe { ops.launch(stream, kernels.backward, &entry, shape, args) }
        }
        NormKind::Rms => {
            let args = [dx, parts, y, dy, x, stats, gain, height, width];
            // SAFETY: the parameters of rms_norm_backward, whose lengths were checked; the variant is
            // for rows of this width.
            unsafe { ops.launch(stream, kernels.backward, &entry, shape, args) }
        }
    }?;

    match sums {
        [] => Ok(()),
        _ => column_sums::sum_partials(ops, stream, sums, partials, blocks),
    }
}
