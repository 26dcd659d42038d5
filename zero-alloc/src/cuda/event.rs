//! Points in CUDA streams.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::driver::Point;
use super::poll::Deadline;
use super::stream::{Capture, Sticky};
use crate::device::{DeviceError, Event};

struct Inner {
    point: Point,
    stream: Arc<str>,
    /// The failure of its stream, if there is one.
    sticky: Arc<Sticky>,
    /// It was recorded into a graph: it orders what is recorded there, and means nothing afterwards.
    capture: Option<Arc<Capture>>,
    done: AtomicBool,
}

/// A point in a [`CudaStream`](super::CudaStream), without timing.
#[derive(Clone)]
pub struct CudaEvent(Arc<Inner>);

impl std::fmt::Debug for CudaEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaEvent({})", self.0.stream)
    }
}

impl CudaEvent {
    pub(super) fn new(point: Point, stream: Arc<str>, sticky: Arc<Sticky>, capture: Option<Arc<Capture>>) -> Self {
        Self(Arc::new(Inner { point, stream, sticky, capture, done: AtomicBool::new(false) }))
    }

    pub(super) fn point(&self) -> &Point {
        &self.0.point
    }

    pub(super) fn sticky(&self) -> &Sticky {
        &self.0.sticky
    }

    pub(super) fn capture(&self) -> Option<&Arc<Capture>> {
        self.0.capture.as_ref()
    }
}

impl Event for CudaEvent {
    fn is_done(&self) -> Result<bool, DeviceError> {
        let event = &*self.0;
        if event.done.load(Ordering::Acquire) {
            return Ok(true);
        }
        event.sticky.check()?;
        if let Some(capture) = &event.capture {
            return Ok(capture.is_over());
        }
        let done = event.point.query().map_err(|error| event.sticky.fail(&event.stream, "an operation", error))?;
        if done {
            event.done.store(true, Ordering::Release);
        }
        Ok(done)
    }

    fn synchronize(&self, limit: Duration) -> Result<(), DeviceError> {
        Deadline::after(limit).wait(|| format!("stream {}", self.0.stream), || self.is_done())
    }
}
