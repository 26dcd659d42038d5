//! A stream's place at the scheduler: enqueuing, and the thread that runs its operations.

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::current::{self, Current};
use super::{Clock, Entry, Scheduler, Shared, State, StreamState};
use crate::device::DeviceError;
use crate::host::HostEvent;
use crate::host::op::{Item, Named};

/// Where an event lies: what is ordered before it, and, once reached, what was known there.
pub(in crate::host) struct Mark {
    /// Weak, since the scheduler keeps events. It lives as long as a stream has anything to run.
    scheduler: Weak<Shared>,
    ordered: Clock,
    known: OnceLock<Clock>,
}

impl Mark {
    pub(super) fn ordered(&self) -> &Clock {
        &self.ordered
    }

    pub(super) fn known(&self) -> Option<Clock> {
        self.known.get().cloned()
    }

    pub(super) fn knows(&self, clock: Clock) {
        let _ = self.known.set(clock);
    }

    /// Lets something run, as time would.
    pub(in crate::host) fn poll(&self, event: &HostEvent) {
        self.drive(1, None, event);
    }

    /// Lets streams run until the event is reached or the limit is over.
    pub(in crate::host) fn wait(&self, event: &HostEvent, limit: Duration) {
        // A limit beyond the clock's reach is as good as an hour.
        let deadline = Instant::now().checked_add(limit).or(Instant::now().checked_add(Duration::from_secs(3600)));
        self.drive(usize::MAX, deadline, event);
    }

    /// Lets streams run towards the event; once it is reached, the host knows what was known there.
    fn drive(&self, steps: usize, deadline: Option<Instant>, event: &HostEvent) {
        let Some(scheduler) = self.scheduler.upgrade().map(Scheduler) else { return };
        scheduler.drive(steps, deadline, |_| event.result().is_some());
        if event.result().is_some()
            && let Some(known) = self.known.get()
        {
            scheduler.0.state.lock().host.join(known);
        }
    }
}

/// A stream at the scheduler.
pub(in crate::host) struct SeededStream {
    scheduler: Scheduler,
    index: usize,
    named: Arc<Named>,
}

impl Scheduler {
    /// A place for one more stream.
    pub(in crate::host) fn seat(&self, named: Named) -> Result<SeededStream, DeviceError> {
        let named = Arc::new(named);
        let mut state = self.0.state.lock();
        let index = state.streams.len();
        state.streams.push(StreamState {
            named: Arc::clone(&named),
            queue: Default::default(),
            end: None,
            failed: None,
            next: None,
            sequence: 0,
            blocked: None,
            enqueued: 0,
            ordered: Clock::default(),
            epoch: 0,
            knows: Clock::default(),
        });
        drop(state);
        let scheduler = self.clone();
        std::thread::Builder::new()
            .name(named.thread_name())
            .spawn(move || work(&scheduler, index))
            .map_err(|e| DeviceError::Driver { call: "thread spawn", message: e.to_string() })?;
        Ok(SeededStream { scheduler: self.clone(), index, named })
    }
}

impl SeededStream {
    pub(in crate::host) fn named(&self) -> &Named {
        &self.named
    }

    pub(super) fn index(&self) -> usize {
        self.index
    }

    pub(in crate::host) fn push(&self, item: Item) -> Result<(), DeviceError> {
        let mut guard = self.scheduler.0.state.lock();
        let state = &mut *guard;
        let stream = &mut state.streams[self.index];
        if stream.end.is_some() {
            return Err(self.named.closed());
        }
        if let Item::Wait(event) = &item
            && let Some(mark) = event.mark()
        {
            stream.ordered.join(&mark.ordered);
        }
        stream.append(self.index, item, &state.host);
        self.run_some(guard);
        Ok(())
    }

    pub(in crate::host) fn record(&self) -> HostEvent {
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

    /// A point behind what is enqueued so far.
    fn event(&self, stream: &StreamState) -> HostEvent {
        let mut ordered = stream.ordered.clone();
        ordered.set(self.index, stream.enqueued);
        let mark = Mark { scheduler: Arc::downgrade(&self.scheduler.0), ordered, known: OnceLock::new() };
        HostEvent::marked(Arc::clone(&self.named.name), mark)
    }

    pub(in crate::host) fn close(&self) {
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

    /// Lets the streams run a few steps, none at all half of the time.
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
        self.queue.push_back(Entry { item, sequence: self.enqueued, host: host.clone() });
    }
}

impl Drop for SeededStream {
    fn drop(&mut self) {
        self.close();
        // What is left runs as far as it can; the rest runs when somebody waits for what it needs.
        let index = self.index;
        self.scheduler.drive(usize::MAX, None, move |state| {
            state.streams[index].queue.is_empty() && state.streams[index].blocked.is_none()
        });
        self.scheduler.0.turn.notify_all();
    }
}

/// The stream's thread: runs its operations when it is their turn.
fn work(scheduler: &Scheduler, index: usize) {
    loop {
        let (label, op, named) = {
            let mut state = scheduler.0.state.lock();
            loop {
                let running = state.running == Some(index);
                let stream = &mut state.streams[index];
                if running && let Some((label, op)) = stream.next.take() {
                    break (label, op, Arc::clone(&stream.named));
                }
                if stream.end.is_some() && stream.queue.is_empty() && stream.next.is_none() {
                    return;
                }
                scheduler.0.turn.wait(&mut state);
            }
        };
        let current = Current::new(scheduler.clone(), index, label);
        let result = current::with(current, || named.call(label, op));
        let mut state = scheduler.0.state.lock();
        let violation = state.violations.iter().rev().find(|v| v.second == (Arc::clone(&named.name), label));
        let result = match (result, violation) {
            (Ok(sound), Some(violation)) if !sound => Err(DeviceError::Operation {
                stream: named.name.to_string(),
                op: label.to_owned(),
                message: violation.to_string(),
            }),
            (result, _) => result.map(|_| ()),
        };
        state.streams[index].failed = result.err();
        state.running = None;
        drop(state);
        super::progress();
        scheduler.0.turn.notify_all();
    }
}
