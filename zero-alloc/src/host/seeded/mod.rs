//! The seeded scheduler: streams whose operations interleave in an order that follows from a seed.
//!
//! Either a host thread or one operation runs at a time. Whenever the host enqueues or waits, the
//! seed selects the operations that run. An operation that waits in a [`Monitor`](super::Monitor)
//! lets others run. So every order that streams and events allow can occur. The same seed repeats
//! an order if only one host thread enqueues; with several host threads, the order also depends on
//! their timing.
//!
//! A [checker](checker) sees accesses through
//! [`DeviceSlice::as_host`](crate::device::DeviceSlice::as_host) and `as_host_mut`, and knows the
//! order by streams, events, monitors and the host. An operation with an unordered access fails;
//! its error names the block, the operations and their streams.

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

use self::checker::{Access, Checker};
use super::execution::{Execution, next_number};
use super::queue::{Item, Op, StreamInfo};
use super::{HostEvent, HostStream};
use crate::device::{BlockNote, DeviceError, Stream};
use crate::timeline::Enqueued;
pub use checker::{Violation, ViolationKind};
pub(super) use clock::Clock;
pub(super) use current::{acquire, block, in_operation, release};
pub(super) use seeded_stream::Mark;

/// Increases with each change of a monitor; blocked operations then run again.
static PROGRESS: AtomicU64 = AtomicU64::new(0);

pub(super) fn note_progress() {
    PROGRESS.fetch_add(1, Ordering::Relaxed);
}

pub(super) fn progress() -> u64 {
    PROGRESS.load(Ordering::Relaxed)
}

/// A handle of a scheduler.
#[derive(Clone)]
pub(super) struct Scheduler(Arc<Shared>);

struct Shared {
    /// Different for any two schedulers of the process.
    number: u64,
    state: Mutex<State>,
    turn: Condvar,
}

struct State {
    random: u64,
    streams: Vec<StreamState>,
    /// The stream whose operation runs; host threads wait meanwhile.
    running: Option<usize>,
    /// The operations that the host has waited for.
    host: Clock,
    checker: Checker,
    violations: Vec<Violation>,
}

struct Entry {
    item: Item,
    /// Its number in the queue.
    sequence: u64,
    /// The host's clock when it was enqueued.
    host: Clock,
}

struct StreamState {
    info: Arc<StreamInfo>,
    queue: VecDeque<Entry>,
    end: Option<HostEvent>,
    failed: Option<DeviceError>,
    /// The operation that the stream's thread runs next.
    next: Option<(Enqueued, Op)>,
    /// The number of the current item in the queue.
    sequence: u64,
    /// Set while the operation waits in a monitor: the progress at that time, and the deadline.
    blocked: Option<(u64, Option<Instant>)>,
    /// The number of items enqueued, and the numbers of all items that are ordered before the next
    /// one.
    enqueued: u64,
    ordered: Clock,
    /// The stream's time, and the times of all streams that are ordered before it.
    epoch: u64,
    clock: Clock,
}

