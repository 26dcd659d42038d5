//! The contract of launches: every operation names its stream, takes slices, and returns at once.

use half::bf16;
use zero_alloc::device::{AnySlice, Device, DeviceError, DeviceSlice};

use crate::step::{RankStats, StepRates, StepReport, StepSettings, StepState, power};

/// Why a launch was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// Lengths that must agree do not.
    #[error("{what}: expected {expected} elements, got {got}")]
    LengthMismatch {
        /// The operation and argument.
        what: &'static str,
        /// Elements expected.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// The operation is not defined for these dtypes.
    #[error("{what}: not defined for {dtype}")]
    Unsupported {
        /// The operation and argument.
        what: &'static str,
        /// The dtype.
        dtype: zero_alloc::device::DType,
    },
    /// A slice does not start at a multiple of its element's size.
    #[error("{what}: address {address:#x} is not a multiple of {align_bytes} bytes")]
    Misaligned {
        /// The operation and argument.
        what: &'static str,
        /// Where the slice starts.
        address: usize,
        /// The size of an element.
        align_bytes: usize,
    },
    /// A slice that is written shares memory with another argument.
    #[error("{first} and {second} overlap")]
    Overlap {
        /// The operation and argument that is written.
        first: &'static str,
        /// The other argument.
        second: &'static str,
    },
    /// The operating system refused the threads of the host's operations.
    #[error("cannot start {threads} threads: {message}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// What was said.
        message: String,
    },
    /// A CUDA kernel could not be compiled.
    #[error(transparent)]
    Cuda(#[from] crate::cuda::CudaError),
    /// The stream refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Sum of squares and non-finite count of a gradient (as it travels: scaled and summed over ranks).
/// Eight-byte fields, so that it travels as bytes and lies on a device as on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct GradStats {
    /// Sum of squares of the finite elements, in fp64, in an order fixed by the length alone.
    pub sum_sq: f64,
    /// Elements that are infinite or NaN.
    pub nonfinite: u64,
}

/// What every AdamW launch of one step shares; it lies on the device, so that a step needs no host wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct StepScalars {
    /// Multiplies every gradient: clip / (loss_scale x ranks x micro-batches).
    pub grad_scale: f32,
    /// Learning rate, for the decay.
    pub lr: f32,
    /// lr / (1 - beta1^t), divided in fp64.
    pub step_size: f32,
    /// sqrt(1 - beta2^t).
    pub bias_correction2_sqrt: f32,
    /// 1 - beta1, in fp64 before it is rounded, as all that is made of the betas.
    pub one_minus_beta1: f32,
    /// beta2.
    pub beta2: f32,
    /// 1 - beta2.
    pub one_minus_beta2: f32,
    /// Not 0: the step is skipped, nothing is written.
    pub skip: u32,
}

impl StepScalars {
    /// The scalars of Adam's step `t`, counted from 1, at learning rate `lr`.
    pub fn new(t: u64, lr: f64, hyper: &AdamHyper, grad_scale: f64) -> Self {
        Self::with_rates(t, &StepRates { lr, beta1: hyper.beta1, beta2: hyper.beta2 }, grad_scale)
    }

    pub(crate) fn with_rates(t: u64, rates: &StepRates, grad_scale: f64) -> Self {
        let &StepRates { lr, beta1, beta2 } = rates;
        Self {
            grad_scale: grad_scale as f32,
            lr: lr as f32,
            step_size: (lr / (1.0 - power(beta1, t))) as f32,
            bias_correction2_sqrt: (1.0 - power(beta2, t)).sqrt() as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            skip: 0,
        }
    }

    /// The scalars of a step that is skipped.
    pub fn skipped() -> Self {
        Self { skip: 1, ..Self::default() }
    }
}

/// Constants of Adam. In fp64, since `1 - beta2` of an fp32 beta2 is already wrong in the fifth digit.
#[derive(Clone, Copy, Debug, PartialEq)]
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
}

