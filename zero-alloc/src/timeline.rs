//! Stream operations: their sizes and recorded spans.

use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The size of an operation, known when it is enqueued, for its cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Work {
    /// Bytes that it reads and writes, or that it sends.
    pub bytes: u64,
    /// Floating-point operations, if they decide its cost.
    pub flops: u64,
    /// A number of whoever enqueued it: which communicator, which part of a model.
    pub class: u32,
}

impl Work {
    /// An operation that moves `bytes`.
    pub const fn bytes(bytes: u64) -> Self {
        Self {
            bytes,
            flops: 0,
            class: 0,
        }
    }

    /// Sets [`Work::flops`].
    #[must_use]
    pub const fn flops(mut self, flops: u64) -> Self {
        self.flops = flops;
        self
    }

    /// Sets [`Work::class`].
    #[must_use]
    pub const fn class(mut self, class: u32) -> Self {
        self.class = class;
        self
    }
}

/// One operation on one stream, in time since the [`Timeline`] was created.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpSpan {
    /// The operation's label.
    pub label: &'static str,
    /// The program's phase when the operation was enqueued: [`Timeline::set_phase`].
    pub phase: &'static str,
    /// When the host enqueued it.
    pub enqueued: Duration,
    /// The stream's name.
    pub stream: Arc<str>,
    /// When it started.
    pub start: Duration,
    /// When it ended.
    pub end: Duration,
}

impl OpSpan {
    /// An operation of no phase, enqueued when it started.
    pub fn new(
        label: &'static str,
        stream: impl Into<Arc<str>>,
        start: Duration,
        end: Duration,
    ) -> Self {
        Self {
            label,
            phase: "",
            enqueued: start,
            stream: stream.into(),
            start,
            end,
        }
    }
}
impl OpSpan {
    /// Sets [`OpSpan::phase`].
    #[must_use]
    pub fn phase(mut self, phase: &'static str) -> Self {
        self.phase = phase;
        self
    }

    /// Sets [`OpSpan::enqueued`].
    #[must_use]
    pub fn enqueued(mut self, enqueued: Duration) -> Self {
        self.enqueued = enqueued;
        self
    }
}

/// The part of an [`OpSpan`] that is known when the operation is enqueued.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Enqueued {
    pub(crate) label: &'static str,
    pub(crate) phase: &'static str,
    pub(crate) at: Duration,
    pub(crate) work: Work,
}

impl Enqueued {
    /// An operation that is enqueued now, for `timeline` if there is one.
    pub(crate) fn new(label: &'static str, timeline: Option<&Timeline>) -> Self {
        let Some(timeline) = timeline else {
            return Self {
                label,
                ..Self::default()
            };
        };
        Self {
            label,
            phase: *timeline.0.phase.lock(),
            at: timeline.now(),
            work: Work::default(),
        }
    }

    pub(crate) fn span(self, stream: &Arc<str>, start: Duration, end: Duration) -> OpSpan {
        let Self {
            label,
            phase,
            at: enqueued,
            work: _,
        } = self;
        OpSpan {
            label,
            phase,
            enqueued,
            stream: Arc::clone(stream),
            start,
            end,
        }
    }
}

/// The span of an operation that may not have run yet. `poll` returns `None` if the span will never
/// be known.
#[cfg_attr(
    not(feature = "cuda"),
    allow(dead_code, reason = "only a device measures spans later")
)]
pub(crate) trait Pending: Send {
    fn poll(&self) -> Poll<Option<OpSpan>>;
}

struct Inner {
    origin: Instant,
    /// The phase of the next operations.
    phase: Mutex<&'static str>,
    spans: Mutex<Vec<OpSpan>>,
    pending: Mutex<Vec<Box<dyn Pending>>>,
}

