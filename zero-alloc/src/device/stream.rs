//! The contracts of streams and events.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::DeviceError;

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
