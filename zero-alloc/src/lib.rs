#![doc = include_str!("../README.md")]

pub mod cuda;
pub mod device;
pub mod host;
pub mod library;
pub mod planner;
pub mod pool;
mod primitive;
pub mod testing;
pub mod timeline;

pub use pool::{AllocError, Block, Held, MemoryKind, Movable, Pool, Purpose, Report};
