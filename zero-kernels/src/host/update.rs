//! The arguments of an update as Rust slices.

use half::{bf16, f16};
use zero_alloc::device::{AnySlice, DType};
use zero_shard::BlockFormat;

use crate::codec::{join, split};
use crate::error::KernelError;
use crate::float::Float;
use crate::step::StepScalars;

/// The arguments of an update on the host; all slices have the same length.
#[derive(Debug)]
pub struct UpdateSlices<'a, S = &'a mut [f32]> {
    /// The weights.
    pub weights: WeightSlices<'a>,
    /// The rule's slots, in their order, updated.
    pub slots: Vec<S>,
    /// The gradient, still scaled.
    pub grad: FloatSlice<'a>,
    /// The scalars of the step.
    pub scalars: StepScalars,
    /// The weight decay of these elements.
    pub weight_decay: f64,
}

/// A slot in blocks.
#[derive(Debug)]
pub struct BlockSlot<'a> {
    /// The format.
    pub format: BlockFormat,
    /// Whole blocks, updated.
    pub blocks: &'a mut [u8],
}

/// The weights of [`UpdateSlices`].
#[derive(Debug)]
pub enum WeightSlices<'a> {
    /// fp32 masters.
    Fp32 {
        /// Updated.
        master: &'a mut [f32],
        /// The parameter, written; `None` if the master is the parameter.
        param_out: Option<FloatSliceMut<'a>>,
    },
    /// bf16 parameters and remainders.
    Remainder {
        /// Updated.
        param: &'a mut [bf16],
        /// Updated.
        remainder: &'a mut [i16],
    },
}

/// Values of one of three dtypes.
#[derive(Clone, Copy, Debug)]
pub enum FloatSlice<'a> {
    /// fp32.
    F32(&'a [f32]),
    /// bf16.
    Bf16(&'a [bf16]),
    /// fp16.
    F16(&'a [f16]),
}

/// Values of one of three dtypes, written.
#[derive(Debug)]
pub enum FloatSliceMut<'a> {
    /// fp32.
    F32(&'a mut [f32]),
    /// bf16.
    Bf16(&'a mut [bf16]),
    /// fp16.
    F16(&'a mut [f16]),
}

/// Runs `$body` with `$x` as the typed slice of a [`FloatSlice`] or [`FloatSliceMut`].
macro_rules! with_floats {
    ($enum:ident, $slice:expr, $x:ident => $body:expr) => {
        match $slice {
            $enum::F32($x) => $body,
            $enum::Bf16($x) => $body,
            $enum::F16($x) => $body,
        }
    };
}
pub(crate) use with_floats;

impl FloatSlice<'_> {
    /// # Safety
    /// As for [`DeviceSlice::as_host`](zero_alloc::device::DeviceSlice::as_host).
    pub(crate) unsafe fn of(slice: AnySlice) -> Result<Self, KernelError> {
        Ok(match slice.dtype() {
            // SAFETY: the caller's promise.
            DType::F32 => Self::F32(unsafe { slice.typed()?.as_host() }),
            // SAFETY: the caller's promise.
            DType::Bf16 => Self::Bf16(unsafe { slice.typed()?.as_host() }),
            // SAFETY: the caller's promise.
            DType::F16 => Self::F16(unsafe { slice.typed()?.as_host() }),
            dtype => return Err(unsupported("update: grad", dtype)),
        })
    }
}

impl FloatSliceMut<'_> {
    /// # Safety
    /// As for [`DeviceSlice::as_host_mut`](zero_alloc::device::DeviceSlice::as_host_mut).
    pub(crate) unsafe fn of(slice: AnySlice) -> Result<Self, KernelError> {
        Ok(match slice.dtype() {
            // SAFETY: the caller's promise.
            DType::F32 => Self::F32(unsafe { slice.typed()?.as_host_mut() }),
            // SAFETY: the caller's promise.
            DType::Bf16 => Self::Bf16(unsafe { slice.typed()?.as_host_mut() }),
            // SAFETY: the caller's promise.
            DType::F16 => Self::F16(unsafe { slice.typed()?.as_host_mut() }),
            dtype => return Err(unsupported("update: param_out", dtype)),
        })
    }
}

fn unsupported(what: &'static str, dtype: DType) -> KernelError {
    KernelError::Unsupported { what, dtype }
}

/// For rules that need no vectorised loop: element by element, in any of the dtypes.
impl UpdateSlices<'_> {
    /// Element `i` of the gradient, unscaled and clipped.
    ///
    /// # Panics
    /// There is no such element.
    pub fn grad(&self, i: usize) -> f32 {
        with_floats!(FloatSlice, self.grad, grad => grad[i].to_f32() * self.scalars.grad_scale)
    }

    /// Weight `i` in fp32.
    ///
    /// # Panics
    /// There is no such element.
    pub fn weight(&self, i: usize) -> f32 {
        match &self.weights {
            WeightSlices::Fp32 { master, .. } => master[i],
            WeightSlices::Remainder { param, remainder } => join(param[i], remainder[i]),
        }
    }

    /// Sets weight `i`, and the parameter with it.
    ///
    /// # Panics
    /// There is no such element.
    pub fn set_weight(&mut self, i: usize, weight: f32) {
        match &mut self.weights {
            WeightSlices::Fp32 { master, param_out } => {
                master[i] = weight;
                if let Some(param) = param_out {
                    with_floats!(FloatSliceMut, param, param => param[i] = Float::from_f32(weight));
                }
            }
            WeightSlices::Remainder { param, remainder } => {
                (param[i], remainder[i]) = split(weight);
            }
        }
    }
}
