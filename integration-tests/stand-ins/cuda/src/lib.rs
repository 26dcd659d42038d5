//! A stand-in for `libcuda.so.1` on machines without a GPU, so that tests there run all CUDA code
//! of this workspace: memory, streams, events, graphs, launches and, through PTX, the kernels.
//!
//! Device memory is host memory at the same address; a registry of live ranges decides which
//! accesses are legal. A stream is a thread with a queue, so only events order two streams. A
//! kernel is PTX, decoded at load and interpreted warp by warp. New memory is filled with one bits
//! (NaN in every float format), the default stream is rejected (unless a test calls
//! `standInAcceptDefaultStreams`), and an access outside live memory
//! fails the context permanently, as on a GPU.
//!
//! | variable | meaning |
//! |---|---|
//! | `ZERO_STANDIN_MEMORY_BYTES` | memory of a device; default 8 GiB |
//! | `ZERO_STANDIN_DEVICES` | number of devices; default 1 |
//! | `ZERO_STANDIN_DELAY_SEED` | seed of random delays before operations, and of a random legal order of a graph's nodes |
//! | `ZERO_STANDIN_RACES` | 1: a race of two warps in shared memory fails the launch |
//! | `ZERO_STANDIN_TRACE` | 1: print the name and code of every call to stderr |
//! | `ZERO_STANDIN_SHARING` | 0: allocations cannot be shared with other processes. By default they can, by file descriptor but not by fabric handle |
//! | `ZERO_STANDIN_ONE_HOST_THREAD` | 1: one thread runs the host functions of all streams, in the order in which streams reach them, as the driver does under WSL2. By default each stream has its own |
//! | `ZERO_STANDIN_MEMORY_WAITS` | 0: streams cannot wait for values in memory |
//! | `ZERO_STANDIN_PINNED_BYTES` | host memory that may be registered at once; default unlimited |
//! | `ZERO_STANDIN_LAUNCH_SECONDS` | time limit of one kernel; default 300 |
//! | `ZERO_STANDIN_COUNTS` | a file: at the end of the process, the calls and bytes of all work are written there as CSV |
//! | `ZERO_STANDIN_DRY` | 1: the dry mode, below |
//!
//! In the dry mode the device is as large as an H200 (132 multiprocessors, 140 GiB) and its memory
//! is reserved addresses that read as zero until they are written. Of a large kernel four blocks
//! run at its first launch, and the work of the others is estimated; large copies, fills, products
//! and collectives do not run. So a run of any size takes seconds, its numbers are meaningless, and
//! its counts are those of a real run.
//!
//! Limits: a block's memory accesses are sequentially consistent, unlike a GPU's; races are found
//! only in shared memory and only between warps; times are meaningless.

mod api;
mod counts;
mod driver;
mod error;
mod exec;
mod ops;
mod ptx;
mod settings;

pub use api::*;
