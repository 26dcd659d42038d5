//! What lies in a stream's queue, and how an operation is run.

use std::sync::Arc;

use super::{HostEvent, OpSpan, Timeline};
use crate::device::{DeviceError, run_named};

pub(super) type Op = Box<dyn FnOnce() -> Result<(), DeviceError> + Send>;

/// One item of a queue.
pub(super) enum Item {
    Run(&'static str, Op),
    Record(HostEvent),
    Wait(HostEvent),
}

/// Who a stream is, and where its operations are recorded.
pub(super) struct Named {
    pub(super) name: Arc<str>,
    pub(super) id: u64,
    pub(super) timeline: Option<Timeline>,
}

impl Named {
    /// The name of the stream's thread: the system's end at a zero.
    pub(super) fn thread_name(&self) -> String {
        self.name.replace('\0', " ")
    }

    pub(super) fn closed(&self) -> DeviceError {
        DeviceError::Closed { stream: self.name.to_string() }
    }

    /// Runs an operation; its error or panic gets the names of the stream and the operation.
    pub(super) fn call(&self, label: &'static str, op: Op) -> Result<(), DeviceError> {
        self.timed(label, || run_named(&self.name, label, op))
    }

    /// Runs `work` and records when.
    pub(super) fn timed<R>(&self, label: &'static str, work: impl FnOnce() -> R) -> R {
        let Some(timeline) = &self.timeline else { return work() };
        let start = timeline.now();
        let result = work();
        timeline.push(OpSpan { label, stream: Arc::clone(&self.name), start, end: timeline.now() });
        result
    }
}
