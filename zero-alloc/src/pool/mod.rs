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
mod hazards;
mod map;
mod movable;
mod purpose;
mod report;
mod source;
mod state;
mod stitched;

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use self::backings::Backings;
use self::hazards::Hazards;
use self::report::Account;
use self::source::{Arena, Source};
use self::state::{Hold, State};
use self::stitched::Views;
use crate::device::{BlockNote, DType, Device};
use crate::planner::{Planner, PlannerConfig};

pub use block::Block;
pub use error::AllocError;
pub use map::{MapHistory, MemoryMap, Span};
pub use movable::Movable;
pub use purpose::Purpose;
pub use report::{Held, Report};

/// Blocks are aligned to this, where the device's backings are.
const ALIGN_BYTES: usize = 256;

struct Inner<D: Device> {
    device: D,
    budget_bytes: usize,
    state: Mutex<State<D>>,
}

/// A pool of blocks of one device. Cloning gives another handle of the same pool.
pub struct Pool<D: Device>(Arc<Inner<D>>);

impl<D: Device> Clone for Pool<D> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<D: Device> fmt::Debug for Pool<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("device", &self.0.device).field("report", &self.report()).finish()
    }
}

impl<D: Device> Pool<D> {
    /// A pool that takes at most `budget_bytes` from the device, rounded up to the device's granularity. It takes
    /// nothing before the first block.
    pub fn new(device: D, budget_bytes: usize) -> Self {
        let granule = device.granularity_bytes().min(ALIGN_BYTES);
        let mut config = PlannerConfig {
            granule_bytes: granule as u64,
            page_bytes: device.granularity_bytes() as u64,
            cost: device.cost(),
            ..PlannerConfig::default()
        };
        let mut source = Source::Backings(Backings::default());
        // Without addresses there are still backings.
        if let Some(memory) = device.virtual_memory()
            && let Ok(arena) = Arena::new(memory, budget_bytes)
        {
            config.page_bytes = memory.page_bytes() as u64;
            config.limit_bytes = arena.address_bytes() as u64;
            config.stitching = true;
            source = Source::Arena(arena);
        }
        let state = State {
            planner: Planner::new(config),
            source,
            hazards: Hazards::default(),
            views: Views::default(),
            movable: Default::default(),
            account: Account::default(),
            moved_bytes: 0,
            compactions: 0,
        };
        Self(Arc::new(Inner { device, budget_bytes, state: Mutex::new(state) }))
    }

    /// The device whose memory this is.
    pub fn device(&self) -> &D {
        &self.0.device
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
        let (hold, ptr) = self.take(len, dtype, purpose, stream)?;
        Ok(Block::new(self.clone(), ptr, (len, dtype), purpose, hold, stream.clone()))
    }

    fn take(
        &self,
        len: usize,
        dtype: DType,
        purpose: Purpose,
        stream: &D::Stream,
    ) -> Result<(Hold, *mut u8), AllocError> {
        let mut state = self.0.state.lock();
        let budget_bytes = self.0.budget_bytes;
        let Some(bytes) = len.checked_mul(dtype.size_bytes()) else {
            return Err(state.out_of_memory(usize::MAX, purpose, budget_bytes));
        };
        if bytes > budget_bytes - state.account.0.total.live_bytes {
            return Err(state.out_of_memory(bytes, purpose, budget_bytes));
        }
        let mut hold = Hold::Nothing;
        if bytes > 0 {
            hold = state.take(&self.0.device, bytes, purpose, stream, budget_bytes)?;
        }
        let ptr = state.address(hold);
        state.account.add(purpose, bytes);
        if bytes > 0 {
            self.0.device.note_block(BlockNote::Taken { ptr, bytes, purpose, stream });
        }
        Ok((hold, ptr))
    }

    /// What the pool holds.
    pub fn report(&self) -> Report {
        let state = self.0.state.lock();
        let mut report = state.account.0.clone();
        report.reserved_bytes = state.source.bytes();
        report.backing_allocations = state.source.allocations();
        let planner = state.planner.report();
        report.free_bytes = planner.free_bytes as usize;
        report.largest_free_bytes = planner.largest_free_bytes as usize;
        report.moved_bytes = state.moved_bytes;
        report.compactions = state.compactions;
        report.stitched_pages = state.views.mapped_pages();
        report
    }

    /// Starts the peaks anew from what is live.
    pub fn reset_peaks(&self) {
        self.0.state.lock().account.reset_peaks();
    }

    /// Moves blocks so that `bytes` of free memory are contiguous, by copies on `stream`. Only [`Movable`] blocks move,
    /// and only while no [`Movable::with`] runs. Says how many bytes are contiguous then: fewer than asked where
    /// blocks with fixed addresses are in the way.
    ///
    /// # Errors
    /// The stream is gone.
    pub fn compact(&self, bytes: usize, stream: &D::Stream) -> Result<usize, AllocError> {
        let mut state = self.0.state.lock();
        let reachable = state.planner.largest_after_compaction();
        let wanted = (bytes as u64).min(reachable);
        if wanted > state.planner.report().largest_free_bytes
            && let Some(plan) = state.planner.plan_compaction(wanted, 1)
        {
            state.apply(&self.0.device, &plan, stream)?;
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
            let state = self.0.state.lock();
            let report = state.planner.report();
            (report.fragmentation(), report.free_bytes as usize, state.compactions)
        };
        if fragmentation > threshold {
            self.compact(free_bytes, stream)?;
        }
        Ok(self.0.state.lock().compactions > before)
    }

    /// Checks the planner's books; for tests.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check_invariants(&self) -> Result<(), String> {
        self.0.state.lock().planner.check_invariants()
    }

    fn give_back(
        &self,
        hold: Hold,
        (ptr, bytes): (*mut u8, usize),
        purpose: Purpose,
        home: &D::Stream,
        uses: Vec<(u64, D::Event)>,
    ) {
        let mut state = self.0.state.lock();
        if bytes > 0 {
            self.0.device.note_block(BlockNote::Freed { ptr, bytes, home, uses: &uses });
        }
        state.free(hold, home, uses);
        state.account.sub(purpose, bytes);
    }
}

impl<D: Device> Drop for Inner<D> {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let source = std::mem::replace(&mut state.source, Source::Backings(Backings::default()));
        let (views, hazards) = (std::mem::take(&mut state.views), std::mem::take(&mut state.hazards));
        if hazards.all_done() {
            // SAFETY: no block is left, and all that used the memory has run.
            unsafe { release(source, views, &self.device) };
            return;
        }
        // Waiting here could block the very stream whose end is waited for (a block may be dropped by an
        // operation), so another thread does.
        let device = self.device.clone();
        let reaper = std::thread::Builder::new().name("pool reaper".into());
        let _ = reaper.spawn(move || {
            hazards.wait_all();
            // SAFETY: no block is left, and all that used the memory has run.
            unsafe { release(source, views, &device) };
        });
    }
}

/// Gives everything back to the device.
///
/// # Safety
/// No operation uses the memory any more.
unsafe fn release<D: Device>(source: Source, views: Views<D>, device: &D) {
    if let Some(memory) = device.virtual_memory() {
        // SAFETY: the caller's promise.
        unsafe { views.release(memory) };
    }
    // SAFETY: the caller's promise; the views are gone.
    unsafe { source.release(device) };
}
