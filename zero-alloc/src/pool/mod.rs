//! The pool: where all model state, buckets, gathered units and activations come from.
//!
//! A [`Block`] is an owned piece of device memory with a [`Purpose`]. Dropping it gives it back in stream
//! order: what [`Block::record_use`] noted must have run before another stream may use the memory again.
//!
//! The life of memory here: a **backing** comes from [`Memory::allocate`](crate::device::Memory::allocate) and
//! goes back when the last handle and block of the pool are gone. It is a segment of one offset space, which
//! the [`Planner`] cuts into blocks; where the device has virtual memory, pages under one range of addresses take
//! the place of backings. A freed block is free for everyone at once; what other
//! streams must wait for before they touch it is a **hazard** of its bytes, kept until they are taken again.

mod backings;
mod block;
mod error;
#[cfg(all(test, not(any(loom, miri))))]
mod fault_tests;
mod hazards;
mod lane;
#[cfg(all(test, not(loom)))]
mod lane_tests;
#[cfg(all(test, loom))]
mod loom_tests;
mod map;
mod movable;
mod out_of_memory;
mod purpose;
mod release;
mod report;
mod source;
mod state;
mod stitched;
mod trim;

use std::fmt;
use std::sync::Arc;

use self::backings::Backings;
use self::hazards::Hazards;
use self::lane::{LANES, Lane, LaneState};
use self::report::Account;
use self::source::{Arena, Source};
use self::state::{Allocation, LENT, Refusal, State};
use self::stitched::Views;
use crate::device::{BlockNote, DType, Device, DeviceError};
use crate::planner::{Planner, PlannerConfig, Request};
use crate::primitive::{Mutex, MutexGuard, thread_number};

pub use block::Block;
pub use error::AllocError;
pub use map::{MapHistory, MemoryMap, Span};
pub use movable::Movable;
pub use purpose::Purpose;
pub use report::{Held, MemoryKind, Report};

/// Blocks are aligned to this, where the device's backings are.
const ALIGN_BYTES: usize = 256;

/// What all lanes share.
struct Central<D: Device> {
    device: D,
    budget_bytes: usize,
    kind: MemoryKind,
    /// The size of the chunks that lanes take.
    chunk_bytes: usize,
    state: Mutex<State<D>>,
}

/// A pool of blocks of one device. Cloning gives another handle of the same pool.
pub struct Pool<D: Device>(Arc<[Arc<Lane<D>>; LANES]>);

impl<D: Device> Clone for Pool<D> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<D: Device> fmt::Debug for Pool<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("device", self.device()).field("report", &self.report()).finish()
    }
}

impl<D: Device> Pool<D> {
    /// A pool that takes at most `budget_bytes` from the device, rounded up to the device's granularity. It takes
    /// nothing before the first block. [`Pool::memory_kind`] says whether those are pages.
    pub fn new(device: D, budget_bytes: usize) -> Self {
        let granule = device.granularity_bytes().min(ALIGN_BYTES);
        let mut config = PlannerConfig {
            granule_bytes: granule as u64,
            page_bytes: granule as u64,
            cost: device.cost(),
            ..PlannerConfig::default()
        };
        let mut source = Source::Backings(Backings::default());
        let mut kind = MemoryKind::Backings;
        if let Some(memory) = device.virtual_memory() {
            match Arena::new(memory, budget_bytes) {
                Ok(arena) => {
                    config.page_bytes = memory.page_bytes() as u64;
                    config.limit_bytes = arena.address_bytes() as u64;
                    config.stitching = true;
                    (source, kind) = (Source::Arena(arena), MemoryKind::Pages);
                }
                // Without addresses there are still backings.
                Err(error) => kind = MemoryKind::BackingsForPages(error),
            }
        }
        let state = State {
            planner: Planner::new(config),
            source,
            hazards: Hazards::default(),
            views: Views::default(),
            movable: Default::default(),
            account: Account::default(),
            lent_bytes: 0,
            moved_bytes: 0,
            compactions: 0,
        };
        let chunk_bytes = lane::chunk_bytes(budget_bytes, granule);
        let central = Arc::new(Central { device, budget_bytes, kind, chunk_bytes, state: Mutex::new(state) });
        Self(Arc::new(std::array::from_fn(|_| Arc::new(Lane::new(Arc::clone(&central), granule as u64)))))
    }

    fn central(&self) -> &Central<D> {
        &self.0[0].central
    }

    /// The lane of the calling thread.
    fn lane(&self) -> &Arc<Lane<D>> {
        &self.0[thread_number() % LANES]
    }

