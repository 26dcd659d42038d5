//! A process's part of the world, as its host threads see it: its communicators, and their
//! collectives in flight.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use zero_alloc::TimeLimit;
use zero_alloc::device::DeviceError;

use super::abort::AbortCompletion;
use super::fnv::Fnv;
use super::message::{Context, Message, Progress, SplitRank, bounded, named_rank};
use crate::CommError;
use crate::call::{Call, Counts};
use crate::split_request::SplitRequest;

/// Time limit for the coordinator's answer to a report. After it, the rank fails with the failure
/// that it saw itself.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Counts of a call that a report contains; of a call with more, their sum. The coordinator compares
/// pairs of counts of at most as many ranks.
const MAX_COUNTS: usize = 16;

/// The library's communicator of a communicator, or a test's substitute.
pub(crate) trait Transport: Send + Sync {
    /// Returns an asynchronous error, if there is one.
    fn error(&self) -> Option<String>;

    /// Starts to abort all collectives in flight.
    fn abort(&self) -> AbortCompletion;
}

/// Returns whether a stream has reached a point.
pub(crate) type Probe = Box<dyn Fn() -> Result<bool, DeviceError> + Send>;

/// A collective of this rank in flight.
pub(crate) struct Operation {
    /// The name of its stream.
    pub(crate) stream: String,
    /// Returns whether the stream has reached it.
    pub(crate) reached: Probe,
    /// Returns whether it has ended.
    pub(crate) ended: Probe,
    /// Poisons the stream.
    pub(crate) poison: Box<dyn FnOnce(&CommError) + Send>,
}

/// A communicator of this process.
pub(super) struct Open {
    pub(super) transport: Arc<dyn Transport>,
    called: u64,
    /// The hash of all calls.
    hash: Fnv,
    /// The latest calls, from the first one that a report would contain; each with the hash of all
    /// calls up to it.
    calls: VecDeque<(Call, Fnv)>,
    /// Oldest first: the collectives of a communicator run in order.
    operations: VecDeque<Operation>,
    /// Operations that have ended.
    ended: u64,
    /// The limit of the oldest operation, which starts when the watcher sees that the stream has
    /// reached it.
    time: Option<TimeLimit>,
    /// The calls made, reached and ended at the last report.
    reported: (u64, u64, u64),
}

#[derive(Default)]
pub(super) struct State {
    pub(super) failure: Option<CommError>,
    pub(super) open: BTreeMap<Context, Open>,
    /// Messages to send at once.
    pub(super) urgent: Vec<Message>,
    /// This rank's places in the communicators of completed splits.
    pub(super) places: HashMap<(Context, u64), Option<SplitRank>>,
    /// The connection to the coordinator has ended.
    pub(super) disconnected: bool,
    pub(super) closing: bool,
    /// The watcher has ended.
    pub(super) over: bool,
}

/// The world, as the threads of this process see it.
pub(crate) struct World {
    pub(crate) rank: usize,
    pub(crate) limit: Duration,
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
}

