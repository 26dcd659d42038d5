#![doc = include_str!("../README.md")]

pub mod cuda;
mod float;
pub mod host;
mod kernels;
pub mod random;
pub mod reference;
pub mod step;

pub use float::Float;
pub use kernels::{AdamArgs, AdamHyper, GradStats, KernelError, Kernels, StepScalars};
pub use step::Vote;
