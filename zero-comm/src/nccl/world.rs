//! A process's part of the world: what it has under way, and the thread that watches it.
//!
//! The host threads that enqueue write down what they called and go on; everything that takes time is the watcher's.
//! Every few milliseconds it
//!
//! - tells the hub what was called, and how far this rank's streams have come;
//! - asks each communicator for an error that came up meanwhile;
//! - looks how long the oldest collective under way has been running: from when its stream reached it, so that the
//!   compute before it does not count. Over the limit, it asks the hub whose fault that is;
//! - hears what the hub has to say. A failure ends the world here: first the streams with collectives under way are
//!   poisoned, so that nobody takes what they leave for a result, then the communicators are aborted.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::TcpStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use zero_alloc::device::DeviceError;

use super::abort::AbortCompletion;
use super::message::{Context, Message};
use super::rendezvous::Joined;
use super::server::BEAT;
use super::wire::{Incoming, send};
use crate::CommError;
use crate::call::Call;
use crate::split_request::SplitRequest;

/// Between two looks of the watcher.
const TICK: Duration = Duration::from_millis(10);
/// How long the hub may take to pronounce a failure that was told to it.
const VERDICT_LIMIT: Duration = Duration::from_secs(2);

/// What carries a communicator's data.
pub(super) trait Transport: Send + Sync {
    /// An error that came up outside any call.
    fn error(&self) -> Option<String>;

    /// Begins to end all that is under way.
    fn abort(&self) -> AbortCompletion;
}

/// Whether a point of a stream is reached.
pub(super) type Probe = Box<dyn Fn() -> Result<bool, DeviceError> + Send>;

/// A collective of this rank under way.
pub(super) struct Operation {
    pub(super) call: Call,
    /// The name of its stream.
    pub(super) stream: String,
    /// The stream has come to it.
    pub(super) reached: Probe,
    /// It has ended.
    pub(super) ended: Probe,
    /// Makes the stream fail.
    pub(super) poison: Box<dyn FnOnce(&CommError) + Send>,
}

/// A communicator of this process.
struct Open {
    transport: Arc<dyn Transport>,
    /// The oldest first; NCCL runs the collectives of a communicator one after the other.
    operations: VecDeque<Operation>,
    ended: u64,
    /// Since when the oldest is under way.
    since: Option<Instant>,
    told: (u64, u64),
}

#[derive(Default)]
struct State {
    failure: Option<CommError>,
    open: BTreeMap<Context, Open>,
    /// What is to be told to the hub.
    unsaid: Vec<Message>,
    /// Meetings that all ranks came to: what a split made of its ranks, and what each has registered.
    splits: HashMap<(Context, u64), (Context, Vec<SplitRequest>)>,
    registrations: HashMap<(Context, u64), Vec<Option<u64>>>,
    /// The hub has gone, and said so: nobody is told anything any more.
    alone: bool,
    closing: bool,
    over: bool,
}

/// What the threads of a process share.
pub(super) struct Shared {
    pub(super) rank: usize,
    pub(super) limit: Duration,
    outgoing: Mutex<TcpStream>,
    state: Mutex<State>,
    changed: Condvar,
}

/// The world; when the last communicator drops it, it says goodbye.
pub(super) struct World {
    shared: Arc<Shared>,
    watcher: Mutex<Option<JoinHandle<()>>>,
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
        let watcher = Watcher { shared: Arc::clone(&shared), incoming: joined.incoming, heard: Instant::now() };
        let spawned = std::thread::Builder::new().name(format!("rank {rank} watcher")).spawn(move || watcher.run());
        let watcher = spawned.map_err(|e| CommError::BackEnd {
            back_end: "nccl",
            message: format!("the system has no thread for the watcher: {e}"),
        })?;
        Ok(Self { shared, watcher: Mutex::new(Some(watcher)) })
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.shared.state.lock().closing = true;
        if let Some(watcher) = self.watcher.lock().take() {
            // It ends by itself, within the limit of a verdict.
            let _ = watcher.join();
        }
    }
}

impl Shared {
    pub(super) fn failure(&self) -> Option<CommError> {
        self.state.lock().failure.clone()
    }

    /// Sends what is unsaid, in its order.
    fn speak(&self) {
        let outgoing = self.outgoing.lock();
        let (unsaid, alone) = {
            let mut state = self.state.lock();
            (std::mem::take(&mut state.unsaid), state.alone)
        };
        if !unsaid.is_empty() && !alone {
            // Where it fails the watcher sees the end of the connection.
            let _ = send(&outgoing, &unsaid);
        }
    }

    fn say(&self, message: Message) {
        self.state.lock().unsaid.push(message);
    }

    /// This rank makes its next call on `context`.
    pub(super) fn called(&self, context: Context, call: Call) {
        self.say(Message::Called { context, call });
    }

    /// The collective that was called last on `context` is enqueued.
    pub(super) fn watch(&self, context: Context, operation: Operation) {
        let mut state = self.state.lock();
        let failure = state.failure.clone();
        if let Some(open) = state.open.get_mut(&context) {
            open.operations.push_back(operation);
            if let Some(failure) = failure {
                let operation = open.operations.pop_back();
                drop(state);
                if let Some(operation) = operation {
                    (operation.poison)(&failure);
                }
            }
        }
    }

