//! Adam and AdamW.
//!
//! With `g` the gradient times `grad_scale`, `t` the step, all in fp32 and in this order:
//!
//! ```text
//! AdamW:  w = w * (1 - lr * weight_decay)          Adam:  g = fma(weight_decay, w, g)
//! m = fma(1 - beta1, g - m, m)
//! v = fma((1 - beta2) * g, g, v * beta2)
//! w = w - (lr / (1 - beta1^t)) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//! ```
//!
//! This is PyTorch's order (`torch.optim.AdamW`, `lerp`, `addcmul`, `addcdiv`), including its fused
//! multiply-adds. Sources: Kingma & Ba, arXiv 1412.6980; Loshchilov & Hutter, arXiv 1711.05101.

mod blocks;
mod host;
mod remainder;

use serde::{Deserialize, Serialize};

use crate::codec::{AverageCodecs, Codec};
use crate::error::KernelError;
use crate::host::update::{
    BlockSlot, FloatSlice, FloatSliceMut, UpdateSlices, WeightSlices, with_floats,
};
use crate::rule::{
    CudaKernel, SettingError, Slot, StepPoint, UpdateForm, UpdateRule, WeightsForm, entries,
    exactly, float_index,
};
use crate::step::{RULE_SCALARS, StepScalars};

pub use host::{AdamSlices, adam};
pub use remainder::{RemainderSlices, adam_remainder};

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

impl Default for AdamHyper {
    /// PyTorch's AdamW, without decay.
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            decoupled: true,
            bias_correction: true,
        }
    }
}

/// The scalars of a step's launches, as Adam reads [`StepScalars`].
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct AdamScalars {
    /// Factor of every gradient.
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

const _: () = assert!(size_of::<AdamScalars>() == size_of::<StepScalars>());

impl AdamScalars {
    /// The scalars of step `t`, counted from 1, at learning rate `lr`.
    pub fn new(t: u64, lr: f64, hyper: &AdamHyper, grad_scale: f64) -> Self {
        let at = StepPoint { t, lr, betas: None };
        bytemuck::cast(StepScalars::new(grad_scale, hyper.scalars(&at)))
    }
}

impl From<AdamScalars> for StepScalars {
    fn from(scalars: AdamScalars) -> Self {
        bytemuck::cast(scalars)
    }
}

/// `AdamConstants` of adam.cu.
fn constants(hyper: &AdamHyper, weight_decay: f64) -> Vec<u32> {
    let eps = hyper.eps as f32;
    let weight_decay = weight_decay as f32;
    vec![
        eps.to_bits(),
        weight_decay.to_bits(),
        hyper.decoupled.into(),
    ]
}

impl UpdateRule for AdamHyper {
    fn name(&self) -> &'static str {
        "adam"
    }

    fn label(&self, form: &UpdateForm) -> &'static str {
        match form.weights {
            WeightsForm::Fp32 { .. } => "adam",
            WeightsForm::Remainder => "adam_remainder",
        }
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        // Without `..`: a new field does not compile until somebody adds it.
        let Self {
            beta1,
            beta2,
            eps,
            weight_decay,
            decoupled,
            bias_correction,
        } = self;
        vec![
            ("beta1", beta1.to_string()),
            ("beta2", beta2.to_string()),
            ("eps", eps.to_string()),
            ("weight_decay", weight_decay.to_string()),
            ("decoupled", decoupled.to_string()),
            ("bias_correction", bias_correction.to_string()),
        ]
    }

    fn check(&self) -> Result<(), SettingError> {
        for (name, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            SettingError::decay(name, beta)?;
        }
        SettingError::from_zero("eps", self.eps)?;
        SettingError::from_zero("weight_decay", self.weight_decay)
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn betas(&self) -> Option<[f64; 2]> {
        Some([self.beta1, self.beta2])
    }

    fn slots(&self, averages: AverageCodecs) -> Vec<Slot> {
        let slot = |name, codec| Slot { name, codec };
        vec![
            slot("first_moment", averages.signed),
            slot("second_moment", averages.positive),
        ]
    }

    fn scalars(&self, at: &StepPoint) -> [f32; RULE_SCALARS] {
        let [beta1, beta2] = at.betas.unwrap_or([self.beta1, self.beta2]);
        let correction = |beta| {
            if self.bias_correction {
                1.0 - power(beta, at.t)
            } else {
                1.0
            }
        };
        [
            at.lr as f32,
            (at.lr / correction(beta1)) as f32,
            correction(beta2).sqrt() as f32,
            (1.0 - beta1) as f32,
            beta2 as f32,
            (1.0 - beta2) as f32,
        ]
    }

    fn update(&self, slices: UpdateSlices<'_>) -> Result<(), KernelError> {
        let UpdateSlices {
            weights,
            slots,
            grad,
            scalars,
            weight_decay,
        } = slices;
        let scalars = bytemuck::cast(scalars);
        let hyper = Self {
            weight_decay,
            ..*self
        };
        let [first_moment, second_moment] = exactly("adam: slots", slots)?;

        match weights {
            WeightSlices::Remainder { param, remainder } => {
                with_floats!(FloatSlice, grad, grad => {
                    let slices = RemainderSlices {
                        param,
                        remainder,
                        first_moment,
                        second_moment,
                        grad,
                    };
                    adam_remainder(slices, &scalars, &hyper)
                })
            }
            WeightSlices::Fp32 { master, param_out } => {
                with_floats!(FloatSlice, grad, grad => {
                    let slices = AdamSlices::<_, _, _, f32> {
                        weights: master,
                        first_moment,
                        second_moment,
                        grad,
                        param_out: None,
                    };
                    match param_out {
                        None => adam(slices, &scalars, &hyper),
                        Some(param) => with_floats!(FloatSliceMut, param, param => {
                            adam(slices.with_param_out(param), &scalars, &hyper)
                        }),
                    }
                })
            }
        }
    }

    fn update_blocks(
        &self,
        slices: UpdateSlices<'_, BlockSlot<'_>>,
    ) -> Option<Result<(), KernelError>> {
        blocks::adam_blocks(self, slices)
    }

    fn cuda_kernel(&self, form: &UpdateForm, weight_decay: f64) -> Option<CudaKernel> {
        let grad = float_index(form.grad)?;
        let averages = [form.slots.first(), form.slots.get(1)];
        let bits =
            |codecs: AverageCodecs| averages == [Some(&codecs.signed), Some(&codecs.positive)];
        let kernels = match () {
            () if bits(Codec::Fp32.into()) => &KERNELS,
            () if bits(AverageCodecs::EIGHT_BITS) => &KERNELS_8,
            () if bits(AverageCodecs::FOUR_BITS) => &KERNELS_4,
            () => return None,
        };
        let entry = match form.weights {
            WeightsForm::Remainder => kernels.remainder[grad],
            WeightsForm::Fp32 { param_out: None } => kernels.master[grad],
            WeightsForm::Fp32 {
                param_out: Some(param),
            } => kernels.param[grad][float_index(param)?],
        };
        let tables = form.slots.iter().filter_map(|codec| match codec {
            Codec::Blocks(format) => Some(format.table()),
            _ => None,
        });
        let mut constants = constants(self, weight_decay);
        constants.extend(tables.flatten().map(|value| value.to_bits()));
        Some(CudaKernel {
            form: form.clone(),
            source: kernels.source,
            entry,
            constants,
        })
    }
}

