//! Streams. A stream is a queue or, during a capture, a position in a graph.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::capture::Capture;
use super::device::{self, Device};
use super::event::{EVENTS, Event, Recorded, Ticket};
use super::op::Op;
use super::queue::{Queue, wait_for_all};
use crate::error::{Failure, Outcome, say};
use stand_in_shared::{Handles, fresh_number, lock};

/// A stream's part in a capture: its next operation depends on the nodes `after`.
#[derive(Clone)]
pub(crate) struct Part {
    pub(crate) capture: Arc<Capture>,
    pub(crate) after: Vec<usize>,
}

pub(crate) struct Stream {
    pub(crate) number: usize,
    pub(crate) device: &'static Device,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    queue: Queue,
    part: Mutex<Option<Part>>,
}

static STREAMS: Handles<Stream> = Handles::new();

/// The handle of the calling thread's own default stream; 0 and 1 are the legacy default stream.
const PER_THREAD: usize = 2;

/// The numbers of the legacy default streams, by device.
static LEGACY: Mutex<Option<HashMap<u32, usize>>> = Mutex::new(None);

thread_local! {
    /// The numbers of this thread's default streams, by device.
    static OF_THREAD: RefCell<HashMap<u32, usize>> = RefCell::default();
}

/// The stream of a handle. The default streams are rejected unless a test accepts them, since this
/// workspace uses them only where a framework does.
pub(crate) fn stream(number: usize) -> Outcome<Arc<Stream>> {
    if number > PER_THREAD {
        return Ok(STREAMS.get(number)?);
    }
    let device = device::current().ok();
    let Some(device) = device.filter(|device| device.accepts_default_streams()) else {
        say!("the default stream (handle {number}) is refused");
        return Err(Failure::InvalidHandle);
    };
    if number == PER_THREAD {
        OF_THREAD.with(|numbers| default_stream(device, &mut numbers.borrow_mut()))
    } else {
        default_stream(device, lock(&LEGACY).get_or_insert_default())
    }
}

/// The default stream of a device among `numbers`, made anew for a new context.
fn default_stream(
    device: &'static Device,
    numbers: &mut HashMap<u32, usize>,
) -> Outcome<Arc<Stream>> {
    let known = numbers.get(&device.ordinal);
    if let Some(stream) = known.and_then(|number| STREAMS.get(*number).ok()) {
        return Ok(stream);
    }
    let number = create(device, 0, 0)?;
    numbers.insert(device.ordinal, number);
    Ok(STREAMS.get(number)?)
}

/// A new stream of the device.
pub(crate) fn create(device: &'static Device, flags: u32, priority: i32) -> Outcome<usize> {
    let number = fresh_number();
    let queue = Queue::start(device, number)?;
    let stream = Stream {
        number,
        device,
        flags,
        priority,
        queue,
        part: Mutex::new(None),
    };
    Ok(STREAMS.insert(number, Arc::new(stream)))
}

/// Destroys the handle. Submitted operations still run.
pub(crate) fn destroy(number: usize) -> Outcome {
    stream(number)?.part().map_or(Ok(()), |part| {
        part.capture.invalidate();
        Err(Failure::CaptureUnsupported)
    })?;
    STREAMS.remove(number)?;
    Ok(())
}

/// All streams of a device.
pub(crate) fn of_device(device: &'static Device) -> Vec<Arc<Stream>> {
    STREAMS
        .select(|s| s.device.ordinal == device.ordinal)
        .into_iter()
        .map(|(_, stream)| stream)
        .collect()
}

/// Destroys all streams and events of the device's context, after their work.
pub(crate) fn destroy_all(device: &'static Device) {
    for (number, stream) in STREAMS.select(|s| s.device.ordinal == device.ordinal) {
        drop(stream);
        let _ = STREAMS.remove(number);
    }
    wait_for_all(device.ordinal);
    for (number, _) in EVENTS.select(|e| e.device.ordinal == device.ordinal) {
        let _ = EVENTS.remove(number);
    }
}

impl Stream {
    pub(crate) fn part(&self) -> Option<Part> {
        lock(&self.part).clone()
    }

    pub(crate) fn set_part(&self, part: Option<Part>) {
        *lock(&self.part) = part;
    }

    /// Enqueues or captures an operation. The current context of this thread must be the stream's.
    pub(crate) fn submit(&self, op: Op) -> Outcome {
        if device::current()?.ordinal != self.device.ordinal {
            return Err(Failure::InvalidHandle);
        }
        let mut part = lock(&self.part);
        match &mut *part {
            None => self.queue.push(op),
            Some(part) => {
                let node = part.capture.add(op, std::mem::take(&mut part.after))?;
                part.after = vec![node];
            }
        }
        Ok(())
    }

    pub(crate) fn record(&self, event: &Event) -> Outcome {
        if event.device.ordinal != self.device.ordinal {
            return Err(Failure::InvalidHandle);
        }
        self.device.check()?;
        let part = lock(&self.part);
        let recorded = match &*part {
            None => {
                let ticket = Arc::new(Ticket::default());
                self.queue.push(Op::Record(ticket.clone()));
                Recorded::Stream(ticket)
            }
            Some(part) => Recorded::Capture(part.capture.clone(), part.after.clone()),
        };
        *lock(&event.recorded) = recorded;
        Ok(())
    }

    /// Makes all later operations wait for the event's last recording. An event that was never
    /// recorded is complete.
    pub(crate) fn wait_for(self: &Arc<Self>, event: &Event) -> Outcome {
        self.device.check()?;
        let mut part = lock(&self.part);
        match (event.recorded(), &mut *part) {
            (Recorded::Nothing, _) => {}
            (Recorded::Stream(ticket), None) => self.queue.push(Op::Wait(ticket)),
            (Recorded::Stream(_), Some(part)) => {
                part.capture.invalidate();
                return Err(Failure::CaptureIsolation);
            }
            (Recorded::Capture(capture, after), None) => {
                capture.join(self.clone())?;
                *part = Some(Part { capture, after });
            }
            (Recorded::Capture(capture, after), Some(part)) => {
                if !Arc::ptr_eq(&capture, &part.capture) {
                    capture.invalidate();
                    part.capture.invalidate();
                    return Err(Failure::CaptureMerge);
                }
                part.after.extend(
                    after
                        .iter()
                        .filter(|node| !part.after.contains(node))
                        .copied()
                        .collect::<Vec<_>>(),
                );
            }
        }

        Ok(())
    }

    fn refuse_in_capture(&self) -> Outcome {
        match self.part() {
            None => Ok(()),
            Some(part) => {
                part.capture.invalidate();
                Err(Failure::CaptureUnsupported)
            }
        }
    }

    pub(crate) fn query(&self) -> Outcome {
        self.device.check()?;
        self.refuse_in_capture()?;
        let idle = self.queue.is_idle();
        self.device.check()?;
        if idle { Ok(()) } else { Err(Failure::NotReady) }
    }

    pub(crate) fn synchronize(&self) -> Outcome {
        self.device.check()?;
        self.refuse_in_capture()?;
        self.queue.wait();
        self.device.check()
    }
}
