#![doc = include_str!("../README.md")]

mod check;
pub mod cuda;
mod float;
pub mod host;
mod kernels;
pub mod reference;
pub mod step;

pub use float::Float;
pub use kernels::{
    AdamArgs, AdamConstants, AdamHyper, DecideArgs, GradStats, KernelError, Kernels, RemainderArgs, StepScalars,
};
pub use step::RankStats;