impl World {
    pub(super) fn new(rank: usize, limit: Duration) -> Self {
        Self {
            rank,
            limit,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn failure(&self) -> Option<CommError> {
        self.state.lock().failure.clone()
    }

    /// The failure of the world, within `limit`.
    pub(crate) fn wait_for_failure(&self, limit: Duration) -> Option<CommError> {
        self.wait(limit, |state| state.failure.clone())
    }

    pub(super) fn queue(&self, message: Message) {
        self.state.lock().urgent.push(message);
    }

    /// Records this rank's next call on `context`.
    pub(crate) fn called(&self, context: Context, call: Call) {
        if let Some(open) = self.state.lock().open.get_mut(&context) {
            open.called(call);
        }
    }

    /// Hands the enqueued operation of the last call on `context` to the watcher.
    pub(crate) fn watch(&self, context: Context, operation: Operation) {
        let mut state = self.state.lock();
        if let Some(failure) = state.failure.clone() {
            drop(state);
            return (operation.poison)(&failure);
        }
        if let Some(open) = state.open.get_mut(&context) {
            open.operations.push_back(operation);
        }
    }

    /// Aborts `transport` after a failure of the world.
    pub(crate) fn abort(&self, transport: &dyn Transport) -> AbortCompletion {
        self.poison_in_flight();
        transport.abort()
    }

    /// After a failure of the world, poisons the streams of all collectives in flight. This
    /// precedes every abort, because an abort ends collectives without results.
    pub(super) fn poison_in_flight(&self) {
        // Under the lock: another thread that finds no collective left may abort at once.
        let mut state = self.state.lock();
        let Some(failure) = state.failure.clone() else {
            return;
        };
        for operation in state
            .open
            .values_mut()
            .flat_map(|open| std::mem::take(&mut open.operations))
        {
            if !matches!((operation.ended)(), Ok(true)) {
                (operation.poison)(&failure);
            }
        }
    }

    /// The number of collectives of `context` in flight.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn under_way(&self, context: Context) -> usize {
        self.state
            .lock()
            .open
            .get(&context)
            .map_or(0, |open| open.operations.len())
    }

    /// Waits until `context` has no collective in flight. One that does not end within the limit,
    /// since the drain or the end of the one before it, is late and ends the world.
    ///
    /// # Errors
    /// The failure of the world. The collectives in flight are then aborted, which may take longer.
    pub(crate) fn drain(&self, context: Context) -> Result<(), CommError> {
        let mut time = TimeLimit::new(self.limit);
        let mut before = None;
        loop {
            let (sequence, call) = {
                let state = self.state.lock();
                if let Some(failure) = &state.failure {
                    return Err(failure.clone());
                }
                let Some(open) = state.open.get(&context) else {
                    return Ok(());
                };
                let Some(call) = open.oldest().filter(|_| !open.operations.is_empty()) else {
                    return Ok(());
                };
                (open.ended, call.clone())
            };
            if before.replace(sequence) != Some(sequence) {
                time = TimeLimit::new(self.limit);
            }
            if time.has_passed() {
                return Err(self.late(context, sequence, call));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Adds a new communicator. If the world has failed, aborts it: the watcher aborts only those
    /// that it finds.
    pub(crate) fn open(&self, context: Context, transport: Arc<dyn Transport>) {
        let mut state = self.state.lock();
        if state.failure.is_some() {
            drop(state);
            return transport.abort().wait();
        }
        state.open.insert(context, Open::new(transport));
    }

    /// Removes `context`, which this rank drops after `done` calls.
    pub(crate) fn close(&self, context: Context, done: u64) {
        let mut state = self.state.lock();
        let last = state
            .open
            .remove(&context)
            .and_then(|mut open| open.report(context));
        state.urgent.extend(last);
        state.urgent.push(Message::Left { context, done });
    }

    /// Ends the world with `error`, or with the failure that came first, which is returned.
    pub(crate) fn fail(&self, error: CommError) -> CommError {
        let error = match named_rank(&error) {
            Some(_) => error,
            None => CommError::Peer {
                rank: self.rank,
                message: error.to_string(),
            },
        };

        let error = bounded(error);
        self.report(
            Message::Failed {
                error: error.clone(),
            },
            error,
        )
    }

    /// Ends the world because a collective of this rank exceeded the limit; returns the failure.
    pub(crate) fn late(&self, context: Context, sequence: u64, call: Call) -> CommError {
        let Fault { message, fallback } = self.late_fault(context, sequence, call);
        self.report(message, fallback)
    }

    pub(super) fn late_fault(&self, context: Context, sequence: u64, call: Call) -> Fault {
        let message = format!(
            "collective {sequence}, {call}: did not end within {:?}",
            self.limit
        );
        let fallback = CommError::Peer {
            rank: self.rank,
            message,
        };
        Fault {
            message: Message::Late {
                context,
                sequence,
                call,
                limit: self.limit,
            },
            fallback,
        }
    }

    /// Reports a failure to the coordinator and returns the failure that it answers with, or
    /// `fallback` without an answer.
    fn report(&self, message: Message, fallback: CommError) -> CommError {
        let disconnected = {
            let mut state = self.state.lock();
            if let Some(failure) = &state.failure {
                return failure.clone();
            }
            state.urgent.push(message);
            state.disconnected || state.over
        };
        let limit = if disconnected {
            Duration::ZERO
        } else {
            ANSWER_LIMIT
        };
        self.wait(limit, |state| state.failure.clone())
            .unwrap_or_else(|| self.set_failure(fallback))
    }

    /// Sets the failure unless one is set; returns the first.
    pub(super) fn set_failure(&self, error: CommError) -> CommError {
        let failure = self.state.lock().failure.get_or_insert(error).clone();
        self.changed.notify_all();
        failure
    }

    /// Waits until `ready` returns a value, for at most `limit`.
    fn wait<R>(&self, limit: Duration, ready: impl Fn(&mut State) -> Option<R>) -> Option<R> {
        let mut time = TimeLimit::new(limit);
        let mut state = self.state.lock();
        loop {
            if let Some(result) = ready(&mut state) {
                return Some(result);
            }
            if time.has_passed() {
                return None;
            }
            self.changed.wait_for(&mut state, time.slice());
        }
    }

    /// Joins split `number` of `context` and waits until all ranks have. Returns this rank's place
    /// in its new communicator.
    pub(crate) fn split(
        &self,
        context: Context,
        number: u64,
        request: SplitRequest,
    ) -> Result<Option<SplitRank>, CommError> {
        if self.state.lock().disconnected {
            return Err(self.fail(CommError::Peer {
                rank: 0,
                message: format!("left before split {number}"),
            }));
        }

        self.queue(Message::Split {
            context,
            number,
            request,
        });
        let placed = self.wait(self.limit, |state| match &state.failure {
            Some(failure) => Some(Err(failure.clone())),
            None => state.places.remove(&(context, number)).map(Ok),
        });

        placed.unwrap_or_else(|| {
            let message = format!("split {number} did not end within {:?}", self.limit);
            let late = Message::LateSplit {
                context,
                number,
                limit: self.limit,
            };
            Err(self.report(
                late,
                CommError::Peer {
                    rank: self.rank,
                    message,
                },
            ))
        })
    }
}

/// A failure that this process detected: the report to the coordinator, and the failure to set if
/// it does not answer.
pub(super) struct Fault {
    pub(super) message: Message,
    pub(super) fallback: CommError,
}

impl Open {
    fn new(transport: Arc<dyn Transport>) -> Self {
        Self {
            transport,
            called: 0,
            hash: Fnv::default(),
            calls: VecDeque::new(),
            operations: VecDeque::new(),
            ended: 0,
            time: None,
            reported: (0, 0, 0),
        }
    }

    fn called(&mut self, call: Call) {
        self.called += 1;
        self.hash.add(&call);
        self.calls.push_back((call, self.hash));
        self.forget();
    }

    /// Drops the calls that no report would contain.
    fn forget(&mut self) {
        let first = self.number().saturating_sub(Progress::BEFORE);
        while self.first_kept() < first {
            self.calls.pop_front();
        }
    }

    /// The number of the call at which this rank is.
    fn number(&self) -> u64 {
        self.ended.min(self.called.saturating_sub(1))
    }

    fn first_kept(&self) -> u64 {
        self.called - self.calls.len() as u64
    }

    /// The oldest call that runs.
    fn oldest(&self) -> Option<&Call> {
        let index = self.ended.checked_sub(self.first_kept())?;
        Some(&self.calls.get(index as usize)?.0)
    }

    /// The progress, if it has changed since the last report.
    pub(super) fn report(&mut self, context: Context) -> Option<Message> {
        let called = self.called;
        let reached = self.ended + u64::from(self.time.is_some());
        let ended = self.ended;
        let counts = (called, reached, ended);
        if counts == std::mem::replace(&mut self.reported, counts) {
            return None;
        }

        let recent = self.first_kept()..=self.number();
        let recent = recent.zip(&self.calls);
        let progress = Progress {
            called,
            reached,
            ended,
            recent: recent
                .map(|(_, (call, hash))| (summary(call), hash.0))
                .collect(),
        };
        Some(Message::Progress { context, progress })
    }

    /// Removes the operations that have ended. Returns the oldest collective in flight if it
    /// exceeds `limit`.
    pub(super) fn check(
        &mut self,
        rank: usize,
        limit: Duration,
    ) -> Result<Option<(u64, Call)>, CommError> {
        if let Some(message) = self.transport.error() {
            return Err(CommError::Peer { rank, message });
        }
        loop {
            let index = (self.ended - self.first_kept()) as usize;
            let oldest = self.operations.front().zip(self.calls.get(index));
            let Some((oldest, (call, _))) = oldest else {
                return Ok(None);
            };
            let skipped = |_| CommError::Skipped {
                sequence: self.ended,
                call: Box::new(call.clone()),
                rank,
                stream: oldest.stream.clone(),
            };
            if (oldest.ended)().map_err(skipped)? {
                self.end_oldest();
                continue;
            }
            if self.time.is_none() && (oldest.reached)().map_err(skipped)? {
                self.time = Some(TimeLimit::new(limit));
            }
            let late = self.time.as_mut().is_some_and(TimeLimit::has_passed);
            return Ok(late.then(|| (self.ended, call.clone())));
        }
    }

    fn end_oldest(&mut self) {
        self.operations.pop_front();
        self.ended += 1;
        self.time = None;
        self.forget();
    }
}

/// A call of a report, which is small also in a large world. The hash covers all counts but pairs.
fn summary(call: &Call) -> Call {
    match &call.segments {
        Counts::Uneven(counts) if counts.len() > MAX_COUNTS => Call {
            segments: Counts::Balanced(counts.iter().sum()),
            ..call.clone()
        },
        Counts::Pairs(counts) if counts.len() > MAX_COUNTS => Call {
            segments: Counts::Balanced(call.segments.total(counts.len())),
            ..call.clone()
        },
        _ => call.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::frames::encode;
    use super::super::testing::{Fake, broadcast};
    use super::*;

    /// Reports do not grow with the calls, the counts of a call or the calls in flight.
    #[test]
    fn reports_are_small_and_cover_all_calls() {
        let mut open = Open::new(Arc::new(Fake::default()));
        let mut hashes = Vec::new();
        for number in 0..2000 {
            let counts = (0..4096).map(|rank| (1 << 40) + rank + number / 1000);
            open.called(Call {
                segments: match number % 2 == 1 {
                    true => Counts::Pairs(counts.map(|count| [count, count]).collect()),
                    false => Counts::Uneven(counts.collect()),
                },
                ..broadcast(8)
            });
            if number % 10 == 9 {
                (0..8).for_each(|_| open.end_oldest());
            }

            let Some(message) = open.report(7) else {
                panic!("no report of call {number}")
            };
            assert!(encode(&message).unwrap().len() < 150, "{message:?}");
            let Message::Progress { progress, .. } = message else {
                panic!("{message:?}")
            };
            assert_eq!(progress.number(), open.ended);
            assert_eq!(progress.called, open.called);
            hashes.extend(progress.recent.last().map(|(_, hash)| *hash));
            assert!(open.calls.len() as u64 <= open.called - open.ended + Progress::BEFORE);
        }
        assert!(open.report(7).is_none());
        hashes.dedup();
        assert_eq!(hashes.len(), 201);
    }
}
