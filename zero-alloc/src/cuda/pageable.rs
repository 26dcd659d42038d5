//! The ranges of host memory that have the id of pinned memory and are not pinned, because the
//! system refused.
//!
//! The driver's own copies of such memory would wait inside the call, holding locks (see
//! `staging`), so a copy looks its slices up here. Without such ranges that is one load.
//!
//! Why one id for both: callers need no second path for memory that could not be pinned.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::RwLock;

use crate::device::{AnySlice, DeviceId};

/// Bytes by first address.
static RANGES: RwLock<BTreeMap<usize, usize>> = RwLock::new(BTreeMap::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

pub(super) fn insert(start: usize, bytes: usize) {
    let mut ranges = RANGES.write();
    ranges.insert(start, bytes);
    COUNT.store(ranges.len(), Ordering::Release);
}

/// Removes the range that starts at `start`; returns whether there was one.
pub(super) fn remove(start: usize) -> bool {
    if COUNT.load(Ordering::Acquire) == 0 {
        return false;
    }
    let mut ranges = RANGES.write();
    let removed = ranges.remove(&start).is_some();
    COUNT.store(ranges.len(), Ordering::Release);
    removed
}

/// Whether the slice is in such a range.
pub(super) fn contains(slice: AnySlice) -> bool {
    if slice.device() != DeviceId::PINNED || COUNT.load(Ordering::Acquire) == 0 {
        return false;
    }
    let at = slice.as_ptr().addr();
    RANGES
        .read()
        .range(..=at)
        .next_back()
        .is_some_and(|(&start, &bytes)| at - start < bytes)
}
