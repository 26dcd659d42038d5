//! The operations on the host: safe functions over Rust slices, and [`HostKernels`], which enqueues
//! them on streams.
//!
//! Each function runs on the calling thread and is compiled for several instruction sets (AVX-512,
//! AVX2 with FMA, the baseline), one of which is selected at run time. [`Workers`] splits
//! updates, cast, accumulate and grad_stats over threads. Results are bit-identical for every instruction
//! set, alignment and split:
//!
//! - adam, cast and accumulate compute each element separately in fp32, with IEEE rounding at each
//!   operation and fused multiply-adds exactly where the source has `mul_add` (a CPU without FMA
//!   computes them in software: slowly, with the same bits);
//! - grad_stats sums in fp64 in an order fixed by the length alone (see [`grad_stats`]).
//!
//! [`Kernels::orthogonalise`](crate::Kernels::orthogonalise) is an exception: the sums of its products
//! are in faer's order, which depends on the instruction set too.

mod accumulate;
pub(crate) mod block_codes;
mod cast;
mod coded;
mod grad_stats;
mod launch;
mod orthogonalise;
mod pack;
pub(crate) mod prefetch;
pub(crate) mod update;
pub(crate) mod workers;

pub use accumulate::accumulate;
pub use cast::cast;
pub use coded::{decode_blocks, encode_blocks};
pub use grad_stats::grad_stats;
pub use launch::HostKernels;
pub use orthogonalise::orthogonalise_scratch_elems;
pub use update::{BlockSlot, FloatSlice, FloatSliceMut, UpdateSlices, WeightSlices};
pub use workers::Workers;

/// The constants of the summation order of [`grad_stats`], shared with its kernel.
#[cfg(feature = "cuda")]
pub(crate) mod stats_order {
    pub(crate) use super::grad_stats::CHUNK_ELEMS;
    #[cfg(test)]
    pub(crate) use super::grad_stats::{STRIP_ELEMS, TOP_LANES};
}

use crate::check::same_len;
