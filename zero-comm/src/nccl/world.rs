//! A process's part of the world: its collectives in flight, and the watcher thread.
//!
//! A host thread that enqueues a collective only queues its message to the coordinator. Every few milliseconds the
//! watcher
//!
//! - sends the queued messages and this rank's progress to the coordinator;
//! - queries each communicator for an asynchronous error;
//! - measures how long the oldest collective in flight has run since its stream reached it; earlier compute does not
//!   count. If it exceeds the limit, the coordinator determines which rank is late;
//! - receives from the coordinator. A failure ends the world: the watcher first poisons the streams that have
//!   collectives in flight, so that nothing uses their results, and then aborts the communicators.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::TcpStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use zero_alloc::TimeLimit;
use zero_alloc::device::DeviceError;

use super::abort::AbortCompletion;
use super::library::back_end;
use super::message::{Context, MeetingEntry, Message};
use super::rendezvous::Joined;
use super::server::{KEEPALIVE, silence_limit};
use super::wire::{Incoming, send};
use crate::CommError;
use crate::call::Call;
use crate::split_request::SplitRequest;

/// The watcher's period.
const TICK: Duration = Duration::from_millis(10);
/// Time limit for the coordinator's answer to a report. After it, the rank fails with the failure that it saw itself.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// The NCCL communicator of a communicator, or a test's substitute.
pub(super) trait Transport: Send + Sync {
    /// Returns an asynchronous error, if there is one.
    fn error(&self) -> Option<String>;

    /// Starts to abort all collectives in flight.
    fn abort(&self) -> AbortCompletion;
}

/// Returns whether a stream has reached a point.
pub(super) type Probe = Box<dyn Fn() -> Result<bool, DeviceError> + Send>;

/// A collective of this rank in flight.
pub(super) struct Operation {
    pub(super) call: Call,
    /// The name of its stream.
    pub(super) stream: String,
    /// Returns whether the stream has reached it.
    pub(super) reached: Probe,
    /// Returns whether it has ended.
    pub(super) ended: Probe,
    /// Poisons the stream.
    pub(super) poison: Box<dyn FnOnce(&CommError) + Send>,
}

/// A communicator of this process.
struct Open {
    transport: Arc<dyn Transport>,
    /// Oldest first: NCCL runs the collectives of a communicator in order.
    operations: VecDeque<Operation>,
    /// Operations that have ended.
    ended: u64,
    /// The limit of the oldest operation, which starts when the watcher sees that the stream has reached it.
    time: Option<TimeLimit>,
    /// The last progress sent: calls reached and ended.
    reported: (u64, u64),
}

#[derive(Default)]
struct State {
    failure: Option<CommError>,
    open: BTreeMap<Context, Open>,
    /// Messages to send.
    queue: Vec<Message>,
    /// Completed meetings: the first new communicator and all ranks' entries.
    meetings: HashMap<(Context, u64), (Context, Vec<MeetingEntry>)>,
    /// The connection to the coordinator has ended.
    disconnected: bool,
    closing: bool,
    /// The watcher has ended.
    over: bool,
}

/// The state that a process's threads share.
pub(super) struct Shared {
    pub(super) rank: usize,
    pub(super) limit: Duration,
    outgoing: Mutex<TcpStream>,
    state: Mutex<State>,
    changed: Condvar,
}

/// This process's world. Dropping it ends the watcher, which sends the goodbye.
pub(super) struct World {
    shared: Arc<Shared>,
    watcher: Option<JoinHandle<()>>,
}

impl std::ops::Deref for World {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}

impl World {
    pub(super) fn start(joined: Joined, rank: usize, limit: Duration) -> Result<Self, CommError> {
        let (outgoing, state) = (Mutex::new(joined.outgoing), Mutex::default());
        let shared = Arc::new(Shared { rank, limit, outgoing, state, changed: Condvar::new() });
        let watcher =
            Watcher { shared: Arc::clone(&shared), incoming: joined.incoming, silence: silence_limit(limit) };
        let spawned = std::thread::Builder::new().name(format!("rank {rank} watcher")).spawn(move || watcher.run());
        let watcher = spawned.map_err(|e| back_end(format!("failed to start the watcher thread: {e}")))?;
        Ok(Self { shared, watcher: Some(watcher) })
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.shared.state.lock().closing = true;
        if let Some(watcher) = self.watcher.take() {
            // It ends by itself, within `ANSWER_LIMIT`.
            let _ = watcher.join();
        }
    }
}

impl Shared {
    pub(super) fn failure(&self) -> Option<CommError> {
        self.state.lock().failure.clone()
    }

    fn queue(&self, message: Message) {
        self.state.lock().queue.push(message);
    }

    /// Sends the queued messages, in order.
    fn flush(&self) {
        let outgoing = self.outgoing.lock();
        let (messages, disconnected) = {
            let mut state = self.state.lock();
            (std::mem::take(&mut state.queue), state.disconnected)
        };
        if !messages.is_empty() && !disconnected {
            // If sending fails, the watcher detects the end of the connection.
            let _ = send(&outgoing, &messages);
        }
    }

