//! Stands in for `libcuda.so.1` on machines without a GPU, so that all CUDA code of this workspace runs under test
//! there: memory, streams, events, graphs, launches and, through PTX, the kernels' own arithmetic.
//!
//! Device memory is host memory at the same address; a registry of what is live says which accesses are legal. A
//! stream is a thread with a queue, so two streams are ordered by nothing but events. A kernel is PTX, decoded at
//! load and interpreted warp by warp. Memory is not zeroed but filled with ones (NaN in every float format), the
//! default stream is refused, and an access outside live memory fails the context permanently, as on a GPU.
//!
//! | variable | meaning |
//! |---|---|
//! | `ZERO_STANDIN_MEMORY_BYTES` | memory of a device, 8 GiB unless set |
//! | `ZERO_STANDIN_DEVICES` | devices, 1 unless set |
//! | `ZERO_STANDIN_DELAY_SEED` | random waits before operations, and another legal order of a graph's nodes, from this seed |
//! | `ZERO_STANDIN_RACES` | 1: a race of two warps in shared memory is a failure of the launch |
//! | `ZERO_STANDIN_TRACE` | 1: every call says its name and code on stderr |
//! | `ZERO_STANDIN_SHARING` | 0: no memory that other processes may open; unless set there is, by file descriptors and not over NVLink |
//! | `ZERO_STANDIN_LAUNCH_SECONDS` | limit of one kernel, 300 unless set |
//!
//! Limits: it knows one thread's order of memory accesses within a block, not a GPU's weak memory model;
//! it finds races in shared memory between warps only; and its times mean nothing.

mod api;
mod driver;
mod error;
mod exec;
mod ops;
mod ptx;
mod settings;

pub use api::*;