impl AdamHyper {
    /// What does not move, as every back end uses it; what is made of the betas is in [`StepScalars`].
    pub fn constants(&self) -> AdamConstants {
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
pub struct AdamConstants {
    pub(crate) eps: f32,
    pub(crate) weight_decay: f32,
    /// Not 0: AdamW.
    pub(crate) decoupled: u32,
}

/// One AdamW launch: all slices have one length.
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
    /// Where the new parameter goes in its own dtype; `None` where the master is the parameter.
    pub param_out: Option<AnySlice>,
    /// The step's scalars, read when the launch runs.
    pub scalars: DeviceSlice<StepScalars>,
    /// Constants; the betas are those of the scalars.
    pub hyper: AdamHyper,
}

/// One AdamW launch on weights that are a bf16 parameter and a 16-bit remainder: all slices have one length.
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
    /// The step's scalars, read when the launch runs.
    pub scalars: DeviceSlice<StepScalars>,
    /// Constants; the betas are those of the scalars.
    pub hyper: AdamHyper,
}

/// The decision of a step, all of it in device memory (see [`crate::step`]).
#[derive(Clone, Copy, Debug)]
pub struct DecideArgs {
    /// The votes of all ranks, in rank order.
    pub votes: DeviceSlice<RankStats>,
    /// One, read.
    pub settings: DeviceSlice<StepSettings>,
    /// Those of the schedule's positions from the settings' first on; read.
    pub rates: DeviceSlice<StepRates>,
    /// One, updated.
    pub state: DeviceSlice<StepState>,
    /// One, written: what the step's Adam launches read.
    pub scalars: DeviceSlice<StepScalars>,
    /// At least one; the report of iteration `i` goes to place `i % len`.
    pub reports: DeviceSlice<StepReport>,
}

/// The operations of a ZeRO step, enqueued on streams of `D`. Arguments are checked at the call: lengths, dtypes,
/// alignment, and that nothing that is written overlaps anything else. Empty ranges are fine, and cost nothing.
///
/// No operation allocates device memory, waits, or leaves anything to the host: on a GPU all can be recorded into a
/// graph.
pub trait Kernels<D: Device>: Send + Sync {
    /// One fused Adam step over a flat range.
    ///
    /// # Errors
    /// The arguments do not fit, or the stream refused.
    fn adam(&self, stream: &D::Stream, args: AdamArgs) -> Result<(), KernelError>;

    /// One fused Adam step over a flat range of parameters with remainders: the same bits as [`Self::adam`] with fp32
    /// masters.
    ///
    /// # Errors
    /// The arguments do not fit, or the stream refused.
    fn adam_remainder(&self, stream: &D::Stream, args: RemainderArgs) -> Result<(), KernelError>;

    /// `dst[i] = src[i] * scale`, rounded to nearest even; any of fp32, bf16, fp16 to any.
    ///
    /// # Errors
    /// The arguments do not fit, or the stream refused.
    fn cast(&self, stream: &D::Stream, src: AnySlice, dst: AnySlice, scale: f32) -> Result<(), KernelError>;

    /// `acc[i] += grad[i]` in fp32.
    ///
    /// # Errors
    /// The arguments do not fit, or the stream refused.
    fn accumulate(&self, stream: &D::Stream, grad: AnySlice, acc: DeviceSlice<f32>) -> Result<(), KernelError>;

    /// Elements of the scratch that [`Self::grad_stats`] needs for gradients of up to `len` elements; 0 on the host.
    fn stats_scratch_elems(&self, len: usize) -> usize;

    /// `out[0]` becomes the statistics of `grad`: the same bits for the same values, whatever the
    /// alignment or the number of threads. `scratch` is the caller's, used until the launch has run, of at least
    /// [`Self::stats_scratch_elems`].
    ///
    /// # Errors
    /// The arguments do not fit, or the stream refused.
    fn grad_stats(
        &self,
        stream: &D::Stream,
        grad: AnySlice,
        scratch: DeviceSlice<f64>,
        out: DeviceSlice<GradStats>,
    ) -> Result<(), KernelError>;

    /// `out[0]` becomes this rank's vote, from the statistics of its units, in order, one loss and one word of flags.
    ///
    /// # Errors
    /// The arguments do not fit, or the stream refused.
    fn make_vote(
        &self,
        stream: &D::Stream,
        units: DeviceSlice<GradStats>,
        loss: DeviceSlice<f64>,
        flags: DeviceSlice<u64>,
        out: DeviceSlice<RankStats>,
    ) -> Result<(), KernelError>;

    /// The decision of a step from the votes of all ranks: [`crate::step::decide_step`], in stream order.
    ///
    /// # Errors
    /// The arguments do not fit, or the stream refused.
    fn decide_step(&self, stream: &D::Stream, args: DecideArgs) -> Result<(), KernelError>;
}
