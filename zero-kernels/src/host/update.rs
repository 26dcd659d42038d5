//! The arguments of an update as Rust slices.

use half::{bf16, f16};
use zero_alloc::device::{AnySlice, DType};

use super::workers::Parts;
use crate::{Float, KernelError, StepScalars};

/// The arguments of an update on the host; all slices have the same length.
#[derive(Debug)]
pub struct UpdateSlices<'a> {
    /// The weights.
    pub weights: WeightSlices<'a>,
    /// The rule's slots, in their order, updated.
    pub slots: Vec<&'a mut [f32]>,
    /// The gradient, still scaled.
    pub grad: FloatSlice<'a>,
    /// The scalars of the step.
    pub scalars: StepScalars,
    /// The weight decay of these elements.
    pub weight_decay: f64,
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

    fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Self::F32(x) => (Self::F32(&x[..at]), Self::F32(&x[at..])),
            Self::Bf16(x) => (Self::Bf16(&x[..at]), Self::Bf16(&x[at..])),
            Self::F16(x) => (Self::F16(&x[..at]), Self::F16(&x[at..])),
        }
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

    fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Self::F32(x) => {
                let (a, b) = x.split_at_mut(at);
                (Self::F32(a), Self::F32(b))
            }
            Self::Bf16(x) => {
                let (a, b) = x.split_at_mut(at);
                (Self::Bf16(a), Self::Bf16(b))
            }
            Self::F16(x) => {
                let (a, b) = x.split_at_mut(at);
                (Self::F16(a), Self::F16(b))
            }
        }
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
            WeightSlices::Remainder { param, remainder } => super::join(param[i], remainder[i]),
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
                (param[i], remainder[i]) = super::split(weight);
            }
        }
    }
}

impl Parts for UpdateSlices<'_> {
    fn elems(&self) -> usize {
        match &self.weights {
            WeightSlices::Fp32 { master, .. } => master.len(),
            WeightSlices::Remainder { param, .. } => param.len(),
        }
    }

    fn split_at(self, at: usize) -> (Self, Self) {
        let (weights, weights_rest) = match self.weights {
            WeightSlices::Fp32 { master, param_out } => {
                let (master, master_rest) = master.split_at_mut(at);
                let (param_out, param_rest) = param_out.map(|p| p.split_at(at)).unzip();
                (
                    WeightSlices::Fp32 { master, param_out },
                    WeightSlices::Fp32 {
                        master: master_rest,
                        param_out: param_rest,
                    },
                )
            }
            WeightSlices::Remainder { param, remainder } => {
                let (param, param_rest) = param.split_at_mut(at);
                let (remainder, remainder_rest) = remainder.split_at_mut(at);
                (
                    WeightSlices::Remainder { param, remainder },
                    WeightSlices::Remainder {
                        param: param_rest,
                        remainder: remainder_rest,
                    },
                )
            }
        };

        let slots = self.slots.into_iter();
        let (slots, slots_rest) = slots.map(|slot| slot.split_at_mut(at)).unzip();
        let (grad, grad_rest) = self.grad.split_at(at);
        let part = |weights, slots, grad| Self {
            weights,
            slots,
            grad,
            scalars: self.scalars,
            weight_decay: self.weight_decay,
        };
        (
            part(weights, slots, grad),
            part(weights_rest, slots_rest, grad_rest),
        )
    }
}