    /// How many collectives of `context` are under way.
    pub(super) fn under_way(&self, context: Context) -> usize {
        self.state.lock().open.get(&context).map_or(0, |open| open.operations.len())
    }

    pub(super) fn open(&self, context: Context, transport: Arc<dyn Transport>) {
        let open = Open { transport, operations: VecDeque::new(), ended: 0, since: None, told: (0, 0) };
        self.state.lock().open.insert(context, open);
    }

    /// This rank gives up `context` after `done` calls.
    pub(super) fn close(&self, context: Context, done: u64) {
        let mut state = self.state.lock();
        state.open.remove(&context);
        state.unsaid.push(Message::Left { context, done });
    }

    /// Ends the world by `error`, unless something else has; what did.
    pub(super) fn fail(&self, error: CommError) -> CommError {
        self.ask(Message::Failed { error: error.clone() }, error)
    }

    /// A collective of this rank has taken longer than the limit: ends the world; by whose fault.
    pub(super) fn late(&self, context: Context, sequence: u64, call: Call) -> CommError {
        let (tell, own) = self.late_words(context, sequence, call);
        self.ask(tell, own)
    }

    fn late_words(&self, context: Context, sequence: u64, call: Call) -> (Message, CommError) {
        let message = format!("collective {sequence}, {call}: did not end within {:?}", self.limit);
        let tell = Message::Late { context, sequence, call, limit_ms: milliseconds(self.limit) };
        (tell, CommError::Peer { rank: self.rank, message })
    }

    /// Tells the hub, and waits for what it pronounces; `own` stands where it does not.
    fn ask(&self, message: Message, own: CommError) -> CommError {
        let alone = {
            let mut state = self.state.lock();
            if let Some(failure) = &state.failure {
                return failure.clone();
            }
            state.unsaid.push(message);
            state.alone || state.over
        };
        if !alone {
            self.speak();
        }
        let verdict = |state: &mut State| state.failure.clone();
        let wait = if alone { Duration::ZERO } else { VERDICT_LIMIT };
        self.wait(wait, verdict).unwrap_or_else(|| {
            let mut state = self.state.lock();
            let failure = state.failure.get_or_insert(own).clone();
            self.changed.notify_all();
            failure
        })
    }

    /// Waits until `ready` gives something, at most `limit`.
    fn wait<R>(&self, limit: Duration, ready: impl Fn(&mut State) -> Option<R>) -> Option<R> {
        let deadline = Instant::now().checked_add(limit);
        let mut state = self.state.lock();
        loop {
            if let Some(result) = ready(&mut state) {
                return Some(result);
            }
            match deadline {
                Some(deadline) if self.changed.wait_until(&mut state, deadline).timed_out() => {
                    return ready(&mut state);
                }
                Some(_) => {}
                None => self.changed.wait(&mut state),
            }
        }
    }

    /// Meeting `number` of `context` is a split: the number of its first new communicator, and what all ranks ask.
    pub(super) fn split(
        &self,
        context: Context,
        number: u64,
        request: SplitRequest,
    ) -> Result<(Context, Vec<SplitRequest>), CommError> {
        let tell = Message::Split { context, number, request };
        self.meet(context, number, ("split", tell), |state| state.splits.remove(&(context, number)))
    }

    /// Meeting `number` of `context` is a registration: the bytes that each rank has registered, if it could.
    pub(super) fn register(
        &self,
        context: Context,
        number: u64,
        bytes: Option<u64>,
    ) -> Result<Vec<Option<u64>>, CommError> {
        let tell = Message::Register { context, number, bytes };
        self.meet(context, number, ("registration", tell), |state| state.registrations.remove(&(context, number)))
    }

    /// Comes to a meeting, and waits until all have.
    fn meet<R>(
        &self,
        context: Context,
        number: u64,
        (kind, tell): (&str, Message),
        answer: impl Fn(&mut State) -> Option<R>,
    ) -> Result<R, CommError> {
        if self.state.lock().alone {
            return Err(self.fail(CommError::Peer { rank: 0, message: format!("left before {kind} {number}") }));
        }
        self.say(tell);
        self.speak();
        let answer = self.wait(self.limit, |state| match &state.failure {
            Some(failure) => Some(Err(failure.clone())),
            None => answer(state).map(Ok),
        });
        answer.unwrap_or_else(|| {
            let message = format!("{kind} {number} did not end within {:?}", self.limit);
            let tell = Message::LateMeeting { context, number, limit_ms: milliseconds(self.limit) };
            Err(self.ask(tell, CommError::Peer { rank: self.rank, message }))
        })
    }
}

fn milliseconds(limit: Duration) -> u64 {
    limit.as_millis().try_into().unwrap_or(u64::MAX)
}

/// What the watcher has found: what it tells the hub, and what stands if the hub pronounces nothing.
struct Finding {
    tell: Message,
    own: CommError,
}

struct Watcher {
    shared: Arc<Shared>,
    incoming: Incoming,
    /// When the hub was heard last.
    heard: Instant,
}

