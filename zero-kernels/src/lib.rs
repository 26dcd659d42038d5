#![doc = include_str!("../README.md")]

mod check;
mod codec;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
mod float;
pub mod host;
mod kernels;
pub mod reference;
mod rule;
pub mod rules;
pub mod step;

pub use codec::{AverageCodecs, Codec, CodedSlice, Rounding, join, split};
pub use error::{Argument, KernelError};
pub use float::Float;
pub use kernels::{
    AdvanceArgs, EncodeSums, Feedback, Kernels, MatrixRows, OrthogonaliseArgs, Segments,
};
pub use rule::{
    CudaKernel, MatrixRule, MatrixScale, NewtonSchulz, SettingError, Slot, StepPoint, UpdateArgs,
    UpdateForm, UpdateRule, Weights, WeightsForm,
};
pub use rules::adam::{AdamHyper, AdamScalars};
pub use rules::muon::Muon;
pub use rules::{adam, muon};
pub use step::{GradStats, RULE_SCALARS, RankStats, StepScalars};
