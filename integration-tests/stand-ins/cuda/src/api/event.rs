//! Events.

use std::sync::Arc;

use super::{Out, driver};
use crate::driver::capture::forbid_while_capturing;
use crate::driver::device::current;
use crate::driver::event::{EVENTS, Event};
use crate::driver::stream::stream;
use crate::error::{Failure, Outcome};
use stand_in_shared::fresh_number;

/// `CU_EVENT_BLOCKING_SYNC` and `CU_EVENT_DISABLE_TIMING`.
const BLOCKING_SYNC: u32 = 1;
const DISABLE_TIMING: u32 = 2;

fn elapsed(milliseconds: &Out<f32>, start: usize, end: usize) -> Outcome {
    current()?;
    let start = EVENTS.get(start)?.time()?;
    let end = EVENTS.get(end)?.time()?;
    let between = if end >= start {
        (end - start).as_secs_f64()
    } else {
        -(start - end).as_secs_f64()
    };
    milliseconds.put((between * 1e3) as f32)
}

driver! {
    cuEventCreate(found: Out<usize>, flags: u32) {
        if flags & !(BLOCKING_SYNC | DISABLE_TIMING) != 0 {
            return Err(Failure::InvalidValue);
        }
        let event = Event::new(current()?, flags & DISABLE_TIMING == 0);
        found.put(EVENTS.insert(fresh_number(), Arc::new(event)))
    }

    cuEventDestroy_v2(event: usize) {
        current()?;
        EVENTS.remove(event)?;
        Ok(())
    }

    cuEventRecord(event: usize, on: usize) {
        let on = stream(on)?;
        current()?;
        on.record(&*EVENTS.get(event)?)
    }

    cuEventQuery(event: usize) {
        let device = current()?;
        let ticket = EVENTS.get(event)?.ticket()?;
        forbid_while_capturing()?;
        let done = ticket.is_none_or(|ticket| ticket.time().is_some());
        device.check()?;
        if done { Ok(()) } else { Err(Failure::NotReady) }
    }

    cuEventSynchronize(event: usize) {
        let device = current()?;
        if let Some(ticket) = EVENTS.get(event)?.ticket()? {
            ticket.wait();
        }
        device.check()
    }

    cuEventElapsedTime(milliseconds: Out<f32>, start: usize, end: usize) {
        elapsed(&milliseconds, start, end)
    }

    cuEventElapsedTime_v2(milliseconds: Out<f32>, start: usize, end: usize) {
        elapsed(&milliseconds, start, end)
    }
}
