//! Communicators: what is in progress, and operations in their order.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::cuda::{Current, Stream, launch, launch_each};
use crate::exchange::{Aborted, Exchange};
use crate::work::{Kind, Part, give, take};

/// `ncclResult_t`.
pub(crate) const SUCCESS: i32 = 0;
pub(crate) const CUDA_ERROR: i32 = 1;
pub(crate) const SYSTEM_ERROR: i32 = 2;
pub(crate) const INVALID_ARGUMENT: i32 = 4;
pub(crate) const INVALID_USAGE: i32 = 5;
pub(crate) const IN_PROGRESS: i32 = 7;

/// Where the variable wants an error.
fn error_at() -> Option<(usize, u64)> {
    let text = std::env::var("ZERO_STANDIN_NCCL_ERROR_AT").ok()?;
    let (rank, sequence) = text.split_once(':')?;
    Some((rank.parse().ok()?, sequence.parse().ok()?))
}

#[derive(Default)]
struct Order {
    /// Operations enqueued.
    enqueued: u64,
    /// Operations that have ended; the next one's number.
    ended: u64,
    /// Kinds that all ranks have called once.
    connected: HashSet<Kind>,
    splits: u64,
    /// Operations that were recorded into graphs.
    recorded: u64,
    /// An operation works in its buffers.
    working: bool,
}

/// A communicator of this process.
pub(crate) struct Comm {
    exchange: Exchange,
    /// What asking for its state gives.
    pub(crate) state: AtomicI32,
    order: Mutex<Order>,
    changed: Condvar,
    /// It was not split from another.
    is_world: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

static LIVE: Mutex<Option<HashMap<usize, Arc<Comm>>>> = Mutex::new(None);
static NEXT: AtomicU64 = AtomicU64::new(0x1000);

/// The communicator of a handle, if it lives.
pub(crate) fn find(handle: usize) -> Option<Arc<Comm>> {
    lock(&LIVE).as_ref()?.get(&handle).cloned()
}

/// Ends a handle.
pub(crate) fn remove(handle: usize) -> Option<Arc<Comm>> {
    lock(&LIVE).as_mut()?.remove(&handle)
}

fn insert(comm: Arc<Comm>) -> usize {
    let handle = NEXT.fetch_add(16, Ordering::Relaxed) as usize;
    lock(&LIVE).get_or_insert_default().insert(handle, comm);
    handle
}

impl Comm {
    fn start(exchange: Exchange, is_world: bool) -> Arc<Self> {
        let (order, changed) = (Mutex::default(), Condvar::new());
        let comm = Arc::new(Self { exchange, state: AtomicI32::new(IN_PROGRESS), order, changed, is_world });
        let meeting = Arc::clone(&comm);
        comm.background(move || {
            if meeting.exchange.meet("init", &[]).is_ok() {
                meeting.set(SUCCESS);
            }
        });
        comm
    }

    /// The communicator of `n` ranks that know `name`; its handle.
    pub(crate) fn init(name: &str, rank: usize, n: usize) -> usize {
        insert(Self::start(Exchange::new(name, rank, n), true))
    }

    fn background(&self, work: impl FnOnce() + Send + 'static) {
        if std::thread::Builder::new().name("nccl stand-in".to_owned()).spawn(work).is_err() {
            self.set(SYSTEM_ERROR);
        }
    }

    fn set(&self, state: i32) {
        self.state.store(state, Ordering::Release);
    }

    pub(crate) fn rank_and_size(&self) -> (usize, usize) {
        (self.exchange.rank, self.exchange.n)
    }

    /// Enqueues the parts as one operation.
    pub(crate) fn enqueue(self: &Arc<Self>, stream: Stream, parts: Vec<Part>) -> i32 {
        let state = self.state.load(Ordering::Acquire);
        if state != SUCCESS {
            // As NCCL: a communicator in progress is not to be used.
            return if state == IN_PROGRESS { INVALID_ARGUMENT } else { state };
        }
        if stream.is_capturing() {
            return self.record(stream, parts);
        }
        let mut order = lock(&self.order);
        let sequence = order.enqueued;
        order.enqueued += 1;
        let new: Vec<Kind> =
            parts.iter().map(|part| part.kind).filter(|&kind| order.connected.insert(kind)).collect();
        drop(order);
        let comm = Arc::clone(self);
        if new.is_empty() {
            return if comm.submit(stream, sequence, parts) { SUCCESS } else { CUDA_ERROR };
        }
        let Some(context) = Current::of_this_thread() else { return CUDA_ERROR };
        self.set(IN_PROGRESS);
        self.background(move || {
            if comm.exchange.meet(&format!("connect-{sequence}"), &[]).is_ok() {
                let taken = context.make() && comm.submit(stream, sequence, parts);
                comm.set(if taken { SUCCESS } else { CUDA_ERROR });
            }
        });
        IN_PROGRESS
    }

    fn submit(self: &Arc<Self>, stream: Stream, sequence: u64, parts: Vec<Part>) -> bool {
        let comm = Arc::clone(self);
        launch(stream, move || {
            let _ = comm.run(sequence, &parts);
            let mut order = lock(&comm.order);
            (order.ended, order.working) = (sequence + 1, false);
            comm.changed.notify_all();
        })
    }

