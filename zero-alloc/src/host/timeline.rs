//! A recorder of what ran when on which stream.

use std::sync::Arc;
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

struct Inner {
    origin: Instant,
    spans: Mutex<Vec<OpSpan>>,
}

/// Collects [`OpSpan`]s of all streams that were made with it. Cloning gives another handle of the same one.
///
/// Streams get it by [`HostDevice::with_timeline`](crate::host::HostDevice::with_timeline). Waits for events
/// are recorded too, labelled `"wait"`, so that idle time can be told from work.
#[derive(Clone)]
pub struct Timeline(Arc<Inner>);

impl Default for Timeline {
    fn default() -> Self {
        Self(Arc::new(Inner { origin: Instant::now(), spans: Mutex::default() }))
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

    /// All spans so far, in the order in which they ended.
    pub fn spans(&self) -> Vec<OpSpan> {
        self.0.spans.lock().clone()
    }

    /// All spans so far; they are forgotten here.
    pub fn take(&self) -> Vec<OpSpan> {
        std::mem::take(&mut self.0.spans.lock())
    }
}
