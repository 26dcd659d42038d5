//! Returning memory to the device while the pool lives.
//!
//! Only the free end of the offset space is returned: pages, or trailing backings that are entirely
//! free, and only after everything that used it has run. That wait holds no lock, so it blocks no
//! thread and no operation that drops a block.

use std::ops::Range;
use std::time::Duration;

use super::Pool;
use super::source::Source;
use super::state::State;
use crate::TimeLimit;
use crate::device::{Device, Event};

/// The result of one pass over the free end.
struct Trimmed<D: Device> {
    bytes: usize,
    /// Once this event is reached, more can be returned.
    later: Option<D::Event>,
}

impl<D: Device> Pool<D> {
    /// Returns the free end of the pool's memory to the device: the free pages above its last
    /// block, or the trailing backings that are entirely free. Waits at most `limit` until
    /// everything that used it has run; memory in use longer stays. Returns the number of bytes. Keep a block for as long as anything
    /// uses its address (a graph that is launched again, a library with which it is registered).
    ///
    /// Memory below the last block stays. Use this for memory that another library needs, not in
    /// every step: the pool reserves memory again when needed, at the cost of the device's calls.
    pub fn trim(&self, limit: Duration) -> usize {
        let mut time = TimeLimit::new(limit);
        let mut bytes = 0;
        loop {
            for lane in self.0.iter() {
                lane.return_empty(&mut lane.lock());
            }
            let trimmed = self.central().state.lock().trim(self.device());
            bytes += trimmed.bytes;
            let Some(event) = trimmed.later else {
                return bytes;
            };
            let left = time.left();
            // A failed event counts as reached: everything before it has run or never will.
            if left.is_zero()
                || event.synchronize(left).is_err() && !event.is_done().unwrap_or(true)
            {
                return bytes;
            }
        }
    }
}

impl<D: Device> State<D> {
    /// Returns the part of the free end whose users have run.
    fn trim(&mut self, device: &D) -> Trimmed<D> {
        match self.source {
            Source::Arena(_) => self.trim_pages(device),
            Source::Backings(_) => self.trim_backings(device),
        }
    }

    /// The free range at the end.
    fn free_tail(&self) -> Option<Range<u64>> {
        let mut tail = None;
        self.planner.for_each_range(|start, bytes, tag| {
            tail = tag.is_none().then_some(start..start + bytes)
        });
        tail
    }

    fn trim_pages(&mut self, device: &D) -> Trimmed<D> {
        let tail = self.free_tail();
        let (Source::Arena(arena), Some(memory), Some(tail)) =
            (&mut self.source, device.virtual_memory(), tail)
        else {
            return Trimmed {
                bytes: 0,
                later: None,
            };
        };

        let page = memory.page_bytes() as u64;
        let end = tail.end;
        let from = tail.start.next_multiple_of(page).min(end);
        let (pending_end, later) = self.hazards.find_pending(from..end);
        let cut = pending_end.next_multiple_of(page).min(end);
        // `Planner::shrink` cuts off all of a free end, so a granule below the cut is allocated
        // during the call.
        let granule = self.planner.config().granule_bytes;
        let guard = if cut > from {
            self.planner.allocate_at(cut - granule, granule, 0)
        } else {
            None
        };

        let bytes = if cut > from && guard.is_none() {
            0
        } else {
            self.planner.shrink()
        };

        if let Some(guard) = guard {
            self.planner.free(guard);
        }
        self.hazards.remove(end - bytes..end);
        // SAFETY: no block has the range or a view of it; all users, at whatever addresses,
        // preceded its hazards, and those have run.
        unsafe { self.views.drop_above(end - bytes, memory) };
        // SAFETY: as above; no view is left.
        unsafe { arena.shrink(memory, bytes as usize) };

        Trimmed {
            bytes: bytes as usize,
            later,
        }
    }

    fn trim_backings(&mut self, device: &D) -> Trimmed<D> {
        let mut trimmed = Trimmed {
            bytes: 0,
            later: None,
        };

        while let Some(tail) = self.free_tail() {
            let Source::Backings(backings) = &mut self.source else {
                break;
            };
            if !backings.can_free_last(&tail) {
                break;
            }
            let (pending_end, later) = self.hazards.find_pending(tail.clone());
            if pending_end > tail.start {
                trimmed.later = later;
                break;
            }
            self.hazards.remove(tail);
            trimmed.bytes += self.planner.shrink() as usize;
            // SAFETY: no block has it, and everything that used it has run.
            unsafe { backings.free_last(device) };
        }

        trimmed
    }
}
