//! Saving while training goes on: a step waits for a copy into a staging buffer, never for the disk.
//!
//! ```text
//! trainer   begin: copy -> buffer | step | step | ready? no | step | ready? yes | complete: exchange, publish
//! worker                    fence, write file, sync ............................'
//! ```
//!
//! Buffers of this module: as many staging buffers as were asked for, each as large as the rank's state in its
//! file, made once. A buffer is free, or being filled by `begin`, or with the worker until its file is
//! synced; then it is free again. So at most that many saves are in flight.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;

use zero_shard::Layout;

use crate::pages::Pages;
use crate::plan::{FilePlan, ordered, pieces_of};
use crate::report::{Published, Receipt};
use crate::runs::runs;
use crate::transfer::Slices;
use crate::{CkptError, SaveMeta, ShardData, StateSpec, Store};

/// Memory that holds a snapshot: [`Pages`], or pinned memory of a device's own.
pub trait StagingMemory: Send + 'static {
    /// The bytes.
    fn bytes(&self) -> &[u8];

    /// The bytes.
    fn bytes_mut(&mut self) -> &mut [u8];
}

impl StagingMemory for Pages {
    fn bytes(&self) -> &[u8] {
        Pages::bytes(self)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        Pages::bytes_mut(self)
    }
}

/// Waits until the snapshot is complete, on the worker's thread: for host memory it has nothing to wait for;
/// a device waits for the event behind its copies. So no value of after the step gets into the snapshot, and
/// the step does not wait for the copies either.
pub type Fence = Box<dyn FnOnce() -> Result<(), String> + Send>;

/// A place in the staging buffer to be filled: real elements of one unit of one state.
pub struct Slot<'a> {
    /// The state.
    pub state: &'a StateSpec,
    /// The unit.
    pub unit: usize,
    /// Which elements of the rank's shard of that unit.
    pub in_shard: Range<u64>,
    /// Their bytes, little-endian, in the dtype of the state.
    pub bytes: &'a mut [u8],
}

struct Job<M> {
    step: u64,
    buffer: M,
    fence: Fence,
}

type Done<M> = (M, Result<Receipt, CkptError>);

/// A [`Store`] whose files are written behind the trainer's back. All ranks call `begin` and `complete` in the
/// same order.
pub struct BackgroundStore<M: StagingMemory = Pages> {
    store: Arc<Store>,
    layout: Arc<Layout>,
    states: Vec<StateSpec>,
    plan: FilePlan,
    limit: usize,
    free: Vec<M>,
    /// Saves begun and not completed, oldest first: what is known of the staging of each.
    in_flight: VecDeque<(SaveMeta, Option<Result<Receipt, CkptError>>)>,
    jobs: Option<Sender<Job<M>>>,
    done: Receiver<Done<M>>,
    worker: Option<JoinHandle<()>>,
}

impl BackgroundStore<Pages> {
    /// Saves the `states` of `layout` through `store`, with `buffers` staging buffers of host memory.
    ///
    /// # Errors
    /// No memory, no thread, or sizes that do not fit.
    pub fn new(store: Store, layout: Arc<Layout>, states: Vec<StateSpec>, buffers: usize) -> Result<Self, CkptError> {
        let bytes = staging_bytes(&layout, store.rank(), &states)?;
        let make = || {
            let len = usize::try_from(bytes).ok();
            len.and_then(Pages::touched).ok_or(CkptError::OutOfMemory { bytes })
        };
        let memory = (0..buffers.max(1)).map(|_| make()).collect::<Result<_, _>>()?;
        Self::with_memory(store, layout, states, memory)
    }
}

/// Bytes of a staging buffer for `rank`: its real elements in all states.
///
/// # Errors
/// No such rank, or a size beyond 64 bits.
pub fn staging_bytes(layout: &Layout, rank: u64, states: &[StateSpec]) -> Result<u64, CkptError> {
    plan(layout, rank, states).map(|p| p.state_bytes())
}