impl Watcher {
    fn run(mut self) {
        let mut spoken = Instant::now();
        loop {
            self.listen();
            let finding = self.look();
            if spoken.elapsed() > BEAT {
                self.shared.say(Message::Alive);
                spoken = Instant::now();
            }
            self.shared.speak();
            if let Some(finding) = finding {
                self.report(finding);
            }
            if self.shared.failure().is_some() {
                self.end();
            }
            let state = self.shared.state.lock();
            if state.closing || state.failure.is_some() {
                drop(state);
                return self.leave();
            }
        }
    }

    /// Tells the hub of a finding, and hears its verdict.
    fn report(&mut self, Finding { tell, own }: Finding) {
        self.shared.say(tell);
        self.shared.speak();
        let deadline = Instant::now() + VERDICT_LIMIT;
        while self.shared.failure().is_none() && Instant::now() < deadline && !self.shared.state.lock().alone {
            self.listen();
        }
        self.shared.state.lock().failure.get_or_insert(own);
        self.shared.changed.notify_all();
    }

    /// Hears the hub, for a tick at most.
    fn listen(&mut self) {
        if self.shared.state.lock().alone {
            return std::thread::sleep(TICK);
        }
        let heard = self.incoming.next(TICK);
        let mut state = self.shared.state.lock();
        match heard {
            Ok(None) if self.heard.elapsed() <= self.shared.limit.max(BEAT * 5) => {}
            Ok(None) => {
                let message = format!("gave no sign of life for {:?}", self.shared.limit);
                state.failure.get_or_insert(CommError::Peer { rank: 0, message });
                state.alone = true;
            }
            Ok(Some(message)) => {
                self.heard = Instant::now();
                match message {
                    Message::Failed { error } => {
                        state.failure.get_or_insert(error);
                    }
                    Message::SplitDone { context, number, first, requests } => {
                        state.splits.insert((context, number), (first, requests));
                    }
                    Message::RegisterDone { context, number, bytes } => {
                        state.registrations.insert((context, number), bytes);
                    }
                    Message::Goodbye => state.alone = true,
                    _ => {}
                }
            }
            Err(error) => {
                let message = format!("its process ended, or the connection to it did: {error}");
                state.failure.get_or_insert(CommError::Peer { rank: 0, message });
                state.alone = true;
            }
        }
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Looks at what is under way.
    fn look(&self) -> Option<Finding> {
        let mut state = self.shared.state.lock();
        let State { open, unsaid, failure, .. } = &mut *state;
        if failure.is_some() {
            return None;
        }
        for (&context, open) in open {
            match open.look(self.shared.rank, self.shared.limit) {
                Ok(None) => {}
                Ok(Some((sequence, call))) => {
                    let (tell, own) = self.shared.late_words(context, sequence, call);
                    return Some(Finding { tell, own });
                }
                Err(error) => return Some(Finding { tell: Message::Failed { error: error.clone() }, own: error }),
            }
            let now = (open.ended + u64::from(open.since.is_some()), open.ended);
            if now != open.told {
                open.told = now;
                unsaid.push(Message::Progress { context, reached: now.0, ended: now.1 });
            }
        }
        None
    }

    /// Ends what is under way by the failure.
    fn end(&self) {
        let mut state = self.shared.state.lock();
        let Some(failure) = state.failure.clone() else { return };
        let open: Vec<_> =
            state.open.values_mut().map(|o| (Arc::clone(&o.transport), std::mem::take(&mut o.operations))).collect();
        drop(state);
        let (transports, operations): (Vec<_>, Vec<_>) = open.into_iter().unzip();
        let broken_off =
            operations.into_iter().flatten().filter(|operation| !matches!((operation.ended)(), Ok(true)));
        broken_off.for_each(|operation| (operation.poison)(&failure));
        // All at once: what one has under way may stand behind another's on a stream.
        let ends: Vec<AbortCompletion> = transports.iter().map(|transport| transport.abort()).collect();
        AbortCompletion::wait_for_all(ends);
        self.shared.changed.notify_all();
    }

    /// The world is over here.
    fn leave(&mut self) {
        self.shared.state.lock().over = true;
        let failed = self.shared.failure().is_some();
        if !failed {
            self.shared.say(Message::Goodbye);
        }
        self.shared.speak();
        // Rank 0's goodbye comes back when all have been told; then its process, and the hub with it, may end.
        let deadline = Instant::now() + VERDICT_LIMIT;
        while self.shared.rank == 0 && !failed && Instant::now() < deadline && !self.shared.state.lock().alone {
            self.listen();
        }
    }
}

impl Open {
    /// Drops what has ended; the oldest collective if it takes longer than `limit`.
    fn look(&mut self, rank: usize, limit: Duration) -> Result<Option<(u64, Call)>, CommError> {
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
                self.since = None;
                continue;
            }
            if self.since.is_none() && (oldest.reached)().map_err(skipped)? {
                self.since = Some(Instant::now());
            }
            let late = self.since.is_some_and(|since| since.elapsed() > limit);
            return Ok(late.then(|| (self.ended, oldest.call.clone())));
        }
        Ok(None)
    }
}
