#![doc = include_str!("../README.md")]

mod check;
#[cfg(feature = "cuda")]
pub mod cuda;
mod float;
pub mod host;
mod kernels;
pub mod reference;
pub mod step;

pub use float::Float;
pub use kernels::{
    AdamArgs, AdamHyper, AdvanceArgs, GradStats, KernelError, Kernels, RemainderArgs, Segments,
    StepScalars,
};
pub use step::RankStats;
