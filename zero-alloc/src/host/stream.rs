//! Streams of the host.

use std::sync::Arc;
use std::time::Duration;

use super::HostEvent;
use super::execution::{Execution, check_runs};
use super::queue::{Item, Queue};
use crate::device::{DeviceError, Event, Stream};
use crate::timeline::Enqueued;
use crate::timeline::Work;

/// A stream of the host: a queue that its own worker thread or the seeded scheduler runs in order.
/// Items enqueued before the last handle is dropped still run.
#[derive(Clone)]
pub struct HostStream(pub(super) Arc<dyn Queue>);

impl std::fmt::Debug for HostStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostStream({})", self.name())
    }
}

impl HostStream {
    /// Enqueues `op`; `label` names it in errors and timelines. An `Err` or a panic poisons the
    /// stream: [`Stream::synchronize`] then returns an error that names the stream and the label.
    ///
    /// An operation must wait for other streams' operations only through a
    /// [`Monitor`](super::Monitor).
    ///
    /// # Errors
    /// [`DeviceError::Closed`].
    pub fn enqueue(
        &self,
        label: &'static str,
        op: impl FnOnce() -> Result<(), DeviceError> + Send + 'static,
    ) -> Result<(), DeviceError> {
        self.enqueue_sized(label, Work::default(), op)
    }

    /// [`HostStream::enqueue`] of an operation whose size is known, for
    /// [schedules](crate::schedule).
    ///
    /// # Errors
    /// [`DeviceError::Closed`].
    pub fn enqueue_sized(
        &self,
        label: &'static str,
        work: Work,
        op: impl FnOnce() -> Result<(), DeviceError> + Send + 'static,
    ) -> Result<(), DeviceError> {
        let enqueued = Enqueued {
            work,
            ..self.0.info().enqueued(label)
        };
        self.0.push(Item::Run(enqueued, Box::new(op)))
    }

    /// How its operations run.
    pub(crate) fn execution(&self) -> Execution {
        self.0.info().execution
    }

    /// Checks that its operations run, and are not only [recorded](crate::schedule::Recorder): for
    /// the operation `what`, which others wait for.
    ///
    /// # Errors
    /// [`DeviceError::AnotherExecution`].
    pub fn check_runs(&self, what: &'static str) -> Result<(), DeviceError> {
        check_runs(what, self.name(), self.execution())
    }

    /// Closes the queue for all handles: items in the queue still run, later operations and waits
    /// are refused, and [`Stream::record`] returns the end of the queue.
    pub fn close(&self) {
        self.0.close();
    }
}

// SAFETY: one thread, or the scheduler, runs a queue in order; one counter assigns the ids of all
// back ends.
unsafe impl Stream for HostStream {
    type Event = HostEvent;

    fn name(&self) -> &str {
        &self.0.info().name
    }

    fn id(&self) -> u64 {
        self.0.info().id
    }

    fn record(&self) -> Result<HostEvent, DeviceError> {
        Ok(self.0.record())
    }

    fn wait(&self, event: &HostEvent) -> Result<(), DeviceError> {
        self.0.info().check_event(event)?;
        self.0
            .push(Item::Wait(self.0.info().enqueued("wait"), event.clone()))
    }

    fn synchronize(&self, limit: Duration) -> Result<(), DeviceError> {
        self.0.record().synchronize(limit)
    }

    fn enqueue_host(
        &self,
        label: &'static str,
        op: impl FnOnce() -> Result<(), DeviceError> + Send + 'static,
    ) -> Result<(), DeviceError> {
        self.enqueue(label, op)
    }
}
