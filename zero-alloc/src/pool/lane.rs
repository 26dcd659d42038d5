//! Lanes: small blocks for a thread while another thread holds the pool's lock.
//!
//! A pool has one planner behind one lock. A thread that finds the lock free allocates from the
//! planner, so a program that allocates on one thread has deterministic placement. A thread that
//! finds the lock held allocates its next [`TURNS`] small blocks from its lane: from chunks of the
//! pool's memory that the lane divides itself, with its own free ranges and hazards, behind a lock
//! that is hardly contended. With one lock instead, two threads on two streams ran at 0.28 of one
//! thread's speed each, and at 0.16 with an operation between (`benches/notes/2026-11-23.md`);
//! probably because each reused memory that the other's stream had just freed, and waited for it.
//!
//! Lock order: lanes by index, then the pool's state.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::hazards::{Hazards, RECORD_ATTEMPTS, record_end};
use super::report::Account;
use super::state::{Allocation, LANE_TAG};
use super::{Central, Purpose};
use crate::device::{BlockNote, Device, DeviceError, Stream};
use crate::planner::{Lifetime, Offsets, Pick, RangeId, Request, Side};
use crate::primitive::{Mutex, MutexGuard};

/// The number of lanes of a pool; more threads share them.
pub(super) const LANES: usize = 16;
/// The number of small blocks that a thread allocates from its lane after contention.
const TURNS: u32 = 1024;
/// A chunk is this fraction of the budget, but at most [`MAX_CHUNK_BYTES`].
pub(super) const CHUNKS_PER_BUDGET: usize = 512;
const MAX_CHUNK_BYTES: usize = 64 << 20;
/// A block is small if a chunk holds at least this many.
const SMALL_BLOCKS_PER_CHUNK: usize = 8;

/// The size of a lane's chunks in a pool of this budget.
pub(super) fn chunk_bytes(budget_bytes: usize, granule: usize) -> usize {
    (budget_bytes / CHUNKS_PER_BUDGET).min(MAX_CHUNK_BYTES) & !(granule - 1)
}

/// A part of the pool's memory that a lane divides.
struct Chunk<D: Device> {
    /// Its offset in the lane's space.
    start: u64,
    bytes: u64,
    /// Its range in the pool's planner, and its offset there.
    range: RangeId,
    offset: u64,
    ptr: *mut u8,
    /// The number of live blocks in it.
    blocks: usize,
    /// The stream that it was allocated on, and its end at that time if it may be destroyed.
    home: D::Stream,
    home_end: Vec<(u64, D::Event)>,
}

// SAFETY: the chunk owns its memory; the address is not tied to a thread.
unsafe impl<D: Device> Send for Chunk<D> {}

/// The state that a lane's lock protects.
pub(super) struct LaneState<D: Device> {
    space: Offsets,
    /// By their offset in `space`.
    chunks: Vec<Chunk<D>>,
    hazards: Hazards<D>,
    pub(super) account: Account,
}

/// One lane. Blocks hold their lane, so that threads do not share reference counts either.
#[repr(align(128))]
pub(super) struct Lane<D: Device> {
    pub(super) central: Arc<Central<D>>,
    state: Mutex<LaneState<D>>,
    /// The number of small blocks that its thread still allocates here.
    turns: AtomicU32,
}