/// Collects [`OpSpan`]s of all streams that were created with it. Clones share the spans.
///
/// A device passes it to its streams:
/// [`HostDevice::with_timeline`](crate::host::HostDevice::with_timeline),
/// `CudaDevice::with_timeline`. Waits for events are recorded as `"wait"`, which separates idle
/// time from work.
#[derive(Clone)]
pub struct Timeline(Arc<Inner>);

impl Default for Timeline {
    fn default() -> Self {
        let phase = Mutex::default();
        let spans = Mutex::default();
        let pending = Mutex::default();
        Self(Arc::new(Inner {
            origin: Instant::now(),
            phase,
            spans,
            pending,
        }))
    }
}

impl std::fmt::Debug for Timeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Timeline({} spans)", self.0.spans.lock().len())
    }
}

impl Timeline {
    /// An empty timeline; its time starts now.
    pub fn new() -> Self {
        Self::default()
    }

    /// Time since the timeline was created.
    pub fn now(&self) -> Duration {
        self.0.origin.elapsed()
    }

    /// Sets the phase of operations that are enqueued from now on, and returns the phase before.
    pub fn set_phase(&self, phase: &'static str) -> &'static str {
        std::mem::replace(&mut *self.0.phase.lock(), phase)
    }

    /// The time of `instant`; zero if it was before the timeline was created.
    pub fn at(&self, instant: Instant) -> Duration {
        instant.saturating_duration_since(self.0.origin)
    }

    /// Adds a span; for streams of other back ends and for host work.
    pub fn push(&self, span: OpSpan) {
        self.0.spans.lock().push(span);
    }

    /// Adds a span that becomes known later.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn expect(&self, span: Box<dyn Pending>) {
        self.0.pending.lock().push(span);
    }

    /// All spans so far, in the order of their ends. Operations that a device has not run yet
    /// appear in a later call.
    pub fn spans(&self) -> Vec<OpSpan> {
        self.settle();
        self.0.spans.lock().clone()
    }

    /// Removes and returns all spans so far, in the order of their ends.
    pub fn take(&self) -> Vec<OpSpan> {
        self.settle();
        std::mem::take(&mut self.0.spans.lock())
    }

    /// Collects the pending operations that have run.
    fn settle(&self) {
        let mut pending = self.0.pending.lock();
        if pending.is_empty() {
            return;
        }
        let mut spans = self.0.spans.lock();
        pending.retain(|span| match span.poll() {
            Poll::Pending => true,
            Poll::Ready(span) => {
                spans.extend(span);
                false
            }
        });
        spans.sort_by_key(|span| span.end);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::*;

    /// Pending (0), run (1) or failed (2).
    struct Later(Arc<AtomicU8>);

    impl Pending for Later {
        fn poll(&self) -> Poll<Option<OpSpan>> {
            let start = Duration::from_millis(1);
            let end = Duration::from_millis(2);
            match self.0.load(Ordering::Relaxed) {
                0 => Poll::Pending,
                1 => Poll::Ready(Some(OpSpan::new("later", "a", start, end))),
                _ => Poll::Ready(None),
            }
        }
    }

    #[test]
    fn pending_spans_appear_in_order_of_ends() {
        let timeline = Timeline::new();
        let states = [0, 0, 0].map(|s| Arc::new(AtomicU8::new(s)));
        for state in &states {
            timeline.expect(Box::new(Later(Arc::clone(state))));
        }
        let start = Duration::ZERO;
        let end = Duration::from_millis(3);
        timeline.push(OpSpan::new("now", "b", start, end));
        assert_eq!(timeline.spans().len(), 1);
        states[0].store(1, Ordering::Relaxed);
        states[1].store(2, Ordering::Relaxed);
        let labels = |spans: Vec<OpSpan>| spans.into_iter().map(|s| s.label).collect::<Vec<_>>();
        assert_eq!(labels(timeline.take()), ["later", "now"]);
        assert!(timeline.take().is_empty());
        states[2].store(1, Ordering::Relaxed);
        assert_eq!(labels(timeline.take()), ["later"]);
    }
}