    /// Locks everything, in order.
    fn lock(&self) -> (Vec<MutexGuard<'_, LaneState<D>>>, MutexGuard<'_, State<D>>) {
        (self.0.iter().map(|lane| lane.lock()).collect(), self.central().state.lock())
    }

    /// The device whose memory this is.
    pub fn device(&self) -> &D {
        &self.central().device
    }

    /// What it takes from the device, and why not pages where the device has them.
    pub fn memory_kind(&self) -> &MemoryKind {
        &self.central().kind
    }

    /// Takes the whole budget from the device at once, as one backing, and says where that begins and how long it is:
    /// for memory that a library is told of, which must not grow afterwards. Asked again it says the same.
    ///
    /// # Errors
    /// The pool has pages, or has backings already; or the device has not that much.
    pub fn take_budget(&self) -> Result<(*mut u8, usize), AllocError> {
        let central = self.central();
        let mut state = central.state.lock();
        let refused = |message: &str| DeviceError::Driver { call: "Pool::take_budget", message: message.to_owned() };
        let State { source: Source::Backings(backings), planner, .. } = &mut *state else {
            return Err(refused("the device lends pages, which are not one piece").into());
        };
        if backings.bytes() == 0 && central.budget_bytes > 0 {
            let grown = backings.grow(&central.device, central.budget_bytes, central.budget_bytes)?;
            let bytes = grown.ok_or_else(|| refused("the budget is beyond the address space"))?;
            backings.starts_at(planner.add_segment(bytes as u64));
        }
        let only = backings.only().filter(|(_, bytes)| *bytes >= central.budget_bytes);
        if only.is_some() {
            backings.tell();
        }
        Ok(only.ok_or_else(|| refused("the pool has taken memory already, and not all of its budget at once"))?)
    }

    /// A block of `len` elements of `dtype`, first used on `stream`; contents are undefined. What `stream` is
    /// given from now on runs after the earlier users of the memory; nothing else waits, the host neither.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`], or the device failed.
    pub fn allocate(
        &self,
        len: usize,
        dtype: DType,
        purpose: Purpose,
        stream: &D::Stream,
    ) -> Result<Block<D>, AllocError> {
        let lane = self.lane();
        let bytes = self.bytes_of(len, dtype, purpose)?;
        let (hold, ptr) = self.take(lane, bytes, purpose, stream)?;
        Ok(Block::new(Arc::clone(lane), ptr, (len, dtype), purpose, hold, stream.clone()))
    }

    fn bytes_of(&self, len: usize, dtype: DType, purpose: Purpose) -> Result<usize, AllocError> {
        len.checked_mul(dtype.size_bytes()).ok_or_else(|| self.out_of_memory(usize::MAX, purpose, None))
    }

    /// Takes bytes from the planner, or from the lane while others are at the planner.
    fn take(
        &self,
        lane: &Lane<D>,
        bytes: usize,
        purpose: Purpose,
        stream: &D::Stream,
    ) -> Result<(Allocation, *mut u8), AllocError> {
        let central = self.central();
        let mut free = None;
        if lane.serves(bytes) {
            let mut at_lane = lane.takes_turn();
            if !at_lane {
                free = central.state.try_lock();
                at_lane = free.is_none();
                if at_lane {
                    lane.stay();
                }
            }
            if at_lane && let Some(taken) = lane.take(bytes, purpose, stream)? {
                return Ok(taken);
            }
        }
        self.take_central(free.unwrap_or_else(|| central.state.lock()), bytes, purpose, stream)
    }

    /// Takes bytes from the planner.
    fn take_central(
        &self,
        state: MutexGuard<'_, State<D>>,
        bytes: usize,
        purpose: Purpose,
        stream: &D::Stream,
    ) -> Result<(Allocation, *mut u8), AllocError> {
        match self.central().take(state, bytes, purpose, stream) {
            Err(Refusal::NoRoom(_)) => self.take_last(bytes, purpose, stream),
            Err(Refusal::Failed(error)) => Err(error.into()),
            Ok(taken) => Ok(taken),
        }
    }

    /// Takes bytes when lanes have given back what they do not use.
    #[cold]
    fn take_last(
        &self,
        bytes: usize,
        purpose: Purpose,
        stream: &D::Stream,
    ) -> Result<(Allocation, *mut u8), AllocError> {
        for lane in self.0.iter() {
            lane.return_empty(&mut lane.lock());
        }
        let central = self.central();
        match central.take(central.state.lock(), bytes, purpose, stream) {
            Err(Refusal::NoRoom(device)) => Err(self.out_of_memory(bytes, purpose, device)),
            Err(Refusal::Failed(error)) => Err(error.into()),
            Ok(taken) => Ok(taken),
        }
    }

