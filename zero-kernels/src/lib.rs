#![doc = include_str!("../README.md")]

mod check;
mod codec;
#[cfg(feature = "cuda")]
pub mod cuda;
mod float;
pub mod host;
mod kernels;
pub mod reference;
mod rule;
mod rules;
pub mod step;

pub use codec::{Codec, Rounding};
pub use float::Float;
pub use kernels::{AdvanceArgs, GradStats, KernelError, Kernels, Segments};
pub use rule::{
    CudaKernel, Grain, RULE_SCALARS, SettingError, Slot, StepPoint, StepScalars, UpdateArgs,
    UpdateForm, UpdateRule, Weights, WeightsForm,
};
pub use rules::adam::{AdamHyper, AdamScalars};
pub use step::RankStats;
