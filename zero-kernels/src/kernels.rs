//! The trait [`Kernels`], and its arguments. Each operation is enqueued on an explicit
//! stream; the call returns before it runs.

use std::sync::Arc;

use zero_alloc::device::{AnySlice, Device, DeviceSlice};
use zero_shard::BlockFormat;

use crate::codec::Codec;
use crate::error::KernelError;
use crate::rule::{NewtonSchulz, UpdateArgs, UpdateRule};
use crate::step::{
    GradStats, RankStats, StepConfig, StepRates, StepRecord, StepScalars, StepState,
};

/// The arguments of [`Kernels::advance_step`], all in device memory.
#[derive(Clone, Copy, Debug)]
pub struct AdvanceArgs {
    /// The statistics of all ranks, in rank order; at least one.
    pub ranks: DeviceSlice<RankStats>,
    /// One element, read.
    pub config: DeviceSlice<StepConfig>,
    /// The schedule's values from [`StepConfig::first_position`] on, for each position one entry
    /// for each of `scalars`; read.
    pub rates: DeviceSlice<StepRates>,
    /// One element, updated.
    pub state: DeviceSlice<StepState>,
    /// The scalars of the step's updates, one for each set of rates; at least one, written.
    pub scalars: DeviceSlice<StepScalars>,
    /// A ring of at least one element; the record of iteration `i` is written to element `i % len`.
    pub records: DeviceSlice<StepRecord>,
}

/// The elements of a unit that [`Kernels::pack`] writes: `count` segments of `len` elements, such
/// as the same range of each rank's shard. Segment `q` starts at element `start + q * stride` of
/// the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segments {
    /// Start of the first segment.
    pub start: usize,
    /// Elements of a segment.
    pub len: usize,
    /// Distance between the starts of two segments.
    pub stride: usize,
    /// Number of segments.
    pub count: usize,
}

impl Segments {
    /// The elements of all segments; `None` if a place overflows.
    pub(crate) fn elems(&self) -> Option<usize> {
        let last = self.count.saturating_sub(1).checked_mul(self.stride)?;
        self.start.checked_add(last)?.checked_add(self.len)?;
        self.len.checked_mul(self.count)
    }
}

/// The rows of a matrix in memory.
#[derive(Clone, Copy, Debug)]
pub struct MatrixRows {
    /// From the first to the last element of the matrix, so `(rows - 1) * stride + cols` elements;
    /// only those of the matrix are read or written, so that others may be in use meanwhile.
    pub data: AnySlice,
    /// Elements from the start of a row to the start of the next; at least those of a row.
    pub stride: usize,
}

/// The elements from the first to the last of a matrix in rows; `None` if they overflow.
pub(crate) fn elems_of_rows([rows, cols]: [usize; 2], stride: usize) -> Option<usize> {
    if rows == 0 || cols == 0 {
        return Some(0);
    }
    (rows - 1).checked_mul(stride)?.checked_add(cols)
}

/// The arguments of [`Kernels::orthogonalise`].
#[derive(Clone, Copy, Debug)]
pub struct OrthogonaliseArgs {
    /// From the first to the last element of the matrix, so `(rows - 1) * row_stride + cols`
    /// elements; only those of the matrix are read and written, so that others may be in use
    /// meanwhile.
    pub values: DeviceSlice<f32>,
    /// Rows of the matrix.
    pub rows: usize,
    /// Columns of the matrix.
    pub cols: usize,
    /// Elements from the start of a row to the start of the next; at least `cols`.
    pub row_stride: usize,
    /// At least [`Kernels::orthogonalise_scratch_elems`] elements, in use until the operation has
    /// run.
    pub scratch: DeviceSlice<f32>,
    /// The iteration.
    pub rule: NewtonSchulz,
    /// The factor of the result.
    pub scale: f32,
}

