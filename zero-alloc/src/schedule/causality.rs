//! Which points of streams a program knows to be reached, by what it has waited for alone.
//!
//! A pool asks whether an event is reached before it reuses memory. In modelled time and in a
//! schedule the answer must not depend on how fast threads are, so an event counts as reached once
//! the program has waited for it, or for one that is behind it.

use std::sync::Arc;

use parking_lot::Mutex;

/// For each stream, the number of its points that are reached.
type Clock = Vec<u64>;

#[derive(Debug, Default)]
struct Clocks {
    /// For each stream, the points that are reached when all that is enqueued on it has run.
    streams: Vec<Clock>,
    /// The points that the program knows to be reached.
    program: Clock,
}

/// The streams of one program.
#[derive(Clone, Debug, Default)]
pub(crate) struct Causality(Arc<Mutex<Clocks>>);

/// A stream of a program.
#[derive(Clone, Debug)]
pub(crate) struct CausalStream {
    program: Causality,
    stream: usize,
}

/// A point in a stream.
#[derive(Clone, Debug)]
pub(crate) struct CausalPoint {
    of: CausalStream,
    clock: Arc<[u64]>,
}

fn join(clock: &mut Clock, other: &[u64]) {
    if clock.len() < other.len() {
        clock.resize(other.len(), 0);
    }
    for (known, other) in clock.iter_mut().zip(other) {
        *known = (*known).max(*other);
    }
}

impl Causality {
    pub(crate) fn add_stream(&self) -> CausalStream {
        let mut clocks = self.0.lock();
        clocks.streams.push(Clock::new());
        CausalStream {
            program: self.clone(),
            stream: clocks.streams.len() - 1,
        }
    }
}

impl CausalStream {
    /// The point behind everything that is enqueued so far.
    pub(crate) fn record(&self) -> CausalPoint {
        let mut clocks = self.program.0.lock();
        let clock = &mut clocks.streams[self.stream];
        if clock.len() <= self.stream {
            clock.resize(self.stream + 1, 0);
        }
        clock[self.stream] += 1;
        CausalPoint {
            of: self.clone(),
            clock: clock.as_slice().into(),
        }
    }

    /// Orders later operations behind `point`.
    pub(crate) fn wait(&self, point: &CausalPoint) {
        if Arc::ptr_eq(&self.program.0, &point.of.program.0) {
            join(
                &mut self.program.0.lock().streams[self.stream],
                &point.clock,
            );
        }
    }
}

impl CausalPoint {
    /// The program has waited for the point.
    pub(crate) fn program_waited(&self) {
        join(&mut self.of.program.0.lock().program, &self.clock);
    }

    /// Whether the program knows that the point is reached.
    pub(crate) fn is_known(&self) -> bool {
        let stream = self.of.stream;
        let known = self.of.program.0.lock().program.get(stream).copied();
        known.unwrap_or(0) >= self.clock[stream]
    }
}
