//! Saving while training goes on: a step waits for a copy into a staging buffer, never for the disk.
//!
//! ```text
//! trainer   begin: copy -> buffer | steps, as many as it takes ..... | advance: receipts | steps | advance: verdict
//! worker                            fence, write file, sync -> ready   rank 0: publish -> ready
//! ```
//!
//! Each step may carry the bit [`BackgroundStore::ready`] of every rank in what the ranks exchange anyway; when it
//! is set on all, [`BackgroundStore::advance`] costs one small exchange and no wait. [`BackgroundStore::complete`]
//! does the rest of a save at once, waiting as long as it takes.
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

use crate::agree::Receipts;
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

/// What the worker is asked to do.
enum Job<M> {
    Stage { step: u64, buffer: M, fence: Fence },
    Publish { meta: SaveMeta, receipts: Receipts },
}

/// What the worker has done.
enum Done<M> {
    Staged(M, Result<Receipt, CkptError>),
    Published(Result<Published, CkptError>),
}

/// How far a save in flight has come on this rank.
enum Phase {
    /// Its state is in a staging buffer, which the worker is writing.
    Staging,
    /// Its file is synced, or has failed; the buffer is free.
    Staged(Result<Receipt, CkptError>),
    /// Rank 0: the worker is publishing.
    Publishing,
    /// It is published, or not; the other ranks are to hear it. (On those, always so.)
    Decided(Result<Published, CkptError>),
}

struct InFlight {
    meta: SaveMeta,
    phase: Phase,
}

/// A [`Store`] whose files are written behind the trainer's back. All ranks call `begin` and `complete` in the
/// same order.
pub struct BackgroundStore<M: StagingMemory = Pages> {
    store: Arc<Store>,
    layout: Arc<Layout>,
    states: Vec<StateSpec>,
    plan: FilePlan,
    limit: usize,
    free: Vec<M>,
    /// Saves begun and not completed, oldest first.
    in_flight: VecDeque<InFlight>,
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
                let done = match job {
                    Job::Stage { step, buffer, fence } => {
                        let staged = fence().map_err(|message| CkptError::Snapshot { message }).and_then(|()| {
                            let bytes = &buffer.bytes()[..plan.state_bytes() as usize];
                            let (states, pieces) = (states.clone(), plan.pieces.clone());
                            store.stage_source(step, &layout, states, pieces, &Slices::new(vec![bytes]))
                        });
                        Done::Staged(buffer, staged)
                    }
                    Job::Publish { meta, receipts } => Done::Published(store.publish(&meta, &layout, receipts)),
                };
                if send.send(done).is_err() {
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
        // A buffer is missing only where the worker is gone with it.
        let phase = match self.free.pop() {
            None => Phase::Staged(Err(ended())),
            Some(mut buffer) => {
                let slots = slots(&self.layout, self.store.rank(), &self.plan, &self.states, buffer.bytes_mut());
                match copy(slots) {
                    Err(message) => {
                        self.free.push(buffer);
                        Phase::Staged(Err(CkptError::Snapshot { message }))
                    }
                    Ok(fence) => match self.send(Job::Stage { step, buffer, fence }) {
                        true => Phase::Staging,
                        false => Phase::Staged(Err(ended())),
                    },
                }
            }
        };
        self.in_flight.push_back(InFlight { meta, phase });
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

    /// Whether [`BackgroundStore::advance`] would have to wait for nothing on this rank. When it is so on all
    /// ranks, it is time to call it.
    pub fn ready(&mut self) -> bool {
        self.collect(false);
        self.in_flight.front().is_some_and(|f| matches!(f.phase, Phase::Staged(_) | Phase::Decided(_)))
    }

    /// Takes the oldest save in flight one exchange further, together with the other ranks: the first time the
    /// receipts, after which rank 0 publishes in the background (`None`); the second time the verdict. Waits
    /// for this rank where it is not ready. See [`Store::save`] for `exchange`; here it is called once.
    ///
    /// # Errors
    /// [`CkptError::NothingInFlight`]; otherwise as [`Store::save`], the same on all ranks, and the save is over.
    pub fn advance<E: std::fmt::Display>(
        &mut self,
        mut exchange: impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, E>,
    ) -> Result<Option<Published>, CkptError> {
        while matches!(self.in_flight.front(), Some(f) if matches!(f.phase, Phase::Staging | Phase::Publishing)) {
            self.collect(true);
        }
        let InFlight { meta, phase } = self.in_flight.pop_front().ok_or(CkptError::NothingInFlight)?;
        match phase {
            Phase::Decided(verdict) => self.store.share_verdict(&self.layout, verdict, &mut exchange).map(Some),
            Phase::Staged(staged) => {
                let receipts = self.store.share_receipts(&self.layout, staged, &mut exchange)?;
                let phase = if self.store.rank() != 0 {
                    Phase::Decided(self.store.decide(&meta, &self.layout, receipts))
                } else if self.send(Job::Publish { meta: meta.clone(), receipts }) {
                    Phase::Publishing
                } else {
                    Phase::Decided(Err(ended()))
                };
                self.in_flight.push_front(InFlight { meta, phase });
                Ok(None)
            }
            Phase::Staging | Phase::Publishing => Err(ended()),
        }
    }

    /// Completes the oldest save in flight together with the other ranks, waiting as long as it takes.
    ///
    /// # Errors
    /// As [`BackgroundStore::advance`].
    pub fn complete<E: std::fmt::Display>(
        &mut self,
        mut exchange: impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, E>,
    ) -> Result<Published, CkptError> {
        loop {
            if let Some(published) = self.advance(&mut exchange)? {
                return Ok(published);
            }
        }
    }

    /// Whether the worker is there to take it.
    fn send(&self, job: Job<M>) -> bool {
        self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok())
    }

    /// Takes what the worker has finished; waits for one thing where asked.
    fn collect(&mut self, wait: bool) {
        loop {
            let next = match wait {
                true => self.done.recv().map_err(|_| TryRecvError::Disconnected),
                false => self.done.try_recv(),
            };
            match next {
                Ok(Done::Staged(buffer, staged)) => {
                    self.free.push(buffer);
                    self.settle(|phase| matches!(phase, Phase::Staging), Phase::Staged(staged));
                }
                Ok(Done::Published(verdict)) => {
                    self.settle(|phase| matches!(phase, Phase::Publishing), Phase::Decided(verdict));
                }
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    for save in &mut self.in_flight {
                        match save.phase {
                            Phase::Staging => save.phase = Phase::Staged(Err(ended())),
                            Phase::Publishing => save.phase = Phase::Decided(Err(ended())),
                            Phase::Staged(_) | Phase::Decided(_) => {}
                        }
                    }
                    return;
                }
            }
            if wait {
                return;
            }
        }
    }

    /// The worker does its jobs in order, so what it has finished is of the oldest save that waits for such.
    fn settle(&mut self, waits: impl Fn(&Phase) -> bool, phase: Phase) {
        if let Some(save) = self.in_flight.iter_mut().find(|save| waits(&save.phase)) {
            save.phase = phase;
        }
    }
}

fn ended() -> CkptError {
    CkptError::Snapshot { message: "the background writer has ended".into() }
}

impl<M: StagingMemory> Drop for BackgroundStore<M> {
    /// Waits for the worker and removes what was staged and not published.
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
        self.collect(false);
        for save in self.in_flight.drain(..) {
            if let Phase::Staged(Ok(receipt)) = save.phase {
                self.store.discard(&receipt);
            }
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