    /// Reports this rank's next call on `context`.
    pub(super) fn called(&self, context: Context, call: Call) {
        self.queue(Message::Called { context, call });
    }

    /// Hands the enqueued operation of the last call on `context` to the watcher.
    pub(super) fn watch(&self, context: Context, operation: Operation) {
        let mut state = self.state.lock();
        if let Some(failure) = state.failure.clone() {
            drop(state);
            return (operation.poison)(&failure);
        }
        if let Some(open) = state.open.get_mut(&context) {
            open.operations.push_back(operation);
        }
    }

    /// The number of collectives of `context` in flight.
    pub(super) fn under_way(&self, context: Context) -> usize {
        self.state.lock().open.get(&context).map_or(0, |open| open.operations.len())
    }

    /// Adds a new communicator. If the world has failed, aborts it: the watcher aborts only those that it finds.
    pub(super) fn open(&self, context: Context, transport: Arc<dyn Transport>) {
        let mut state = self.state.lock();
        if state.failure.is_some() {
            drop(state);
            return transport.abort().wait();
        }
        let open = Open { transport, operations: VecDeque::new(), ended: 0, time: None, reported: (0, 0) };
        state.open.insert(context, open);
    }

    /// Removes `context`, which this rank drops after `done` calls.
    pub(super) fn close(&self, context: Context, done: u64) {
        let mut state = self.state.lock();
        state.open.remove(&context);
        state.queue.push(Message::Left { context, done });
    }

    /// Ends the world with `error`, or with the failure that came first, which is returned.
    pub(super) fn fail(&self, error: CommError) -> CommError {
        use CommError::{Aborted, Left, Mismatch, Panicked, Peer, Skipped, Stalled};
        let error = match error {
            Mismatch { .. } | Stalled { .. } | Left { .. } | Skipped { .. } | Panicked { .. } | Aborted { .. } => {
                error
            }
            Peer { .. } => error,
            // All other variants concern this process only.
            other => Peer { rank: self.rank, message: other.to_string() },
        };
        self.report(Message::Failed { error: error.clone() }, error)
    }

    /// Ends the world because a collective of this rank exceeded the limit; returns the failure.
    pub(super) fn late(&self, context: Context, sequence: u64, call: Call) -> CommError {
        let Fault { message, fallback } = self.late_fault(context, sequence, call);
        self.report(message, fallback)
    }

    fn late_fault(&self, context: Context, sequence: u64, call: Call) -> Fault {
        let message = format!("collective {sequence}, {call}: did not end within {:?}", self.limit);
        let fallback = CommError::Peer { rank: self.rank, message };
        Fault { message: Message::Late { context, sequence, call, limit: self.limit }, fallback }
    }

