#![doc = include_str!("../README.md")]

mod buckets;
mod call;
mod communicator;
mod error;
mod prefetch;
mod reduce;
pub mod threads;

pub use buckets::{BucketError, BucketOptions, Buckets, Done, Filling, InFlight};
pub use call::{Call, Checked, Group, Segments, balanced_range};
pub use communicator::{Collective, Communicator, ReduceOp, Traffic};
pub use error::CommError;
pub use prefetch::{OrderCheck, PrefetchError, PrefetchOptions, Prefetcher, StepReport, UnitGather, Unsharded};