/// The error of an encoding, added to the next one: the argument of [`Kernels::encode_blocks`].
///
/// ```text
/// x     = src + error
/// error = keep * error + (1 - keep) * (x - decode(encode(x)))
/// ```
///
/// With `keep` 0 this is error feedback; above, a running mean of the errors (LoCo, Xie et al.,
/// arXiv 2407.04480). What is not finite is left out of the error.
#[derive(Clone, Copy, Debug)]
pub struct Feedback {
    /// An element for each of the source, updated.
    pub error: DeviceSlice<f32>,
    /// The part of the error that stays.
    pub keep: f32,
}

/// Sums over values that were encoded, for their relative error. Blocks that are not finite are
/// left out. The order of a sum is fixed by the length, as cuda/encode_blocks.cu documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct EncodeSums {
    /// Of the squares of the errors.
    pub error_sq: f64,
    /// Of the squares of the greatest errors that the format allows.
    pub bound_sq: f64,
    /// Of the squares of the values.
    pub value_sq: f64,
}

impl EncodeSums {
    /// Elements of one entry.
    pub const ELEMS: usize = 16_384;

    /// Entries for `elems` elements.
    pub const fn count(elems: usize) -> usize {
        elems.div_ceil(Self::ELEMS)
    }

    /// The sum of all.
    pub fn total(sums: &[Self]) -> Self {
        let mut total = Self::default();
        for sums in sums {
            total.error_sq += sums.error_sq;
            total.bound_sq += sums.bound_sq;
            total.value_sq += sums.value_sq;
        }
        total
    }
}

/// The operations of a ZeRO step, enqueued on streams of `D`. The call checks the arguments:
/// lengths, dtypes, alignment, and that no written slice overlaps another argument. Empty ranges
/// are allowed.
///
/// No operation allocates device memory or waits for the host, so a step can be recorded into a
/// graph. Each returns an error if the arguments are invalid or the stream fails.
///
/// # Safety
/// An operation uses its arguments' memory only on the stream, and reads and writes as documented:
/// callers free or reuse the memory behind that point.
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no kernels for `{D}`",
    note = "use zero_kernels::host::HostKernels for HostDevice, zero_kernels::cuda::CudaKernels for CudaDevice"
)]
pub unsafe trait Kernels<D: Device>: Send + Sync {
    /// One update over a flat range by `rule`: it reads the gradient once, and reads and writes
    /// weights and slots.
    ///
    /// # Errors
    /// See [`KernelError`].
    fn update(
        &self,
        stream: &D::Stream,
        rule: &Arc<dyn UpdateRule>,
        args: UpdateArgs,
    ) -> Result<(), KernelError>;

    /// Replaces a matrix by `scale` times [`NewtonSchulz`] of it: the same bits at any alignment
    /// and row stride, with any number of threads. A matrix that is not finite becomes NaN. The
    /// host computes in fp32, and CUDA in bf16 with sums in fp32, as `torch.optim.Muon` does.
    ///
    /// # Errors
    /// See [`KernelError`].
    fn orthogonalise(&self, stream: &D::Stream, args: OrthogonaliseArgs)
    -> Result<(), KernelError>;

    /// Whether [`Self::orthogonalise`] has all that it needs.
    ///
    /// # Errors
    /// Why it refuses.
    fn can_orthogonalise(&self) -> Result<(), KernelError> {
        Ok(())
    }

    /// Elements of scratch that [`Self::orthogonalise`] needs for a matrix of this shape, such as a
    /// copy and two squares of its shorter side.
    fn orthogonalise_scratch_elems(&self, rows: usize, cols: usize) -> usize;

    /// `dst[i] = src[i] * scale`, rounded to nearest even; any of fp32, bf16, fp16 to any.
    ///
    /// # Errors
    /// See [`KernelError`].
    fn cast(
        &self,
        stream: &D::Stream,
        src: AnySlice,
        dst: AnySlice,
        scale: f32,
    ) -> Result<(), KernelError>;