    /// Reports a failure to the coordinator and returns the failure that it answers with, or `fallback` without an
    /// answer.
    fn report(&self, message: Message, fallback: CommError) -> CommError {
        let disconnected = {
            let mut state = self.state.lock();
            if let Some(failure) = &state.failure {
                return failure.clone();
            }
            state.queue.push(message);
            state.disconnected || state.over
        };
        if !disconnected {
            self.flush();
        }
        let limit = if disconnected { Duration::ZERO } else { ANSWER_LIMIT };
        self.wait(limit, |state| state.failure.clone()).unwrap_or_else(|| self.set_failure(fallback))
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

    /// Joins meeting `number` of `context`, a split. Returns the first new communicator and all ranks' requests.
    pub(super) fn split(
        &self,
        context: Context,
        number: u64,
        request: SplitRequest,
    ) -> Result<(Context, Vec<SplitRequest>), CommError> {
        let (first, entries) = self.meet(context, number, MeetingEntry::Split(request))?;
        let request = |entry| if let MeetingEntry::Split(request) = entry { Some(request) } else { None };
        Ok((first, entries.into_iter().filter_map(request).collect()))
    }

    /// Joins meeting `number` of `context`, a registration. Returns the bytes that each rank registered, `None` if it
    /// failed to.
    pub(super) fn register(
        &self,
        context: Context,
        number: u64,
        bytes: Option<u64>,
    ) -> Result<Vec<Option<u64>>, CommError> {
        let (_, entries) = self.meet(context, number, MeetingEntry::Registration(bytes))?;
        let bytes = |entry| if let MeetingEntry::Registration(bytes) = entry { Some(bytes) } else { None };
        Ok(entries.into_iter().filter_map(bytes).collect())
    }

    /// Joins a meeting and waits until all ranks have.
    fn meet(
        &self,
        context: Context,
        number: u64,
        entry: MeetingEntry,
    ) -> Result<(Context, Vec<MeetingEntry>), CommError> {
        let kind = entry.kind();
        if self.state.lock().disconnected {
            return Err(self.fail(CommError::Peer { rank: 0, message: format!("left before {kind} {number}") }));
        }
        self.queue(Message::Meet { context, number, entry });
        self.flush();
        let met = self.wait(self.limit, |state| match &state.failure {
            Some(failure) => Some(Err(failure.clone())),
            None => state.meetings.remove(&(context, number)).map(Ok),
        });
        met.unwrap_or_else(|| {
            let message = format!("{kind} {number} did not end within {:?}", self.limit);
            let late = Message::LateMeeting { context, number, limit: self.limit };
            Err(self.report(late, CommError::Peer { rank: self.rank, message }))
        })
    }
}

/// A failure that this process detected: the report to the coordinator, and the failure to set if it does not answer.
struct Fault {
    message: Message,
    fallback: CommError,
}

struct Watcher {
    shared: Arc<Shared>,
    incoming: Incoming,
    /// The time for which the coordinator may send nothing; starts anew with each message.
    silence: TimeLimit,
}

impl Watcher {
    fn run(mut self) {
        let mut last_keepalive = Instant::now();
        loop {
            self.receive();
            let fault = self.check_collectives();
            if last_keepalive.elapsed() > KEEPALIVE {
                self.shared.queue(Message::Alive);
                last_keepalive = Instant::now();
            }
            self.shared.flush();
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

    /// Reports a fault to the coordinator and waits for its answer.
    fn report(&mut self, Fault { message, fallback }: Fault) {
        self.shared.queue(message);
        self.shared.flush();
        self.receive_until(|state| state.failure.is_some());
        self.shared.set_failure(fallback);
    }

    /// Receives until `done` or the end of the connection, for at most [`ANSWER_LIMIT`].
    fn receive_until(&mut self, done: impl Fn(&State) -> bool) {
        let mut time = TimeLimit::new(ANSWER_LIMIT);
        let pending = |state: &State| !done(state) && !state.disconnected;
        while pending(&self.shared.state.lock()) && !time.has_passed() {
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
        let lost = match received {
            Ok(None) if !self.silence.has_passed() => None,
            Ok(None) => Some(format!("sent nothing for {:?}", self.shared.limit)),
            Ok(Some(message)) => {
                self.silence = silence_limit(self.shared.limit);
                match message {
                    Message::Failed { error } => {
                        state.failure.get_or_insert(error);
                    }
                    Message::Met { context, number, first, entries } => {
                        state.meetings.insert((context, number), (first, entries));
                    }
                    Message::Goodbye => state.disconnected = true,
                    _ => {}
                }
                None
            }
            Err(error) => Some(format!("its process or the connection to it ended: {error}")),
        };
        if let Some(message) = lost {
            state.failure.get_or_insert(CommError::Peer { rank: 0, message });
            state.disconnected = true;
        }
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Removes collectives that have ended, queues this rank's progress, and returns the first fault.
    fn check_collectives(&self) -> Option<Fault> {
        let mut state = self.shared.state.lock();
        let State { open, queue, failure, .. } = &mut *state;
        if failure.is_some() {
            return None;
        }
        for (&context, open) in open {
            match open.check(self.shared.rank, self.shared.limit) {
                Ok(None) => {}
                Ok(Some((sequence, call))) => return Some(self.shared.late_fault(context, sequence, call)),
                Err(error) => {
                    return Some(Fault { message: Message::Failed { error: error.clone() }, fallback: error });
                }
            }
            let progress = (open.ended + u64::from(open.time.is_some()), open.ended);
            if progress != open.reported {
                open.reported = progress;
                queue.push(Message::Progress { context, reached: progress.0, ended: progress.1 });
            }
        }
        None
    }

    /// Poisons the streams of the collectives in flight and aborts all communicators.
    fn abort_all(&self) {
        let mut state = self.shared.state.lock();
        let Some(failure) = state.failure.clone() else { return };
        let open: Vec<_> =
            state.open.values_mut().map(|o| (Arc::clone(&o.transport), std::mem::take(&mut o.operations))).collect();
        drop(state);
        let (transports, operations): (Vec<_>, Vec<_>) = open.into_iter().unzip();
        let unfinished =
            operations.into_iter().flatten().filter(|operation| !matches!((operation.ended)(), Ok(true)));
        unfinished.for_each(|operation| (operation.poison)(&failure));
        // All aborts start before any is awaited: on a stream, a collective can wait behind another communicator's.
        let completions: Vec<AbortCompletion> = transports.iter().map(|transport| transport.abort()).collect();
        AbortCompletion::wait_for_all(completions);
        self.shared.changed.notify_all();
    }

    fn leave(&mut self) {
        self.shared.state.lock().over = true;
        let failed = self.shared.failure().is_some();
        if !failed {
            self.shared.queue(Message::Goodbye);
        }
        self.shared.flush();
        if self.shared.rank == 0 && !failed {
            // The coordinator answers when it has sent its goodbye to all ranks. Only then may this process end.
            self.receive_until(|_| false);
        }
    }
}

impl Open {
    /// Removes the operations that have ended. Returns the oldest collective in flight if it exceeds `limit`.
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
