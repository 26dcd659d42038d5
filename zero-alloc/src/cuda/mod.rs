//! The CUDA back end: NVIDIA GPUs through the driver API, found at run time.
//!
//! It needs no toolkit. On a machine without a driver [`CudaDevice::open`] returns
//! [`DeviceError::NoDriver`](crate::device::DeviceError::NoDriver) with the paths tried; nothing
//! panics.
//!
//! It never uses the default stream, never synchronizes implicitly (the host waits only in
//! `synchronize`, `upload` and `download`, by polling, each with a limit), and does not track the
//! users of memory.
//!
//! - [`CudaDevice`]: memory (pages or backings), streams, copies, modules.
//! - [`CudaStream`], [`CudaEvent`]: order. [`CudaStream::labelled`] names operations in errors and
//!   timelines.
//! - [`Module`], [`Function`]: kernels. [`Graph`]: a recorded sequence of operations, enqueued as
//!   one.
//! - [`PinnedMemory`]: host memory that the device accesses directly. [`bind_to_node`]: cores near
//!   the device.
//! - [`interop`]: conversion from and to a framework's raw handles.
//!
//! What this crate cannot track is `unsafe`: a launch, whose memory pools do not know, and the
//! loading of machine code, whose sizes the driver believes. Kernels with safe launches, as those
//! of zero-kernels, are in modules that are never unloaded.

mod clock;
mod device;
mod driver;
mod event;
mod graph;
mod host_wait;
pub mod interop;
mod module;
mod numa;
mod pageable;
mod pinned;
mod poll;
mod staging;
mod sticky;
mod stream;

pub use device::CudaDevice;
pub use event::CudaEvent;
pub use graph::Graph;
pub use module::{Function, Module};
pub use numa::bind_to_node;
pub use pinned::PinnedMemory;
pub use stream::CudaStream;
