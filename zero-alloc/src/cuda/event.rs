//! Points in CUDA streams.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::driver::Point;
use super::host_wait;
use super::poll::Deadline;
use super::sticky::Sticky;
use super::stream::Capture;
use crate::device::{DeviceError, DeviceId, Event};

struct Inner {
    point: Point,
    stream: Arc<str>,
    /// The failures of its stream, and its position there.
    sticky: (Arc<Sticky>, u64),
    /// The recording that contains the event: it orders operations there. Afterwards the event is
    /// reached when what the recording's streams had enqueued before it has run.
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
    pub(super) fn new(
        point: Point,
        stream: Arc<str>,
        sticky: (Arc<Sticky>, u64),
        capture: Option<Arc<Capture>>,
    ) -> Self {
        Self(Arc::new(Inner {
            point,
            stream,
            sticky,
            capture,
            done: AtomicBool::new(false),
        }))
    }

    /// Checks that the event is of the context with the id `device`, for an operation `what` of
    /// that context.
    pub(super) fn check_device(
        &self,
        what: &'static str,
        device: DeviceId,
    ) -> Result<(), DeviceError> {
        let got = self.0.point.device();
        if got == device {
            return Ok(());
        }
        Err(DeviceError::AnotherDevice {
            what,
            expected: device,
            got,
        })
    }

    pub(super) fn point(&self) -> &Point {
        &self.0.point
    }

    /// Calls `with` for each point that a stream must wait for, until it fails.
    pub(super) fn try_for_each_point(
        &self,
        mut with: impl FnMut(&Point) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        match &self.0.capture {
            Some(capture) if capture.is_over() => capture.before.lock().iter().try_for_each(with),
            _ => with(&self.0.point),
        }
    }

    pub(super) fn sticky(&self) -> (&Arc<Sticky>, u64) {
        (&self.0.sticky.0, self.0.sticky.1)
    }

    pub(super) fn capture(&self) -> Option<&Arc<Capture>> {
        self.0.capture.as_ref()
    }
}

// SAFETY: the driver reports an event as reached when the operations before it have run. Operations
// of a recording do not run; the event of one is reached when the recording is over and what its
// streams had enqueued before has run.
unsafe impl Event for CudaEvent {
    fn is_done(&self) -> Result<bool, DeviceError> {
        let event = &*self.0;
        if event.done.load(Ordering::Acquire) {
            return Ok(true);
        }
        host_wait::expire();
        let (sticky, position) = &event.sticky;
        let done = match &event.capture {
            Some(capture) => capture.is_reached(),
            None => event.point.query(),
        };
        let done = done.map_err(|error| sticky.fail(&event.stream, "an operation", 0, error))?;
        if !done {
            // Also if the stream has failed: operations before this point may still use memory.
            return Ok(false);
        }
        sticky.check_before(*position)?;
        event.done.store(true, Ordering::Release);
        Ok(true)
    }

    fn synchronize(&self, limit: Duration) -> Result<(), DeviceError> {
        let waited =
            Deadline::after(limit).wait(|| format!("stream {}", self.0.stream), || self.is_done());
        // The failure of an operation is more informative than an expired limit.
        let (sticky, position) = &self.0.sticky;
        if waited.is_err() {
            sticky.check_before(*position).and(waited)
        } else {
            waited
        }
    }
}
