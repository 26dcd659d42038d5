//! Replay of allocation traces through zero-alloc's planner, beside the crate offset-allocator.

pub mod planner;
pub mod synth;
pub mod trace;

pub use planner::{Outcome, Timing};
pub use trace::{Op, Trace};
