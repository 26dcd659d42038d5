//! Giving memory back to the device while the pool lives.
//!
//! What goes is the free end of the offset space: pages, or the last backings that are free as a whole. Nothing goes
//! before all that used it has run. The wait for that holds no lock, so it holds up no thread and no operation that
//! drops a block.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::Pool;
use super::source::Source;
use super::state::State;
use crate::device::{Device, Event};

/// What a look at the free end found.
struct Trimmed<D: Device> {
    bytes: usize,
    /// Behind this, more can go.
    later: Option<D::Event>,
}

impl<D: Device> Pool<D> {
    /// Gives the free end of the pool's memory back to the device: the free pages above its last block, or those of
    /// the last backings that are free as a whole. Waits until all that used it has run, at most `limit`; what is in
    /// use longer stays, as does the memory of [`Pool::take_budget`]. Says how many bytes went back. Who needs an
    /// address for longer than its block (a graph that is launched again, a library that was told of it) keeps the
    /// block.
    ///
    /// What lies below the last block stays, so [`Pool::compact`] before this gives more where blocks may move. A
    /// pool takes memory again when it needs it, at the cost of the device's calls: this is for memory that another
    /// needs, not for every step.
    pub fn trim(&self, limit: Duration) -> usize {
        let start = Instant::now();
        let mut bytes = 0;
        loop {
            for lane in self.0.iter() {
                lane.return_empty(&mut lane.lock());
            }
            let central = self.central();
            let trimmed = central.state.lock().trim(&central.device);
            bytes += trimmed.bytes;
            let Some(event) = trimmed.later else { return bytes };
            let left = limit.saturating_sub(start.elapsed());
            // Where the event fails, its stream has ended, and so has all that was before it.
            if left.is_zero() || event.synchronize(left).is_err() && !event.is_done().unwrap_or(true) {
                return bytes;
            }
        }
    }
}

impl<D: Device> State<D> {
    /// Gives back what is free at the end and done.
    fn trim(&mut self, device: &D) -> Trimmed<D> {
        match self.source {
            Source::Arena(_) => self.trim_pages(device),
            Source::Backings(_) => self.trim_backings(device),
        }
    }

    /// The free range at the end.
    fn free_tail(&self) -> Option<Range<u64>> {
        let mut tail = None;
        self.planner.for_each_range(|start, bytes, tag, _| tail = tag.is_none().then_some(start..start + bytes));
        tail
    }

    fn trim_pages(&mut self, device: &D) -> Trimmed<D> {
        let tail = self.free_tail();
        let (Source::Arena(arena), Some(memory), Some(tail)) = (&mut self.source, device.virtual_memory(), tail)
        else {
            return Trimmed { bytes: 0, later: None };
        };
        let (page, end) = (memory.page_bytes() as u64, tail.end);
        let from = tail.start.next_multiple_of(page).min(end);
        let (used_to, later) = self.hazards.settle(from..end);
        let cut = used_to.next_multiple_of(page).min(end);
        // What is in use is set aside, since the planner gives all of a free end.
        let granule = self.planner.config().granule_bytes;
        let aside = if cut > from { self.planner.take_at(cut - granule, granule, 0) } else { None };
        let bytes = if cut > from && aside.is_none() { 0 } else { self.planner.shrink() };
        if let Some(aside) = aside {
            self.planner.free(aside);
        }
        self.hazards.forget(end - bytes..end);
        // SAFETY: no block has the range or a view of it; whoever used it, at whatever addresses, came before its
        // hazards, and those have run.
        unsafe { self.views.drop_above(end - bytes, memory) };
        // SAFETY: as above; no view is left.
        unsafe { arena.shrink(memory, bytes as usize) };
        Trimmed { bytes: bytes as usize, later }
    }

    fn trim_backings(&mut self, device: &D) -> Trimmed<D> {
        let mut trimmed = Trimmed { bytes: 0, later: None };
        while let Some(tail) = self.free_tail() {
            let Source::Backings(backings) = &mut self.source else { break };
            if !backings.may_give_back(&tail) {
                break;
            }
            let (used_to, later) = self.hazards.settle(tail.clone());
            if used_to > tail.start {
                trimmed.later = later;
                break;
            }
            self.hazards.forget(tail);
            trimmed.bytes += self.planner.shrink() as usize;
            // SAFETY: no block has it, and all that used it has run.
            unsafe { backings.give_back_last(device) };
        }
        trimmed
    }
}