impl std::fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Scheduler({} streams)",
            self.0.state.lock().streams.len()
        )
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
        Self(Arc::new(Shared {
            number: next_number(),
            state: Mutex::new(state),
            turn: Condvar::new(),
        }))
    }

    /// How its streams run.
    pub(super) fn execution(&self) -> Execution {
        Execution::Seeded(self.0.number)
    }

    pub(super) fn violations(&self) -> Vec<Violation> {
        self.0.state.lock().violations.clone()
    }

    /// Runs streams until `done`, for at most `steps` steps and until `deadline`; returns whether
    /// `done` holds. Without a deadline it also returns when no stream can run.
    fn drive(
        &self,
        mut steps: usize,
        deadline: Option<Instant>,
        done: impl Fn(&State) -> bool,
    ) -> bool {
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
            // Other host threads may enqueue something.
            let Some(deadline) = deadline else {
                return false;
            };
            if Instant::now() >= deadline {
                return false;
            }
            self.0.turn.wait_for(&mut state, Duration::from_millis(1));
        }
    }

    /// Runs one item of a stream, or continues its blocked operation until it blocks again.
    fn step(&self, state: &mut MutexGuard<'_, State>, index: usize) {
        let stream = &mut state.streams[index];
        if stream.blocked.is_none() {
            let Some(entry) = stream.queue.pop_front() else {
                return;
            };
            stream.sequence = entry.sequence;
            stream.clock.join(&entry.host);
            match entry.item {
                Item::Record(event) => {
                    stream.tick(index);
                    if let Some(mark) = event.mark() {
                        mark.set_clock(stream.clock.clone());
                    }
                    event.reach(stream.failed.clone());
                    return;
                }
                Item::Wait(_, event) => {
                    if let Some(clock) = event.mark().and_then(Mark::clock) {
                        stream.clock.join(clock);
                    }
                    if let Some(Err(error)) = event.result() {
                        stream.failed.get_or_insert(error);
                    }
                    return;
                }
                Item::Run(enqueued, op) => {
                    if stream.failed.is_some() {
                        return;
                    }
                    stream.tick(index);
                    stream.next = Some((enqueued, op));
                }
            }
        }

        state.running = Some(index);
        self.0.turn.notify_all();
        while state.running.is_some() {
            self.0.turn.wait(state);
        }
    }

    pub(super) fn note_block(&self, note: &BlockNote<'_, HostStream, HostEvent>) {
        let mut state = self.0.state.lock();
        let state = &mut *state;
        match *note {
            BlockNote::Allocated {
                ptr,
                bytes,
                purpose,
                stream,
            } => {
                state
                    .checker
                    .allocate(range(ptr, bytes), purpose, stream.name());
            }
            BlockNote::Freed {
                ptr,
                bytes,
                home,
                uses,
            } => {
                let Some(home) = state
                    .streams
                    .iter_mut()
                    .find(|stream| stream.info.id == home.id())
                else {
                    return;
                };
                let mut allowed = home.ordered.clone();
                for mark in uses.iter().filter_map(|(_, event)| event.mark()) {
                    allowed.join(mark.ordered());
                }
                let name = &home.info.name;
                if let Some(violation) =
                    state
                        .checker
                        .free(range(ptr, bytes), allowed, name, &state.host)
                {
                    let stream = name.to_string();
                    let cause = violation.to_string().into();
                    home.failed.get_or_insert(DeviceError::Operation {
                        stream,
                        op: "free".into(),
                        cause,
                    });
                    state.violations.push(violation);
                }
            }
        }
    }

    /// Checks an access of the running operation; returns whether it is ordered.
    fn note_access(
        &self,
        index: usize,
        range: Range<usize>,
        write: bool,
        label: &'static str,
        synchronized: bool,
    ) -> bool {
        let mut state = self.0.state.lock();
        let state = &mut *state;
        let stream = &state.streams[index];
        let access = Access {
            stream: index,
            epoch: stream.epoch,
            sequence: stream.sequence,
            name: Arc::clone(&stream.info.name),
            label,
            synchronized,
        };
        let violation = state.checker.access(range, write, &access, &stream.clock);
        let sound = violation.is_none();
        state.violations.extend(violation);
        sound
    }
}

fn range(ptr: *mut u8, bytes: usize) -> Range<usize> {
    ptr.addr()..ptr.addr() + bytes
}

impl State {
    /// A stream that can run, drawn by the seed.
    fn pick(&mut self) -> Option<usize> {
        let progress = progress();
        let can_run = |stream: &StreamState| match &stream.blocked {
            Some((seen, deadline)) => {
                *seen != progress || deadline.is_some_and(|at| Instant::now() >= at)
            }
            None => match stream.queue.front().map(|entry| &entry.item) {
                Some(Item::Wait(_, event)) => event.result().is_some(),
                Some(_) => true,
                None => false,
            },
        };
        let ready: Vec<usize> = (0..self.streams.len())
            .filter(|i| can_run(&self.streams[*i]))
            .collect();
        if ready.is_empty() {
            return None;
        }
        Some(ready[self.draw(ready.len())])
    }

    /// A random number below `bound` (splitmix64).
    fn draw(&mut self, bound: usize) -> usize {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound.max(1) as u64) as usize
    }
}

impl StreamState {
    /// Advances the stream's time.
    fn tick(&mut self, index: usize) {
        self.epoch += 1;
        self.clock.set(index, self.epoch);
    }
}
