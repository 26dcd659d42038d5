//! Collectives on explicit streams, gradient buckets and unit prefetch.

mod communicator;

pub use communicator::{Collective, CommError, Communicator, ReduceOp, Traffic};
