//! Events: points in a stream that other streams and the host can wait for.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use super::capture::Capture;
use super::device::Device;
use crate::error::{Failure, Outcome};
use stand_in_shared::{Handles, lock};

/// One recording of an event, complete when its stream has reached it.
#[derive(Debug, Default)]
pub(crate) struct Ticket {
    done: Mutex<Option<Instant>>,
    changed: Condvar,
}

impl Ticket {
    pub(crate) fn complete(&self) {
        *lock(&self.done) = Some(Instant::now());
        self.changed.notify_all();
    }

    pub(crate) fn time(&self) -> Option<Instant> {
        *lock(&self.done)
    }

    pub(crate) fn wait(&self) {
        let done = lock(&self.done);
        drop(
            self.changed
                .wait_while(done, |done| done.is_none())
                .unwrap_or_else(PoisonError::into_inner),
        );
    }
}

/// The stream or capture that an event was last recorded in.
#[derive(Clone)]
pub(crate) enum Recorded {
    Nothing,
    Stream(Arc<Ticket>),
    /// In a capture, after these nodes.
    Capture(Arc<Capture>, Vec<usize>),
}

pub(crate) struct Event {
    pub(crate) device: &'static Device,
    pub(crate) timed: bool,
    pub(crate) recorded: Mutex<Recorded>,
}

pub(crate) static EVENTS: Handles<Event> = Handles::new();

impl Event {
    pub(crate) fn new(device: &'static Device, timed: bool) -> Self {
        Self {
            device,
            timed,
            recorded: Mutex::new(Recorded::Nothing),
        }
    }

    pub(crate) fn recorded(&self) -> Recorded {
        lock(&self.recorded).clone()
    }

    /// The ticket of the last recording; `None` if the event was never recorded.
    pub(crate) fn ticket(&self) -> Outcome<Option<Arc<Ticket>>> {
        match self.recorded() {
            Recorded::Nothing => Ok(None),
            Recorded::Stream(ticket) => Ok(Some(ticket)),
            Recorded::Capture(capture, _) => {
                capture.invalidate();
                Err(Failure::CapturedEvent)
            }
        }
    }

    /// The completion time of the last recording, for `cuEventElapsedTime`.
    pub(crate) fn time(&self) -> Outcome<Instant> {
        if !self.timed {
            return Err(Failure::InvalidHandle);
        }
        self.ticket()?
            .ok_or(Failure::InvalidHandle)?
            .time()
            .ok_or(Failure::NotReady)
    }
}
