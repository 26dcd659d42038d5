//! Replay of allocation traces through zero-alloc's planner and pool, and through the crate
//! offset-allocator.

pub mod planner;
pub mod pool;
pub mod synth;
pub mod trace;
mod writer;

pub use planner::{Outcome, Timing};
pub use trace::{Op, Trace};