fn plan(layout: &Layout, rank: u64, states: &[StateSpec]) -> Result<FilePlan, CkptError> {
    let plan = FilePlan::new(&ordered(states.to_vec()), pieces_of(layout, rank)?);
    plan.ok_or_else(|| CkptError::argument("bytes of state", "a number of 64 bits", "more"))
}

impl<M: StagingMemory> BackgroundStore<M> {
    /// The same with the caller's own staging buffers, each of at least [`staging_bytes`].
    ///
    /// # Errors
    /// A buffer is too small, or there is no thread.
    pub fn with_memory(
        store: Store,
        layout: Arc<Layout>,
        states: Vec<StateSpec>,
        memory: Vec<M>,
    ) -> Result<Self, CkptError> {
        let states = ordered(states);
        let plan = plan(&layout, store.rank(), &states)?;
        if let Some(small) = memory.iter().find(|m| (m.bytes().len() as u64) < plan.state_bytes()) {
            return Err(CkptError::argument("bytes of a staging buffer", plan.state_bytes(), small.bytes().len()));
        }
        let store = Arc::new(store);
        let (jobs, todo) = channel::<Job<M>>();
        let (send, done) = channel();
        let mine = (Arc::clone(&store), Arc::clone(&layout), states.clone(), plan.clone());
        let work = move || {
            let (store, layout, states, plan) = mine;
            for job in todo {
                let written = (job.fence)().map_err(|message| CkptError::Snapshot { message }).and_then(|()| {
                    let bytes = &job.buffer.bytes()[..plan.state_bytes() as usize];
                    let (states, pieces) = (states.clone(), plan.pieces.clone());
                    store.stage_source(job.step, &layout, states, pieces, &Slices::new(vec![bytes]))
                });
                if send.send((job.buffer, written)).is_err() {
                    return;
                }
            }
        };
        let worker = std::thread::Builder::new().name("zero-ckpt-save".into()).spawn(work);
        let worker = worker.map_err(CkptError::io("start the writer of", store.path()))?;
        Ok(Self {
            store,
            layout,
            states,
            plan,
            limit: memory.len(),
            free: memory,
            in_flight: VecDeque::new(),
            jobs: Some(jobs),
            done,
            worker: Some(worker),
        })
    }

    /// Begins a save: `copy` fills every slot, or has a device do it and returns the fence to wait for. Returns
    /// as soon as `copy` does. A failed copy counts as a save in flight, so that all ranks stay in step; it
    /// surfaces in [`BackgroundStore::complete`], on all of them.
    ///
    /// # Errors
    /// [`CkptError::InFlight`]: no buffer is free. It is the same on all ranks.
    pub fn begin(
        &mut self,
        meta: SaveMeta,
        copy: impl FnOnce(Vec<Slot<'_>>) -> Result<Fence, String>,
    ) -> Result<(), CkptError> {
        self.collect(false);
        if self.in_flight.len() >= self.limit {
            return Err(CkptError::InFlight { limit: self.limit });
        }
        let step = meta.step;
        self.in_flight.push_back((meta, None));
        // A buffer is missing only where the worker is gone with it.
        let Some(mut buffer) = self.free.pop() else {
            self.fail("the background writer has ended".into());
            return Ok(());
        };
        let slots = slots(&self.layout, self.store.rank(), &self.plan, &self.states, buffer.bytes_mut());
        match copy(slots) {
            Ok(fence) => {
                let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(Job { step, buffer, fence }).is_ok());
                if !sent {
                    self.fail("the background writer has ended".into());
                }
            }
            Err(message) => {
                self.free.push(buffer);
                self.fail(message);
            }
        }
        Ok(())
    }

