//! A process's part of the world: its collectives in flight, and the watcher thread.
//!
//! A host thread that enqueues a collective only queues the call for the watcher. Every few
//! milliseconds the watcher
//!
//! - hashes the queued calls, and keeps them until all ranks agree on them;
//! - queries each communicator for an asynchronous error;
//! - measures how long the oldest collective in flight has run since its stream reached it; earlier
//!   compute does not count. If it exceeds the limit, the coordinator determines which rank is
//!   late;
//! - receives from the coordinator, and answers its requests for calls. A failure ends the world:
//!   the watcher first poisons the streams that have collectives in flight, so that nothing uses
//!   their results, and then aborts the communicators.
//!
//! Once a report interval it sends this rank's progress to the coordinator. All other messages are
//! urgent: they are sent at once, after the progress up to them.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::ErrorKind;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use zero_alloc::TimeLimit;
use zero_alloc::device::DeviceError;

use super::abort::AbortCompletion;
use super::calls::Log;
use super::message::{Context, Message, Place, bounded};
use super::rendezvous::Joined;
use super::server::{KEEPALIVE, silence_limit};
use super::wire::{Incoming, send};
use crate::CommError;
use crate::call::Call;
use crate::error::nccl_failure;
use crate::split_request::SplitRequest;

/// The watcher's period.
const TICK: Duration = Duration::from_millis(10);
/// Time limit for the coordinator's answer to a report. After it, the rank fails with the failure
/// that it saw itself.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// The NCCL communicator of a communicator, or a test's substitute.
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
    pub(crate) call: Call,
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
struct Open {
    transport: Arc<dyn Transport>,
    /// Oldest first: NCCL runs the collectives of a communicator in order.
    operations: VecDeque<Operation>,
    /// Operations that have ended.
    ended: u64,
    /// The limit of the oldest operation, which starts when the watcher sees that the stream has
    /// reached it.
    time: Option<TimeLimit>,
}

#[derive(Default)]
struct State {
    failure: Option<CommError>,
    open: BTreeMap<Context, Open>,
    /// Events of host threads, in order.
    events: Vec<Event>,
    /// This rank's places in the communicators of completed splits.
    places: HashMap<(Context, u64), Option<Place>>,
    /// The connection to the coordinator has ended.
    disconnected: bool,
    closing: bool,
    /// The watcher has ended.
    over: bool,
}

/// What a host thread queues for the watcher.
enum Event {
    /// A new communicator; this rank is its first if `first`.
    Open {
        context: Context,
        first: bool,
    },
    Called {
        context: Context,
        call: Call,
    },
    /// A message to send at once.
    Send(Message),
}

/// The world, as the threads of this process see it.
pub(crate) struct World {
    pub(crate) rank: usize,
    pub(crate) limit: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

/// This process's connection to the world. Dropping it ends the watcher, which sends the goodbye.
pub(crate) struct Connection {
    pub(crate) world: Arc<World>,
    watcher: Option<JoinHandle<()>>,
}

impl Connection {
    pub(crate) fn start(joined: Joined, rank: usize, limit: Duration) -> Result<Self, CommError> {
        let shared = Arc::new(World {
            rank,
            limit,
            state: Mutex::default(),
            changed: Condvar::new(),
        });

        let watcher = Watcher {
            shared: Arc::clone(&shared),
            outgoing: joined.outgoing,
            incoming: joined.incoming,
            silence: TimeLimit::new(silence_limit(limit)),
            logs: BTreeMap::new(),
            // A short limit needs recent reports, so that no rank is named as late that is not.
            report_every: joined.report_every.min(limit / 4),
            reported: Instant::now(),
            sent: Instant::now(),
            unsent: None,
        };

        let spawned = std::thread::Builder::new()
            .name(format!("rank {rank} watcher"))
            .spawn(move || watcher.run());
        let watcher = spawned
            .map_err(|e| nccl_failure(format!("failed to start the watcher thread: {e}")))?;
        Ok(Self {
            world: shared,
            watcher: Some(watcher),
        })
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.world.state.lock().closing = true;
        if let Some(watcher) = self.watcher.take() {
            // It ends by itself, within `ANSWER_LIMIT`.
            let _ = watcher.join();
        }
    }
}

impl World {
    pub(crate) fn failure(&self) -> Option<CommError> {
        self.state.lock().failure.clone()
    }

    fn queue(&self, event: Event) {
        self.state.lock().events.push(event);
    }

