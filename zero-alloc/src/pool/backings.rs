//! The large allocations that a pool makes from its device.

use std::ops::Range;
use std::ptr::NonNull;

use crate::device::{Device, DeviceError, Memory};

/// Bounds of the size of a backing that is larger than its first request.
const MIN_BYTES: usize = 1 << 20;
const MAX_AHEAD_BYTES: usize = 256 << 20;

struct Backing {
    /// Its first offset.
    start: u64,
    bytes: usize,
    ptr: NonNull<u8>,
}

// SAFETY: the backing owns its memory; the address is not tied to a thread.
unsafe impl Send for Backing {}

/// Backings in the order of their offsets.
#[derive(Default)]
pub(super) struct Backings {
    list: Vec<Backing>,
    bytes: usize,
    allocations: u64,
}

impl Backings {
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn allocations(&self) -> u64 {
        self.allocations
    }

    /// Allocates another backing of at least `bytes`. If budget and device allow, its size is at
    /// least a quarter of the sum of all backings (within bounds), so that their number stays
    /// small. Returns its size, or `None` if `bytes` exceed the budget; [`Backings::set_start`]
    /// must follow.
    pub(super) fn grow(
        &mut self,
        device: &impl Device,
        bytes: usize,
        budget_bytes: usize,
    ) -> Result<Option<usize>, DeviceError> {
        let granularity = device.granularity_bytes();
        let limit = budget_bytes
            .checked_next_multiple_of(granularity)
            .unwrap_or(usize::MAX);
        let left = limit - self.bytes.min(limit);
        let Some(least) = bytes
            .checked_next_multiple_of(granularity)
            .filter(|least| *least <= left)
        else {
            return Ok(None);
        };

        let ahead = (self.bytes / 4)
            .clamp(MIN_BYTES, MAX_AHEAD_BYTES)
            .next_multiple_of(granularity);
        let wanted = ahead.min(left / granularity * granularity).max(least);
        self.allocations += 1;

        let (ptr, bytes) = match device.allocate(wanted) {
            Ok(ptr) => (ptr, wanted),
            Err(DeviceError::OutOfMemory { .. }) if wanted > least => {
                (device.allocate(least)?, least)
            }
            Err(error) => return Err(error),
        };

        self.bytes += bytes;
        self.list.push(Backing {
            start: u64::MAX,
            bytes,
            ptr,
        });

        Ok(Some(bytes))
    }

    /// Sets the first offset of the newest backing, which is above those of the others.
    pub(super) fn set_start(&mut self, start: u64) {
        if let Some(newest) = self.list.last_mut() {
            newest.start = start;
        }
    }

    /// Whether the last backing is exactly this range and may be freed.
    pub(super) fn can_free_last(&self, range: &Range<u64>) -> bool {
        let is_last = |last: &Backing| {
            (last.start, last.bytes as u64) == (range.start, range.end - range.start)
        };
        self.list.last().is_some_and(is_last)
    }

    /// Frees the last backing.
    ///
    /// # Safety
    /// All operations that use it have run, and none will be enqueued.
    pub(super) unsafe fn free_last(&mut self, device: &impl Memory) {
        if let Some(last) = self.list.pop() {
            self.bytes -= last.bytes;
            // SAFETY: it was allocated by this device with this size and is freed once; the rest is
            // the caller's promise.
            unsafe { device.deallocate(last.ptr, last.bytes) };
        }
    }

    /// The address of an offset within a backing.
    pub(super) fn address(&self, offset: u64) -> *mut u8 {
        let after = self.list.partition_point(|backing| backing.start <= offset);
        let backing = &self.list[after - 1];
        backing
            .ptr
            .as_ptr()
            .wrapping_add((offset - backing.start) as usize)
    }

    /// Frees all backings.
    ///
    /// # Safety
    /// All operations that use the memory have run, and none will be enqueued.
    pub(super) unsafe fn release(mut self, device: &impl Memory) {
        while !self.list.is_empty() {
            // SAFETY: the caller's promise.
            unsafe { self.free_last(device) };
        }
    }
}
