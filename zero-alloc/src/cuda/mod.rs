//! The CUDA back end: NVIDIA GPUs through the driver API, found at run time.
//!
//! It is compiled in every build and needs no toolkit. On a machine without a driver [`CudaDevice::open`] returns
//! [`DeviceError::NoDriver`](crate::device::DeviceError::NoDriver) with what was tried; nothing panics.
//!
//! What it does not do, on purpose: it never uses the default stream, never synchronises on its own (the host waits in
//! `synchronize`, `upload` and `download` only, polling, each with a limit), and does not track who uses which memory.
//!
//! - [`CudaDevice`]: memory (pages under addresses of their own, or backings), streams, copies, modules.
//! - [`CudaStream`], [`CudaEvent`]: order. [`CudaStream::labelled`] names operations in errors and timelines.
//! - [`Module`], [`Function`]: kernels. [`Graph`]: a recorded sequence of operations, enqueued as one.
//! - [`PinnedMemory`]: host memory that the device copies from and to by itself.
//! - [`interop`]: raw handles of a framework, both ways.

mod clock;
mod device;
mod driver;
mod event;
mod graph;
pub mod interop;
mod module;
mod pinned;
mod poll;
mod staging;
mod sticky;
mod stream;

pub use device::CudaDevice;
pub use event::CudaEvent;
pub use graph::Graph;
pub use module::{Function, Module};
pub use pinned::PinnedMemory;
pub use stream::CudaStream;
