//! What the ranks tell one another beside their votes: a request to stop, and readiness to take a save further.
//!
//! | buffer | bytes | life |
//! |---|---|---|
//! | `word` | 8, in memory that the host and copies use | written by an operation of the host in the compute stream |
//! | `flags` | 8, on the device | a copy of it, which the vote reads |
//!
//! So a request to stop counts until the device comes to the vote, however far ahead the host is.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice, Stream};
use zero_alloc::{Block, Purpose};

use super::rank::Rank;
use crate::error::TrainError;

const BYTES: usize = size_of::<u64>();
/// A rank was asked to stop after this step.
const STOP: u64 = 1;
/// The rank is ready to take the save under way a step further.
const READY: u64 = 2;

/// The flags of one rank.
pub(super) struct Flags<'a, D: Device> {
    rank: &'a Rank<D>,
    word: NonNull<u64>,
    flags: Block<D>,
}

/// Where the operation of the host writes.
struct Word(NonNull<u64>);

// SAFETY: memory of the process, used in the order of one stream.
unsafe impl Send for Word {}

impl Word {
    /// # Safety
    /// The memory is there, and nothing else uses it now.
    unsafe fn set(&self, flags: u64) {
        // SAFETY: the caller's promise; allocated for a word.
        unsafe { self.0.write(flags) };
    }
}

impl<'a, D: Device> Flags<'a, D> {
    pub(super) fn new(rank: &'a Rank<D>) -> Result<Self, TrainError> {
        let flags = rank.pool.allocate(BYTES, DType::U8, Purpose::Workspace, &rank.compute)?;
        // Backings are aligned to 64 bytes or more.
        let word = rank.host.memory.allocate(BYTES)?.cast();
        Ok(Self { rank, word, flags })
    }

    /// Enqueues this rank's flags of a step on the compute stream, as they are when it gets there.
    ///
    /// # Errors
    /// The stream refused.
    pub(super) fn enqueue(&self, cancel: &Arc<AtomicBool>, ready: bool) -> Result<DeviceSlice<u64>, TrainError> {
        let (word, cancel, compute) = (Word(self.word), Arc::clone(cancel), &self.rank.compute);
        let write = move || {
            let stop = if cancel.load(Ordering::Relaxed) { STOP } else { 0 };
            // SAFETY: the drop of the flags frees the word only behind this operation; the copy before it has run.
            unsafe { word.set(stop | if ready { READY } else { 0 }) };
            Ok(())
        };
        (self.rank.host.enqueue)(compute, "flags", Box::new(write))?;
        // SAFETY: the compute stream alone uses the block; dropping it notes that stream.
        let flags = unsafe { self.flags.slice() };
        // SAFETY: as long as was allocated, until the drop of the flags has waited for the copy.
        let word = unsafe { AnySlice::from_raw_parts(self.word.as_ptr().cast(), BYTES, DType::U8) };
        self.rank.pool.device().copy(compute, word, flags)?;
        // SAFETY: eight bytes at the start of a block, which is aligned for them.
        Ok(unsafe { DeviceSlice::from_raw_parts(flags.as_ptr().cast(), 1) })
    }
}

/// Whether any rank was asked to stop.
pub(super) fn stop(flags: zero_optim::ReducedFlags) -> bool {
    flags.any & STOP != 0
}

/// Whether all ranks are ready to take the save under way a step further.
pub(super) fn ready(flags: zero_optim::ReducedFlags) -> bool {
    flags.all & READY != 0
}

impl<D: Device> Drop for Flags<'_, D> {
    /// Drains the compute stream.
    fn drop(&mut self) {
        // A stream that refuses is closed, and uses the block no more.
        let _closed = self.flags.record_use(&self.rank.compute);
        // A stream that failed may still hold a copy of the word: it stays then, as it does where the limit passes.
        if self.rank.compute.synchronize(self.rank.settings.host_limit()).is_ok() {
            // SAFETY: allocated with these bytes; all that used it has run.
            unsafe { self.rank.host.memory.deallocate(self.word.cast(), BYTES) };
        }
    }
}
