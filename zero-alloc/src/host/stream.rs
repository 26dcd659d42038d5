//! Streams of the host.

use std::sync::Arc;
use std::time::Duration;

use super::op::{Item, Named};
use super::seeded::{Scheduler, SeededStream};
use super::worker::Worker;
use super::{HostEvent, Timeline};
use crate::device::{DeviceError, Event, Stream, next_stream_id};

/// A stream of the host: a queue that is run in order, by its own worker thread or by the seeded scheduler.
/// When the last handle is gone, what is left in the queue still runs.
#[derive(Clone)]
pub struct HostStream(Arc<Queue>);

enum Queue {
    Worker(Worker),
    Seeded(SeededStream),
}

impl std::fmt::Debug for HostStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostStream({})", self.name())
    }
}

impl HostStream {
    pub(super) fn spawn(
        name: &str,
        timeline: Option<Timeline>,
        scheduler: Option<&Scheduler>,
    ) -> Result<Self, DeviceError> {
        let named = Named { name: name.into(), id: next_stream_id(), timeline };
        let queue = match scheduler {
            Some(scheduler) => Queue::Seeded(scheduler.seat(named)?),
            None => Queue::Worker(Worker::spawn(named)?),
        };
        Ok(Self(Arc::new(queue)))
    }

    fn named(&self) -> &Named {
        match &*self.0 {
            Queue::Worker(worker) => worker.named(),
            Queue::Seeded(seat) => seat.named(),
        }
    }

    pub(super) fn named_arc(&self) -> Arc<str> {
        Arc::clone(&self.named().name)
    }

    pub(super) fn seat(&self) -> Option<&SeededStream> {
        match &*self.0 {
            Queue::Worker(_) => None,
            Queue::Seeded(seat) => Some(seat),
        }
    }

    /// Enqueues `op`; `label` names it in errors and timelines. An `Err` or a panic poisons the stream:
    /// what [`Stream::synchronize`] returns then names the stream and the label.
    ///
    /// An operation that must wait for another one does it through a [`Monitor`](super::Monitor).
    ///
    /// # Errors
    /// [`DeviceError::Closed`].
    pub fn enqueue(
        &self,
        label: &'static str,
        op: impl FnOnce() -> Result<(), DeviceError> + Send + 'static,
    ) -> Result<(), DeviceError> {
        self.push(Item::Run(label, Box::new(op)))
    }

    /// Closes the queue for all handles: what is enqueued still runs, later operations and waits are refused,
    /// and [`Stream::record`] gives the end of the queue.
    pub fn close(&self) {
        match &*self.0 {
            Queue::Worker(worker) => worker.close(),
            Queue::Seeded(seat) => seat.close(),
        }
    }

    fn push(&self, item: Item) -> Result<(), DeviceError> {
        match &*self.0 {
            Queue::Worker(worker) => worker.push(item),
            Queue::Seeded(seat) => seat.push(item),
        }
    }
}

// SAFETY: one thread, or one seat of the scheduler, runs a queue in order; ids are counted once for all back ends.
unsafe impl Stream for HostStream {
    type Event = HostEvent;

    fn name(&self) -> &str {
        &self.named().name
    }

    fn id(&self) -> u64 {
        self.named().id
    }

    fn record(&self) -> Result<HostEvent, DeviceError> {
        Ok(match &*self.0 {
            Queue::Worker(worker) => worker.record(),
            Queue::Seeded(seat) => seat.record(),
        })
    }

    fn wait(&self, event: &HostEvent) -> Result<(), DeviceError> {
        // What is reached needs no place in the queue; the seeded scheduler is told all the same.
        if let Queue::Worker(worker) = &*self.0
            && matches!(event.result(), Some(Ok(())))
        {
            return if worker.is_closed() { Err(worker.named().closed()) } else { Ok(()) };
        }
        self.push(Item::Wait(event.clone()))
    }

    fn synchronize(&self, limit: Duration) -> Result<(), DeviceError> {
        self.record()?.synchronize(limit)
    }
}
