//! The large allocations that a pool has from its device.

use std::ops::Range;
use std::ptr::NonNull;

use crate::device::{Device, DeviceError, Memory};

/// Smallest and greatest backing taken where less is asked for.
const LEAST_BYTES: usize = 1 << 20;
const MOST_AHEAD_BYTES: usize = 256 << 20;

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
    /// Others were told where it is: nothing goes back before the end.
    told: bool,
}

impl Backings {
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn allocations(&self) -> u64 {
        self.allocations
    }

    /// Takes one more backing, of `bytes` or more: a quarter of what is held, so that their number stays small,
    /// but not beyond the budget (`None` where `bytes` alone are). Gives its size; [`Backings::starts_at`]
    /// must follow.
    pub(super) fn grow(
        &mut self,
        device: &impl Device,
        bytes: usize,
        budget_bytes: usize,
    ) -> Result<Option<usize>, DeviceError> {
        let granularity = device.granularity_bytes();
        let limit = budget_bytes.checked_next_multiple_of(granularity).unwrap_or(usize::MAX);
        let left = limit - self.bytes.min(limit);
        let Some(least) = bytes.checked_next_multiple_of(granularity).filter(|least| *least <= left) else {
            return Ok(None);
        };
        let ahead = (self.bytes / 4).clamp(LEAST_BYTES, MOST_AHEAD_BYTES).next_multiple_of(granularity);
        let wanted = ahead.min(left / granularity * granularity).max(least);
        self.allocations += 1;
        let (ptr, bytes) = match device.allocate(wanted) {
            Ok(ptr) => (ptr, wanted),
            Err(DeviceError::OutOfMemory { .. }) if wanted > least => (device.allocate(least)?, least),
            Err(error) => return Err(error),
        };
        self.bytes += bytes;
        self.list.push(Backing { start: u64::MAX, bytes, ptr });
        Ok(Some(bytes))
    }

    /// Says which offset the newest backing got; offsets rise.
    pub(super) fn starts_at(&mut self, start: u64) {
        if let Some(newest) = self.list.last_mut() {
            newest.start = start;
        }
    }

    /// Whether the last backing is just this range and may go back.
    pub(super) fn may_give_back(&self, range: &Range<u64>) -> bool {
        let is_last = |last: &Backing| (last.start, last.bytes as u64) == (range.start, range.end - range.start);
        !self.told && self.list.last().is_some_and(is_last)
    }

    /// Gives the last backing back.
    ///
    /// # Safety
    /// No operation that has not run uses it, and nothing will.
    pub(super) unsafe fn give_back_last(&mut self, device: &impl Memory) {
        if let Some(last) = self.list.pop() {
            self.bytes -= last.bytes;
            // SAFETY: it came from `allocate` of this device with this size, and is given back once; the rest is the
            // caller's promise.
            unsafe { device.deallocate(last.ptr, last.bytes) };
        }
    }

    /// From now on nothing goes back before the end: others are told where it is.
    pub(super) fn tell(&mut self) {
        self.told = true;
    }

    /// Where the only backing begins, and its size; `None` where there are none or several.
    pub(super) fn only(&self) -> Option<(*mut u8, usize)> {
        match self.list.as_slice() {
            [only] => Some((only.ptr.as_ptr(), only.bytes)),
            _ => None,
        }
    }

    /// The address of an offset within a backing.
    pub(super) fn address(&self, offset: u64) -> *mut u8 {
        let after = self.list.partition_point(|backing| backing.start <= offset);
        let backing = &self.list[after - 1];
        backing.ptr.as_ptr().wrapping_add((offset - backing.start) as usize)
    }

    /// Gives everything back to the device.
    ///
    /// # Safety
    /// No operation that has not run uses the memory, and nothing will.
    pub(super) unsafe fn release(self, device: &impl Memory) {
        for backing in self.list {
            // SAFETY: it came from `allocate` of this device with this size, and is given back once; the rest
            // is the caller's promise.
            unsafe { device.deallocate(backing.ptr, backing.bytes) };
        }
    }
}
