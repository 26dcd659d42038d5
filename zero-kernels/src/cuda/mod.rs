//! The operations as CUDA kernels: sources, run-time compilation, and launches.
//!
//! Building needs no GPU, driver or toolkit: NVRTC is loaded at run time ([`Nvrtc::find`]); without
//! it the error [`CudaError::NoNvrtc`] lists the library names that were tried. A kernel is
//! compiled at first use for the device's architecture and cached on disk ([`KernelCache`]).
//!
//! | file | operation | host version |
//! |---|---|---|
//! | src/rules/adam/adam.cu | AdamW and Adam with fp32 masters, or on bf16 parameters with 16-bit remainders | [`adam::adam`](crate::adam::adam()), [`adam::adam_remainder`](crate::adam::adam_remainder) |
//! | src/rules/adam/adam_blocks.cu | the same, with moments in blocks of 8 or 4 bits | decoding, the above, encoding |
//! | cuda/encode_blocks.cu | encoding with error feedback and sums of errors | [`host::encode_blocks`](crate::host::encode_blocks) |
//! | cuda/decode_blocks.cu | sums of arrays in blocks | [`host::decode_blocks`](crate::host::decode_blocks) |
//! | cuda/cast.cu | conversion with a scale | [`host::cast`](crate::host::cast()) |
//! | cuda/cast_rows.cu | the same for the rows of a matrix | [`reference::cast_rows`](crate::reference::cast_rows()) |
//! | cuda/normalise.cu | a matrix over its norm, before Newton-Schulz iterations by products of another library ([`MatrixProducts`]) | part of the operation |
//! | cuda/accumulate.cu | sum over micro-batches | [`host::accumulate`](crate::host::accumulate()) |
//! | cuda/grad_stats.cu | norm and non-finite count, two stages | [`host::grad_stats`](crate::host::grad_stats()) |
//! | cuda/pack.cu | parts of units to shards, one rank's behind another's | [`reference::pack`](crate::reference::pack()) |
//! | cuda/step.cu | statistics of a rank; clipping, loss scale and scalars of a step; one thread | [`step::advance_step`](crate::step::advance_step) |
//!
//! [`CudaKernels`] launches them. A [`Loader`] compiles and loads any source, including those of
//! other crates.
//!
//! The kernels do the operations of the host versions in the same order, with fused multiply-adds
//! in the same places, so results are equal bit for bit except for NaN payloads. This is checked on
//! a stand-in for a GPU that interprets PTX. The tests passed on an H200 in November 2026, before
//! update rules changed the launches, and were **not run on a GPU since**.

mod cache;
mod error;
mod every_kernel;
mod kernels;
mod launch;
mod launch_blocks;
mod loader;
mod newton_schulz;
mod nvrtc;
mod source;
mod span;
mod target;

pub use cache::{Compile, KernelCache, user_folder};
pub use error::CudaError;
#[doc(hidden)]
pub use every_kernel::kernel_signatures;
pub use kernels::CudaKernels;
pub use loader::{Functions, Loader};
pub use newton_schulz::{MatrixProduct, MatrixProducts, orthogonalise_scratch_elems};
pub use nvrtc::{Compiled, Nvrtc};
pub use source::KernelSource;
pub use span::{Span, THREADS};
pub use target::{Arch, Target};
