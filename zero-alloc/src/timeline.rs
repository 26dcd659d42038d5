//! A recorder of what ran when on which stream.

use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// One operation on one stream, in time since the [`Timeline`] was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpSpan {
    /// The operation's label.
    pub label: &'static str,
    /// The stream's name.
    pub stream: Arc<str>,
    /// When it began to run.
    pub start: Duration,
    /// When it had run.
    pub end: Duration,
}

/// A span that a device has yet to run: asked again until it is there, or known never to come.
pub(crate) trait Pending: Send {
    fn poll(&self) -> Poll<Option<OpSpan>>;
}

struct Inner {
    origin: Instant,
    spans: Mutex<Vec<OpSpan>>,
    pending: Mutex<Vec<Box<dyn Pending>>>,
}

/// Collects [`OpSpan`]s of all streams that were made with it. Cloning gives another handle of the same one.
///
/// Streams get it by [`HostDevice::with_timeline`](crate::host::HostDevice::with_timeline) and
/// [`CudaDevice::with_timeline`](crate::cuda::CudaDevice::with_timeline). Waits for events
/// are recorded too, labelled `"wait"`, so that idle time can be told from work.
#[derive(Clone)]
pub struct Timeline(Arc<Inner>);

impl Default for Timeline {
    fn default() -> Self {
        Self(Arc::new(Inner { origin: Instant::now(), spans: Mutex::default(), pending: Mutex::default() }))
    }
}

impl std::fmt::Debug for Timeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Timeline({} spans)", self.0.spans.lock().len())
    }
}

impl Timeline {
    /// An empty one; its time starts now.
    pub fn new() -> Self {
        Self::default()
    }

    /// Time since it was made.
    pub fn now(&self) -> Duration {
        self.0.origin.elapsed()
    }

    /// Adds a span; for streams of other back ends and for host work.
    pub fn push(&self, span: OpSpan) {
        self.0.spans.lock().push(span);
    }

    /// Adds a span that is known later.
    pub(crate) fn expect(&self, span: Box<dyn Pending>) {
        self.0.pending.lock().push(span);
    }

    /// All spans so far, in the order in which they ended. What a device has not run yet comes with a later call.
    pub fn spans(&self) -> Vec<OpSpan> {
        self.settle();
        self.0.spans.lock().clone()
    }

    /// All spans so far, in the order in which they ended; they are forgotten here.
    pub fn take(&self) -> Vec<OpSpan> {
        self.settle();
        std::mem::take(&mut self.0.spans.lock())
    }

    /// Takes over what has run by now.
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

    /// Not run yet, run, or never.
    struct Later(Arc<AtomicU8>);

    impl Pending for Later {
        fn poll(&self) -> Poll<Option<OpSpan>> {
            let (start, end) = (Duration::from_millis(1), Duration::from_millis(2));
            match self.0.load(Ordering::Relaxed) {
                0 => Poll::Pending,
                1 => Poll::Ready(Some(OpSpan { label: "later", stream: "a".into(), start, end })),
                _ => Poll::Ready(None),
            }
        }
    }

    #[test]
    fn a_span_comes_when_it_has_run_and_in_the_order_of_ends() {
        let (timeline, states) = (Timeline::new(), [0, 0, 0].map(|s| Arc::new(AtomicU8::new(s))));
        for state in &states {
            timeline.expect(Box::new(Later(Arc::clone(state))));
        }
        let (start, end) = (Duration::ZERO, Duration::from_millis(3));
        timeline.push(OpSpan { label: "now", stream: "b".into(), start, end });
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