    /// [`Self::cast`] of a matrix `[rows, cols]`.
    ///
    /// # Errors
    /// See [`KernelError`].
    fn cast_rows(
        &self,
        stream: &D::Stream,
        src: MatrixRows,
        dst: MatrixRows,
        shape: [usize; 2],
        scale: f32,
    ) -> Result<(), KernelError>;

    /// Whether [`Self::update`] takes slots in this format.
    fn updates(&self, codec: Codec) -> bool;

    /// Encodes `src`, in fp32, bf16 or fp16, into `blocks`, bytes of `format`. `sums` has
    /// [`EncodeSums::count`] entries, to which those of this array are added.
    ///
    /// # Errors
    /// See [`KernelError`].
    fn encode_blocks(
        &self,
        stream: &D::Stream,
        format: BlockFormat,
        src: AnySlice,
        blocks: AnySlice,
        feedback: Option<Feedback>,
        sums: Option<DeviceSlice<EncodeSums>>,
    ) -> Result<(), KernelError>;

    /// Writes to `dst`, in fp32, bf16 or fp16, the sum of `parts` arrays in `blocks`, one after
    /// another: in fp32, in their order.
    ///
    /// # Errors
    /// See [`KernelError`].
    fn decode_blocks(
        &self,
        stream: &D::Stream,
        format: BlockFormat,
        blocks: AnySlice,
        parts: usize,
        dst: AnySlice,
    ) -> Result<(), KernelError>;

    /// Packs `segments` of a unit into `dst`, one behind the other, as [`Self::cast`] with scale 1.
    /// `parts` are slices of the unit with their offsets in it, in ascending order; elements in no
    /// part are 0. On a GPU one launch packs up to 128 parts of one dtype.
    ///
    /// # Errors
    /// See [`KernelError`].
    fn pack(
        &self,
        stream: &D::Stream,
        parts: &[(AnySlice, usize)],
        segments: Segments,
        dst: AnySlice,
    ) -> Result<(), KernelError>;

    /// `acc[i] += grad[i]` in fp32.
    ///
    /// # Errors
    /// See [`KernelError`].
    fn accumulate(
        &self,
        stream: &D::Stream,
        grad: AnySlice,
        acc: DeviceSlice<f32>,
    ) -> Result<(), KernelError>;

    /// Elements of scratch that [`Self::grad_stats`] needs for gradients of up to `lens` elements;
    /// 0 on the host.
    fn stats_scratch_elems(&self, lens: &[usize]) -> usize;

    /// Writes the statistics of each gradient to its element of `out`: the same bits for the same
    /// values, at any alignment, with any number of threads, and alone or beside others. `scratch`
    /// has at least [`Self::stats_scratch_elems`] elements and is in use until the launches have
    /// run. On a GPU two launches serve up to 128 gradients of one dtype.
    ///
    /// # Errors
    /// See [`KernelError`].
    fn grad_stats(
        &self,
        stream: &D::Stream,
        grads: &[AnySlice],
        scratch: DeviceSlice<f64>,
        out: DeviceSlice<GradStats>,
    ) -> Result<(), KernelError>;

    /// Writes this rank's [`RankStats`] to `out[0]`, from the statistics of its units, in unit
    /// order, its loss and 64 flag bits.
    ///
    /// # Errors
    /// See [`KernelError`].
    fn rank_stats(
        &self,
        stream: &D::Stream,
        units: DeviceSlice<GradStats>,
        loss: DeviceSlice<f64>,
        flags: DeviceSlice<u64>,
        out: DeviceSlice<RankStats>,
    ) -> Result<(), KernelError>;

    /// [`step::advance_step`](crate::step::advance_step) on values in device memory.
    ///
    /// # Errors
    /// See [`KernelError`].
    fn advance_step(&self, stream: &D::Stream, args: AdvanceArgs) -> Result<(), KernelError>;
}
