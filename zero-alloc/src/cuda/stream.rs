//! CUDA streams.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::CudaEvent;
use super::clock::Clock;
use super::driver::{Point, Queue};
use super::poll::Deadline;
use super::sticky::{Sticky, named};
use crate::device::{DeviceError, DeviceId, Event, Stream, next_stream_id, run_named};

/// A recording of operations, active or over.
#[derive(Default)]
pub(super) struct Capture {
    over: AtomicBool,
    /// The ends of the recording's streams when each became part of it: operations before them run,
    /// unlike those that are recorded.
    pub(super) before: Mutex<Vec<Point>>,
    /// The stream, if a framework records it; only the driver knows when that recording ends.
    foreign: Option<Weak<Inner>>,
}

impl Capture {
    pub(super) fn is_over(&self) -> bool {
        let over = self.over.load(Ordering::Acquire);
        let Some(foreign) = self.foreign.as_ref().filter(|_| !over) else {
            return over;
        };
        if let Some(stream) = foreign.upgrade() {
            if stream.queue.is_capturing().unwrap_or(false) {
                return false;
            }
            // The framework began without our knowledge, so there is no earlier point of the
            // stream.
            self.before.lock().extend(stream.queue.record(false).ok());
        }
        self.end();
        true
    }

    /// Whether the recording is over, and all operations that its streams enqueued before it have
    /// run.
    pub(super) fn is_reached(&self) -> Result<bool, DeviceError> {
        if !self.is_over() {
            return Ok(false);
        }
        for point in self.before.lock().iter() {
            if !point.query()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Release);
    }
}

pub(super) struct Inner {
    name: Arc<str>,
    id: u64,
    queue: Queue,
    /// Whether a framework may destroy the stream while handles of it live.
    may_end: bool,
    clock: Option<Arc<Clock>>,
    sticky: Arc<Sticky>,
    /// The recording that this stream is in, if any.
    capture: Mutex<Option<Arc<Capture>>>,
}

/// A stream of a GPU. It is not ordered against the default stream. Operations enqueued before the
/// last handle is dropped still run.
///
/// Failures are sticky: those of the device, which the driver reports, and those of
/// [`CudaStream::labelled`] operations.
#[derive(Clone)]
pub struct CudaStream(Arc<Inner>);

impl std::fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaStream({})", self.0.name)
    }
}

impl CudaStream {
    pub(super) fn new(name: &str, queue: Queue, clock: Option<Arc<Clock>>) -> Self {
        Self::with_owner(name, queue, false, clock)
    }

    /// A stream that a framework may destroy while handles of it live, if `may_end`.
    pub(super) fn with_owner(
        name: &str,
        queue: Queue,
        may_end: bool,
        clock: Option<Arc<Clock>>,
    ) -> Self {
        let sticky = Arc::default();
        let capture = Mutex::default();
        Self(Arc::new(Inner {
            name: name.into(),
            id: next_stream_id(),
            queue,
            may_end,
            clock,
            sticky,
            capture,
        }))
    }

    pub(super) fn queue(&self) -> &Queue {
        &self.0.queue
    }

    pub(super) fn shared_name(&self) -> &Arc<str> {
        &self.0.name
    }

    pub(super) fn sticky(&self) -> &Arc<Sticky> {
        &self.0.sticky
    }

    /// Checks that the stream is of the context with the id `device`, for operations `what` of that
    /// context.
    ///
    /// # Errors
    /// [`DeviceError::AnotherDevice`].
    pub fn check_device(&self, what: &'static str, device: DeviceId) -> Result<(), DeviceError> {
        let got = self.0.queue.device();
        if got == device {
            Ok(())
        } else {
            Err(DeviceError::AnotherDevice {
                what,
                expected: device,
                got,
            })
        }
    }