/// The kernels for moments of a format: names by dtype of the gradient, and of the parameter.
struct Kernels {
    source: &'static str,
    master: [&'static str; 3],
    param: [[&'static str; 3]; 3],
    remainder: [&'static str; 3],
}

macro_rules! kernels {
    ($source:literal, $prefix:literal) => {
        Kernels {
            source: $source,
            master: entries!($prefix),
            param: [
                entries!(concat!($prefix, "_f32")),
                entries!(concat!($prefix, "_bf16")),
                entries!(concat!($prefix, "_f16")),
            ],
            remainder: entries!(concat!($prefix, "_remainder")),
        }
    };
}

const KERNELS: Kernels = kernels!("adam.cu", "adam");
const KERNELS_8: Kernels = kernels!("adam8.cu", "adam8");
const KERNELS_4: Kernels = kernels!("adam4.cu", "adam4");

/// `base` to the power of `exponent` by squaring, from the highest bit down: the same products, so
/// the same bits, on every machine (library `pow` functions differ in the last place).
fn power(base: f64, exponent: u64) -> f64 {
    let mut result = 1.0;
    for bit in (0..u64::BITS - exponent.leading_zeros()).rev() {
        result *= result;
        if exponent >> bit & 1 == 1 {
            result *= base;
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::power;

    #[test]
    #[cfg_attr(miri, ignore = "Miri's powf is inexact on purpose")]
    fn power_is_near_powf() {
        for base in [0.9, 0.999, 0.95, 0.0, 1.0] {
            for t in (0..if cfg!(miri) { 5 } else { 200 }).chain([1000, 12345, 1 << 20, u64::MAX]) {
                let (ours, theirs): (f64, f64) = (power(base, t), base.powf(t as f64));
                // Each squaring doubles the relative error so far: about t roundings.
                let bound = t as f64 * f64::EPSILON * theirs;
                assert!(
                    (ours - theirs).abs() <= bound.min(1.0) + f64::MIN_POSITIVE,
                    "{base}^{t}: {ours} and {theirs}"
                );
            }
        }
    }
}
