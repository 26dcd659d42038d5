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

mod dtype;
mod error;
mod id;
mod reduced;
mod slice;
mod virtual_memory;
pub(crate) mod watch;

use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::host::{HostEvent, HostStream};
use crate::planner::CostModel;

pub use dtype::{DType, Element};
pub use error::{Cause, DeviceError};
pub(crate) use error::{run_named, same_len};
pub use id::DeviceId;
pub use reduced::Reduced;
pub(crate) use slice::check_copy;
pub use slice::{AnySlice, DeviceSlice};
pub use virtual_memory::{Page, VirtualMemory};

/// The kind of hardware of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceKind {
    /// The host's own memory and cores: slices can be read as Rust slices.
    Host,
    /// An NVIDIA GPU.
    Cuda,
    /// No hardware: addresses are fictitious (see `zero_alloc::testing::Simulated`).
    Simulated,
}

/// The source of **backings**, the large allocations that a pool divides into blocks.
///
/// # Safety
/// `allocate` returns `bytes` bytes, aligned to `granularity_bytes`, with no other owner until they
/// are deallocated. This device's copies and its streams' operations can read and write them; host
/// code can only if they are host memory, which is initialised (to any bytes). `id` never changes,
/// and operations of devices with this id can access the bytes; it is [`DeviceId::HOST`] or
/// [`DeviceId::PINNED`] only if host code can too.
///
/// Why initialised: safe code can then have the memory as `&mut [T]` in place of `MaybeUninit`. A
/// closure that leaves elements out is sound, and `copy_from_slice` is all that it needs.
pub unsafe trait Memory: Debug + Send + Sync {
    /// The id of the memory that `allocate` returns and `virtual_memory` maps.
    fn id(&self) -> DeviceId;

    /// Allocates `bytes` bytes, aligned to [`Memory::granularity_bytes`]; contents are undefined.
    ///
    /// # Errors
    /// The device is out of memory, or the call failed.
    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError>;

    /// Frees a backing.
    ///
    /// # Safety
    /// `ptr` came from `allocate(bytes)` of this memory, is freed once, and no enqueued operation
    /// uses it any more.
    unsafe fn deallocate(&self, ptr: NonNull<u8>, bytes: usize);

    /// The alignment of every backing; a power of two, at least 64.
    fn granularity_bytes(&self) -> usize;

    /// Virtual memory, if the device has it; pools then use pages instead of backings.
    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        None
    }

    /// The cost of moving and mapping on this device.
    fn cost(&self) -> CostModel {
        CostModel::HOST
    }
}

/// A pool's notification to its device about a block.
#[derive(Debug)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum BlockNote<'a, S, E> {
    /// A block was allocated, for first use on `stream`.
    Allocated {
        /// Its first byte.
        ptr: *mut u8,
        bytes: usize,
        purpose: crate::Purpose,
        /// The stream of its first use.
        stream: &'a S,
    },
    /// A block was freed. Operations enqueued on `home` so far, and those before the events of
    /// `uses`, may still use it.
    Freed {
        /// Its first byte.
        ptr: *mut u8,
        bytes: usize,
        /// The stream it was allocated on.
        home: &'a S,
        /// The recorded uses, with the ids of their streams.
        uses: &'a [(u64, E)],
    },
}