    /// Returns the error that poisoned the stream, if any.
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        self.0.sticky.check()
    }

    /// Records a failure of the device, which affects all operations not known to have run.
    pub(super) fn lost(&self, error: DeviceError) -> DeviceError {
        self.0.sticky.fail(&self.0.name, "an operation", 0, error)
    }

    /// Runs `enqueue`, and treats everything that it enqueues on this stream as one operation: `op`
    /// names it in errors, and in the timeline if the device has one. An `Err` poisons the stream.
    ///
    /// # Errors
    /// The error that poisoned the stream, or the error of `enqueue`.
    pub fn labelled<R>(
        &self,
        op: &'static str,
        enqueue: impl FnOnce() -> Result<R, DeviceError>,
    ) -> Result<R, DeviceError> {
        self.attempt(op, || {
            // Events in a graph have no times.
            let Some(clock) = self
                .0
                .clock
                .as_ref()
                .filter(|_| self.capture_now().is_none())
            else {
                return enqueue();
            };
            let enqueued = clock.enqueued(op);
            let start = self.0.queue.record(true)?;
            let result = enqueue()?;
            clock.expect(enqueued, &self.0.name, start, self.0.queue.record(true)?);
            Ok(result)
        })
    }

    /// Runs `enqueue` twice, waits until the stream has run both, and returns the time of the
    /// second on the device, with a resolution of about half a microsecond. While the device runs
    /// the first, the host enqueues the second: the host's time counts only as far as it is longer
    /// than a run. `op` is the name in errors.
    ///
    /// # Errors
    /// The stream is being recorded, the limit has passed, `enqueue` failed, or the stream did.
    pub fn time(
        &self,
        op: &'static str,
        limit: Duration,
        mut enqueue: impl FnMut() -> Result<(), DeviceError>,
    ) -> Result<Duration, DeviceError> {
        self.refuse_in_capture(op)?;
        let (start, end) = self.attempt(op, || {
            enqueue()?;
            let start = self.0.queue.record(true)?;
            enqueue()?;
            Ok((start, self.0.queue.record(true)?))
        })?;
        let reached = || end.query().map_err(|error| self.lost(error));
        Deadline::after(limit).wait(|| format!("{op} on stream {}", self.0.name), reached)?;
        Ok(Duration::from_secs_f64(
            f64::from(end.since_ms(&start)?.max(0.0)) / 1e3,
        ))
    }

    /// Whether operations are now recorded into a graph instead of run.
    pub fn is_recorded(&self) -> bool {
        self.capture_now().is_some()
    }

    /// As [`CudaStream::labelled`], without the timeline.
    pub(super) fn attempt<R>(
        &self,
        op: &str,
        enqueue: impl FnOnce() -> Result<R, DeviceError>,
    ) -> Result<R, DeviceError> {
        let sticky = &self.0.sticky;
        sticky.check()?;
        let position = sticky.position();
        enqueue().map_err(|error| match self.capture_now() {
            // An operation that cannot be recorded fails the recording, not the stream.
            Some(_) => named(&self.0.name, op, error),
            None => sticky.fail(&self.0.name, op, position, error),
        })
    }

    /// Poisons the stream, for libraries that detect later that their operation failed. Later
    /// operations and waits are refused; [`Stream::synchronize`] and events not known to be reached
    /// return the error, also on streams that wait for this one.
    pub fn poison(&self, error: DeviceError) {
        self.lost(error);
    }

    /// The recording that this stream is in now.
    pub(super) fn capture_now(&self) -> Option<Arc<Capture>> {
        let mut capture = self.0.capture.lock();
        if capture.as_ref().is_some_and(|capture| capture.is_over()) {
            *capture = None;
        }
        let queue = &self.0.queue;
        if capture.is_none() && queue.is_foreign() && queue.is_capturing().unwrap_or(false) {
            *capture = Some(Arc::new(Capture {
                foreign: Some(Arc::downgrade(&self.0)),
                ..Capture::default()
            }));
        }
        capture.clone()
    }

    /// Makes the stream part of `capture`. Called before the driver does, so that the stream's end
    /// is not recorded.
    pub(super) fn enter(&self, capture: &Arc<Capture>) -> Result<(), DeviceError> {
        if self.capture_now().is_none() {
            let end = self
                .0
                .queue
                .record(false)
                .map_err(|error| self.lost(error))?;
            capture.before.lock().push(end);
        }
        *self.0.capture.lock() = Some(Arc::clone(capture));
        Ok(())
    }

    /// Fails if the stream is being recorded: then nothing runs, and the host cannot wait for it.
    pub(super) fn refuse_in_capture(&self, op: &'static str) -> Result<(), DeviceError> {
        if self.capture_now().is_some() {
            let message = format!(
                "stream {} is recorded into a graph, and the host cannot wait for it",
                self.0.name
            );
            return Err(DeviceError::Driver { call: op, message });
        }
        Ok(())
    }
}

// SAFETY: the driver runs a stream's operations in order; one counter assigns the ids of all back
// ends.
unsafe impl Stream for CudaStream {
    type Event = CudaEvent;

    fn name(&self) -> &str {
        &self.0.name
    }

    fn id(&self) -> u64 {
        self.0.id
    }

    fn may_end(&self) -> bool {
        self.0.may_end
    }

    fn record(&self) -> Result<CudaEvent, DeviceError> {
        let stream = &*self.0;
        let position = stream.sticky.position();
        // Events of a poisoned stream return its error.
        let point = stream
            .queue
            .record(false)
            .map_err(|error| self.lost(error))?;
        Ok(CudaEvent::new(
            point,
            Arc::clone(&stream.name),
            (Arc::clone(&stream.sticky), position),
            self.capture_now(),
        ))
    }

    fn wait(&self, event: &CudaEvent) -> Result<(), DeviceError> {
        event.check_device("wait, event", self.0.queue.device())?;
        match event.capture().filter(|capture| !capture.is_over()) {
            Some(capture) => self.enter(capture)?,
            // An event from before the recording; a reached one has no effect.
            None if self.capture_now().is_some() && event.is_done()? => return Ok(()),
            None => {}
        }
        let (sticky, position) = event.sticky();
        self.labelled("wait", || {
            event.try_for_each_point(|point| self.0.queue.wait(point))
        })?;
        if !Arc::ptr_eq(sticky, &self.0.sticky) {
            sticky.is_waited_for(position, &self.0.sticky, self.0.sticky.position());
        }
        Ok(())
    }

    fn synchronize(&self, limit: Duration) -> Result<(), DeviceError> {
        self.refuse_in_capture("synchronize")?;
        let ready = || self.0.queue.query().map_err(|error| self.lost(error));
        let waited = Deadline::after(limit).wait(|| format!("stream {}", self.0.name), ready);
        // The failure of an operation is more informative than an expired limit.
        self.check().and(waited)
    }

    /// A thread of the driver runs `op`, one thread for all streams. After a failure later host
    /// operations are skipped; device operations that are already enqueued run.
    fn enqueue_host(
        &self,
        label: &'static str,
        op: impl FnOnce() -> Result<(), DeviceError> + Send + 'static,
    ) -> Result<(), DeviceError> {
        self.refuse_in_capture("enqueue_host")?;
        let sticky = Arc::clone(&self.0.sticky);
        let name = Arc::clone(&self.0.name);
        let position = sticky.position();
        let run = move || {
            if sticky.check_before(position).is_ok() {
                let failed = run_named(&name, label, op).err();
                failed.map(|error| sticky.fail(&name, label, position, error));
            }
        };
        self.labelled(label, || self.0.queue.call_host(Box::new(run)))
    }
}
