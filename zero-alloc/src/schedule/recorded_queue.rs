//! The queues of a recorder's streams.

use std::sync::Arc;

use super::recorder::{Item, Operation, RecordedPoint, Recorder};
use crate::device::DeviceError;
use crate::host::HostEvent;
use crate::host::queue::{Item as QueueItem, Queue, StreamInfo};

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
