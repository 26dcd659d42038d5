//! The numbers of one arena, as a C structure.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::arena::Arena;

/// `zero_torch_statistics` of the C header. Fields are only ever added at the end, and `size` says
/// how many the caller has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Statistics {
    /// `sizeof` of the caller's structure. The call writes this many bytes at most, and sets it to
    /// what it wrote.
    pub size: u64,
    /// Bytes requested by live blocks.
    pub live_bytes: u64,
    /// The peak of `live_bytes`; an upper bound if several threads allocate at once.
    pub peak_live_bytes: u64,
    /// Reserved from the device.
    pub reserved_bytes: u64,
    /// The peak of `reserved_bytes`, as seen by this function and by `zero_torch_empty_cache`.
    pub peak_reserved_bytes: u64,
    /// Reserved and in no block.
    pub free_bytes: u64,
    /// The largest contiguous part of `free_bytes`.
    pub largest_free_bytes: u64,
    /// The limit of `reserved_bytes`.
    pub budget_bytes: u64,
    /// Live blocks.
    pub blocks: u64,
    /// Allocations so far.
    pub allocations: u64,
    /// Frees so far.
    pub frees: u64,
    /// Allocations that failed because the arena or the device is out of memory.
    pub out_of_memory: u64,
    /// Pages mapped a second time so far, to make a large block of free pages in several places.
    pub stitched_pages: u64,
    /// 0, because blocks do not move: fields are never removed.
    pub moved_bytes: u64,
}

fn count(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

impl Arena {
    pub(crate) fn statistics(&self) -> Statistics {
        let report = self.pool().report();
        let counts = &self.counts;
        let reserved_bytes = report.reserved_bytes as u64;
        counts
            .peak_reserved_bytes
            .fetch_max(reserved_bytes, Ordering::Relaxed);
        Statistics {
            size: size_of::<Statistics>() as u64,
            live_bytes: report.total.live_bytes as u64,
            peak_live_bytes: report.total.peak_bytes as u64,
            reserved_bytes,
            peak_reserved_bytes: count(&counts.peak_reserved_bytes),
            free_bytes: report.free_bytes as u64,
            largest_free_bytes: report.largest_free_bytes as u64,
            budget_bytes: self.budget_bytes() as u64,
            blocks: self.block_count() as u64,
            allocations: count(&counts.allocations),
            frees: count(&counts.frees),
            out_of_memory: count(&counts.out_of_memory),
            stitched_pages: report.stitched_pages,
            moved_bytes: 0,
        }
    }
}