    /// What the pool holds. Exact, but for peaks where several threads allocate: each thread's own peaks are summed
    /// then, so a peak may be said too large, never too small.
    pub fn report(&self) -> Report {
        let (fronts, state) = self.lock();
        let mut report = state.account.0.clone();
        report.memory = self.central().kind.clone();
        report.reserved_bytes = state.source.bytes();
        report.backing_allocations = state.source.allocations();
        let planner = state.planner.report();
        report.free_bytes = planner.free_bytes as usize;
        report.largest_free_bytes = planner.largest_free_bytes as usize;
        report.moved_bytes = state.moved_bytes;
        report.compactions = state.compactions;
        report.stitched_pages = state.views.mapped_pages();
        for front in &fronts {
            report.add_held(&front.account.0);
            report.free_bytes += front.free_bytes() as usize;
        }
        report
    }

    /// Starts the peaks anew from what is live.
    pub fn reset_peaks(&self) {
        let (mut fronts, mut state) = self.lock();
        state.account.reset_peaks();
        fronts.iter_mut().for_each(|front| front.account.reset_peaks());
    }

    /// Moves blocks so that `bytes` of free memory are contiguous, by copies on `stream`. Only [`Movable`] blocks move,
    /// and only while no [`Movable::with`] runs. Says how many bytes are contiguous then: fewer than asked where
    /// blocks with fixed addresses are in the way.
    ///
    /// # Errors
    /// The stream is gone.
    pub fn compact(&self, bytes: usize, stream: &D::Stream) -> Result<usize, AllocError> {
        let mut state = self.central().state.lock();
        let reachable = state.planner.largest_after_compaction();
        let wanted = (bytes as u64).min(reachable);
        if wanted > state.planner.report().largest_free_bytes
            && let Some(plan) = state.planner.plan_compaction(wanted, 1)
        {
            state.apply(self.device(), &plan, stream)?;
        }
        Ok(state.planner.report().largest_free_bytes as usize)
    }

    /// For the end of a step: compacts everything where the largest free range is less than `1 - threshold` of what is
    /// free. Says whether anything moved.
    ///
    /// # Errors
    /// The stream is gone.
    pub fn compact_above(&self, threshold: f64, stream: &D::Stream) -> Result<bool, AllocError> {
        let (fragmentation, free_bytes, before) = {
            let state = self.central().state.lock();
            let report = state.planner.report();
            (report.fragmentation(), report.free_bytes as usize, state.compactions)
        };
        if fragmentation > threshold {
            self.compact(free_bytes, stream)?;
        }
        Ok(self.central().state.lock().compactions > before)
    }

    /// Checks the books; for tests.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check_invariants(&self) -> Result<(), String> {
        let (fronts, state) = self.lock();
        state.planner.check_invariants()?;
        let lent: u64 = fronts.iter().map(|front| front.bytes()).sum();
        if lent != state.lent_bytes as u64 || lent != state.planner.report().by_tag[LENT as usize] {
            return Err(format!("lanes have {lent} bytes, {} are lent", state.lent_bytes));
        }
        fronts.iter().try_for_each(|front| front.check_invariants())
    }
}

impl<D: Device> Central<D> {
    /// Takes bytes behind the pool's lock.
    fn take(
        &self,
        mut state: MutexGuard<'_, State<D>>,
        bytes: usize,
        purpose: Purpose,
        stream: &D::Stream,
    ) -> Result<(Allocation, *mut u8), Refusal> {
        if bytes == 0 {
            return Ok((Allocation::Nothing, std::ptr::null_mut()));
        }
        if bytes > state.room(self.budget_bytes) {
            return Err(Refusal::NoRoom(None));
        }
        let request = Request { bytes: bytes as u64, align: 1, lifetime: purpose.lifetime(), tag: purpose as u8 };
        let hold = state.take(&self.device, request, stream, self.budget_bytes)?;
        let ptr = state.address(hold);
        state.account.add(purpose, bytes);
        self.device.note_block(BlockNote::Taken { ptr, bytes, purpose, stream });
        Ok((hold, ptr))
    }

    fn give(
        &self,
        hold: Allocation,
        (ptr, bytes): (*mut u8, usize),
        purpose: Purpose,
        home: &D::Stream,
        uses: Vec<(u64, D::Event)>,
    ) {
        let mut state = self.state.lock();
        self.device.note_block(BlockNote::Freed { ptr, bytes, home, uses: &uses });
        state.free(hold, home, uses);
        state.account.sub(purpose, bytes);
    }
}
