//! A stream of the scheduler: its queue, and the thread that runs its operations.

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::current::{self, Current};
use super::{Clock, Entry, Scheduler, Shared, State, StreamState};
use crate::device::DeviceError;
use crate::host::HostEvent;
use crate::host::queue::{Item, Queue, StreamInfo, spawn};

/// The place of an event in the order of operations.
pub(in crate::host) struct Mark {
    /// Weak, because the scheduler holds events. It lives until every stream has run all its items.
    scheduler: Weak<Shared>,
    /// The numbers of the items that are ordered before the event.
    ordered: Clock,
    /// The stream's clock when the event was reached.
    clock: OnceLock<Clock>,
}

impl Mark {
    pub(super) fn ordered(&self) -> &Clock {
        &self.ordered
    }

    pub(super) fn clock(&self) -> Option<&Clock> {
        self.clock.get()
    }

    pub(super) fn set_clock(&self, clock: Clock) {
        let _ = self.clock.set(clock);
    }

    /// Runs one step, so that a host that polls makes progress.
    pub(in crate::host) fn poll(&self, event: &HostEvent) {
        self.drive(1, None, event);
    }

    /// Runs streams until the event is reached or the limit passes.
    pub(in crate::host) fn wait(&self, event: &HostEvent, limit: Duration) {
        // An hour replaces a limit that the clock cannot represent.
        let deadline = Instant::now()
            .checked_add(limit)
            .or(Instant::now().checked_add(Duration::from_secs(3600)));
        self.drive(usize::MAX, deadline, event);
    }

    /// Runs streams towards the event; once it is reached, the host is ordered after it.
    fn drive(&self, steps: usize, deadline: Option<Instant>, event: &HostEvent) {
        let Some(scheduler) = self.scheduler.upgrade().map(Scheduler) else {
            return;
        };
        scheduler.drive(steps, deadline, |_| event.result().is_some());
        if event.result().is_some()
            && let Some(clock) = self.clock.get()
        {
            scheduler.0.state.lock().host.join(clock);
        }
    }
}

/// A stream of the scheduler.
pub(in crate::host) struct SeededStream {
    scheduler: Scheduler,
    index: usize,
    info: Arc<StreamInfo>,
}

impl Scheduler {
    pub(in crate::host) fn create_stream(
        &self,
        info: StreamInfo,
    ) -> Result<SeededStream, DeviceError> {
        let info = Arc::new(info);
        let mut state = self.0.state.lock();
        let index = state.streams.len();
        state.streams.push(StreamState {
            info: Arc::clone(&info),
            queue: Default::default(),
            end: None,
            failed: None,
            next: None,
            sequence: 0,
            blocked: None,
            enqueued: 0,
            ordered: Clock::default(),
            epoch: 0,
            clock: Clock::default(),
        });

        drop(state);
        let scheduler = self.clone();
        spawn(&info, move || work(&scheduler, index))?;
        Ok(SeededStream {
            scheduler: self.clone(),
            index,
            info,
        })
    }
}

impl Queue for SeededStream {
    fn info(&self) -> &StreamInfo {
        &self.info
    }

    fn push(&self, item: Item) -> Result<(), DeviceError> {
        let mut guard = self.scheduler.0.state.lock();
        let state = &mut *guard;
        let stream = &mut state.streams[self.index];
        if stream.end.is_some() {
            return Err(self.info.closed());
        }
        if let Item::Wait(_, event) = &item
            && let Some(mark) = event.mark()
        {
            stream.ordered.join(&mark.ordered);
        }
        stream.append(self.index, item, &state.host);
        self.run_some(guard);
        Ok(())
    }

    fn record(&self) -> HostEvent {
        let mut guard = self.scheduler.0.state.lock();
        let state = &mut *guard;
        let stream = &mut state.streams[self.index];
        if let Some(end) = &stream.end {
            return end.clone();
        }
        let event = self.event(stream);
        stream.append(self.index, Item::Record(event.clone()), &state.host);
        self.run_some(guard);
        event
    }

    fn close(&self) {
        let mut state = self.scheduler.0.state.lock();
        let state = &mut *state;
        let stream = &mut state.streams[self.index];
        if stream.end.is_none() {
            let end = self.event(stream);
            stream.append(self.index, Item::Record(end.clone()), &state.host);
            stream.end = Some(end);
            self.scheduler.0.turn.notify_all();
        }
    }
}

impl SeededStream {
    /// A point after everything enqueued so far.
    fn event(&self, stream: &StreamState) -> HostEvent {
        let mut ordered = stream.ordered.clone();
        ordered.set(self.index, stream.enqueued);
        let mark = Mark {
            scheduler: Arc::downgrade(&self.scheduler.0),
            ordered,
            clock: OnceLock::new(),
        };
        HostEvent::of_scheduler(&self.info, mark)
    }

    /// Runs a few steps of any streams; half of the time, no step.
    fn run_some(&self, mut state: MutexGuard<'_, State>) {
        let steps = if state.draw(2) == 0 { 0 } else { state.draw(6) };
        drop(state);
        if steps > 0 {
            self.scheduler.drive(steps, None, |_| false);
        }
    }
}

impl StreamState {
    fn append(&mut self, index: usize, item: Item, host: &Clock) {
        self.enqueued += 1;
        self.ordered.set(index, self.enqueued);
        self.queue.push_back(Entry {
            item,
            sequence: self.enqueued,
            host: host.clone(),
        });
    }
}

impl Drop for SeededStream {
    fn drop(&mut self) {
        self.close();
        // Items that wait for other streams run when the host waits for those.
        let index = self.index;
        self.scheduler.drive(usize::MAX, None, move |state| {
            state.streams[index].queue.is_empty() && state.streams[index].blocked.is_none()
        });
        self.scheduler.0.turn.notify_all();
    }
}

/// The stream's thread: runs each operation when the scheduler selects the stream.
fn work(scheduler: &Scheduler, index: usize) {
    loop {
        let (enqueued, op, info) = {
            let mut state = scheduler.0.state.lock();
            loop {
                let running = state.running == Some(index);
                let stream = &mut state.streams[index];
                if running && let Some((enqueued, op)) = stream.next.take() {
                    break (enqueued, op, Arc::clone(&stream.info));
                }
                if stream.end.is_some() && stream.queue.is_empty() && stream.next.is_none() {
                    return;
                }
                scheduler.0.turn.wait(&mut state);
            }
        };
        let label = enqueued.label;
        let current = Current::new(scheduler.clone(), index, label);
        let result = current::with(current, || {
            info.call(enqueued, op, &mut Duration::default())
        });
        let mut state = scheduler.0.state.lock();
        let violation = state
            .violations
            .iter()
            .rev()
            .find(|v| v.second == (Arc::clone(&info.name), label));
        let result = match (result, violation) {
            (Ok(sound), Some(violation)) if !sound => Err(DeviceError::Operation {
                stream: info.name.to_string(),
                op: label.to_owned(),
                cause: violation.to_string().into(),
            }),
            (result, _) => result.map(|_| ()),
        };
        // A violation found while the operation ran may have failed the stream already.
        if let Err(error) = result {
            state.streams[index].failed.get_or_insert(error);
        }
        state.running = None;
        drop(state);
        super::note_progress();
        scheduler.0.turn.notify_all();
    }
}
