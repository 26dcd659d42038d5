//! Lanes: where threads get small blocks from while another thread has the pool's lock.
//!
//! A pool has one planner behind one lock. As long as a thread finds that lock free, its blocks come from there; so a
//! program that allocates on one thread has one planner, and placement that repeats. A thread that finds the lock
//! taken turns to its lane for its next [`TURNS`] small blocks: to chunks of the pool's memory that the lane divides
//! by itself, with free ranges and hazards of its own, behind a lock that others hardly ever want.
//!
//! Locks are taken in this order: lanes by number, then the pool's.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::hazards::Hazards;
use super::report::Account;
use super::state::{Allocation, LENT};
use super::{Central, Purpose};
use crate::device::{BlockNote, Device, DeviceError};
use crate::planner::{Lifetime, Offsets, Pick, RangeId, Request, Side};
use crate::primitive::{Mutex, MutexGuard};

/// How many lanes a pool has; more threads than that share them.
pub(super) const LANES: usize = 16;
/// For how many small blocks a thread stays with its lane.
const TURNS: u32 = 1024;
/// A chunk is this part of the budget, but at most [`MOST_CHUNK_BYTES`].
pub(super) const CHUNK_PART: usize = 512;
const MOST_CHUNK_BYTES: usize = 64 << 20;
/// A block is small if a chunk holds so many.
const SMALL_PART: usize = 8;

/// The size of a lane's chunks in a pool with such a budget.
pub(super) fn chunk_bytes(budget_bytes: usize, granule: usize) -> usize {
    (budget_bytes / CHUNK_PART).min(MOST_CHUNK_BYTES) & !(granule - 1)
}

/// A part of the pool's memory that a lane divides.
struct Chunk<D: Device> {
    /// Its offset in the lane's space.
    start: u64,
    bytes: u64,
    /// The range of the pool's planner, and its offset there.
    range: RangeId,
    offset: u64,
    ptr: *mut u8,
    /// How many blocks lie in it.
    blocks: usize,
    /// The stream it was taken on.
    home: D::Stream,
}

// SAFETY: the chunk owns its memory; the address is not tied to a thread.
unsafe impl<D: Device> Send for Chunk<D> {}

/// What lies behind a lane's lock.
pub(super) struct LaneState<D: Device> {
    space: Offsets,
    /// By their offset in `space`.
    chunks: Vec<Chunk<D>>,
    hazards: Hazards<D>,
    pub(super) account: Account,
}

/// One lane; blocks hold the lane that they were taken in, so that counting references is not shared either.
#[repr(align(128))]
pub(super) struct Lane<D: Device> {
    pub(super) central: Arc<Central<D>>,
    front: Mutex<LaneState<D>>,
    /// For how many blocks more its thread stays with it.
    turns: AtomicU32,
}

