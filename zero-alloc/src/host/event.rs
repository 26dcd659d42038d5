//! Points in host streams.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::Monitor;
use super::execution::{Execution, check_runs};
use super::queue::StreamInfo;
use super::seeded::Mark;
use crate::device::{DeviceError, Event};
#[cfg(feature = "cuda")]
use crate::primitive::Mutex;
use crate::schedule::{CausalPoint, RecordedPoint};

struct Point {
    stream: Arc<str>,
    execution: Execution,
    /// Set once, when the point is reached or its stream failed before it.
    result: OnceLock<Result<(), DeviceError>>,
    reached: Monitor<()>,
    /// The event's place in the order of the seeded scheduler; `None` for a stream of a worker
    /// thread.
    mark: Option<Mark>,
    /// The event's place in a schedule, if its stream records.
    recorded: Option<RecordedPoint>,
    /// The program's knowledge of it, if that counts and not the thread of its stream.
    causal: Option<CausalPoint>,
    /// In modelled time, in nanoseconds.
    time: AtomicU64,
    #[cfg(feature = "cuda")]
    waiters: Mutex<Vec<Waiter>>,
}

/// A function that is called with the result.
#[cfg(feature = "cuda")]
type Waiter = Box<dyn FnOnce(Result<(), DeviceError>) + Send>;

/// A point in a [`HostStream`](super::HostStream).
#[derive(Clone)]
pub struct HostEvent(Arc<Point>);

impl std::fmt::Debug for HostEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostEvent({}, {:?})", self.0.stream, self.0.result.get())
    }
}

impl HostEvent {
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn of_scheduler(stream: &StreamInfo, mark: Mark) -> Self {
        Self::of(stream, Some(mark), None, None)
    }

    /// A point in a stream of a worker thread.
    pub(super) fn of_worker(stream: &StreamInfo) -> Self {
        Self::of(stream, None, None, stream.causal_point())
    }

    /// A point in a stream that records. Whoever waits for it goes on at once.
    pub(crate) fn of_recorder(stream: &StreamInfo, point: RecordedPoint) -> Self {
        Self::of(stream, None, Some(point), stream.causal_point())
    }

    fn of(
        stream: &StreamInfo,
        mark: Option<Mark>,
        recorded: Option<RecordedPoint>,
        causal: Option<CausalPoint>,
    ) -> Self {
        Self(Arc::new(Point {
            stream: Arc::clone(&stream.name),
            execution: stream.execution,
            result: match recorded {
                Some(_) => Ok(()).into(),
                None => OnceLock::new(),
            },
            reached: Monitor::new(()),
            mark,
            recorded,
            causal,
            time: AtomicU64::new(0),
            #[cfg(feature = "cuda")]
            waiters: Mutex::default(),
        }))
    }

    #[cfg(any(test, feature = "testing"))]
    pub(super) fn mark(&self) -> Option<&Mark> {
        self.0.mark.as_ref()
    }

    /// Its place in a schedule.
    pub(crate) fn recorded(&self) -> Option<&RecordedPoint> {
        self.0.recorded.as_ref()
    }

    /// The program's knowledge of it.
    pub(super) fn causal(&self) -> Option<&CausalPoint> {
        self.0.causal.as_ref()
    }

    /// Sets the modelled time of the point, before it is reached.
    pub(super) fn set_time(&self, time: Duration) {
        self.0.time.store(
            u64::try_from(time.as_nanos()).unwrap_or(u64::MAX),
            Ordering::Relaxed,
        );
    }

    /// The modelled time of a reached point.
    pub(super) fn time(&self) -> Duration {
        Duration::from_nanos(self.0.time.load(Ordering::Relaxed))
    }

    /// Marks the point as reached; only the first call has an effect.
    pub(super) fn reach(&self, failed: Option<DeviceError>) {
        let _ = self.0.result.set(failed.map_or(Ok(()), Err));
        self.0.reached.update(|()| ());
        #[cfg(feature = "cuda")]
        if let Some(result) = self.result() {
            // `then` looks for the result under this lock.
            let waiters = std::mem::take(&mut *self.0.waiters.lock());
            waiters
                .into_iter()
                .for_each(|waiter| waiter(result.clone()));
        }
    }

    /// Calls `waiter` with the result when the point is reached, on the thread that reaches it; or
    /// now, if it is reached. Drops it if the point will not be reached. `waiter` must not block.
    #[cfg(feature = "cuda")]
    pub(crate) fn then(&self, waiter: impl FnOnce(Result<(), DeviceError>) + Send + 'static) {
        let mut waiters = self.0.waiters.lock();
        match self.result() {
            Some(result) => {
                drop(waiters);
                waiter(result);
            }
            None => waiters.push(Box::new(waiter)),
        }
    }

    /// Whether the seeded scheduler reaches the point, when a thread waits for it.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_seeded(&self) -> bool {
        self.0.mark.is_some()
    }

    /// How its stream's operations run.
    pub(super) fn execution(&self) -> Execution {
        self.0.execution
    }

    /// Checks that what is before the point runs.
    pub(crate) fn check_runs(&self, what: &'static str) -> Result<(), DeviceError> {
        check_runs(what, &self.0.stream, self.0.execution)
    }

    /// The name of its stream.
    pub(crate) fn stream(&self) -> &str {
        &self.0.stream
    }

    /// Waits for the point and returns its result; the outer error is that the limit passed. A wait
    /// of a stream, of which the program knows nothing.
    pub(super) fn wait(&self, limit: Duration) -> Result<Result<(), DeviceError>, DeviceError> {
        let what = || format!("stream {}", self.0.stream);
        if let Some(mark) = &self.0.mark {
            mark.wait(self, limit);
            return self.result().ok_or_else(|| DeviceError::TimedOut {
                what: what(),
                limit,
            });
        }
        match self.result() {
            Some(result) => Ok(result),
            None => self.0.reached.wait_until(limit, what, |()| self.result()),
        }
    }

    /// The result, once the point is reached.
    pub(super) fn result(&self) -> Option<Result<(), DeviceError>> {
        self.0.result.get().cloned()
    }
}

// SAFETY: a point is reached when the operations before it have returned.
unsafe impl Event for HostEvent {
    fn is_done(&self) -> Result<bool, DeviceError> {
        if let Some(mark) = &self.0.mark {
            mark.poll(self);
        }
        if let Some(causal) = &self.0.causal
            && !causal.is_known()
        {
            return Ok(false);
        }
        self.result().transpose().map(|reached| reached.is_some())
    }

    fn synchronize(&self, limit: Duration) -> Result<(), DeviceError> {
        if let Some(point) = &self.0.recorded {
            point.host_waits();
            self.0.causal.iter().for_each(CausalPoint::program_waited);
            return Ok(());
        }
        let result = self.wait(limit)?;
        self.0.causal.iter().for_each(CausalPoint::program_waited);
        #[cfg(any(test, feature = "testing"))]
        super::model::passed(self.time());
        result
    }
}
