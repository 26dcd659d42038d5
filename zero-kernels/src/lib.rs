//! Fused AdamW, cast, norm and overflow check.

mod kernels;

pub use kernels::{AdamArgs, AdamHyper, GradStats, KernelError, Kernels, StepScalars};
