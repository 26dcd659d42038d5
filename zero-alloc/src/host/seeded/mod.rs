//! The seeded scheduler: streams whose operations interleave in an order that follows from a seed.
//!
//! Nothing runs by itself. One thing runs at a time: a host thread, or one operation; which one is drawn from the
//! seed whenever the host enqueues or waits. An operation that waits in a [`Monitor`](super::Monitor) gives way. So every
//! order that the streams and events allow can come up, and comes up again with the same seed, as long as one
//! host thread enqueues; with several, their own timing is part of the order.
//!
//! A [checker](checker) watches what operations touch through
//! [`DeviceSlice::as_host`](crate::device::DeviceSlice::as_host) and its twin, and knows what is ordered by streams,
//! events, gates and the host. The operation that breaks the order fails, with an error that names the block,
//! the operations and their streams.

mod checker;
mod clock;
mod current;
mod seeded_stream;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use self::checker::{Checker, Touch};
use super::op::{Item, Named, Op};
use super::{HostEvent, HostStream};
use crate::device::{BlockNote, DeviceError};
pub use checker::{Violation, ViolationKind};
pub(super) use clock::Clock;
pub(super) use current::{block, cross, in_operation, pass};
pub(super) use seeded_stream::{Mark, SeededStream};

/// Rises whenever a gate changes, so that blocked operations are asked again.
static PROGRESS: AtomicU64 = AtomicU64::new(0);

pub(super) fn progress() {
    PROGRESS.fetch_add(1, Ordering::Relaxed);
}

pub(super) fn progress_so_far() -> u64 {
    PROGRESS.load(Ordering::Relaxed)
}

/// A scheduler; cloning gives another handle of the same one.
#[derive(Clone)]
pub(super) struct Scheduler(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    turn: Condvar,
}

struct State {
    random: u64,
    streams: Vec<StreamState>,
    /// The stream whose operation runs; the host threads wait meanwhile.
    running: Option<usize>,
    /// What the host has waited for.
    host: Clock,
    checker: Checker,
    violations: Vec<Violation>,
}

struct Entry {
    item: Item,
    /// Its number in the queue.
    sequence: u64,
    /// What the host knew when it enqueued this.
    host: Clock,
}

struct StreamState {
    named: Arc<Named>,
    queue: VecDeque<Entry>,
    end: Option<HostEvent>,
    failed: Option<DeviceError>,
    /// The operation whose turn it is, for the stream's thread to take.
    next: Option<(&'static str, Op)>,
    /// Its number.
    sequence: u64,
    /// The operation waits in a gate: the progress seen then, and its limit.
    blocked: Option<(u64, Option<Instant>)>,
    /// How many items were enqueued, and what is ordered before the next one, by their numbers.
    enqueued: u64,
    ordered: Clock,
    /// How many operations have begun or passed gates, and what they know.
    epoch: u64,
    knows: Clock,
}

impl std::fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Scheduler({} streams)", self.0.state.lock().streams.len())
    }
}

impl Scheduler {
    pub(super) fn new(seed: u64) -> Self {
        let state = State {
            random: seed,
            streams: Vec::new(),
            running: None,
            host: Clock::default(),
            checker: Checker::default(),
            violations: Vec::new(),
        };
        Self(Arc::new(Shared { state: Mutex::new(state), turn: Condvar::new() }))
    }

    /// Everything that was found so far.
    pub(super) fn violations(&self) -> Vec<Violation> {
        self.0.state.lock().violations.clone()
    }

    /// Lets streams run until `done`, for `steps` steps or until `deadline`; says whether it is done. With no
    /// deadline it also ends when nothing can run.
    fn drive(&self, mut steps: usize, deadline: Option<Instant>, done: impl Fn(&State) -> bool) -> bool {
        if in_operation() {
            return false;
        }
        let mut state = self.0.state.lock();
        loop {
            if state.running.is_some() {
                self.0.turn.wait(&mut state);
                continue;
            }
            if done(&state) {
                return true;
            }
            if steps == 0 {
                return false;
            }
            if let Some(stream) = state.pick() {
                steps -= 1;
                self.step(&mut state, stream);
                continue;
            }
            // Other host threads may bring something to do.
            let Some(deadline) = deadline else { return false };
            if Instant::now() >= deadline {
                return false;
            }
            self.0.turn.wait_for(&mut state, Duration::from_millis(1));
        }
    }

