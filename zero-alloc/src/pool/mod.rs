//! The pool: where all model state, buckets, gathered units and activations come from.
//!
//! A [`Block`] is an owned piece of device memory with a [`Purpose`]. Dropping it gives it back in stream
//! order: what [`Block::record_use`] noted must have run before another stream may use the memory again.
//!
//! The life of memory here: a **backing** comes from [`Memory::allocate`](crate::device::Memory::allocate) and
//! goes back when the last handle and block of the pool are gone. It is a segment of one offset space, which
//! [`Offsets`] cuts into blocks. A freed block is free for everyone at once; what other
//! streams must wait for before they touch it is a **hazard** of its bytes, kept until they are taken again.

mod backings;
mod block;
mod error;
mod hazards;
mod purpose;
mod report;

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use self::backings::Backings;
use self::hazards::Hazards;
use self::report::Account;
use crate::device::{BlockNote, DType, Device};
use crate::planner::{Offsets, Pick, RangeId};

pub use block::Block;
pub use error::AllocError;
pub use purpose::Purpose;
pub use report::{Held, Report};

/// Blocks are aligned to this, where the device's backings are.
const ALIGN_BYTES: usize = 256;

struct Inner<D: Device> {
    device: D,
    budget_bytes: usize,
    state: Mutex<State<D>>,
}

struct State<D: Device> {
    offsets: Offsets,
    backings: Backings,
    hazards: Hazards<D>,
    account: Account,
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
    /// A pool that holds at most `budget_bytes` live. It takes nothing from the device before the first block.
    pub fn new(device: D, budget_bytes: usize) -> Self {
        let granule = device.granularity_bytes().min(ALIGN_BYTES);
        let state = State {
            offsets: Offsets::new(granule as u64),
            backings: Backings::default(),
            hazards: Hazards::default(),
            account: Account::default(),
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
        let mut state = self.0.state.lock();
        let live_bytes = state.account.0.total.live_bytes;
        let budget_bytes = self.0.budget_bytes;
        let out_of_memory = |asked_bytes| AllocError::OutOfMemory { asked_bytes, purpose, live_bytes, budget_bytes };
        let bytes = len.checked_mul(dtype.size_bytes()).ok_or_else(|| out_of_memory(usize::MAX))?;
        if bytes > budget_bytes - live_bytes {
            return Err(out_of_memory(bytes));
        }
        let (range, ptr) = if bytes == 0 {
            (None, std::ptr::null_mut())
        } else {
            let (range, start) = state.take(&self.0.device, bytes, purpose, budget_bytes)?;
            let end = start + state.offsets.bytes_of(range);
            if let Err(error) = state.hazards.take(start..end, stream) {
                state.offsets.give(range);
                return Err(error.into());
            }
            let ptr = state.backings.address(start);
            self.0.device.note_block(BlockNote::Taken { ptr, bytes, purpose, stream });
            (Some(range), ptr)
        };
        state.account.add(purpose, bytes);
        drop(state);
        Ok(Block::new(self.clone(), ptr, (len, dtype), purpose, range, stream.clone()))
    }

    /// What the pool holds.
    pub fn report(&self) -> Report {
        let state = self.0.state.lock();
        let mut report = state.account.0.clone();
        report.reserved_bytes = state.backings.bytes();
        report.backing_allocations = state.backings.allocations();
        report
    }

    /// Starts the peaks anew from what is live.
    pub fn reset_peaks(&self) {
        self.0.state.lock().account.reset_peaks();
    }

    fn give_back(
        &self,
        range: Option<RangeId>,
        bytes: usize,
        purpose: Purpose,
        home: &D::Stream,
        uses: Vec<(u64, D::Event)>,
    ) {
        let mut state = self.0.state.lock();
        if let Some(range) = range {
            let (start, rounded) = state.offsets.give(range);
            let ptr = state.backings.address(start);
            self.0.device.note_block(BlockNote::Freed { ptr, bytes, home, uses: &uses });
            state.hazards.put(start..start + rounded, home, uses);
        }
        state.account.sub(purpose, bytes);
    }
}

impl<D: Device> State<D> {
    fn take(
        &mut self,
        device: &D,
        bytes: usize,
        purpose: Purpose,
        budget_bytes: usize,
    ) -> Result<(RangeId, u64), AllocError> {
        let (asked, side) = (bytes as u64, purpose.side());
        if let Some(taken) = self.offsets.take(asked, 1, side, Pick::Best, purpose as u8) {
            return Ok(taken);
        }
        let backing_bytes = self.backings.grow(device, bytes, budget_bytes)?;
        let start = self.offsets.add_segment(backing_bytes as u64);
        self.backings.starts_at(start);
        self.offsets.take(asked, 1, side, Pick::Best, purpose as u8).ok_or(AllocError::OutOfMemory {
            asked_bytes: bytes,
            purpose,
            live_bytes: self.account.0.total.live_bytes,
            budget_bytes,
        })
    }
}

impl<D: Device> Drop for Inner<D> {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let backings = std::mem::take(&mut state.backings);
        let hazards = std::mem::take(&mut state.hazards);
        if hazards.all_done() {
            // SAFETY: no block is left, and all that used the memory has run.
            unsafe { backings.release(&self.device) };
            return;
        }
        // Waiting here could block the very stream whose end is waited for (a block may be dropped by an
        // operation), so another thread does.
        let device = self.device.clone();
        let reaper = std::thread::Builder::new().name("pool reaper".into());
        let _ = reaper.spawn(move || {
            hazards.wait_all();
            // SAFETY: no block is left, and all that used the memory has run.
            unsafe { backings.release(&device) };
        });
    }
}