impl<D: Device> Lane<D> {
    pub(super) fn new(central: Arc<Central<D>>, granule: u64) -> Self {
        let front = LaneState {
            space: Offsets::new(granule),
            chunks: Vec::new(),
            hazards: Hazards::default(),
            account: Account::default(),
        };
        Self { central, front: Mutex::new(front), turns: AtomicU32::new(0) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, LaneState<D>> {
        self.front.lock()
    }

    /// Whether nobody has the lane's lock.
    #[cfg(all(test, not(loom)))]
    pub(super) fn is_free(&self) -> bool {
        self.front.try_lock().is_some()
    }

    /// Whether blocks of so many bytes may come from here.
    pub(super) fn serves(&self, bytes: usize) -> bool {
        (1..=self.central.chunk_bytes / SMALL_PART).contains(&bytes)
    }

    /// Whether the next small block comes from here.
    pub(super) fn takes_turn(&self) -> bool {
        let turns = self.turns.load(Ordering::Relaxed);
        self.turns.store(turns.saturating_sub(1), Ordering::Relaxed);
        turns > 0
    }

    /// The pool's lock was taken: the next small blocks come from here.
    pub(super) fn stay(&self) {
        self.turns.store(TURNS, Ordering::Relaxed);
    }

    /// Takes a small block; `None` where neither the lane nor the pool has room for it.
    pub(super) fn take(
        &self,
        bytes: usize,
        purpose: Purpose,
        stream: &D::Stream,
    ) -> Result<Option<(Allocation, *mut u8)>, DeviceError> {
        let front = &mut *self.lock();
        let side = if purpose.lifetime() == Lifetime::Long { Side::Low } else { Side::High };
        let take = |front: &mut LaneState<D>| front.space.take(bytes as u64, 1, side, Pick::Best, purpose as u8);
        let mut taken = take(front);
        if taken.is_none() && self.add_chunk(front, stream) {
            taken = take(front);
        }
        let Some((range, start)) = taken else { return Ok(None) };
        let end = start + front.space.bytes_of(range);
        if let Err(error) = front.hazards.take(start..end, stream) {
            front.space.give(range);
            return Err(error);
        }
        let chunk = front.chunk_of(start);
        chunk.blocks += 1;
        let ptr = chunk.ptr.wrapping_add((start - chunk.start) as usize);
        front.account.add(purpose, bytes);
        self.central.device.note_block(BlockNote::Taken { ptr, bytes, purpose, stream });
        Ok(Some((Allocation::Lane(range), ptr)))
    }

    /// Gives back what was taken here, or behind the pool's lock.
    pub(super) fn give_back(
        &self,
        hold: Allocation,
        bytes: (*mut u8, usize),
        purpose: Purpose,
        home: &D::Stream,
        uses: Vec<(u64, D::Event)>,
    ) {
        match hold {
            Allocation::Nothing => {}
            Allocation::Lane(range) => self.give(range, bytes, purpose, home, uses),
            Allocation::Range(_) | Allocation::View(_) => self.central.give(hold, bytes, purpose, home, uses),
        }
    }

    /// Gives a block back, and its chunk where that is empty now and not the last one.
    fn give(
        &self,
        range: RangeId,
        (ptr, bytes): (*mut u8, usize),
        purpose: Purpose,
        home: &D::Stream,
        uses: Vec<(u64, D::Event)>,
    ) {
        let front = &mut *self.lock();
        self.central.device.note_block(BlockNote::Freed { ptr, bytes, home, uses: &uses });
        let (start, len) = front.space.give(range);
        front.hazards.put(start..start + len, home, uses);
        front.account.sub(purpose, bytes);
        let chunk = front.chunk_of(start);
        chunk.blocks -= 1;
        if chunk.blocks == 0 && front.chunks.len() > 1 {
            self.return_empty(front);
        }
    }

    fn add_chunk(&self, front: &mut LaneState<D>, stream: &D::Stream) -> bool {
        let central = &*self.central;
        let bytes = central.chunk_bytes;
        let mut state = central.state.lock();
        if bytes > state.room(central.budget_bytes) {
            return false;
        }
        let request = Request { bytes: bytes as u64, align: 1, lifetime: Lifetime::Long, tag: LENT };
        let Ok(hold) = state.take(&central.device, request, stream, central.budget_bytes) else {
            return false;
        };
        let Allocation::Range(range) = hold else {
            state.free(hold, stream, Vec::new());
            return false;
        };
        let (ptr, offset, bytes) =
            (state.address(hold), state.planner.offset_of(range), state.planner.bytes_of(range));
        state.lent_bytes += bytes as usize;
        drop(state);
        let start = front.space.add_segment(bytes);
        // `stream` waits for the earlier users of the whole chunk; other streams wait for `stream`.
        front.hazards.put(start..start + bytes, stream, Vec::new());
        front.chunks.push(Chunk { start, bytes, range, offset, ptr, blocks: 0, home: stream.clone() });
        true
    }

    /// Gives the empty chunks back to the pool; says whether there were any.
    pub(super) fn return_empty(&self, front: &mut LaneState<D>) -> bool {
        let before = front.chunks.len();
        let mut i = 0;
        while i < front.chunks.len() {
            let Chunk { start, bytes, blocks, .. } = front.chunks[i];
            // A stream that is gone gives no event: then the chunk, with its hazards, stays.
            let (uses, complete) = front.hazards.events_within(start..start + bytes);
            if blocks == 0 && complete && front.space.remove_segment(start, bytes) {
                front.hazards.forget(start..start + bytes);
                let chunk = front.chunks.remove(i);
                self.give_chunk(&chunk, uses);
            } else {
                i += 1;
            }
        }
        front.chunks.len() < before
    }

    fn give_chunk(&self, chunk: &Chunk<D>, uses: Vec<(u64, D::Event)>) {
        let mut state = self.central.state.lock();
        state.free(Allocation::Range(chunk.range), &chunk.home, uses);
        state.lent_bytes -= chunk.bytes as usize;
    }
}

impl<D: Device> Drop for Lane<D> {
    fn drop(&mut self) {
        // Blocks hold their lane, so no block is left.
        let mut front = self.lock();
        for chunk in std::mem::take(&mut front.chunks) {
            let (uses, _) = front.hazards.events_within(chunk.start..chunk.start + chunk.bytes);
            self.give_chunk(&chunk, uses);
        }
    }
}

impl<D: Device> LaneState<D> {
    fn chunk_of(&mut self, offset: u64) -> &mut Chunk<D> {
        let after = self.chunks.partition_point(|chunk| chunk.start <= offset);
        &mut self.chunks[after - 1]
    }

    /// Bytes of its chunks.
    pub(super) fn bytes(&self) -> u64 {
        self.space.bytes()
    }

    /// Bytes in no block.
    pub(super) fn free_bytes(&self) -> u64 {
        self.space.free_bytes()
    }

    /// Calls `visit` with every range, at its offset in the pool's space: first offset, bytes, tag of a used one.
    pub(super) fn for_each_range(&self, mut visit: impl FnMut(u64, u64, Option<u8>)) {
        self.space.for_each(&mut |start, bytes, tag, _| {
            let after = self.chunks.partition_point(|chunk| chunk.start <= start);
            let chunk = &self.chunks[after - 1];
            visit(chunk.offset + (start - chunk.start), bytes, tag);
        });
    }

    /// Checks the lane's books.
    pub(super) fn check_invariants(&self) -> Result<(), String> {
        self.space.check_invariants()?;
        let chunks: u64 = self.chunks.iter().map(|chunk| chunk.bytes).sum();
        if chunks != self.space.bytes() {
            return Err(format!("{chunks} bytes in chunks, {} in the lane's space", self.space.bytes()));
        }
        let live = self.account.0.total.live_bytes as u64;
        let used = self.space.bytes() - self.space.free_bytes();
        if live > used {
            return Err(format!("{live} bytes live in a lane, {used} in use"));
        }
        Ok(())
    }
}
