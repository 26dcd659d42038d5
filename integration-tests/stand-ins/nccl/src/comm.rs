//! Communicators: their state, and their operations in order.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use stand_in_shared::driver::{
    Current, Stream, Tally, is_dry, launch, launch_each, shareable_bytes, tally, tie,
};
use stand_in_shared::{Handles, fresh_number, lock};

use crate::exchange::{Aborted, Exchange};
use crate::work::{Kind, Part, finish, serialize};

/// `ncclResult_t`.
pub(crate) const SUCCESS: i32 = 0;
pub(crate) const CUDA_ERROR: i32 = 1;
pub(crate) const SYSTEM_ERROR: i32 = 2;
pub(crate) const INVALID_ARGUMENT: i32 = 4;
pub(crate) const INVALID_USAGE: i32 = 5;
pub(crate) const REMOTE_ERROR: i32 = 6;
pub(crate) const IN_PROGRESS: i32 = 7;

/// In the dry mode, operations that send more bytes do not run.
const SMALL_BYTES: u64 = 4 << 10;

/// The rank and operation in `ZERO_STANDIN_NCCL_ERROR_AT`.
fn error_at() -> Option<(usize, u64)> {
    let text = std::env::var("ZERO_STANDIN_NCCL_ERROR_AT").ok()?;
    let (rank, sequence) = text.split_once(':')?;
    Some((rank.parse().ok()?, sequence.parse().ok()?))
}

#[derive(Default)]
struct Order {
    enqueued: u64,
    /// Operations that have ended: the number of the next one.
    ended: u64,
    /// Kinds whose first call has connected the ranks.
    connected: HashSet<Kind>,
    splits: u64,
    /// Operations captured into graphs.
    recorded: u64,
    /// An operation is accessing its buffers.
    working: bool,
    /// Running background threads.
    busy: usize,
    /// Operations enqueued on streams, and those that their streams have run.
    launched: u64,
    passed: u64,
    /// Operations in existing graphs.
    tied: usize,
}

impl Order {
    /// Whether no operation is on a stream or in a graph.
    fn is_quiet(&self) -> bool {
        self.passed == self.launched && self.tied == 0
    }
}

/// The operations that a rank had enqueued on each of its other communicators, by their names, when it
/// enqueued one. Without operations in graphs, whose order is that of their launches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Enqueued(BTreeMap<String, u64>);

impl Enqueued {
    fn to_bytes(&self) -> Vec<u8> {
        let lines: String = self
            .0
            .iter()
            .map(|(name, count)| format!("{name} {count}\n"))
            .collect();
        let len = lines.len() as u64;
        [&len.to_le_bytes(), lines.as_bytes()].concat()
    }

    /// Those at the start of a message, and its rest.
    fn split(message: &[u8]) -> Option<(Self, &[u8])> {
        let (len, rest) = message.split_first_chunk::<8>()?;
        let (lines, rest) = rest.split_at_checked(u64::from_le_bytes(*len) as usize)?;
        let counts = std::str::from_utf8(lines).ok()?.lines().map(|line| {
            let (name, count) = line.split_once(' ')?;
            Some((name.to_owned(), count.parse().ok()?))
        });
        Some((Self(counts.collect::<Option<_>>()?), rest))
    }

    /// A communicator of both ranks on which they have enqueued different numbers.
    fn differs(&self, other: &Self) -> Option<&str> {
        let mut both = self
            .0
            .iter()
            .filter_map(|(name, count)| Some((name, count, other.0.get(name)?)));
        both.find(|(_, own, theirs)| own != theirs)
            .map(|(name, ..)| &**name)
    }
}

/// A communicator of this process.
pub(crate) struct Comm {
    exchange: Exchange,
    /// The result of the last call.
    state: AtomicI32,
    /// An asynchronous error.
    failed: AtomicI32,
    order: Mutex<Order>,
    changed: Condvar,
    /// The name and the rank of the communicator that this one was split from at first, or its own:
    /// the communicators of one rank have the same.
    root: (String, usize),
    /// Registered memory, by handle.
    registered: Mutex<HashMap<usize, Range<u64>>>,
}

static LIVE: Handles<Comm> = Handles::new();

/// The communicator of a handle.
pub(crate) fn find(handle: usize) -> Option<Arc<Comm>> {
    LIVE.get(handle).ok()
}

/// Removes a handle.
pub(crate) fn remove(handle: usize) -> Option<Arc<Comm>> {
    LIVE.remove(handle).ok()
}

fn insert(comm: Arc<Comm>) -> usize {
    LIVE.insert(fresh_number(), comm)
}

