//! The contract of an optimizer's update rule.
//!
//! A rule declares which arrays of state it keeps beside the weights ([`Slot`]) and the scalars of
//! a step ([`UpdateRule::scalars`]), and computes an update of a flat range: on the host a function
//! over Rust slices ([`UpdateRule::update`]), on CUDA a kernel of this crate
//! ([`UpdateRule::cuda_kernel`]). All else is common to all rules: gradient sums, the decision of a
//! step, clipping, loss scale, masters, places of state, checkpoints.
//!
//! To add one, write a folder like `rules/adam`: the rule, its kernel, and a line each in
//! `rules/mod.rs` and `cuda/source.rs`. A kernel's parameters are, in this order: the master
//! weights, or the parameter and its remainder; the slots; the gradient; the parameter to write, if
//! the master is another array; `const StepScalars *`; a struct with the words of
//! [`CudaKernel`]'s constants; `Span`, of all these arrays, or where slots are in blocks of the
//! others.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use serde::{Deserialize, Serialize};
use zero_alloc::device::{AnySlice, DType, DeviceSlice};

use crate::codec::{AverageCodecs, Codec, CodedSlice, Rounding};
use crate::error::KernelError;
use crate::host::update::{BlockSlot, FloatSlice, FloatSliceMut, UpdateSlices, WeightSlices};
use crate::step::{RULE_SCALARS, StepScalars};

/// An array of state that a rule keeps, with an element for each weight. It starts at 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The name in checkpoints, such as `first_moment`.
    pub name: &'static str,
    /// The format in which it is kept.
    pub codec: Codec,
}

/// A rule over whole matrices, in three phases: the rule itself, element by element, which writes a
/// direction in place of weights; [`NewtonSchulz`] of each matrix of it; and [`Self::apply`],
/// element by element. So shards stay flat and equal, and only the second phase exchanges.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MatrixRule {
    /// Updates weights without slots. Its gradient is what the second phase made of the direction,
    /// in fp32 and not scaled by `grad_scale`. It reads the same scalars as the rule.
    pub apply: Arc<dyn UpdateRule>,
    /// The second phase.
    pub newton_schulz: NewtonSchulz,
    /// The factor of its result.
    pub adjust: MatrixScale,
}

/// An iteration that moves all singular values of a matrix towards 1:
///
/// ```text
/// X = M / max(norm(M), eps), transposed if it has more rows than columns
/// A = X X^T;  X = a X + (b A + c A A) X         `steps` times
/// ```
///
/// Source: Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NewtonSchulz {
    /// Iterations.
    pub steps: u32,
    /// a, b and c.
    pub coefficients: [f64; 3],
    /// The least norm to divide by.
    pub eps: f64,
}

impl Default for NewtonSchulz {
    /// PyTorch's.
    fn default() -> Self {
        Self {
            steps: 5,
            coefficients: [3.4445, -4.7750, 2.0315],
            eps: 1e-7,
        }
    }
}

/// The factor by which the update of a matrix depends on its shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MatrixScale {
    /// sqrt(max(1, outputs / inputs)).
    Original,
    /// 0.2 sqrt(max(outputs, inputs)): updates as large as AdamW's (Liu et al., Muon is Scalable for
    /// LLM Training, arXiv 2502.16982).
    MatchRmsAdamw,
}

impl MatrixScale {
    /// Its name in settings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Original => "original",
            Self::MatchRmsAdamw => "match_rms_adamw",
        }
    }

    /// The factor for a matrix that maps `inputs` values to `outputs`.
    pub fn factor(self, outputs: usize, inputs: usize) -> f64 {
        let outputs = outputs as f64;
        let inputs = inputs as f64;
        match self {
            Self::Original => (outputs / inputs).max(1.0).sqrt(),
            Self::MatchRmsAdamw => 0.2 * outputs.max(inputs).sqrt(),
        }
    }
}

/// A step of a rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepPoint {
    /// The number of the update, counted from 1. Skipped steps do not count.
    pub t: u64,
    /// The learning rate.
    pub lr: f64,
    /// The decay rates of a schedule that cycles them, or of a parameter group; `None`: the rule's
    /// own.
    pub betas: Option<[f64; 2]>,
}

/// A setting of a rule that is outside its range.
#[derive(Clone, Debug, PartialEq)]
pub struct SettingError {
    /// The setting.
    pub setting: &'static str,
    /// Its value.
    pub value: f64,
    /// The range.
    pub range: &'static str,
}

impl SettingError {
    /// Returns an error unless `holds`.
    ///
    /// # Errors
    /// `holds` is false.
    pub fn unless(
        holds: bool,
        setting: &'static str,
        value: f64,
        range: &'static str,
    ) -> Result<(), Self> {
        if holds {
            return Ok(());
        }
        Err(Self {
            setting,
            value,
            range,
        })
    }

