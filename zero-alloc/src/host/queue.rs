//! The queue of a stream: its interface, its items, and how an operation runs.

use std::sync::Arc;
use std::time::Duration;

use super::execution::Execution;
use super::{HostEvent, Timeline};
use crate::device::{DeviceError, run_named};
use crate::schedule::{CausalPoint, CausalStream};
use crate::timeline::Enqueued;

pub(crate) type Op = Box<dyn FnOnce() -> Result<(), DeviceError> + Send>;

/// One item of a queue.
pub(crate) enum Item {
    Run(Enqueued, Op),
    Record(HostEvent),
    Wait(Enqueued, HostEvent),
}

/// A queue, run in order by a worker thread or by the seeded scheduler.
pub(crate) trait Queue: Send + Sync {
    fn info(&self) -> &StreamInfo;

    /// Appends an item; an error if the queue is closed.
    fn push(&self, item: Item) -> Result<(), DeviceError>;

    /// The point after the last item.
    fn record(&self) -> HostEvent;

    /// Refuses later items; those in the queue still run.
    fn close(&self);
}

/// The identity of a stream, and the timeline of its operations.
pub(crate) struct StreamInfo {
    pub(crate) name: Arc<str>,
    pub(super) id: u64,
    pub(super) execution: Execution,
    pub(super) timeline: Option<Timeline>,
    /// Its place among the streams of a program whose time is modelled or recorded.
    pub(super) causal: Option<CausalStream>,
    #[cfg(any(test, feature = "testing"))]
    pub(super) model: Option<Arc<super::model::Model>>,
}

impl StreamInfo {
    /// The name of the stream's thread, without zero bytes, which the system does not accept.
    pub(super) fn thread_name(&self) -> String {
        self.name.replace('\0', " ")
    }

    pub(super) fn closed(&self) -> DeviceError {
        DeviceError::Closed {
            stream: self.name.to_string(),
        }
    }

    /// Checks that the stream can wait for `event`.
    pub(super) fn check_event(&self, event: &HostEvent) -> Result<(), DeviceError> {
        self.execution.check(
            "wait",
            format_args!("stream {}", self.name),
            (
                format_args!("the event's stream {}", event.stream()),
                event.execution(),
            ),
        )
    }

    /// An operation that is enqueued now.
    pub(super) fn enqueued(&self, label: &'static str) -> Enqueued {
        let enqueued = Enqueued::new(label, self.timeline.as_ref());
        #[cfg(any(test, feature = "testing"))]
        if self.model.is_some() {
            return Enqueued {
                at: super::model::now(),
                ..enqueued
            };
        }
        enqueued
    }

    /// The point behind everything that is enqueued so far, if the program's knowledge counts.
    pub(crate) fn causal_point(&self) -> Option<CausalPoint> {
        self.causal.as_ref().map(CausalStream::record)
    }

    /// Orders later operations behind `event`.
    pub(crate) fn waits_for(&self, event: &HostEvent) {
        if let (Some(stream), Some(point)) = (&self.causal, event.causal()) {
            stream.wait(point);
        }
    }

    /// Whether times are modelled.
    pub(super) fn is_modelled(&self) -> bool {
        #[cfg(any(test, feature = "testing"))]
        return self.model.is_some();
        #[cfg(not(any(test, feature = "testing")))]
        false
    }

    /// Runs an operation; its error or panic names the stream and the operation.
    pub(super) fn call(
        &self,
        enqueued: Enqueued,
        op: Op,
        now: &mut Duration,
    ) -> Result<(), DeviceError> {
        #[cfg(any(test, feature = "testing"))]
        if let Some(model) = &self.model {
            // Also the model's cost may panic.
            return run_named(&self.name, enqueued.label, || {
                model.run(&self.name, enqueued, now, op)
            });
        }
        let _ = now;
        self.timed(enqueued, || run_named(&self.name, enqueued.label, op))
    }

    /// Runs `work` and records its span.
    pub(super) fn timed<R>(&self, enqueued: Enqueued, work: impl FnOnce() -> R) -> R {
        let Some(timeline) = &self.timeline else {
            return work();
        };
        let start = timeline.now();
        let result = work();
        timeline.push(enqueued.span(&self.name, start, timeline.now()));
        result
    }
}

/// Starts the thread that runs a stream's operations.
pub(super) fn spawn(
    info: &StreamInfo,
    work: impl FnOnce() + Send + 'static,
) -> Result<(), DeviceError> {
    let spawned = std::thread::Builder::new()
        .name(info.thread_name())
        .spawn(work);
    spawned.map(drop).map_err(|e| DeviceError::Driver {
        call: "thread spawn",
        message: e.to_string(),
    })
}
