#![doc = include_str!("../README.md")]

#[macro_use]
mod setters;

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
pub mod host;
#[cfg(feature = "cuda")]
pub mod library;
pub mod planner;
pub mod pool;
mod primitive;
pub mod schedule;
#[cfg(target_os = "linux")]
pub mod swap;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod time_limit;
pub mod timeline;

pub use pool::{
    AllocError, AllocatedBytes, Block, BlockMap, Change, MemoryKind, Pool, Purpose, Report,
};
pub use time_limit::{TimeLimit, with_interrupt};