    /// Returns an error unless the value is a finite number, 0 or above.
    ///
    /// # Errors
    /// It is not.
    pub fn from_zero(setting: &'static str, value: f64) -> Result<(), Self> {
        let holds = value.is_finite() && value >= 0.0;
        Self::unless(holds, setting, value, "a finite number, 0 or above")
    }

    /// Returns an error unless the value is a decay rate: at least 0, below 1.
    ///
    /// # Errors
    /// It is not.
    pub fn decay(setting: &'static str, value: f64) -> Result<(), Self> {
        let holds = (0.0..1.0).contains(&value);
        Self::unless(holds, setting, value, "at least 0, below 1")
    }
}

/// The slots, if there are `N`.
pub(crate) fn exactly<'a, const N: usize>(
    what: &'static str,
    slots: Vec<&'a mut [f32]>,
) -> Result<[&'a mut [f32]; N], KernelError> {
    slots
        .try_into()
        .map_err(|slots: Vec<_>| KernelError::LengthMismatch {
            what: what.into(),
            expected: N,
            got: slots.len(),
        })
}

/// An update rule with its hyperparameters.
pub trait UpdateRule: fmt::Debug + Send + Sync {
    /// Its name.
    fn name(&self) -> &'static str;

    /// The label of its operations in traces.
    fn label(&self, _form: &UpdateForm) -> &'static str {
        self.name()
    }

    /// The hyperparameters as text, which ranks compare.
    fn settings(&self) -> Vec<(&'static str, String)>;

    /// Checks the hyperparameters.
    ///
    /// # Errors
    /// The first one outside its range.
    fn check(&self) -> Result<(), SettingError>;

    /// The weight decay of elements whose group sets none.
    fn weight_decay(&self) -> f64;

    /// Its decay rates, if a schedule or a parameter group may replace them.
    fn betas(&self) -> Option<[f64; 2]> {
        None
    }

    /// The arrays of state. `averages`: the formats for running averages of gradients.
    fn slots(&self, averages: AverageCodecs) -> Vec<Slot>;

    /// The phases behind this rule, if it updates whole matrices. `None`: it is all of an update.
    fn matrix_rule(&self) -> Option<MatrixRule> {
        None
    }

    /// The scalars of a step, rounded as all back ends use them.
    fn scalars(&self, at: &StepPoint) -> [f32; RULE_SCALARS];

    /// Updates a range on this thread. The step is not a skipped one.
    ///
    /// # Errors
    /// The rule does not work on these slices.
    fn update(&self, slices: UpdateSlices<'_>) -> Result<(), KernelError>;

    /// As [`Self::update`], with slots in blocks. `None`: it has no loop for these formats, and did
    /// nothing; they are decoded for [`Self::update`].
    fn update_blocks(
        &self,
        _slices: UpdateSlices<'_, BlockSlot<'_>>,
    ) -> Option<Result<(), KernelError>> {
        None
    }

    /// The CUDA kernel for arguments of `form`; `None` if there is none.
    fn cuda_kernel(&self, _form: &UpdateForm, _weight_decay: f64) -> Option<CudaKernel> {
        None
    }
}

/// Weights that an update reads and writes.
#[derive(Clone, Copy, Debug)]
pub enum Weights {
    /// fp32 masters.
    Fp32 {
        /// Updated.
        master: DeviceSlice<f32>,
        /// The parameter in fp32, bf16 or fp16, written; `None` if the master is the parameter.
        param_out: Option<AnySlice>,
    },
    /// A bf16 parameter and a 16-bit remainder ([`Codec::Remainders`]).
    Remainder {
        /// Updated.
        param: DeviceSlice<bf16>,
        /// Updated.
        remainder: DeviceSlice<i16>,
    },
}

/// The arguments of [`Kernels::update`](crate::Kernels::update); all slices but the scalars have
/// the same length.
#[derive(Clone, Debug)]
pub struct UpdateArgs {
    /// The weights.
    pub weights: Weights,
    /// The rule's slots, in their order, updated. Where one is in blocks, the arguments start with
    /// one.
    pub slots: Vec<CodedSlice>,
    /// fp32, bf16 or fp16.
    pub grad: AnySlice,
    /// One element, read when the launch runs.
    pub scalars: DeviceSlice<StepScalars>,
    /// The weight decay of these elements, in place of the rule's.
    pub weight_decay: f64,
    /// The rounding of slots in bf16.
    pub rounding: Rounding,
}

/// The dtypes of an update's arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UpdateForm {
    /// The weights.
    pub weights: WeightsForm,
    /// The formats of the slots.
    pub slots: Vec<Codec>,
    /// The gradient.
    pub grad: DType,
}

/// The dtypes of [`Weights`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WeightsForm {
    /// fp32 masters.
    Fp32 {
        /// The dtype of the parameter that is written beside them.
        param_out: Option<DType>,
    },
    /// bf16 parameters and remainders.
    Remainder,
}

