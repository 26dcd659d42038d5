//! Modelled time: operations cost what a test says, and streams, events and waits of the host add
//! that up, so that the times of a program follow from its order alone.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::execution::{Execution, next_number};
use crate::schedule::Causality;
use crate::timeline::{Enqueued, OpSpan};

/// The cost of an operation, by the name of its stream and its label.
type Cost = dyn Fn(&str, &str) -> Duration + Send + Sync;

/// The costs of operations, and those that have run.
pub(super) struct Model {
    cost: Box<Cost>,
    spans: Mutex<Vec<OpSpan>>,
    causality: Causality,
    /// Different for any two devices of the process.
    number: u64,
}

impl Model {
    pub(super) fn new(cost: impl Fn(&str, &str) -> Duration + Send + Sync + 'static) -> Self {
        Self {
            cost: Box::new(cost),
            spans: Mutex::default(),
            causality: Causality::default(),
            number: next_number(),
        }
    }

    /// Runs an operation of a stream whose time is `now`.
    pub(super) fn run<R>(
        &self,
        stream: &Arc<str>,
        enqueued: Enqueued,
        now: &mut Duration,
        work: impl FnOnce() -> R,
    ) -> R {
        let start = (*now).max(enqueued.at);
        *now = start + (self.cost)(stream, enqueued.label);
        // Operations that it enqueues begin when it ends.
        passed(*now);
        let result = work();
        self.spans.lock().push(enqueued.span(stream, start, *now));
        result
    }

    /// How the streams run.
    pub(super) fn execution(&self) -> Execution {
        Execution::Modelled(self.number)
    }

    /// The order of the streams.
    pub(super) fn causality(&self) -> &Causality {
        &self.causality
    }

    pub(super) fn spans(&self) -> Vec<OpSpan> {
        self.spans.lock().clone()
    }
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Model")
    }
}

thread_local! {
    /// The time of this thread: that of the latest point for which it has waited.
    static NOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// The time of this thread.
pub(super) fn now() -> Duration {
    NOW.get()
}

/// This thread has waited for a point at `time`.
pub(super) fn passed(time: Duration) {
    NOW.set(NOW.get().max(time));
}
