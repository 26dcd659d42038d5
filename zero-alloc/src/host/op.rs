//! What lies in a stream's queue, and how an operation is run.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::{HostEvent, OpSpan, Timeline};
use crate::device::DeviceError;

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
    pub(super) fn closed(&self) -> DeviceError {
        DeviceError::Closed { stream: self.name.to_string() }
    }

    /// Runs an operation; its error or panic gets the names of the stream and the operation.
    pub(super) fn call(&self, label: &'static str, op: Op) -> Result<(), DeviceError> {
        let (stream, op_name) = (self.name.to_string(), label.to_owned());
        self.timed(label, || match catch_unwind(AssertUnwindSafe(op)) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e @ (DeviceError::Operation { .. } | DeviceError::Panicked { .. }))) => Err(e),
            Ok(Err(e)) => Err(DeviceError::Operation { stream, op: op_name, message: e.to_string() }),
            Err(panic) => Err(DeviceError::Panicked { stream, op: op_name, message: message_of(&*panic) }),
        })
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

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}
