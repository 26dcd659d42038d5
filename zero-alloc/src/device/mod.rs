//! The device contract: the traits of memory, streams and events that every back end implements.
//!
//! It has no tensors and no operations on them. A back end implements [`Device`]; zero-comm and
//! zero-kernels enqueue work on its streams; a framework with its own allocator and streams makes
//! [`DeviceSlice`]s and streams from its pointers and handles.
//!
//! The traits are `unsafe` to implement, because safe code relies on a back end for the validity of
//! memory. Using them is safe.
//!
//! Three rules hold everywhere:
//! 1. **Every operation names its stream.** There is no default stream. Operations of one stream
//!    run in the order in which they were enqueued; only events order operations of different
//!    streams.
//! 2. **Errors are sticky.** The first failed operation poisons its stream: later operations are
//!    skipped, and [`Stream::synchronize`] and events recorded after it return the error.
//! 3. **Waits have limits.** Every call that makes the host wait for a stream or an event has a
//!    time limit as a parameter.

mod contract;
mod dtype;
mod error;
mod id;
mod memory;
mod reduced;
mod slice;
mod stream;
mod virtual_memory;
pub(crate) mod watch;

pub use contract::{BlockNote, Device};
pub use dtype::{DType, Element};
pub use error::{Cause, DeviceError};
pub(crate) use error::{run_named, same_len};
pub use id::{DeviceId, DeviceKind};
pub use memory::Memory;
pub use reduced::Reduced;
pub(crate) use slice::check_copy;
pub use slice::{AnySlice, DeviceSlice};
pub(crate) use stream::next_stream_id;
pub use stream::{Event, Stream};
pub use virtual_memory::{Page, VirtualMemory};