    /// Records the parts as one operation. Its runs meet those of the other ranks' operation of the same number; what is
    /// before and behind them is the streams' business.
    fn record(self: &Arc<Self>, stream: Stream, parts: Vec<Part>) -> i32 {
        let mut order = lock(&self.order);
        if parts.iter().any(|part| !order.connected.contains(&part.kind)) {
            // NCCL would connect now; here that is done outside.
            return INVALID_USAGE;
        }
        let number = order.recorded;
        order.recorded += 1;
        drop(order);
        let (comm, runs) = (Arc::clone(self), AtomicU64::new(0));
        let taken = launch_each(stream, move || {
            let run = runs.fetch_add(1, Ordering::Relaxed);
            let name = |run| format!("recorded-{number}-{run}");
            let mut order = lock(&comm.order);
            while order.working && !comm.exchange.aborted.load(Ordering::Acquire) {
                order = comm.changed.wait(order).unwrap_or_else(PoisonError::into_inner);
            }
            if comm.exchange.aborted.load(Ordering::Acquire) {
                return;
            }
            order.working = true;
            drop(order);
            let _ = comm.work(&name(run), run.checked_sub(1).map(name), &parts);
            lock(&comm.order).working = false;
            comm.changed.notify_all();
        });
        if taken { SUCCESS } else { CUDA_ERROR }
    }

    /// Does an operation when the ones before it are done.
    fn run(&self, sequence: u64, parts: &[Part]) -> Result<(), Aborted> {
        let mut order = lock(&self.order);
        while order.ended != sequence && !self.exchange.aborted.load(Ordering::Acquire) {
            order = self.changed.wait(order).unwrap_or_else(PoisonError::into_inner);
        }
        // Under the lock, so that an abort either is seen here or waits for the end.
        if self.exchange.aborted.load(Ordering::Acquire) {
            return Err(Aborted);
        }
        order.working = true;
        drop(order);
        let (rank, _) = self.rank_and_size();
        if self.is_world && error_at() == Some((rank, sequence)) {
            self.set(SYSTEM_ERROR);
            return Err(self.exchange.hang());
        }
        self.work(&sequence.to_string(), sequence.checked_sub(1).map(|before| before.to_string()), parts)
    }

    /// Does the parts with those of all ranks under `name`. All ranks have done `before`, or they would not be here.
    fn work(&self, name: &str, before: Option<String>, parts: &[Part]) -> Result<(), Aborted> {
        let (rank, n) = self.rank_and_size();
        let all = self.exchange.meet(name, &give(parts, rank, n))?;
        if take(parts, rank, &all).is_none() {
            return Err(self.exchange.hang());
        }
        if let Some(before) = before {
            self.exchange.forget(&before);
        }
        Ok(())
    }

    /// Whether anything is under way.
    pub(crate) fn is_idle(&self) -> bool {
        let order = lock(&self.order);
        order.ended == order.enqueued
    }

    /// Begins to split; the handle of the new communicator goes to `out` in the end.
    pub(crate) fn split(self: &Arc<Self>, color: i32, key: i32, out: impl FnOnce(usize) + Send + 'static) -> i32 {
        if self.state.load(Ordering::Acquire) != SUCCESS {
            return INVALID_ARGUMENT;
        }
        if !self.is_idle() {
            return INVALID_USAGE;
        }
        let mut order = lock(&self.order);
        let what = format!("split-{}", order.splits);
        order.splits += 1;
        drop(order);
        self.set(IN_PROGRESS);
        let comm = Arc::clone(self);
        self.background(move || {
            let wish = [color.to_le_bytes(), key.to_le_bytes()].concat();
            let Ok(all) = comm.exchange.meet(&what, &wish) else { return };
            let number = |bytes: &[u8]| bytes.try_into().map_or(0, i32::from_le_bytes);
            let wishes: Vec<(i32, i32)> = all.iter().map(|b| (number(&b[..4]), number(&b[4..]))).collect();
            let of_color = wishes.iter().enumerate().filter(|(_, wish)| wish.0 == color);
            let mut members: Vec<(i32, usize)> = of_color.map(|(rank, wish)| (wish.1, rank)).collect();
            members.sort_unstable();
            let place = members.iter().position(|&(_, rank)| rank == comm.exchange.rank);
            if let (true, Some(rank)) = (color >= 0, place) {
                let part = comm.exchange.part(&format!("{what}-{color}"), rank, members.len());
                out(insert(Self::start(part, false)));
            }
            comm.set(SUCCESS);
        });
        IN_PROGRESS
    }

    /// Ends what is under way, and waits until nothing touches a buffer any more.
    pub(crate) fn abort(&self) {
        let mut order = lock(&self.order);
        self.exchange.aborted.store(true, Ordering::Release);
        self.changed.notify_all();
        while order.working {
            order = self.changed.wait(order).unwrap_or_else(PoisonError::into_inner);
        }
        drop(order);
        self.exchange.destroy();
    }

    /// Ends a communicator that is idle.
    pub(crate) fn leave(&self) {
        self.exchange.leave();
    }
}
