//! Replay of allocation traces through zero-alloc's planner, beside the crate offset-allocator, and through its pool.

pub mod planner;
pub mod pool;
pub mod programs;
pub mod synth;
pub mod trace;
mod writer;

pub use planner::{Outcome, Timing};
pub use trace::{Op, Trace};