impl Comm {
    fn start(exchange: Exchange, root: Option<(String, usize)>) -> Arc<Self> {
        let own = (exchange.name(), exchange.rank);
        let comm = Arc::new(Self {
            exchange,
            state: AtomicI32::new(IN_PROGRESS),
            failed: AtomicI32::new(SUCCESS),
            order: Mutex::default(),
            changed: Condvar::new(),
            root: root.unwrap_or(own),
            registered: Mutex::default(),
        });
        let meeting = Arc::clone(&comm);
        comm.background(move || {
            if meeting.exchange.meet("init", &[]).is_ok() {
                meeting.set(SUCCESS);
            }
        });
        comm
    }

    /// Starts the communicator `name` of `n` ranks; returns its handle.
    pub(crate) fn init(name: &str, rank: usize, n: usize) -> usize {
        insert(Self::start(Exchange::new(name, rank, n), None))
    }

    fn background(self: &Arc<Self>, work: impl FnOnce() + Send + 'static) {
        self.change(|order| order.busy += 1);
        let comm = Arc::clone(self);
        let work = move || {
            work();
            comm.change(|order| order.busy -= 1);
        };
        if std::thread::Builder::new()
            .name("nccl stand-in".to_owned())
            .spawn(work)
            .is_err()
        {
            self.change(|order| order.busy -= 1);
            self.set(SYSTEM_ERROR);
        }
    }

    fn change(&self, change: impl FnOnce(&mut Order)) {
        change(&mut lock(&self.order));
        self.changed.notify_all();
    }

    fn wait_while(&self, condition: impl Fn(&Order) -> bool) {
        let wait = self
            .changed
            .wait_while(lock(&self.order), |order| condition(order));
        drop(wait.unwrap_or_else(PoisonError::into_inner));
    }

    fn set(&self, state: i32) {
        self.state.store(state, Ordering::Release);
    }

    /// The communicator's state.
    pub(crate) fn state(&self) -> i32 {
        match self.state.load(Ordering::Acquire) {
            SUCCESS => self.failed.load(Ordering::Acquire),
            state => state,
        }
    }

    pub(crate) fn rank_and_size(&self) -> (usize, usize) {
        (self.exchange.rank, self.exchange.n)
    }

    /// Enqueues the parts as one operation.
    pub(crate) fn enqueue(self: &Arc<Self>, stream: Stream, parts: Vec<Part>) -> i32 {
        let state = self.state();
        if state != SUCCESS {
            // As NCCL: a communicator in progress must not be used.
            return if state == IN_PROGRESS {
                INVALID_ARGUMENT
            } else {
                state
            };
        }

        let (_, n) = self.rank_and_size();
        for part in &parts {
            let bytes = part.sent_bytes(n);
            let call = Tally {
                kind: c"collective",
                name: part.kind.name(),
                loaded: bytes,
                stored: bytes,
                operations: 0,
            };
            tally(stream, call);
        }

        if is_dry() && parts.iter().map(|part| part.sent_bytes(n)).sum::<u64>() > SMALL_BYTES {
            return SUCCESS;
        }
        if stream.is_capturing() {
            return self.record(stream, parts);
        }
        let before = self.enqueued_on_others();
        let mut order = lock(&self.order);
        let sequence = order.enqueued;
        order.enqueued += 1;
        let new: Vec<Kind> = parts
            .iter()
            .map(|part| part.kind)
            .filter(|&kind| order.connected.insert(kind))
            .collect();
        drop(order);
        let Some(context) = Current::of_this_thread() else {
            return CUDA_ERROR;
        };
        let comm = Arc::clone(self);
        self.set(IN_PROGRESS);

        self.background(move || {
            if new.is_empty()
                || comm
                    .exchange
                    .meet(&format!("connect-{sequence}"), &[])
                    .is_ok()
            {
                let taken = context.make() && comm.submit(stream, sequence, parts, before);
                comm.set(if taken { SUCCESS } else { CUDA_ERROR });
            }
        });

        IN_PROGRESS
    }

    /// The operations that this rank has enqueued on each of its other communicators.
    fn enqueued_on_others(&self) -> Enqueued {
        let others = LIVE.select(|comm| comm.root == self.root && !std::ptr::eq(comm, self));
        let counts = others
            .into_iter()
            .map(|(_, comm)| (comm.exchange.name(), lock(&comm.order).enqueued));
        Enqueued(counts.collect())
    }