impl<D: Device> Lane<D> {
    pub(super) fn new(central: Arc<Central<D>>, granule: u64) -> Self {
        let state = LaneState {
            space: Offsets::new(granule),
            chunks: Vec::new(),
            hazards: Hazards::default(),
            account: Account::default(),
        };
        Self {
            central,
            state: Mutex::new(state),
            turns: AtomicU32::new(0),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, LaneState<D>> {
        self.state.lock()
    }

    /// Whether the lane's lock is free.
    #[cfg(all(test, not(loom)))]
    pub(super) fn is_free(&self) -> bool {
        self.state.try_lock().is_some()
    }

    /// Whether blocks of this size may be allocated here.
    pub(super) fn serves(&self, bytes: usize) -> bool {
        (1..=self.central.chunk_bytes / SMALL_BLOCKS_PER_CHUNK).contains(&bytes)
    }

    /// Uses up a turn. Returns whether there was one.
    pub(super) fn use_turn(&self) -> bool {
        let turns = self.turns.load(Ordering::Relaxed);
        self.turns.store(turns.saturating_sub(1), Ordering::Relaxed);
        turns > 0
    }

    /// Makes the next [`TURNS`] small blocks come from this lane.
    pub(super) fn start_turns(&self) {
        self.turns.store(TURNS, Ordering::Relaxed);
    }

    /// Allocates a small block; `None` if neither the lane nor the pool has memory for it.
    pub(super) fn allocate(
        &self,
        bytes: usize,
        purpose: Purpose,
        stream: &D::Stream,
    ) -> Result<Option<(Allocation, *mut u8)>, DeviceError> {
        let lane = &mut *self.lock();
        let side = if purpose.lifetime() == Lifetime::Long {
            Side::Low
        } else {
            Side::High
        };

        let allocate = |lane: &mut LaneState<D>| {
            lane.space
                .allocate(bytes as u64, 1, side, Pick::Best, purpose as u8)
        };

        let mut allocated = allocate(lane);
        if allocated.is_none() && self.add_chunk(lane, stream) {
            allocated = allocate(lane);
        }
        let Some((range, start)) = allocated else {
            return Ok(None);
        };
        let end = start + lane.space.bytes_of(range);
        if let Err(error) = lane.hazards.wait_and_remove(start..end, stream) {
            lane.space.free(range);
            return Err(error);
        }

        let chunk = lane.chunk_of(start);
        chunk.blocks += 1;
        let ptr = chunk.ptr.wrapping_add((start - chunk.start) as usize);
        lane.account.add(purpose, bytes);
        self.central.device.note_block(BlockNote::Allocated {
            ptr,
            bytes,
            purpose,
            stream,
        });

        Ok(Some((Allocation::Lane(range), ptr)))
    }

    /// Frees an allocation of this lane or of the planner.
    pub(super) fn free(
        &self,
        allocation: Allocation,
        bytes: (*mut u8, usize),
        purpose: Purpose,
        home: &D::Stream,
        uses: Vec<(u64, D::Event)>,
    ) {
        match allocation {
            Allocation::Empty => {}
            Allocation::Lane(range) => self.free_range(range, bytes, purpose, home, uses),
            Allocation::Range(_) | Allocation::View(_) => {
                self.central.free(allocation, bytes, purpose, home, uses)
            }
        }
    }

    /// Frees a block of this lane, and its chunk if that is empty now and not the last one.
    fn free_range(
        &self,
        range: RangeId,
        (ptr, bytes): (*mut u8, usize),
        purpose: Purpose,
        home: &D::Stream,
        uses: Vec<(u64, D::Event)>,
    ) {
        let lane = &mut *self.lock();
        self.central.device.note_block(BlockNote::Freed {
            ptr,
            bytes,
            home,
            uses: &uses,
        });
        let (start, len) = lane.space.free(range);
        lane.hazards.insert(start..start + len, home, uses);
        lane.account.sub(purpose, bytes);
        let chunk = lane.chunk_of(start);
        chunk.blocks -= 1;
        if chunk.blocks == 0 && lane.chunks.len() > 1 {
            self.return_empty(lane);
        }
    }

    fn add_chunk(&self, lane: &mut LaneState<D>, stream: &D::Stream) -> bool {
        let central = &*self.central;
        let mut state = central.state.lock();
        let bytes = central.chunk_bytes as u64;
        let request = Request {
            bytes,
            align: 1,
            lifetime: Lifetime::Long,
            tag: LANE_TAG,
        };

        let Ok(allocation) = state.allocate(&central.device, request, stream, central.budget_bytes)
        else {
            return false;
        };

        let Allocation::Range(range) = allocation else {
            state.free(allocation, stream, Vec::new());
            return false;
        };

        let ptr = state.address(allocation);
        let offset = state.planner.offset_of(range);
        let bytes = state.planner.bytes_of(range);
        state.lane_bytes += bytes as usize;
        drop(state);
        let start = lane.space.add_segment(bytes);
        // `stream` waits for the earlier users of the whole chunk; other streams wait for `stream`.
        let mut home_end = Vec::new();
        if stream.may_end() {
            record_end(stream, &mut home_end);
        }
        lane.hazards
            .insert(start..start + bytes, stream, home_end.clone());

        lane.chunks.push(Chunk {
            start,
            bytes,
            range,
            offset,
            ptr,
            blocks: 0,
            home: stream.clone(),
            home_end,
        });

        true
    }

    /// Returns the empty chunks to the pool. Returns whether there were any.
    pub(super) fn return_empty(&self, lane: &mut LaneState<D>) -> bool {
        let before = lane.chunks.len();
        let mut i = 0;
        while i < lane.chunks.len() {
            let Chunk {
                start,
                bytes,
                blocks,
                ..
            } = lane.chunks[i];
            // If a stream is closed, its event is missing: then the chunk stays, with its hazards.
            let (uses, complete) = lane.hazards.events_within(start..start + bytes);
            if blocks == 0 && complete && lane.space.remove_segment(start, bytes) {
                lane.hazards.remove(start..start + bytes);
                let chunk = lane.chunks.remove(i);
                self.free_chunk(&chunk, uses);
            } else {
                i += 1;
            }
        }
        lane.chunks.len() < before
    }

    fn free_chunk(&self, chunk: &Chunk<D>, mut uses: Vec<(u64, D::Event)>) {
        // Later uses on the home stream are among `uses`.
        uses.extend(chunk.home_end.iter().cloned());
        let mut state = self.central.state.lock();
        state.free(Allocation::Range(chunk.range), &chunk.home, uses);
        state.lane_bytes -= chunk.bytes as usize;
    }
}

impl<D: Device> Drop for Lane<D> {
    fn drop(&mut self) {
        // Blocks hold their lane, so no block is left.
        let mut lane = self.lock();
        for chunk in std::mem::take(&mut lane.chunks) {
            let range = chunk.start..chunk.start + chunk.bytes;
            let mut attempts =
                (0..RECORD_ATTEMPTS).map(|_| lane.hazards.events_within(range.clone()));
            // Without them the pool's memory is leaked.
            if let Some((uses, _)) = attempts.find(|(_, complete)| *complete) {
                self.free_chunk(&chunk, uses);
            }
        }
    }
}

impl<D: Device> LaneState<D> {
    fn chunk_of(&mut self, offset: u64) -> &mut Chunk<D> {
        let after = self.chunks.partition_point(|chunk| chunk.start <= offset);
        &mut self.chunks[after - 1]
    }

    /// The bytes of its chunks.
    pub(super) fn bytes(&self) -> u64 {
        self.space.bytes()
    }

    /// The bytes in no block.
    pub(super) fn free_bytes(&self) -> u64 {
        self.space.free_bytes()
    }

    /// Calls `visit` with every range: its first offset in the pool's space, bytes, and the tag if
    /// it is used.
    pub(super) fn for_each_range(&self, mut visit: impl FnMut(u64, u64, Option<u8>)) {
        self.space.for_each(&mut |start, bytes, tag| {
            let after = self.chunks.partition_point(|chunk| chunk.start <= start);
            let chunk = &self.chunks[after - 1];
            visit(chunk.offset + (start - chunk.start), bytes, tag);
        });
    }

    /// Checks the lane's invariants.
    pub(super) fn check_invariants(&self) -> Result<(), String> {
        self.space.check_invariants()?;
        let chunks: u64 = self.chunks.iter().map(|chunk| chunk.bytes).sum();
        if chunks != self.space.bytes() {
            return Err(format!(
                "{chunks} bytes in chunks, {} in the lane's space",
                self.space.bytes()
            ));
        }
        let live = self.account.report.total.live_bytes as u64;
        let used = self.space.bytes() - self.space.free_bytes();
        if live > used {
            return Err(format!(
                "{live} bytes are accounted as live in a lane, {used} are allocated"
            ));
        }
        Ok(())
    }
}
