//! The operations as CUDA kernels: sources, their compilation at run time, and how ranges are cut into launches.
//!
//! Nothing here needs a GPU, a driver or a toolkit to build: NVRTC is looked for at run time ([`Nvrtc::find`]), and a
//! machine without it gets [`CudaError::NoNvrtc`], which names what was tried. A kernel is compiled at first use for
//! the device's own architecture (a device newer than NVRTC gets PTX for the newest that NVRTC knows: [`Target`]) and
//! kept on disk ([`KernelCache`]), keyed by source, target, options and the version of NVRTC.
//!
//! | file of `cuda/` | operation | host twin |
//! |---|---|---|
//! | adam.cu | AdamW and Adam with fp32 masters | [`host::adam`](crate::host::adam()) |
//! | adam_remainder.cu | the same on bf16 parameters with 16-bit remainders | [`host::adam_remainder`](crate::host::adam_remainder) |
//! | cast.cu | conversion with a scale | [`host::cast`](crate::host::cast()) |
//! | accumulate.cu | sum over micro-batches | [`host::accumulate`](crate::host::accumulate()) |
//! | grad_stats.cu | norm and non-finite count, two stages | [`host::grad_stats`](crate::host::grad_stats()) |
//! | step.cu | the decision of a step, one thread | [`step::decide_step`](crate::step::decide_step) |
//!
//! [`CudaKernels`] launches them. What an operation becomes is planned as data ([`plan`]), so that dispatch, geometry
//! and parameters are tested without a GPU; a [`Loader`] turns sources into kernels, also those of other crates.
//!
//! The kernels do the host twins' operations in the same order, with fused multiply-adds in the same places, so the
//! bits are the same but for the payloads of NaNs: seen on the stand-in of a GPU, which interprets PTX, and **not on a
//! GPU yet**.

mod cache;
mod entry;
mod error;
mod geometry;
mod launch;
mod loader;
mod nvrtc;
pub mod plan;
mod source;
mod target;

pub use cache::{Cached, Compile, KernelCache, Outcome};
pub use error::CudaError;
pub use geometry::{Span, StatsPlan, THREADS};
pub use launch::CudaKernels;
pub use loader::{Functions, Loader};
pub use nvrtc::{Compiled, Nvrtc};
pub use source::{SOURCES, Source};
pub use target::{Arch, Target};
