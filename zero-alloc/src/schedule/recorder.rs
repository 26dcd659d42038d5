//! The recorder and its schedule.

use std::sync::Arc;

use parking_lot::Mutex;

use super::Causality;
use crate::host::execution::{Execution, next_number};
use crate::timeline::Work;

/// An enqueued operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Operation {
    /// Its stream, an index of [`Schedule::streams`].
    pub stream: usize,
    /// Its label.
    pub label: &'static str,
    /// The program's phase: [`Timeline::set_phase`](crate::timeline::Timeline::set_phase).
    pub phase: &'static str,
    /// Its size.
    pub work: Work,
}

/// An action of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Item {
    /// It enqueued an operation.
    Run(Operation),
    /// It recorded an event on a stream.
    Record {
        /// An index of [`Schedule::streams`].
        stream: usize,
        /// The event's number.
        event: usize,
    },
    /// It made a stream wait for an event.
    Wait {
        /// An index of [`Schedule::streams`].
        stream: usize,
        /// The event's number.
        event: usize,
    },
    /// It waited for an event itself.
    HostWait {
        /// The event's number.
        event: usize,
    },
    /// It called [`Recorder::mark`].
    Mark,
}

/// A recorded program.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    /// The names of its streams.
    pub streams: Vec<Arc<str>>,
    /// Its actions, in order.
    pub items: Vec<Item>,
    pub(super) events: usize,
}

impl Schedule {
    /// The enqueued operations, in order.
    pub fn operations(&self) -> impl Iterator<Item = &Operation> {
        self.items.iter().filter_map(|item| match item {
            Item::Run(operation) => Some(operation),
            _ => None,
        })
    }
}

/// Makes devices whose streams record what is enqueued on them, into one schedule. Clones record
/// into the same one.
///
/// One thread uses the streams of a recorder: the order of its calls is the schedule.
#[derive(Clone, Debug)]
pub struct Recorder {
    /// Different for any two recorders of the process.
    number: u64,
    pub(super) schedule: Arc<Mutex<Schedule>>,
    causality: Causality,
}

impl Default for Recorder {
    fn default() -> Self {
        Self {
            number: next_number(),
            schedule: Arc::default(),
            causality: Causality::default(),
        }
    }
}

impl Recorder {
    /// Creates a recorder of nothing so far.
    pub fn new() -> Self {
        Self::default()
    }

    /// How its streams run.
    pub(crate) fn execution(&self) -> Execution {
        Execution::Recorded(self.number)
    }

    /// Marks this point of the program, such as the end of a step.
    pub fn mark(&self) {
        self.schedule.lock().items.push(Item::Mark);
    }

    /// The order of its streams.
    pub(crate) fn causality(&self) -> &Causality {
        &self.causality
    }

    /// The schedule so far. Streams and events remain valid.
    pub fn schedule(&self) -> Schedule {
        self.schedule.lock().clone()
    }

    /// The schedule, without a copy: for the end of the program. Later items are of another one.
    pub fn take(&self) -> Schedule {
        std::mem::take(&mut *self.schedule.lock())
    }
}

/// A point in a recorded stream.
#[derive(Clone, Debug)]
pub(crate) struct RecordedPoint {
    pub(super) recorder: Recorder,
    pub(super) event: usize,
}

impl RecordedPoint {
    /// The program waits for it.
    pub(crate) fn host_waits(&self) {
        let event = self.event;
        self.recorder
            .schedule
            .lock()
            .items
            .push(Item::HostWait { event });
    }
}
