//! Registration of memory with NCCL, which accesses registered memory directly instead of copying
//! through internal buffers.
//!
//! By NCCL's guide ("User Buffer Registration") and the sources of 2.30 to 2.32 (`src/register`,
//! `src/transport/p2p.cc`, `src/allocator.cc`), memory must be
//!
//! - created by `cuMemCreate` with a handle that peers can import (a file descriptor on one
//!   machine, a fabric handle over NVLink between machines) and, for network cards, with GPUDirect
//!   RDMA: memory of `ncclMemAlloc` or of
//!   [`CudaDevice::with_shareable_backings`](zero_alloc::cuda::CudaDevice::with_shareable_backings).
//!   NCCL accepts other memory, but does not use it;
//! - of one handle. Before a fix of August 2026 (NVIDIA/nccl#2362), if a registered range spanned
//!   several handles, a collective on one handle made a later collective on another access unmapped
//!   memory;
//! - registered from the start of its handle: NVLink switches (NVLS) reduce aligned ranges only;
//! - registered by all ranks that call a collective on it, or by no rank; otherwise the result is
//!   undefined.
//!
//! So this module registers whole allocations of one handle, on all ranks or on no rank.
//!
//! The trainer registers nothing: a pool of pages has many handles, and shareable backings are
//! without stitching. The gain is limited to gathers where there is no NVLS, and has not been
//! measured on a GPU.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use zero_alloc::cuda::CudaDevice;
use zero_alloc::device::{AnySlice, DType, Memory};
use zero_alloc::{Pool, TimeLimit};

use super::control::abort;
use super::control::error::back_end;
use super::control::message::{Context, Registered as Outcome};
use super::handle::{Handle, Registered};
use super::{NcclCommunicator, Process};
use crate::CommError;

/// Memory registered with NCCL. Dropping it deregisters the memory: drop it on all ranks between
/// the same two collectives, and after all graphs with collectives on the memory. Dropping waits,
/// within the limit, for the communicator's collectives in flight. Dropping the communicator
/// deregisters too.
///
/// After a failure, NCCL releases the memory when the abort of its communicator ends, which waits
/// for all graphs with its collectives. Dropping waits for that, for at most five seconds; after
/// them the memory of a pool stays allocated until the process ends, since NCCL and other ranks may
/// still access it.
#[must_use]
pub struct Registration {
    // Weak: a registration does not keep the communicator or the world alive.
    handle: Weak<Handle>,
    process: Weak<Process>,
    context: Context,
    registered: Registered,
    /// Set when NCCL has released the communicator.
    released: Arc<AtomicBool>,
    /// Keeps the memory mapped.
    pool: Option<Pool<CudaDevice>>,
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Registration")
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // The process is dropped last: its goodbye follows the end of the communicator.
        if let (Some(process), Some(handle)) = (self.process.upgrade(), self.handle.upgrade()) {
            // The peers have mapped this memory, so no collective may use it any more.
            if process.world().drain(self.context).is_ok() && handle.deregister(&self.registered) {
                return;
            }
            // If the watcher aborts it already, this does nothing.
            let _completion = process.world().abort(&*handle);
        }
        let mut time = TimeLimit::new(abort::LIMIT);
        while !self.released.load(Ordering::Acquire) {
            if time.has_passed() {
                return std::mem::forget(self.pool.take());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Returns an error text unless all ranks registered the same number of bytes.
fn mismatch(outcome: Outcome) -> Option<String> {
    match outcome {
        Outcome::Equal => None,
        Outcome::Failed { rank } => Some(format!(
            "rank {rank} did not register its memory, so no rank does"
        )),
        Outcome::Differs {
            rank,
            bytes,
            expected,
        } => Some(format!(
            "rank 0 registered {expected} bytes and rank {rank} {bytes}, so no rank does; use the same pool budget on \
             all ranks"
        )),
    }
}

impl NcclCommunicator {
    /// Registers all memory of `pool`, so that collectives on its blocks copy less. The pool
    /// reserves its whole budget as one backing, if it has no backing yet, and never grows. Every
    /// rank of the communicator must call it, with pools of the same budget and the same order of
    /// allocations, and must not call the communicator concurrently.
    ///
    /// Measure whether it helps on your machine. According to its sources, NCCL uses registered
    /// memory with NVLink switches (in all-gather, reduce-scatter and all-reduce), and in rings
    /// over NVLink and network cards for all-gathers and for all-reduces that are not in place;
    /// never for a ring's reduce-scatter. Register memory of `all_to_all` separately: sharing a
    /// registration crashed NCCL 2.24 (NVIDIA/nccl#1859).
    ///
    /// # Errors
    /// A rank's memory is not shareable or not one backing, its NCCL cannot register memory, or two
    /// ranks' lengths differ; then no rank registers, and collectives work as before. Or the world
    /// failed, for example because another rank called `split` instead.
    pub fn register_pool(&self, pool: &Pool<CudaDevice>) -> Result<Registration, CommError> {
        self.registered(Some(pool.clone()), || {
            let (start, bytes) = pool.reserve_budget().map_err(|e| back_end(e.to_string()))?;
            // SAFETY: these bytes are the pool's backing, which the registration's pool keeps
            // mapped.
            let whole =
                unsafe { AnySlice::from_raw_parts(start, bytes, DType::U8, pool.device().id()) };
            // SAFETY: as above.
            unsafe { self.handle.register(whole) }
        })
    }

    /// Registers the whole allocation that contains `memory`, which need not come from a pool.
    /// Every rank must call it, as with [`NcclCommunicator::register_pool`], with allocations of
    /// the same layout: collectives on memory that only some ranks registered have undefined
    /// results.
    ///
    /// # Errors
    /// As for [`NcclCommunicator::register_pool`].
    ///
    /// # Safety
    /// The allocation must be on the device and stay mapped at its address until the result or the
    /// communicator is dropped; if the world has failed
    /// ([`Communicator::failure`](crate::Communicator::failure)), until the process ends.
    pub unsafe fn register(&self, memory: AnySlice) -> Result<Registration, CommError> {
        // SAFETY: the caller's promise.
        self.registered(None, || unsafe { self.handle.register(memory) })
    }

    /// Calls `register` and exchanges the result with all ranks. Returns the registration if all
    /// ranks have one of the same length.
    fn registered(
        &self,
        pool: Option<Pool<CudaDevice>>,
        register: impl FnOnce() -> Result<Registered, CommError>,
    ) -> Result<Registration, CommError> {
        // Held until all ranks agree, so that no collective runs while only some ranks have
        // registered the memory.
        let mut enqueued = self.enqueued.lock();
        let number = enqueued.meetings;
        enqueued.meetings += 1;
        let handle = Arc::downgrade(&self.handle);
        let process = Arc::downgrade(&self.process);
        let released = Arc::clone(&self.handle.released);
        let own = register().map(|registered| Registration {
            handle,
            process,
            context: self.context,
            registered,
            released,
            pool,
        });
        let bytes = own.as_ref().ok().map(|own| own.registered.bytes as u64);
        let outcome = self.process.world().register(self.context, number, bytes)?;
        own.and_then(|own| mismatch(outcome).map_or(Ok(own), |message| Err(back_end(message))))
    }
}
