//! The flags that ranks exchange at the end of a step: a request to stop, and readiness to advance a save.
//!
//! | buffer | bytes | lifetime |
//! |---|---|---|
//! | `host` | 8, in host memory from which copies read | written by a host operation in the compute stream |
//! | `device` | 8, on the device | a copy of it, read by the all-gather of statistics |
//!
//! A request to stop therefore takes effect in the step that the device is computing, even if the host is ahead.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice, Stream};
use zero_alloc::{Block, Purpose};

use super::rank::Rank;
use crate::error::TrainError;

const BYTES: usize = size_of::<u64>();
/// A rank requests to stop after this step.
const STOP: u64 = 1;
/// The rank is ready to advance the save in progress.
const READY: u64 = 2;

/// The flags of one rank.
pub(super) struct Flags<'a, D: Device> {
    rank: &'a Rank<D>,
    host: NonNull<u64>,
    device: Block<D>,
}

/// The flags in host memory, for use in a host operation.
struct HostFlags(NonNull<u64>);

// SAFETY: memory of the process, used in the order of one stream.
unsafe impl Send for HostFlags {}

impl HostFlags {
    /// # Safety
    /// The memory is allocated, and nothing else uses it now.
    unsafe fn set(&self, flags: u64) {
        // SAFETY: the caller's promise; allocated for one u64.
        unsafe { self.0.write(flags) };
    }
}

impl<'a, D: Device> Flags<'a, D> {
    pub(super) fn new(rank: &'a Rank<D>) -> Result<Self, TrainError> {
        let device = rank.pool.allocate(BYTES, DType::U8, Purpose::Workspace, &rank.compute)?;
        // Backings are aligned to 64 bytes or more.
        let host = rank.host.memory.allocate(BYTES)?.cast();
        Ok(Self { rank, host, device })
    }

    /// Enqueues the write and the copy of this rank's flags on the compute stream. The write reads `cancel` when it runs.
    pub(super) fn enqueue(&self, cancel: &Arc<AtomicBool>, ready: bool) -> Result<DeviceSlice<u64>, TrainError> {
        let (host, cancel, compute) = (HostFlags(self.host), Arc::clone(cancel), &self.rank.compute);
        let write = move || {
            let stop = if cancel.load(Ordering::Relaxed) { STOP } else { 0 };
            // SAFETY: the drop of `Flags` frees the memory after this operation; the previous copy has run.
            unsafe { host.set(stop | if ready { READY } else { 0 }) };
            Ok(())
        };
        compute.enqueue_host("flags", write)?;
        // SAFETY: only the compute stream uses the block; the drop records that stream.
        let device = unsafe { self.device.slice() };
        // SAFETY: allocated with this length, until the drop of `Flags` has waited for the copy.
        let host = unsafe {
            AnySlice::from_raw_parts(self.host.as_ptr().cast(), BYTES, DType::U8, self.rank.host.memory.id())
        };
        self.rank.pool.device().copy(compute, host, device)?;
        // SAFETY: eight bytes at the start of a block, which is aligned for them.
        Ok(unsafe { DeviceSlice::from_raw_parts(device.as_ptr().cast(), 1, device.device()) })
    }
}

/// Whether any rank requests to stop.
pub(super) fn stop(flags: zero_optim::ReducedFlags) -> bool {
    flags.any & STOP != 0
}

/// Whether all ranks are ready to advance the save in progress.
pub(super) fn ready(flags: zero_optim::ReducedFlags) -> bool {
    flags.all & READY != 0
}

impl<D: Device> Drop for Flags<'_, D> {
    /// Drains the compute stream.
    fn drop(&mut self) {
        // Recording fails only on a closed stream, which no longer uses the block.
        let _closed = self.device.record_use(&self.rank.compute);
        // After a failure or a timeout a copy may still be queued, so the memory is leaked.
        if self.rank.compute.synchronize(self.rank.settings.host_limit()).is_ok() {
            // SAFETY: allocated with this size; every operation on it has run.
            unsafe { self.rank.host.memory.deallocate(self.host.cast(), BYTES) };
        }
    }
}
