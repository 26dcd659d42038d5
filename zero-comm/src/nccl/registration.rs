//! Memory that NCCL works in directly, instead of copying through its own.
//!
//! What NCCL takes, by its sources (`src/register`, `src/transport/p2p.cc`, `src/allocator.cc`; 2.30 to 2.32) and its
//! guide ("User Buffer Registration"):
//!
//! - memory of `cuMemCreate` with a handle that can be given to the peers (a file descriptor on one machine, a fabric
//!   handle over NVLink between machines) and, for network cards, made fit for them: what
//!   [`CudaDevice::with_shareable_backings`](zero_alloc::cuda::CudaDevice::with_shareable_backings) makes, or
//!   `ncclMemAlloc`.
//!   Other memory is taken and not used;
//! - in one handle. A range over several was taken, but until the change of August 2026 (NVIDIA/nccl#2362) a
//!   collective within one handle of it made a later one within another work outside of what was opened;
//! - from where the handle begins: what switches add within NVLink (NVLS) is aligned;
//! - by all ranks that call a collective, or by none: the result is undefined otherwise.
//!
//! So a registration here is of whole allocations, of one handle each, and of all ranks together.

use std::fmt;
use std::sync::{Arc, Weak};

use zero_alloc::Pool;
use zero_alloc::cuda::CudaDevice;
use zero_alloc::device::{AnySlice, DType};

use super::handle::{Handle, Registered};
use super::library::back_end;
use super::message::Context;
use super::world::Transport;
use super::{NcclCommunicator, Process};
use crate::CommError;

/// Memory that NCCL works in directly, until this is dropped. Every rank drops its own at the same point between two
/// collectives, once no graph holds a collective on the memory any more. Dropping it waits, within the limit, for
/// what is under way on the communicator; where the communicator is gone already, the registration is too.
#[must_use]
pub struct Registration {
    // Neither keeps the communicator or the world from ending.
    handle: Weak<Handle>,
    process: Weak<Process>,
    context: Context,
    registered: Registered,
    /// Its memory is unmapped only after this.
    _pool: Option<Pool<CudaDevice>>,
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Registration")
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let (Some(handle), Some(process)) = (self.handle.upgrade(), self.process.upgrade()) else { return };
        // The peers have this memory open, and lose it: nobody may be at work in it.
        if process.drain(self.context).is_err() {
            handle.abort().wait();
        }
        handle.deregister(&self.registered);
    }
}

/// Why what the ranks have registered, if they could, is no registration of all, if so.
fn refusal(bytes: &[Option<u64>]) -> Option<String> {
    if let Some(rank) = bytes.iter().position(Option::is_none) {
        return Some(format!("rank {rank} did not register its memory, so none is registered"));
    }
    let rank = bytes.iter().position(|of_rank| *of_rank != bytes[0])?;
    let (first, other) = (bytes[0]?, bytes[rank]?);
    Some(format!(
        "rank 0 registered {first} bytes and rank {rank} {other}, so none is registered; give all ranks' pools one budget"
    ))
}

impl NcclCommunicator {
    /// Tells NCCL of all the memory of `pool`, so that collectives on its blocks copy less: the pool takes its whole
    /// budget as one backing, if it has none yet, and never grows. Every rank of the communicator calls it, for the
    /// same memory (pools of one budget, from which blocks are taken in one order), with no other call of it
    /// meanwhile.
    ///
    /// Whether it is worth it is the machine's to say. By NCCL's sources registered memory is used where NVLink's
    /// switches add (all three collectives), and by rings, over NVLink and network cards, in all-gathers and in
    /// all-reduces that are not in place; a ring's reduce-scatter never uses it. What `all_to_all` uses should be
    /// registered for nothing else: that crashed NCCL 2.24 (NVIDIA/nccl#1859).
    ///
    /// # Errors
    /// A rank's memory cannot be opened by others or is not one backing, or its NCCL cannot register; on the other
    /// ranks the error names that rank. Or two ranks' memory differs in length. Nothing is registered then, on any
    /// rank, and collectives go on as before. Or the world failed, as it does where a rank splits the communicator
    /// meanwhile.
    pub fn register_pool(&self, pool: &Pool<CudaDevice>) -> Result<Registration, CommError> {
        self.registered(Some(pool.clone()), || {
            let (at, bytes) = pool.reserve_budget().map_err(|e| back_end(e.to_string()))?;
            // SAFETY: the pool's, which the registration keeps.
            let whole = unsafe { AnySlice::from_raw_parts(at, bytes, DType::U8) };
            // SAFETY: as above.
            unsafe { self.handle.register(whole) }
        })
    }

    /// Tells NCCL of the whole allocation that `memory` lies in, for memory of another's making. Every rank calls it,
    /// as for [`NcclCommunicator::register_pool`], and whatever else lies in that allocation is registered too: also
    /// on all ranks, or the results of collectives on it are undefined.
    ///
    /// # Errors
    /// As for [`NcclCommunicator::register_pool`].
    ///
    /// # Safety
    /// The allocation is the device's and stays as it is, mapped where it is, until the result or the communicator is
    /// dropped.
    pub unsafe fn register(&self, memory: AnySlice) -> Result<Registration, CommError> {
        // SAFETY: the caller's promise.
        self.registered(None, || unsafe { self.handle.register(memory) })
    }

    /// The registration of this rank, if all ranks have one.
    fn registered(
        &self,
        pool: Option<Pool<CudaDevice>>,
        register: impl FnOnce() -> Result<Registered, CommError>,
    ) -> Result<Registration, CommError> {
        // Held until all ranks agree: no collective may find the memory registered on some.
        let mut enqueued = self.enqueued.lock();
        let number = enqueued.meetings;
        enqueued.meetings += 1;
        let (handle, process) = (Arc::downgrade(&self.handle), Arc::downgrade(&self.process));
        let own = register().map(|registered| Registration {
            handle,
            process,
            context: self.context,
            registered,
            _pool: pool,
        });
        let bytes = own.as_ref().ok().map(|own| own.registered.bytes as u64);
        let bytes = self.process.world.register(self.context, number, bytes)?;
        own.and_then(|own| refusal(&bytes).map_or(Ok(own), |why| Err(back_end(why))))
    }
}