/// A device: memory, streams, and copies to and from the host.
///
/// # Safety
/// Copies and `fill_zero` touch their slices in the order of their stream, and nothing else; they
/// refuse slices of memory that the device cannot access. `check_stream` accepts no stream whose
/// events do not order operations on the memory of this device. Slices of a device of kind
/// [`DeviceKind::Host`] can be read as Rust slices.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no device",
    note = "use zero_alloc::host::HostDevice, or zero_alloc::cuda::CudaDevice with the feature `cuda`"
)]
pub unsafe trait Device: Memory + Clone + 'static {
    /// An ordered queue of operations; a clone is a handle of the same queue.
    type Stream: Stream<Event = Self::Event>;
    /// A point in a stream.
    type Event: Event;

    /// The kind of hardware.
    fn kind(&self) -> DeviceKind;

    /// Checks that `stream` is of this device, before the operation `what`. Pools check it of every
    /// stream that they are passed: a stream that a device does not run beside its own, such as
    /// that of a [`Recorder`](crate::schedule::Recorder), orders nothing there.
    ///
    /// # Errors
    /// [`DeviceError::AnotherDevice`] or [`DeviceError::AnotherExecution`].
    fn check_stream(&self, what: &'static str, stream: &Self::Stream) -> Result<(), DeviceError>;

    /// Makes a stream; `name` appears in errors and timelines.
    ///
    /// # Errors
    /// The device has no stream left.
    fn create_stream(&self, name: &str) -> Result<Self::Stream, DeviceError>;

    /// Makes a stream whose operations start before waiting ones of other streams, if the device
    /// has priorities: that of collectives beside compute. A collective then starts when one block
    /// of compute ends, not behind all waiting ones.
    ///
    /// # Errors
    /// As [`Self::create_stream`].
    fn create_urgent_stream(&self, name: &str) -> Result<Self::Stream, DeviceError> {
        self.create_stream(name)
    }

    /// Called by a pool when a block is allocated or freed, for back ends that check the order of
    /// accesses.
    fn note_block(&self, _note: BlockNote<'_, Self::Stream, Self::Event>) {}

    /// Enqueues a copy of `src` to `dst`, both on the device and not overlapping.
    ///
    /// # Errors
    /// Lengths or dtypes differ, the slices overlap, one is of
    /// [another device](DeviceError::AnotherDevice), or the stream is closed or poisoned.
    fn copy(&self, stream: &Self::Stream, src: AnySlice, dst: AnySlice) -> Result<(), DeviceError>;

    /// Enqueues setting all bytes of `dst` to zero.
    ///
    /// # Errors
    /// `dst` is of [another device](DeviceError::AnotherDevice), or the stream is closed or
    /// poisoned.
    fn fill_zero(&self, stream: &Self::Stream, dst: AnySlice) -> Result<(), DeviceError>;

    /// Enqueues a copy of `src` from the host to `dst` and waits for it, at most `limit`.
    ///
    /// # Errors
    /// Lengths differ, the slice is of [another device](DeviceError::AnotherDevice), an earlier
    /// operation of the stream failed, or the limit passed.
    fn upload(
        &self,
        stream: &Self::Stream,
        src: &[u8],
        dst: AnySlice,
        limit: Duration,
    ) -> Result<(), DeviceError>;

    /// Enqueues a copy of `src` to the host and waits for it, at most `limit`.
    ///
    /// # Errors
    /// Lengths differ, the slice is of [another device](DeviceError::AnotherDevice), an earlier
    /// operation of the stream failed, or the limit passed.
    fn download(
        &self,
        stream: &Self::Stream,
        src: AnySlice,
        dst: &mut [u8],
        limit: Duration,
    ) -> Result<(), DeviceError>;

    /// Makes work that is enqueued on `stream` from now on wait for `event` of a stream of the
    /// host, at most `limit`. Work before the event must not wait for later work of this device.
    ///
    /// The default waits in a function of the host: a device that runs those of all streams on one
    /// thread overrides it.
    ///
    /// # Errors
    /// The stream is closed or poisoned, or runs no functions of the host; or the event is of a
    /// stream that records and does not run.
    fn wait_for_host(
        &self,
        stream: &Self::Stream,
        event: &HostEvent,
        limit: Duration,
    ) -> Result<(), DeviceError> {
        event.check_runs("wait_for_host")?;
        let event = event.clone();
        stream.enqueue_host("wait for the host", move || event.synchronize(limit))
    }

    /// Makes work that is enqueued on the stream `host` of the host from now on wait for `event` of
    /// this device, at most `limit`.
    ///
    /// # Errors
    /// The stream is closed, or records and does not run.
    fn host_waits(
        &self,
        host: &HostStream,
        event: &Self::Event,
        limit: Duration,
    ) -> Result<(), DeviceError> {
        host.check_runs("host_waits")?;
        let event = event.clone();
        host.enqueue("wait for the device", move || event.synchronize(limit))
    }
}

/// An id that no other stream of the process has.
pub(crate) fn next_stream_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// An ordered queue of operations on a device.
///
/// # Safety
/// Operations run in the order in which they were enqueued, and not before the events that the
/// stream waits for: `wait` refuses an event for which it would not wait. Ids are unique in the
/// process.
pub unsafe trait Stream: Clone + Debug + Send + Sync + 'static {
    /// A point in this kind of stream.
    type Event: Event;

    /// The name that the stream was made with.
    fn name(&self) -> &str;

    /// Identifies the queue: equal for clones of one stream, different for any two streams of a
    /// process.
    fn id(&self) -> u64;

    /// Whether the stream may be destroyed although handles of it live, as a framework's own
    /// streams may. A pool then records the end of a block's uses when the block is freed, and does
    /// not touch the stream afterwards.
    fn may_end(&self) -> bool {
        false
    }

    /// Records the point after everything enqueued so far.
    ///
    /// # Errors
    /// The driver failed.
    fn record(&self) -> Result<Self::Event, DeviceError>;

    /// Makes everything enqueued from now on wait for `event`; the host does not wait.
    ///
    /// # Errors
    /// The stream is closed or poisoned; or the event is of [another
    /// device](DeviceError::AnotherDevice), or of a stream that is [executed in another
    /// way](DeviceError::AnotherExecution).
    fn wait(&self, event: &Self::Event) -> Result<(), DeviceError>;

    /// Blocks the host until everything enqueued so far has run, at most `limit`.
    ///
    /// # Errors
    /// The first error of the stream, or [`DeviceError::TimedOut`].
    fn synchronize(&self, limit: Duration) -> Result<(), DeviceError>;

    /// Enqueues a function that runs on the host in the stream's order; `label` names it in errors
    /// and timelines. An `Err` or a panic poisons the stream. On a GPU the function must not use
    /// the device, nor wait for work that does.
    ///
    /// # Errors
    /// The stream is closed or poisoned, is recorded into a graph, or runs no functions of the
    /// host.
    fn enqueue_host(
        &self,
        label: &'static str,
        _op: impl FnOnce() -> Result<(), DeviceError> + Send + 'static,
    ) -> Result<(), DeviceError> {
        let message = format!(
            "stream {} runs no functions of the host, such as {label}",
            self.name()
        );
        Err(DeviceError::Driver {
            call: "enqueue_host",
            message,
        })
    }
}

/// A point in a stream, reached when everything before it has run. A clone is the same point.
///
/// # Safety
/// A reached event means that the operations before it touch no memory any more.
pub unsafe trait Event: Clone + Debug + Send + Sync + 'static {
    /// Whether the point is reached, without waiting.
    ///
    /// # Errors
    /// The error that stopped the stream before this point.
    fn is_done(&self) -> Result<bool, DeviceError>;

    /// Blocks the host until the point is reached, at most `limit`.
    ///
    /// # Errors
    /// The error that stopped the stream before this point, or [`DeviceError::TimedOut`].
    fn synchronize(&self, limit: Duration) -> Result<(), DeviceError>;
}
