//! The contract of a device: its memory, its streams, and how they and the host's wait for each
//! other.

use std::time::Duration;

use super::{AnySlice, DeviceError, DeviceKind, Event, Memory, Stream};
use crate::host::{HostEvent, HostStream};

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
