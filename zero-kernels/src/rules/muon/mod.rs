//! Muon: momentum whose update is orthogonalised, for the matrices of a model.
//!
//! With `g` the gradient times `grad_scale`, all in fp32 and in this order:
//!
//! ```text
//! m = lerp(m, g, 1 - momentum)
//! u = lerp(g, m, momentum)  with Nesterov's momentum, else m
//! o = factor(shape) * NewtonSchulz(u), of each matrix
//! w = w * (1 - lr * weight_decay)
//! w = fma(-lr, o, w)
//! ```
//!
//! `lerp(a, b, t)` is PyTorch's: `fma(t, b - a, a)` for t below 1/2, else `fma(t - 1, b - a, b)`. This is
//! the order of `torch.optim.Muon`, which computes `o` in bf16. [`Muon`] is the rule of the first two
//! lines, its [`MatrixRule`] has the others. Source: Jordan et al., Muon: an optimizer for hidden
//! layers in neural networks, 2024.

mod host;

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use zero_alloc::device::DType;

use crate::codec::{AverageCodecs, Codec};
use crate::error::KernelError;
use crate::host::update::{FloatSlice, UpdateSlices, WeightSlices, with_floats};
use crate::rule::{
    CudaKernel, MatrixRule, MatrixScale, NewtonSchulz, SettingError, Slot, StepPoint, UpdateForm,
    UpdateRule, WeightsForm, entries, float_index,
};
use crate::step::{RULE_SCALARS, StepScalars};

/// Hyperparameters of Muon.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Muon {
    /// Decay of the momentum.
    pub momentum: f64,
    /// Whether the update is that of the next step's momentum (Nesterov).
    pub nesterov: bool,
    /// Weight decay.
    pub weight_decay: f64,
    /// Newton-Schulz iterations.
    pub ns_steps: u32,
    /// The factor of a matrix's update.
    pub adjust: MatrixScale,
}

impl Default for Muon {
    /// PyTorch's.
    fn default() -> Self {
        Self {
            momentum: 0.95,
            nesterov: true,
            weight_decay: 0.1,
            ns_steps: 5,
            adjust: MatrixScale::Original,
        }
    }
}

/// Muon's part of [`StepScalars::of_rule`]: the learning rate, 1 - momentum and momentum.
fn of_rule(scalars: &StepScalars) -> [f32; 3] {
    let [lr, one_minus_momentum, momentum, ..] = scalars.of_rule;
    [lr, one_minus_momentum, momentum]
}

impl UpdateRule for Muon {
    fn name(&self) -> &'static str {
        "muon"
    }

    fn label(&self, _form: &UpdateForm) -> &'static str {
        "muon_direction"
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        // Without `..`: a new field does not compile until somebody adds it.
        let Self {
            momentum,
            nesterov,
            weight_decay,
            ns_steps,
            adjust,
        } = self;
        vec![
            ("momentum", momentum.to_string()),
            ("nesterov", nesterov.to_string()),
            ("weight_decay", weight_decay.to_string()),
            ("ns_steps", ns_steps.to_string()),
            ("adjust", adjust.name().to_owned()),
        ]
    }

    fn check(&self) -> Result<(), SettingError> {
        let momentum = self.momentum;
        let holds = (0.0..1.0).contains(&momentum);
        SettingError::unless(holds, "momentum", momentum, "at least 0, below 1")?;
        check_decay(self.weight_decay)?;
        let holds = (1..100).contains(&self.ns_steps);
        SettingError::unless(holds, "ns_steps", self.ns_steps.into(), "from 1 to 99")
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn slots(&self, averages: AverageCodecs) -> Vec<Slot> {
        vec![Slot {
            name: "momentum",
            codec: averages.signed,
        }]
    }

    fn matrix_rule(&self) -> Option<MatrixRule> {
        Some(MatrixRule {
            apply: Arc::new(Apply {
                weight_decay: self.weight_decay,
            }),
            newton_schulz: NewtonSchulz {
                steps: self.ns_steps,
                ..NewtonSchulz::default()
            },
            adjust: self.adjust,
        })
    }

    fn scalars(&self, at: &StepPoint) -> [f32; RULE_SCALARS] {
        let mut scalars = [0.0; RULE_SCALARS];
        let own = [at.lr, 1.0 - self.momentum, self.momentum];
        for (scalar, own) in scalars.iter_mut().zip(own) {
            *scalar = own as f32;
        }
        scalars
    }

    fn update(&self, slices: UpdateSlices<'_>) -> Result<(), KernelError> {
        let UpdateSlices {
            weights,
            slots,
            grad,
            scalars,
            ..
        } = slices;
        let WeightSlices::Fp32 {
            master: direction,
            param_out: None,
        } = weights
        else {
            return Err(KernelError::Refused {
                what: "muon",
                reason: "a direction is written in fp32: pass `Weights::Fp32` without `param_out`",
            });
        };
        let [momentum] = exactly(slots)?;
        with_floats!(FloatSlice, grad, grad => {
            host::direction(direction, momentum, grad, &scalars, self.nesterov)
        })
    }

    fn cuda_kernel(&self, form: &UpdateForm, _weight_decay: f64) -> Option<CudaKernel> {
        if form.weights != (WeightsForm::Fp32 { param_out: None }) {
            return None;
        }
        let momentum = form.slots.first()?;
        let (source, names) = match momentum {
            Codec::Fp32 => ("muon.cu", entries!("muon")),
            codec if *codec == AverageCodecs::EIGHT_BITS.signed => ("muon8.cu", entries!("muon8")),
            codec if *codec == AverageCodecs::FOUR_BITS.signed => ("muon4.cu", entries!("muon4")),
            _ => return None,
        };
        let mut constants = vec![self.nesterov.into()];
        if let Codec::Blocks(format) = momentum {
            constants.extend(format.table().iter().map(|value| value.to_bits()));
        }
        Some(CudaKernel {
            form: form.clone(),
            source,
            entry: names[float_index(form.grad)?],
            constants,
        })
    }
}