impl UpdateArgs {
    /// The elements to update.
    pub fn elems(&self) -> usize {
        match self.weights {
            Weights::Fp32 { master, .. } => master.len(),
            Weights::Remainder { param, .. } => param.len(),
        }
    }

    /// Bytes that the update reads and writes, its scalars left out.
    pub fn bytes(&self) -> usize {
        let elem = match self.weights {
            Weights::Fp32 { .. } => size_of::<f32>(),
            Weights::Remainder { .. } => size_of::<bf16>() + size_of::<i16>(),
        };
        let slots: usize = self.slots.iter().map(|slot| slot.memory.len_bytes()).sum();
        let written = match self.weights {
            Weights::Fp32 { param_out, .. } => param_out.map_or(0, AnySlice::len_bytes),
            Weights::Remainder { .. } => 0,
        };
        2 * (elem * self.elems() + slots) + self.grad.len_bytes() + written
    }

    /// Its dtypes.
    pub fn form(&self) -> UpdateForm {
        UpdateForm {
            weights: match self.weights {
                Weights::Fp32 { param_out, .. } => WeightsForm::Fp32 {
                    param_out: param_out.map(AnySlice::dtype),
                },
                Weights::Remainder { .. } => WeightsForm::Remainder,
            },
            slots: self.slots.iter().map(|slot| slot.codec).collect(),
            grad: self.grad.dtype(),
        }
    }

    /// The arguments of a part of the elements.
    pub(crate) fn slice(&self, range: Range<usize>) -> Self {
        let part = |slice: AnySlice| slice.slice(range.clone());
        Self {
            weights: match self.weights {
                Weights::Fp32 { master, param_out } => Weights::Fp32 {
                    master: master.slice(range.clone()),
                    param_out: param_out.map(part),
                },
                Weights::Remainder { param, remainder } => Weights::Remainder {
                    param: param.slice(range.clone()),
                    remainder: remainder.slice(range.clone()),
                },
            },
            slots: self
                .slots
                .iter()
                .map(|slot| slot.slice(range.clone()))
                .collect(),
            grad: part(self.grad),
            rounding: self.rounding.starting_at(range.start),
            ..*self
        }
    }

    /// The elements `range` as Rust slices, with these `slots`.
    ///
    /// # Safety
    /// As for [`DeviceSlice::as_host_mut`] of each: host memory, disjoint, and nothing else
    /// accesses it meanwhile.
    pub(crate) unsafe fn as_host<'a, S>(
        &self,
        range: Range<usize>,
        slots: Vec<S>,
        scalars: StepScalars,
    ) -> Result<UpdateSlices<'a, S>, KernelError> {
        let part = |slice: AnySlice| slice.slice(range.clone());
        let weights = match self.weights {
            Weights::Fp32 { master, param_out } => WeightSlices::Fp32 {
                // SAFETY: the caller's promise.
                master: unsafe { master.slice(range.clone()).as_host_mut() },
                param_out: match param_out {
                    // SAFETY: the caller's promise.
                    Some(param) => Some(unsafe { FloatSliceMut::of(part(param)) }?),
                    None => None,
                },
            },
            Weights::Remainder { param, remainder } => WeightSlices::Remainder {
                // SAFETY: the caller's promise.
                param: unsafe { param.slice(range.clone()).as_host_mut() },
                // SAFETY: the caller's promise.
                remainder: unsafe { remainder.slice(range.clone()).as_host_mut() },
            },
        };
        Ok(UpdateSlices {
            weights,
            slots,
            // SAFETY: the caller's promise.
            grad: unsafe { FloatSlice::of(part(self.grad)) }?,
            scalars,
            weight_decay: self.weight_decay,
        })
    }
}

/// Names of a kernel's variants for fp32, bf16 and fp16, in the order of [`float_index`].
macro_rules! entries {
    ($prefix:expr) => {
        [
            concat!($prefix, "_f32"),
            concat!($prefix, "_bf16"),
            concat!($prefix, "_f16"),
        ]
    };
}
pub(crate) use entries;

/// The index of a dtype in `entries!`.
pub(crate) const fn float_index(dtype: DType) -> Option<usize> {
    match dtype {
        DType::F32 => Some(0),
        DType::Bf16 => Some(1),
        DType::F16 => Some(2),
        _ => None,
    }
}

/// A CUDA kernel of this crate for an update: its parameters are those of `form` and a struct of the
/// words `constants`. tests/nvrtc.rs compares them with the compiled kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct CudaKernel {
    /// The arguments that it accepts.
    pub(crate) form: UpdateForm,
    /// The file.
    pub(crate) source: &'static str,
    /// The kernel in it.
    pub(crate) entry: &'static str,
    pub(crate) constants: Vec<u32>,
}
