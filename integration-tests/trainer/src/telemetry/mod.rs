//! What a run measures of itself: time by part, memory, bytes sent.

pub(crate) mod breakdown;
pub(crate) mod memory_trace;
pub(crate) mod metrics;
pub(crate) mod observer;
pub(crate) mod phase;
pub(crate) mod phased;
