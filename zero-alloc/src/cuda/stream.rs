//! CUDA streams.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;

use super::CudaEvent;
use super::clock::Clock;
use super::driver::Queue;
use super::poll::Deadline;
use crate::device::{DeviceError, Stream, next_stream_id};

/// The first failure of a stream.
#[derive(Debug, Default)]
pub(super) struct Sticky(OnceLock<DeviceError>);

impl Sticky {
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        self.0.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Notes a failure of `op`; the first one counts, and is returned.
    pub(super) fn fail(&self, stream: &str, op: &str, error: DeviceError) -> DeviceError {
        let named = match error {
            DeviceError::Driver { call, message } => DeviceError::Operation {
                stream: stream.to_owned(),
                op: op.to_owned(),
                message: format!("{call}: {message}"),
            },
            named => named,
        };
        self.0.get_or_init(|| named).clone()
    }
}

/// A recording of operations that is going on, or is over.
#[derive(Debug, Default)]
pub(super) struct Capture(AtomicBool);

impl Capture {
    pub(super) fn is_over(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    pub(super) fn end(&self) {
        self.0.store(true, Ordering::Release);
    }
}

struct Inner {
    name: Arc<str>,
    id: u64,
    queue: Queue,
    clock: Option<Arc<Clock>>,
    sticky: Arc<Sticky>,
    /// What records this stream, if anything does.
    capture: Mutex<Option<Arc<Capture>>>,
}

/// A stream of a GPU. It is not ordered against the default stream. When the last handle is gone, what is enqueued
/// still runs.
///
/// Failures are sticky: of the device, as the driver has it, and of [`CudaStream::labelled`] operations.
#[derive(Clone)]
pub struct CudaStream(Arc<Inner>);

impl std::fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaStream({})", self.0.name)
    }
}

impl CudaStream {
    pub(super) fn new(name: &str, queue: Queue, clock: Option<Arc<Clock>>) -> Self {
        let (sticky, capture) = (Arc::default(), Mutex::default());
        Self(Arc::new(Inner { name: name.into(), id: next_stream_id(), queue, clock, sticky, capture }))
    }

    pub(super) fn queue(&self) -> &Queue {
        &self.0.queue
    }

    pub(super) fn sticky(&self) -> &Arc<Sticky> {
        &self.0.sticky
    }

    /// Enqueues what `enqueue` enqueues on this stream as one operation: `op` names it in errors, and in the timeline
    /// if the device has one. An `Err` poisons the stream.
    ///
    /// # Errors
    /// What poisoned the stream earlier, or what `enqueue` returned.
    pub fn labelled<R>(
        &self,
        op: &'static str,
        enqueue: impl FnOnce() -> Result<R, DeviceError>,
    ) -> Result<R, DeviceError> {
        self.attempt(op, || {
            // Points in a graph have no times.
            let Some(clock) = self.0.clock.as_ref().filter(|_| self.capture_now().is_none()) else {
                return enqueue();
            };
            let start = self.0.queue.record(true)?;
            let result = enqueue()?;
            clock.expect(op, &self.0.name, start, self.0.queue.record(true)?);
            Ok(result)
        })
    }

    /// Without a place in the timeline.
    pub(super) fn attempt<R>(
        &self,
        op: &str,
        enqueue: impl FnOnce() -> Result<R, DeviceError>,
    ) -> Result<R, DeviceError> {
        self.0.sticky.check()?;
        enqueue().map_err(|error| self.0.sticky.fail(&self.0.name, op, error))
    }

    /// Poisons the stream from outside: for libraries that learn later that what they enqueued failed. Operations and
    /// waits are refused from now on, and [`Stream::synchronize`] and events not yet reached return the error.
    pub fn poison(&self, error: DeviceError) {
        self.0.sticky.fail(&self.0.name, "an operation", error);
    }

    /// The recording that this stream is in now.
    pub(super) fn capture_now(&self) -> Option<Arc<Capture>> {
        let mut capture = self.0.capture.lock();
        if capture.as_ref().is_some_and(|capture| capture.is_over()) {
            *capture = None;
        }
        capture.clone()
    }

    pub(super) fn enter(&self, capture: &Arc<Capture>) {
        *self.0.capture.lock() = Some(Arc::clone(capture));
    }

    /// The host cannot wait for what is recorded and does not run.
    pub(super) fn refuse_in_capture(&self, op: &'static str) -> Result<(), DeviceError> {
        if self.capture_now().is_some() {
            let message = format!("stream {} is recorded into a graph, and the host cannot wait for it", self.0.name);
            return Err(DeviceError::Driver { call: op, message });
        }
        Ok(())
    }
}

impl Stream for CudaStream {
    type Event = CudaEvent;

    fn name(&self) -> &str {
        &self.0.name
    }

    fn id(&self) -> u64 {
        self.0.id
    }

    fn record(&self) -> Result<CudaEvent, DeviceError> {
        let stream = &*self.0;
        // A poisoned stream still has points: they return its error.
        let point = stream.queue.record(false).map_err(|error| stream.sticky.fail(&stream.name, "record", error))?;
        Ok(CudaEvent::new(point, Arc::clone(&stream.name), Arc::clone(&stream.sticky), self.capture_now()))
    }

    fn wait(&self, event: &CudaEvent) -> Result<(), DeviceError> {
        use crate::device::Event;
        if let Err(error) = event.sticky().check()
            && event.is_done().is_err()
        {
            // What waits for a failed stream fails with it.
            self.0.sticky.fail(&self.0.name, "wait", error);
            return Ok(());
        }
        match event.capture() {
            // Over: it meant an order within the graph, which there is now nobody to have.
            Some(capture) if capture.is_over() => return Ok(()),
            Some(capture) => self.enter(capture),
            None => {}
        }
        self.labelled("wait", || self.0.queue.wait(event.point()))
    }

    fn synchronize(&self, limit: Duration) -> Result<(), DeviceError> {
        let stream = &*self.0;
        stream.sticky.check()?;
        self.refuse_in_capture("synchronize")?;
        let ready = || {
            stream.sticky.check()?;
            stream.queue.query().map_err(|error| stream.sticky.fail(&stream.name, "an operation", error))
        };
        Deadline::after(limit).wait(|| format!("stream {}", stream.name), ready)
    }
}