fn check_decay(weight_decay: f64) -> Result<(), SettingError> {
    let holds = weight_decay.is_finite() && weight_decay >= 0.0;
    SettingError::unless(
        holds,
        "weight_decay",
        weight_decay,
        "a finite number, 0 or above",
    )
}

/// The slots, if there are `N`.
fn exactly<const N: usize>(slots: Vec<&mut [f32]>) -> Result<[&mut [f32]; N], KernelError> {
    slots
        .try_into()
        .map_err(|slots: Vec<_>| KernelError::LengthMismatch {
            what: "muon: slots".into(),
            expected: N,
            got: slots.len(),
        })
}

/// The last phase: decays the weights, and subtracts the orthogonalised update.
#[derive(Clone, Copy, Debug)]
struct Apply {
    weight_decay: f64,
}

impl UpdateRule for Apply {
    fn name(&self) -> &'static str {
        "muon_apply"
    }

    fn label(&self, form: &UpdateForm) -> &'static str {
        match form.weights {
            WeightsForm::Fp32 { .. } => "muon_apply",
            WeightsForm::Remainder => "muon_apply_remainder",
        }
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        vec![("weight_decay", self.weight_decay.to_string())]
    }

    fn check(&self) -> Result<(), SettingError> {
        check_decay(self.weight_decay)
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn slots(&self, _averages: AverageCodecs) -> Vec<Slot> {
        Vec::new()
    }

    /// Those of [`Muon`] at the same step but its momentum, which this phase does not read.
    fn scalars(&self, at: &StepPoint) -> [f32; RULE_SCALARS] {
        let mut scalars = [0.0; RULE_SCALARS];
        scalars[0] = at.lr as f32;
        scalars
    }

    fn update(&self, slices: UpdateSlices<'_>) -> Result<(), KernelError> {
        let UpdateSlices {
            weights,
            slots,
            grad,
            scalars,
            weight_decay,
        } = slices;
        let [] = exactly(slots)?;
        let FloatSlice::F32(update) = grad else {
            return Err(KernelError::Refused {
                what: "muon_apply",
                reason: "the orthogonalised update is in fp32: pass it so, in place of a gradient",
            });
        };
        host::apply(weights, update, &scalars, weight_decay as f32)
    }

    fn cuda_kernel(&self, form: &UpdateForm, weight_decay: f64) -> Option<CudaKernel> {
        let entry = match form.weights {
            _ if form.grad != DType::F32 => return None,
            WeightsForm::Remainder => "muon_apply_remainder",
            WeightsForm::Fp32 { param_out: None } => "muon_apply",
            WeightsForm::Fp32 {
                param_out: Some(param),
            } => entries!("muon_apply")[float_index(param)?],
        };
        Some(CudaKernel {
            form: form.clone(),
            source: "muon.cu",
            entry,
            constants: vec![(weight_decay as f32).to_bits()],
        })
    }
}
