//! The trait [`Kernels`], its arguments and its errors. Each operation is enqueued on an explicit
//! stream; the call returns before it runs.

use half::bf16;
use serde::{Deserialize, Serialize};
use zero_alloc::device::{AnySlice, Device, DeviceError, DeviceSlice};

use crate::step::{RankStats, StepConfig, StepRates, StepRecord, StepState, power};

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

/// The scalars of all Adam launches of one step. They are in device memory, so that a step needs no
/// host wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct StepScalars {
    /// Factor of every gradient: clip / (loss_scale x ranks x micro-batches).
    pub grad_scale: f32,
    /// Learning rate, for the decay.
    pub lr: f32,
    /// lr / (1 - beta1^t), divided in fp64; lr without bias correction.
    pub step_size: f32,
    /// sqrt(1 - beta2^t); 1 without bias correction.
    pub bias_correction2_sqrt: f32,
    /// 1 - beta1, subtracted in fp64 and then rounded, like all values derived from the betas.
    pub one_minus_beta1: f32,
    /// beta2.
    pub beta2: f32,
    /// 1 - beta2.
    pub one_minus_beta2: f32,
    /// Nonzero if the step is skipped: the launches write nothing.
    pub skip: u32,
}

impl StepScalars {
    /// The scalars of Adam's step `t`, counted from 1, at learning rate `lr`.
    pub fn new(t: u64, lr: f64, hyper: &AdamHyper, grad_scale: f64) -> Self {
        let rates = StepRates {
            lr,
            beta1: hyper.beta1,
            beta2: hyper.beta2,
        };
        Self::with_rates(t, &rates, hyper.bias_correction, grad_scale)
    }

    pub(crate) fn with_rates(
        t: u64,
        rates: &StepRates,
        bias_correction: bool,
        grad_scale: f64,
    ) -> Self {
        let &StepRates { lr, beta1, beta2 } = rates;
        let correction = |beta| {
            if bias_correction {
                1.0 - power(beta, t)
            } else {
                1.0
            }
        };
        Self {
            grad_scale: grad_scale as f32,
            lr: lr as f32,
            step_size: (lr / correction(beta1)) as f32,
            bias_correction2_sqrt: correction(beta2).sqrt() as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            skip: 0,
        }
    }

    /// The scalars of a skipped step.
    pub fn skipped() -> Self {
        Self {
            skip: 1,
            ..Self::default()
        }
    }
}

/// Hyperparameters of Adam, in fp64: `1 - beta2` of an fp32 beta2 is wrong in the fifth digit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamHyper {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// AdamW (decoupled decay) if true, Adam with L2 if false.
    pub decoupled: bool,
    /// Whether the moments are corrected for their start at 0, as in the paper.
    #[serde(default = "yes")]
    pub bias_correction: bool,
}

fn yes() -> bool {
    true
}

impl AdamHyper {
    /// The values that no schedule changes, rounded as all back ends use them. Values derived from
    /// the betas are in [`StepScalars`].
    pub(crate) fn constants(&self) -> AdamConstants {
        AdamConstants {
            eps: self.eps as f32,
            weight_decay: self.weight_decay as f32,
            decoupled: self.decoupled.into(),
        }
    }
}

/// Constants of Adam, rounded to fp32: `AdamConstants` of cuda/prelude.cuh.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct AdamConstants {
    pub(crate) eps: f32,
    pub(crate) weight_decay: f32,
    pub(crate) decoupled: u32,
}

/// The arguments of [`Kernels::adam`]; all slices have the same length.
#[derive(Clone, Copy, Debug)]
pub struct AdamArgs {
    /// fp32 master weights, updated.
    pub master: DeviceSlice<f32>,
    /// fp32, updated.
    pub first_moment: DeviceSlice<f32>,
    /// fp32, updated.
    pub second_moment: DeviceSlice<f32>,
    /// fp32, bf16 or fp16.
    pub grad: AnySlice,
    /// The parameter in fp32, bf16 or fp16, written; `None` if the master is the parameter.
    pub param_out: Option<AnySlice>,
    /// One element, read when the launch runs.
    pub scalars: DeviceSlice<StepScalars>,
    /// Hyperparameters; the betas are those of the scalars.
    pub hyper: AdamHyper,
}

/// The arguments of [`Kernels::adam_remainder`]: weights stored as a bf16 parameter and a 16-bit
/// remainder. All slices have the same length.
#[derive(Clone, Copy, Debug)]
pub struct RemainderArgs {
    /// The parameter, updated.
    pub param: DeviceSlice<bf16>,
    /// Its remainder, updated.
    pub remainder: DeviceSlice<i16>,
    /// fp32, updated.
    pub first_moment: DeviceSlice<f32>,
    /// fp32, updated.
    pub second_moment: DeviceSlice<f32>,
    /// fp32, bf16 or fp16.
    pub grad: AnySlice,
    /// One element, read when the launch runs.
    pub scalars: DeviceSlice<StepScalars>,
    /// Hyperparameters; the betas are those of the scalars.
    pub hyper: AdamHyper,
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
    /// The scalars of the step's Adam launches, one for each set of rates; at least one, written.
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
    /// One fused Adam step over a flat range.
    ///
    /// # Errors
    /// See [`KernelError`].
    fn adam(&self, stream: &D::Stream, args: AdamArgs) -> Result<(), KernelError>;

    /// One fused Adam step over a flat range of parameters with remainders: the same bits as
    /// [`Self::adam`] with fp32 masters.
    ///
    /// # Errors
    /// See [`KernelError`].
    fn adam_remainder(&self, stream: &D::Stream, args: RemainderArgs) -> Result<(), KernelError>;

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
