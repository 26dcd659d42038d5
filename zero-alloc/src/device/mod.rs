//! The device contract: what memory, streams and events promise, whatever the hardware.
//!
//! It has no tensors and no operations. A back end supplies a [`Device`]; zero-comm and zero-kernels put
//! work on its streams; a framework that has an allocator and streams of its own makes
//! [`DeviceSlice`]s and streams from its own pointers and handles.
//!
//! The traits are `unsafe` to implement: whoever dereferences a block, or reads it behind an event, relies on what a
//! back end promises, and safe code can get there. To use them is safe.
//!
//! Three rules hold everywhere:
//! 1. **Every operation names its stream.** There is no default stream. Operations of one stream run in
//!    the order in which they were enqueued; between streams only events order anything.
//! 2. **Errors are sticky.** The first failed operation poisons its stream: later operations are skipped,
//!    and [`Stream::synchronize`] and events recorded after it return the error.
//! 3. **Waits have limits.** Every call that blocks the host takes the longest time it may take.

mod dtype;
mod error;
mod named;
mod pages;
mod slice;
pub(crate) mod watch;

use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::planner::CostModel;

pub use dtype::{DType, Element};
pub use error::DeviceError;
pub(crate) use named::run_named;
pub use pages::{Page, VirtualMemory};
pub use slice::{AnySlice, DeviceSlice};

/// What kind of hardware a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceKind {
    /// The host's own memory and cores: slices can be read as Rust slices.
    Host,
    /// An NVIDIA GPU.
    Cuda,
    /// None at all: addresses are made up (see [`crate::testing::Simulated`]).
    Simulated,
}

/// Where blocks come from: the source of **backings**, large allocations that a pool cuts into blocks.
///
/// # Safety
/// What `allocate` gives is `bytes` bytes at the alignment of `granularity_bytes`, which nobody else has until they
/// are given back, and which this device's copies and its streams' operations can read and write (no others, where
/// it is not host memory).
pub unsafe trait Memory: Debug + Send + Sync {
    /// Allocates `bytes` bytes, aligned to [`Memory::granularity_bytes`]; contents are undefined.
    ///
    /// # Errors
    /// The device has no such memory left, or the call failed.
    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError>;

    /// Gives a backing back.
    ///
    /// # Safety
    /// `ptr` came from `allocate(bytes)` of this memory, is given back once, and no enqueued operation
    /// uses it any more.
    unsafe fn deallocate(&self, ptr: NonNull<u8>, bytes: usize);

    /// The alignment of every backing; a power of two, at least 64.
    fn granularity_bytes(&self) -> usize;

    /// Addresses and pages apart, where the device has that; then pools take pages instead of backings.
    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        None
    }

    /// What moving and mapping cost on this device.
    fn cost(&self) -> CostModel {
        CostModel::HOST
    }
}

/// What a pool tells its device about a block's life.
#[derive(Debug)]
pub enum BlockNote<'a, S, E> {
    /// It begins, first used on `stream`.
    Taken {
        /// Its first byte.
        ptr: *mut u8,
        /// Its size.
        bytes: usize,
        /// What it is held for.
        purpose: crate::Purpose,
        /// Where it is first used.
        stream: &'a S,
    },
    /// It ends: what is enqueued on `home` so far may use it, and what lies before the events of `uses`.
    Freed {
        /// Its first byte.
        ptr: *mut u8,
        /// Its size.
        bytes: usize,
        /// The stream that it was taken on.
        home: &'a S,
        /// The uses noted, with the ids of their streams.
        uses: &'a [(u64, E)],
    },
}

/// A device: memory, streams and copies between the two sides.
///
/// # Safety
/// Copies and `fill_zero` touch their slices in the order of their stream, and nothing else; slices of a device of kind
/// [`DeviceKind::Host`] can be read as Rust slices.
pub unsafe trait Device: Memory + Clone + 'static {
    /// An ordered queue of operations; cloning gives another handle of the same queue.
    type Stream: Stream<Event = Self::Event>;
    /// A point in a stream.
    type Event: Event;

    /// What kind of hardware this is.
    fn kind(&self) -> DeviceKind;

    /// Makes a stream; `name` appears in errors and timelines.
    ///
    /// # Errors
    /// The device has no stream left.
    fn create_stream(&self, name: &str) -> Result<Self::Stream, DeviceError>;

    /// Told by a pool when a block is taken and freed, for back ends that check who uses what when.
    fn note_block(&self, _note: BlockNote<'_, Self::Stream, Self::Event>) {}

    /// Enqueues a copy of `src` to `dst`, both on the device and not overlapping.
    ///
    /// # Errors
    /// Lengths or dtypes differ, or the stream is gone.
    fn copy(&self, stream: &Self::Stream, src: AnySlice, dst: AnySlice) -> Result<(), DeviceError>;

    /// Enqueues setting all bytes of `dst` to zero.
    ///
    /// # Errors
    /// The stream is gone.
    fn fill_zero(&self, stream: &Self::Stream, dst: AnySlice) -> Result<(), DeviceError>;

    /// Enqueues a copy of `src` from the host to `dst` and waits for it, at most `limit`.
    ///
    /// # Errors
    /// Lengths differ, an earlier operation of the stream failed, or the limit passed.
    fn upload(&self, stream: &Self::Stream, src: &[u8], dst: AnySlice, limit: Duration) -> Result<(), DeviceError>;

    /// Enqueues a copy of `src` to the host and waits for it, at most `limit`.
    ///
    /// # Errors
    /// Lengths differ, an earlier operation of the stream failed, or the limit passed.
    fn download(
        &self,
        stream: &Self::Stream,
        src: AnySlice,
        dst: &mut [u8],
        limit: Duration,
    ) -> Result<(), DeviceError>;
}

/// A number that no other stream of the process has.
pub(crate) fn next_stream_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// An ordered queue of operations on a device.
///
/// # Safety
/// Operations run in the order in which they were enqueued, none before what its stream was made to wait for; no two
/// streams of a process have the same `id`.
pub unsafe trait Stream: Clone + Debug + Send + Sync + 'static {
    /// A point in this kind of stream.
    type Event: Event;

    /// The name that the stream was made with.
    fn name(&self) -> &str;

    /// Tells queues apart: the same for clones of one stream, different for any two streams of a process.
    fn id(&self) -> u64;

    /// Marks the point after everything enqueued so far.
    ///
    /// # Errors
    /// The stream is gone.
    fn record(&self) -> Result<Self::Event, DeviceError>;

    /// Makes everything enqueued from now on wait for `event`; the host does not wait.
    ///
    /// # Errors
    /// The stream is gone.
    fn wait(&self, event: &Self::Event) -> Result<(), DeviceError>;

    /// Blocks the host until everything enqueued so far has run, at most `limit`.
    ///
    /// # Errors
    /// The first error of the stream, or [`DeviceError::TimedOut`].
    fn synchronize(&self, limit: Duration) -> Result<(), DeviceError>;
}

/// A point in a stream, reached when everything before it has run. Cloning gives the same point.
///
/// # Safety
/// It is said to be reached only when what was enqueued before it touches no memory any more.
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