    /// Records this rank's next call on `context`.
    pub(crate) fn called(&self, context: Context, call: Call) {
        self.queue(Event::Called { context, call });
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
    fn poison_in_flight(&self) {
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
                let Some(oldest) = open.operations.front() else {
                    return Ok(());
                };
                (open.ended, oldest.call.clone())
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

    /// Adds a new communicator, whose first rank is this rank if `first`. If the world has failed,
    /// aborts it: the watcher aborts only those that it finds.
    pub(crate) fn open(&self, context: Context, first: bool, transport: Arc<dyn Transport>) {
        let mut state = self.state.lock();
        if state.failure.is_some() {
            drop(state);
            return transport.abort().wait();
        }
        state.open.insert(
            context,
            Open {
                transport,
                operations: VecDeque::new(),
                ended: 0,
                time: None,
            },
        );
        state.events.push(Event::Open { context, first });
    }

    /// Removes `context`, which this rank drops after `done` calls.
    pub(crate) fn close(&self, context: Context, done: u64) {
        let mut state = self.state.lock();
        state.open.remove(&context);
        state
            .events
            .push(Event::Send(Message::Left { context, done }));
    }

    /// Ends the world with `error`, or with the failure that came first, which is returned.
    pub(crate) fn fail(&self, error: CommError) -> CommError {
        use CommError::{Aborted, Left, Lost, Mismatch, Panicked, Peer, Skipped, Stalled};
        let error = match error {
            Mismatch { .. }
            | Stalled { .. }
            | Left { .. }
            | Lost { .. }
            | Skipped { .. }
            | Panicked { .. }
            | Aborted { .. } => error,
            Peer { .. } => error,
            // All other variants concern this process only.
            other => Peer {
                rank: self.rank,
                message: other.to_string(),
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

    fn late_fault(&self, context: Context, sequence: u64, call: Call) -> Fault {
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
            state.events.push(Event::Send(message));
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
    fn set_failure(&self, error: CommError) -> CommError {
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
    ) -> Result<Option<Place>, CommError> {
        if self.state.lock().disconnected {
            return Err(self.fail(CommError::Peer {
                rank: 0,
                message: format!("left before split {number}"),
            }));
        }

        self.queue(Event::Send(Message::Split {
            context,
            number,
            request,
        }));
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
struct Fault {
    message: Message,
    fallback: CommError,
}

struct Watcher {
    shared: Arc<World>,
    outgoing: TcpStream,
    incoming: Incoming,
    /// The time for which the coordinator may send nothing; starts anew with each message.
    silence: TimeLimit,
    logs: BTreeMap<Context, Log>,
    report_every: Duration,
    /// The time of the last report.
    reported: Instant,
    /// The time at which the last message was sent.
    sent: Instant,
    /// The failure to send a message, after which nothing is sent.
    unsent: Option<CommError>,
}

impl Watcher {
    fn run(mut self) {
        loop {
            self.receive();
            let fault = self.check_collectives();
            self.send();
            if let Some(fault) = fault {
                self.report(fault);
            }
            if self.shared.failure().is_some() {
                self.abort_all();
            }
            let state = self.shared.state.lock();
            if state.closing || state.failure.is_some() {
                drop(state);
                return self.leave();
            }
        }
    }

    /// Handles the events of host threads, and sends what is urgent or due.
    fn send(&mut self) {
        let (events, disconnected) = {
            let mut state = self.shared.state.lock();
            (std::mem::take(&mut state.events), state.disconnected)
        };

        let mut urgent = Vec::new();
        for event in events {
            match event {
                Event::Open { context, first } => {
                    self.logs.entry(context).or_insert_with(|| Log::new(first));
                }
                Event::Called { context, call } => {
                    if let Some(log) = self.logs.get_mut(&context) {
                        log.calls.push(call);
                    }
                }
                Event::Send(message) => {
                    if let Message::Left { context, .. } = message
                        && let Some(log) = self.logs.get_mut(&context)
                    {
                        log.left = true;
                    }
                    urgent.push(message);
                }
            }
        }

        let mut messages = Vec::new();
        if !urgent.is_empty() || self.reported.elapsed() >= self.report_every {
            self.reported = Instant::now();
            messages.extend(
                self.logs
                    .iter_mut()
                    .flat_map(|(&context, log)| log.report(context)),
            );
        }

        messages.extend(urgent);
        if messages.is_empty() && self.sent.elapsed() > KEEPALIVE {
            messages.push(Message::Alive);
        }

        if !messages.is_empty() && !disconnected && self.unsent.is_none() {
            self.sent = Instant::now();
            if let Err(error) = send(&self.outgoing, &messages) {
                // After a part of a frame, the coordinator must not take the next message for the
                // rest of it. What it has sent, which may be the cause, can still be received.
                let _ = self.outgoing.shutdown(Shutdown::Both);
                let rank = if error.kind() == ErrorKind::InvalidData {
                    self.shared.rank
                } else {
                    0
                };
                let message = format!(
                    "a message of rank {} to rank 0 was not sent: {error}",
                    self.shared.rank
                );
                self.unsent = Some(CommError::Peer { rank, message });
            }
        }
    }

    /// Reports a fault to the coordinator and waits for its answer.
    fn report(&mut self, Fault { message, fallback }: Fault) {
        self.shared.queue(Event::Send(message));
        self.receive_until(|state| state.failure.is_some());
        self.shared.set_failure(fallback);
    }

    /// Sends and receives until `done` or the end of the connection, for at most [`ANSWER_LIMIT`].
    fn receive_until(&mut self, done: impl Fn(&State) -> bool) {
        let mut time = TimeLimit::new(ANSWER_LIMIT);
        let pending = |state: &State| !done(state) && !state.disconnected;
        while pending(&self.shared.state.lock()) && !time.has_passed() {
            self.send();
            self.receive();
        }
    }

    /// Receives one message from the coordinator, waiting for at most one tick.
    fn receive(&mut self) {
        if self.shared.state.lock().disconnected {
            return std::thread::sleep(TICK);
        }
        let received = self.incoming.next(TICK);
        let mut state = self.shared.state.lock();
        let lost = |message| CommError::Peer { rank: 0, message };

        let lost = match received {
            Ok(None) if !self.silence.has_passed() => None,
            Ok(None) => Some(lost(format!(
                "sent nothing for {:?}",
                silence_limit(self.shared.limit)
            ))),
            Ok(Some(message)) => {
                self.silence = TimeLimit::new(silence_limit(self.shared.limit));
                match message {
                    Message::Failed { error } => {
                        state.failure.get_or_insert(error);
                    }
                    Message::Placed {
                        context,
                        number,
                        place,
                    } => {
                        state.places.insert((context, number), place);
                    }
                    Message::ShowCalls { context, from, to } => {
                        let calls = self
                            .logs
                            .get(&context)
                            .map(|log| log.calls.messages(context, from..to));
                        state
                            .events
                            .extend(calls.into_iter().flatten().map(Event::Send));
                    }
                    Message::Agreed {
                        context,
                        count,
                        first,
                    } => {
                        let log = self.logs.get_mut(&context);
                        let answer = log.and_then(|log| log.agreed(context, count, first));
                        state.events.extend(answer.map(Event::Send));
                        self.logs.retain(|_, log| !log.left || log.calls.kept() > 0);
                    }
                    Message::Goodbye => state.disconnected = true,
                    _ => {}
                }
                None
            }
            Err(error) => Some(self.unsent.clone().unwrap_or_else(|| {
                lost(format!(
                    "its process or the connection to it ended: {error}"
                ))
            })),
        };

        if let Some(error) = lost {
            state.failure.get_or_insert(error);
            state.disconnected = true;
        }

        drop(state);
        self.shared.changed.notify_all();
    }

    /// Removes collectives that have ended, records this rank's progress, and returns the first
    /// fault.
    fn check_collectives(&mut self) -> Option<Fault> {
        let mut state = self.shared.state.lock();
        if state.failure.is_some() {
            return None;
        }

        for (&context, open) in &mut state.open {
            let checked = open.check(self.shared.rank, self.shared.limit);
            if let Some(log) = self.logs.get_mut(&context) {
                (log.reached, log.ended) =
                    (open.ended + u64::from(open.time.is_some()), open.ended);
            }
            match checked {
                Ok(None) => {}
                Ok(Some((sequence, call))) => {
                    return Some(self.shared.late_fault(context, sequence, call));
                }
                Err(error) => {
                    return Some(Fault {
                        message: Message::Failed {
                            error: error.clone(),
                        },
                        fallback: error,
                    });
                }
            }
        }

        None
    }

    /// Poisons the streams of the collectives in flight and aborts all communicators.
    fn abort_all(&self) {
        self.shared.poison_in_flight();
        let transports: Vec<_> = self
            .shared
            .state
            .lock()
            .open
            .values()
            .map(|open| Arc::clone(&open.transport))
            .collect();
        // All aborts start before any is awaited: on a stream, a collective can wait behind another
        // communicator's.
        let completions: Vec<AbortCompletion> = transports
            .iter()
            .map(|transport| transport.abort())
            .collect();
        AbortCompletion::wait_for_all(completions);
        self.shared.changed.notify_all();
    }

    fn leave(&mut self) {
        self.shared.state.lock().over = true;
        if self.shared.failure().is_some() {
            return self.send();
        }
        // Until the coordinator answers, it may request calls of this rank; and rank 0's process
        // may end only when the coordinator has sent its goodbye to all ranks.
        self.shared.queue(Event::Send(Message::Goodbye));
        self.receive_until(|state| state.failure.is_some());
    }
}

impl Open {
    /// Removes the operations that have ended. Returns the oldest collective in flight if it
    /// exceeds `limit`.
    fn check(&mut self, rank: usize, limit: Duration) -> Result<Option<(u64, Call)>, CommError> {
        if let Some(message) = self.transport.error() {
            return Err(CommError::Peer { rank, message });
        }
        while let Some(oldest) = self.operations.front() {
            let skipped = |_| CommError::Skipped {
                sequence: self.ended,
                call: Box::new(oldest.call.clone()),
                rank,
                stream: oldest.stream.clone(),
            };
            if (oldest.ended)().map_err(skipped)? {
                self.operations.pop_front();
                self.ended += 1;
                self.time = None;
                continue;
            }
            if self.time.is_none() && (oldest.reached)().map_err(skipped)? {
                self.time = Some(TimeLimit::new(limit));
            }
            let late = self.time.as_mut().is_some_and(TimeLimit::has_passed);
            return Ok(late.then(|| (self.ended, oldest.call.clone())));
        }

        Ok(None)
    }
}
