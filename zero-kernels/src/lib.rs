#![doc = include_str!("../README.md")]

mod float;
pub mod host;
mod kernels;
pub mod reference;

pub use float::Float;
pub use kernels::{AdamArgs, AdamHyper, GradStats, KernelError, Kernels, StepScalars};
