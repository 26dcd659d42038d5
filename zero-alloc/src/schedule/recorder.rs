//! The recorder, and the queues of its streams.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{Causality, ScheduledDevice};
use crate::device::DeviceError;
use crate::host::execution::{Execution, next_number};
use crate::host::queue::{Item as QueueItem, Queue, StreamInfo};
use crate::host::{HostDevice, HostEvent};

/// The size of an operation, known when it is enqueued, for its cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Work {
    /// Bytes that it reads and writes, or that it sends.
    pub bytes: u64,
    /// A number of whoever enqueued it: which communicator, which part of a model.
    pub class: u32,
}

impl Work {
    /// An operation that moves `bytes`.
    pub const fn bytes(bytes: u64) -> Self {
        Self { bytes, class: 0 }
    }

    /// Sets [`Work::class`].
    #[must_use]
    pub const fn class(mut self, class: u32) -> Self {
        self.class = class;
        self
    }
}

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
    schedule: Arc<Mutex<Schedule>>,
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

    /// The host as a device that records. Its memory is the host's, and takes no pages until
    /// something touches it; no operation runs, and `download` leaves its buffer as it is.
    pub fn host(&self) -> HostDevice {
        HostDevice::recorded(self.clone())
    }

    /// A device that is not the host, with fictitious addresses. Its streams and the host's make
    /// one schedule.
    ///
    /// # Panics
    /// The process has had 2^30 of them.
    pub fn device(&self) -> ScheduledDevice {
        ScheduledDevice::with_streams_of(self.host())
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
    recorder: Recorder,
    event: usize,
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

/// The queue of a recorded stream. It is never closed, as its program does not fail.
pub(crate) struct RecordedQueue {
    info: StreamInfo,
    recorder: Recorder,
    stream: usize,
}

impl RecordedQueue {
    pub(crate) fn new(recorder: &Recorder, info: StreamInfo) -> Self {
        let mut schedule = recorder.schedule.lock();
        schedule.streams.push(Arc::clone(&info.name));
        let stream = schedule.streams.len() - 1;
        Self {
            info,
            recorder: recorder.clone(),
            stream,
        }
    }
}

impl Queue for RecordedQueue {
    fn info(&self) -> &StreamInfo {
        &self.info
    }

    fn push(&self, item: QueueItem) -> Result<(), DeviceError> {
        let stream = self.stream;
        let recorded = match item {
            QueueItem::Run(enqueued, _) => Item::Run(Operation {
                stream,
                label: enqueued.label,
                phase: enqueued.phase,
                work: enqueued.work,
            }),
            QueueItem::Record(_) => return Ok(()),
            QueueItem::Wait(_, event) => match event.recorded() {
                Some(point) => {
                    self.info.waits_for(&event);
                    Item::Wait {
                        stream,
                        event: point.event,
                    }
                }
                // The stream has refused events of other devices.
                None => return Ok(()),
            },
        };
        self.recorder.schedule.lock().items.push(recorded);
        Ok(())
    }

    fn record(&self) -> HostEvent {
        let mut schedule = self.recorder.schedule.lock();
        let event = schedule.events;
        schedule.events += 1;
        let stream = self.stream;
        schedule.items.push(Item::Record { stream, event });
        drop(schedule);
        let point = RecordedPoint {
            recorder: self.recorder.clone(),
            event,
        };
        HostEvent::of_recorder(&self.info, point)
    }

    fn close(&self) {}
}
