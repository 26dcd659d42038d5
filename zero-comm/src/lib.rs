#![doc = include_str!("../README.md")]

pub mod backend;
mod buckets;
mod call;
mod comm_dtype;
mod communicator;
#[cfg(feature = "testing")]
pub mod conformance;
mod encoded;
mod error;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "cuda")]
pub mod nccl;
mod nontemporal;
mod options;
pub mod overlap;
mod prefetch;
#[cfg(all(feature = "processes", target_os = "linux"))]
pub mod processes;
mod quantised;
mod reduce;
mod scheduled;
#[cfg(feature = "testing")]
pub mod slow;
mod small_messages;
mod solo;
mod split_request;
pub mod threads;
mod two_level;
mod unit_collectives;
mod wait_on_drop;
#[cfg(feature = "processes")]
#[cfg_attr(
    not(feature = "cuda"),
    allow(dead_code, reason = "NCCL uses all of it")
)]
pub mod world;

pub use buckets::{BucketError, BucketOptions, Buckets, Filling, InFlight, SumInto};
pub use communicator::{Collective, Communicator, ReduceOp, Traffic};
pub use error::CommError;
pub use options::CommOptions;
pub use prefetch::{
    CallerMemory, OrderCheck, OwnShard, PlannedStep, PrefetchError, PrefetchOptions,
    PrefetchReport, PrefetchStep, Prefetcher, ShardSource, Unsharded, plan_step,
};
pub use quantised::UnitFeedback;
pub use scheduled::{ScheduledComm, ScheduledGroups};
pub use solo::Solo;
pub use two_level::{LevelTraffic, TwoLevel};
pub use unit_collectives::{Gather, Reduce};
pub use wait_on_drop::WaitOnDrop;
#[cfg(feature = "processes")]
pub use world::RendezvousError;
pub use zero_alloc::device::Reduced;