    fn submit(
        self: &Arc<Self>,
        stream: Stream,
        sequence: u64,
        parts: Vec<Part>,
        before: Enqueued,
    ) -> bool {
        let comm = Arc::clone(self);
        self.change(|order| order.launched += 1);
        let taken = launch(stream, move || {
            let _ = comm.run(sequence, &parts, &before);
            comm.change(|order| {
                order.ended = sequence + 1;
                order.passed += 1;
                order.working = false;
            });
        });
        if !taken {
            self.change(|order| order.launched -= 1);
        }
        taken
    }

    /// Captures the parts as one operation. Its runs meet those of the other ranks' operation of
    /// the same number.
    fn record(self: &Arc<Self>, stream: Stream, parts: Vec<Part>) -> i32 {
        let mut order = lock(&self.order);
        if parts
            .iter()
            .any(|part| !order.connected.contains(&part.kind))
        {
            // NCCL would connect now. Here the first operation of a kind must not be captured.
            return INVALID_USAGE;
        }
        let number = order.recorded;
        order.recorded += 1;
        drop(order);
        let Some(context) = Current::of_this_thread() else {
            return CUDA_ERROR;
        };
        let comm = Arc::clone(self);
        self.set(IN_PROGRESS);
        self.background(move || {
            let taken = context.make() && comm.add_to_graph(stream, number, parts);
            comm.set(if taken { SUCCESS } else { CUDA_ERROR });
        });

        IN_PROGRESS
    }

