//! The trait [`Kernels`], its arguments and its errors. Each operation is enqueued on an explicit
//! stream; the call returns before it runs.

use std::sync::Arc;

use zero_alloc::device::{AnySlice, Device, DeviceError, DeviceSlice};

use crate::rule::{StepScalars, UpdateArgs, UpdateRule};
use crate::step::{RankStats, StepConfig, StepRates, StepRecord, StepState};

/// An error that kept an operation from being enqueued.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum KernelError {
    /// Arguments have different lengths.
    #[error("{what}: expected {expected} elements, got {got}")]
    LengthMismatch {
        /// The operation and argument.
        what: &'static str,
        expected: usize,
        /// Elements of the argument.
        got: usize,
    },
    /// The operation is not defined for this dtype.
    #[error("{what}: {dtype} is not supported; use fp32, bf16 or fp16")]
    Unsupported {
        /// The operation and argument.
        what: &'static str,
        dtype: zero_alloc::device::DType,
    },
    /// A slice does not start at a multiple of its element's size.
    #[error("{what}: address {address:#x} is not a multiple of {align_bytes} bytes")]
    Misaligned {
        /// The operation and argument.
        what: &'static str,
        /// The slice's first byte.
        address: usize,
        /// The alignment of an element.
        align_bytes: usize,
    },
    /// A written slice shares memory with another argument.
    #[error("{first} and {second} overlap")]
    Overlap {
        /// The operation and the written argument.
        first: &'static str,
        /// The other argument.
        second: &'static str,
    },
    /// A part of a unit starts before the end of the one before it.
    #[error(
        "pack: part {index} starts before the end of the part before it; pass parts in ascending order"
    )]
    PartOrder {
        /// Position of the part.
        index: usize,
    },
    /// The host's threads could not be started.
    #[error("failed to start {threads} threads: {message}")]
    Threads { threads: usize, message: String },
    /// The rule has no CUDA kernel for these dtypes.
    #[error(
        "the update rule {rule} has no CUDA kernel for a gradient of {grad}: train on the host, or add the kernel"
    )]
    NoKernel {
        /// The rule's name.
        rule: &'static str,
        grad: zero_alloc::device::DType,
    },
    /// A CUDA kernel could not be compiled.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] crate::cuda::CudaError),
    /// The stream or device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Sum of squares and non-finite count of a gradient. The gradient is still scaled and summed over
/// ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct GradStats {
    /// Sum of squares of the finite elements, in fp64, in an order fixed by the length alone.
    pub sum_sq: f64,
    /// Elements that are infinite or NaN.
    pub nonfinite: u64,
}

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
