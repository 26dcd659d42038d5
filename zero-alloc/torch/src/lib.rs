//! zero-alloc's arena as an allocator of PyTorch: the functions that
//! `torch.cuda.memory.CUDAPluggableAllocator` calls, statistics, and a map of the memory.
//!
//! `include/zero_alloc_torch.h` is the contract of each function, `README.md` shows how to use
//! them. One arena for each device is made by its first allocation, and lives until the process
//! ends.
//!
//! - `c_api`: the C functions. No error and no panic crosses them: they print to stderr and return.
//! - `arena`: one device's pool, and the rules by which blocks are allocated and freed.
//! - `streams`: PyTorch's streams, with their end if they are destroyed.
//! - `fork`: children of a process that uses the arena.
//! - `graphs`: memory that recorded graphs use.
//! - `statistics`, `svg`: what the arena holds.

mod arena;
pub mod c_api;
mod error;
mod fork;
mod graphs;
mod statistics;
mod streams;
mod svg;

pub use graphs::GraphPoolId;
pub use statistics::Statistics;