    /// Runs one item of a stream, or the rest of its blocked operation until it blocks again.
    fn step(&self, state: &mut MutexGuard<'_, State>, index: usize) {
        let stream = &mut state.streams[index];
        if stream.blocked.is_none() {
            let Some(entry) = stream.queue.pop_front() else { return };
            stream.sequence = entry.sequence;
            stream.knows.join(&entry.host);
            match entry.item {
                Item::Record(event) => {
                    stream.tick(index);
                    if let Some(mark) = event.mark() {
                        mark.knows(stream.knows.clone());
                    }
                    event.reach(stream.failed.clone());
                    return;
                }
                Item::Wait(event) => {
                    if let Some(known) = event.mark().and_then(Mark::known) {
                        stream.knows.join(&known);
                    }
                    if let Some(Err(error)) = event.result() {
                        stream.failed.get_or_insert(error);
                    }
                    return;
                }
                Item::Run(label, op) => {
                    if stream.failed.is_some() {
                        return;
                    }
                    stream.tick(index);
                    stream.next = Some((label, op));
                }
            }
        }
        state.running = Some(index);
        self.0.turn.notify_all();
        while state.running.is_some() {
            self.0.turn.wait(state);
        }
    }

    /// Notes a pool's block.
    pub(super) fn note(&self, note: &BlockNote<'_, HostStream, HostEvent>) {
        let mut state = self.0.state.lock();
        let state = &mut *state;
        match *note {
            BlockNote::Taken { ptr, bytes, purpose, stream } => {
                state.checker.begin(range(ptr, bytes), purpose, &stream.named_arc());
            }
            BlockNote::Freed { ptr, bytes, home, uses } => {
                let Some(home) = home.seat() else { return };
                let mut allowed = Clock::default();
                if let Some(stream) = state.streams.get(home.index()) {
                    allowed.join(&stream.ordered);
                }
                for mark in uses.iter().filter_map(|(_, event)| event.mark()) {
                    allowed.join(mark.ordered());
                }
                let name = Arc::clone(&home.named().name);
                let violation = state.checker.end(range(ptr, bytes), allowed, &name, &state.host);
                if let Some(violation) = violation {
                    let message = violation.to_string();
                    let error = DeviceError::Operation { stream: name.to_string(), op: "free".into(), message };
                    state.streams[home.index()].failed.get_or_insert(error);
                    state.violations.push(violation);
                }
            }
        }
    }

    /// What an operation that runs now touches.
    fn touch(&self, index: usize, range: Range<usize>, write: bool, label: &'static str, crossed: bool) -> bool {
        let mut state = self.0.state.lock();
        let state = &mut *state;
        let stream = &state.streams[index];
        let touch = Touch {
            seat: index,
            epoch: stream.epoch,
            sequence: stream.sequence,
            stream: Arc::clone(&stream.named.name),
            label,
            crossed,
        };
        let violation = state.checker.access(range, write, &touch, &stream.knows);
        let sound = violation.is_none();
        state.violations.extend(violation);
        sound
    }
}

fn range(ptr: *mut u8, bytes: usize) -> Range<usize> {
    ptr.addr()..ptr.addr() + bytes
}

impl State {
    /// A stream that can go on, by the seed.
    fn pick(&mut self) -> Option<usize> {
        let progress = progress_so_far();
        let can_run = |stream: &StreamState| match &stream.blocked {
            Some((seen, limit)) => *seen != progress || limit.is_some_and(|limit| Instant::now() >= limit),
            None => match stream.queue.front().map(|entry| &entry.item) {
                Some(Item::Wait(event)) => event.result().is_some(),
                Some(_) => true,
                None => false,
            },
        };
        let ready: Vec<usize> = (0..self.streams.len()).filter(|i| can_run(&self.streams[*i])).collect();
        if ready.is_empty() {
            return None;
        }
        Some(ready[self.draw(ready.len())])
    }

    /// splitmix64, below `bound`.
    fn draw(&mut self, bound: usize) -> usize {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound.max(1) as u64) as usize
    }
}

impl StreamState {
    /// A new moment of the stream's own time.
    fn tick(&mut self, index: usize) {
        self.epoch += 1;
        self.knows.set(index, self.epoch);
    }
}