    fn add_to_graph(self: &Arc<Self>, stream: Stream, number: u64, parts: Vec<Part>) -> bool {
        let of_graph = Arc::clone(self);
        let comm = Arc::clone(self);
        let runs = AtomicU64::new(0);

        self.change(|order| order.tied += 1);
        tie(stream, move || of_graph.change(|order| order.tied -= 1));
        launch_each(stream, move || {
            let run = runs.fetch_add(1, Ordering::Relaxed);
            let name = |run| format!("recorded-{number}-{run}");
            let mut order = lock(&comm.order);
            while order.working && !comm.exchange.aborted.load(Ordering::Acquire) {
                order = comm
                    .changed
                    .wait(order)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            if comm.exchange.aborted.load(Ordering::Acquire) {
                return;
            }
            order.working = true;
            drop(order);
            let before = run.checked_sub(1).map(name);
            let _ = comm.work(&name(run), before, &parts, &Enqueued::default());
            comm.change(|order| order.working = false);
        })
    }

    /// Runs an operation after all earlier ones have ended.
    fn run(&self, sequence: u64, parts: &[Part], before: &Enqueued) -> Result<(), Aborted> {
        let mut order = lock(&self.order);
        while order.ended != sequence && !self.exchange.aborted.load(Ordering::Acquire) {
            order = self
                .changed
                .wait(order)
                .unwrap_or_else(PoisonError::into_inner);
        }

        // Under the lock, so that an abort is either seen here or waits for the end.
        if self.exchange.aborted.load(Ordering::Acquire) {
            return Err(Aborted);
        }
        order.working = true;
        drop(order);
        let (rank, _) = self.rank_and_size();

        let is_world = self.root == (self.exchange.name(), rank);
        if is_world && error_at() == Some((rank, sequence)) {
            self.failed.store(SYSTEM_ERROR, Ordering::Release);
            return Err(self.exchange.hang());
        }

        self.work(
            &sequence.to_string(),
            sequence.checked_sub(1).map(|before| before.to_string()),
            parts,
            before,
        )
    }

    /// Exchanges the parts with all ranks under `name` and runs them. All ranks have ended
    /// operation `before`.
    fn work(
        &self,
        name: &str,
        before: Option<String>,
        parts: &[Part],
        enqueued: &Enqueued,
    ) -> Result<(), Aborted> {
        let (rank, n) = self.rank_and_size();
        let message = [enqueued.to_bytes(), serialize(parts, rank, n)].concat();
        let all = self.exchange.meet(name, &message)?;
        let all = all.iter().map(|bytes| Enqueued::split(bytes));
        let Some(all) = all.collect::<Option<Vec<_>>>() else {
            return Err(self.exchange.hang());
        };
        for (peer, (theirs, _)) in all.iter().enumerate() {
            if let Some(other) = enqueued.differs(theirs) {
                let own = self.exchange.name();
                eprintln!(
                    "nccl stand-in: operation {name} of communicator {own}: ranks {rank} and {peer} of it have enqueued \
                     different numbers of operations on {other} before; NCCL may wait forever if ranks call \
                     communicators in another order"
                );
                self.failed.store(INVALID_USAGE, Ordering::Release);
                return Err(self.exchange.hang());
            }
        }
        let of_parts: Vec<&[u8]> = all.iter().map(|(_, parts)| *parts).collect();
        if finish(parts, rank, &of_parts).is_none() {
            return Err(self.exchange.hang());
        }
        if let Some(before) = before {
            self.exchange.remove(&before);
        }
        Ok(())
    }

    /// Whether no operation is under way.
    pub(crate) fn is_idle(&self) -> bool {
        let order = lock(&self.order);
        order.ended == order.enqueued
    }

    /// Starts a split, which passes the handle of the new communicator to `out`.
    pub(crate) fn split(
        self: &Arc<Self>,
        color: i32,
        key: i32,
        out: impl FnOnce(usize) + Send + 'static,
    ) -> i32 {
        if self.state() != SUCCESS {
            return INVALID_ARGUMENT;
        }
        if !self.is_idle() {
            return INVALID_USAGE;
        }
        let mut order = lock(&self.order);
        let name = format!("split-{}", order.splits);
        order.splits += 1;
        drop(order);
        self.set(IN_PROGRESS);
        let comm = Arc::clone(self);

        self.background(move || {
            let own = [color.to_le_bytes(), key.to_le_bytes()].concat();
            let Ok(all) = comm.exchange.meet(&name, &own) else {
                return;
            };
            let number = |bytes: &[u8]| bytes.try_into().map_or(0, i32::from_le_bytes);
            let requests: Vec<(i32, i32)> = all
                .iter()
                .map(|b| (number(&b[..4]), number(&b[4..])))
                .collect();
            let of_color = requests
                .iter()
                .enumerate()
                .filter(|(_, request)| request.0 == color);
            let mut members: Vec<(i32, usize)> =
                of_color.map(|(rank, request)| (request.1, rank)).collect();
            members.sort_unstable();
            let place = members
                .iter()
                .position(|&(_, rank)| rank == comm.exchange.rank);
            if let (true, Some(rank)) = (color >= 0, place) {
                let part = comm
                    .exchange
                    .part(&format!("{name}-{color}"), rank, members.len());
                out(insert(Self::start(part, Some(comm.root.clone()))));
            }
            comm.set(SUCCESS);
        });

        // As NCCL 2.30.7, although the split is under way: the state says when it ends.
        SUCCESS
    }

    /// Finalizes the communicator: waits until no graph has its operations and all ranks finalize.
    pub(crate) fn finalize(self: &Arc<Self>) -> i32 {
        if self.state() != SUCCESS {
            return INVALID_ARGUMENT;
        }
        self.set(IN_PROGRESS);
        let comm = Arc::clone(self);
        self.background(move || {
            let aborted = || comm.exchange.aborted.load(Ordering::Acquire);
            comm.wait_while(|order| !order.is_quiet() && !aborted());
            if !aborted() {
                comm.set(if comm.exchange.finalize() {
                    SUCCESS
                } else {
                    REMOTE_ERROR
                });
            }
        });
        IN_PROGRESS
    }

    /// Aborts the operations under way, and waits until they have left their streams and all graphs
    /// with operations of the communicator are gone.
    pub(crate) fn abort(&self) {
        self.exchange.aborted.store(true, Ordering::Release);
        self.change(|_| ());
        self.wait_while(|order| order.busy > 0 || !order.is_quiet());
        self.exchange.destroy();
    }

    /// Registers memory from the beginning of one allocation that other processes can open, since
    /// NVLink switches need aligned memory. Returns its handle.
    pub(crate) fn register(&self, bytes: Range<u64>) -> Option<usize> {
        let whole = shareable_bytes(bytes.start)?;
        if self.state() != SUCCESS || bytes.start != whole.start || bytes.end > whole.end {
            return None;
        }
        let number = fresh_number();
        lock(&self.registered).insert(number, bytes);
        Some(number)
    }

    /// Whether these bytes are registered.
    pub(crate) fn is_registered(&self, at: u64, bytes: usize) -> bool {
        bytes > 0
            && lock(&self.registered)
                .values()
                .any(|r| r.start <= at && at + bytes as u64 <= r.end)
    }

    /// Deregisters memory, which must still exist, with no operation under way: otherwise a peer
    /// may access freed memory.
    pub(crate) fn deregister(&self, number: usize) -> i32 {
        let known = lock(&self.registered).remove(&number);
        let exists = known.is_some_and(|bytes| shareable_bytes(bytes.start).is_some());
        if exists && self.is_idle() {
            return SUCCESS;
        }
        self.failed.store(INVALID_USAGE, Ordering::Release);
        INVALID_USAGE
    }

    /// Ends an idle communicator.
    pub(crate) fn leave(&self) {
        self.exchange.leave();
    }
}
