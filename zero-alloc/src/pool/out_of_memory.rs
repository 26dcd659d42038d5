//! What the error says when a block cannot be had: who holds what, and what moving would give.

use super::{AllocError, Pool, Purpose};
use crate::device::Device;

impl<D: Device> Pool<D> {
    /// The error for a request, with the words of the device where it was the device that had no more.
    pub(super) fn out_of_memory(&self, asked_bytes: usize, purpose: Purpose, device: Option<String>) -> AllocError {
        let report = self.report();
        let mut holders: Vec<_> =
            Purpose::ALL.iter().map(|p| (*p, report.of(*p).live_bytes)).filter(|(_, bytes)| *bytes > 0).collect();
        holders.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        AllocError::OutOfMemory {
            asked_bytes,
            purpose,
            device,
            live_bytes: report.total.live_bytes,
            budget_bytes: self.central().budget_bytes,
            free_bytes: report.free_bytes,
            largest_free_bytes: report.largest_free_bytes,
            after_compaction_bytes: self.central().state.lock().planner.largest_after_compaction() as usize,
            holders,
        }
    }
}
