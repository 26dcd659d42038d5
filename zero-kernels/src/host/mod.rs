//! The operations on the host: safe functions over Rust slices, and [`HostKernels`], which puts them on streams.
//!
//! Each function runs on the calling thread and is compiled for several instruction sets (AVX-512, AVX2 with
//! FMA, the baseline), one of which is chosen at run time. [`Workers`] runs the same functions split over
//! threads. Neither the instruction set, nor the alignment, nor the split changes a bit of any result:
//!
//! - every element of adam, cast and accumulate is computed by itself, in fp32, with IEEE rounding at each
//!   step and with fused multiply-adds exactly where the source says `mul_add` (a CPU without FMA, none of
//!   the last decade, computes them in software: slowly, and with the same bits);
//! - grad_stats sums in fp64 in an order fixed by the length alone (see [`grad_stats`]).

mod accumulate;
mod adam;
mod cast;
mod grad_stats;
mod launch;
mod remainder;
mod workers;

pub use accumulate::accumulate;
pub use adam::{AdamSlices, adam};
pub use cast::cast;
pub use grad_stats::grad_stats;
pub use launch::HostKernels;
pub use remainder::{RemainderSlices, adam_remainder, join, split};
pub use workers::Workers;

/// The constants of [`grad_stats`]' order, which its kernel shares.
pub(crate) mod stats_order {
    pub(crate) use super::grad_stats::CHUNK_ELEMS;
    #[cfg(test)]
    pub(crate) use super::grad_stats::{STRIP_ELEMS, TOP_LANES};
}

use crate::check::same_len;