    /// [`BackgroundStore::begin`] with state in host memory.
    ///
    /// # Errors
    /// As `begin`, or the shard is not of this rank, these states and this layout, which is told on all ranks.
    pub fn begin_copy(&mut self, meta: SaveMeta, shard: &ShardData<'_>) -> Result<(), CkptError> {
        let source = match shard.source() {
            Ok(source) if shard.specs() == self.states && *shard.layout() == *self.layout => Ok(source),
            Ok(_) => Err("the shard has other states or another layout than the store".to_string()),
            Err(e) => Err(e.to_string()),
        };
        self.begin(meta, |slots| {
            let source = source?;
            for (slot, part) in slots.into_iter().zip(source.parts()) {
                slot.bytes.copy_from_slice(part);
            }
            Ok(Box::new(|| Ok(())))
        })
    }

    /// Saves begun and not completed.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether the oldest save in flight is staged, or has failed, on this rank. When it is on all ranks (each can
    /// put this bit into what it exchanges each step), `complete` takes only the time of a few renames.
    pub fn ready(&mut self) -> bool {
        self.collect(false);
        self.in_flight.front().is_some_and(|(_, outcome)| outcome.is_some())
    }

    /// Completes the oldest save in flight with the other ranks: waits for this rank's file, exchanges,
    /// publishes. See [`Store::save`] for `exchange`.
    ///
    /// # Errors
    /// [`CkptError::NothingInFlight`]; otherwise as [`Store::save`], the same on all ranks.
    pub fn complete<E: std::fmt::Display>(
        &mut self,
        exchange: impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, E>,
    ) -> Result<Published, CkptError> {
        while self.in_flight.front().is_some_and(|(_, outcome)| outcome.is_none()) {
            self.collect(true);
        }
        let (meta, outcome) = self.in_flight.pop_front().ok_or(CkptError::NothingInFlight)?;
        let ended = || CkptError::Snapshot { message: "the background writer has ended".into() };
        let staged = outcome.unwrap_or_else(|| Err(ended()));
        self.store.finish(&meta, &self.layout, staged, exchange)
    }

    /// Takes what the worker has finished; waits for one where asked.
    fn collect(&mut self, wait: bool) {
        loop {
            let next =
                if wait { self.done.recv().map_err(|_| TryRecvError::Disconnected) } else { self.done.try_recv() };
            match next {
                Ok((buffer, outcome)) => {
                    self.free.push(buffer);
                    self.settle(outcome);
                }
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    return while self.in_flight.iter().any(|(_, o)| o.is_none()) {
                        self.fail("the background writer has ended".into());
                    };
                }
            }
            if wait {
                return;
            }
        }
    }

    fn fail(&mut self, message: String) {
        self.settle_last(Err(CkptError::Snapshot { message }));
    }

    /// The worker finishes in the order in which saves were begun.
    fn settle(&mut self, outcome: Result<Receipt, CkptError>) {
        if let Some((_, slot)) = self.in_flight.iter_mut().find(|(_, o)| o.is_none()) {
            *slot = Some(outcome);
        }
    }

    /// What fails without the worker is the save begun last.
    fn settle_last(&mut self, outcome: Result<Receipt, CkptError>) {
        if let Some((_, slot)) = self.in_flight.iter_mut().rev().find(|(_, o)| o.is_none()) {
            *slot = Some(outcome);
        }
    }
}

impl<M: StagingMemory> Drop for BackgroundStore<M> {
    /// Waits for the worker and removes what was staged and not published.
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
        self.collect(false);
        for (_, outcome) in self.in_flight.drain(..) {
            outcome.iter().flatten().for_each(|receipt| self.store.discard(receipt));
        }
    }
}

fn slots<'a>(
    layout: &Layout,
    rank: u64,
    plan: &FilePlan,
    states: &'a [StateSpec],
    buffer: &'a mut [u8],
) -> Vec<Slot<'a>> {
    let (mut rest, mut slots) = (buffer, Vec::with_capacity(states.len() * plan.pieces.len()));
    for state in states {
        for piece in &plan.pieces {
            let unit = piece.0 as usize;
            for run in runs(&layout.units()[unit], rank) {
                let (bytes, later) = rest.split_at_mut((run.len() * state.dtype.bytes()) as usize);
                rest = later;
                slots.push(Slot { state, unit, in_shard: run.in_shard(), bytes });
            }
        }
    }
    slots
}
