//! A gathered unit and its memory: in flight, then held by the streams that use it.

use std::fmt;

use zero_alloc::device::{AnySlice, Device, DeviceError, Stream};
use zero_alloc::{Block, Pool, Purpose};

use super::PrefetchError;
use super::live::Lease;
use crate::Communicator;

/// A unit on its way into a block of the pool.
#[must_use = "dropping it wastes the gather"]
pub struct UnitGather<D: Device> {
    /// None once waited for.
    block: Option<Block<D>>,
    comm_stream: D::Stream,
    event: D::Event,
    slice: AnySlice,
}

impl<D: Device> fmt::Debug for UnitGather<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UnitGather({} x {})", self.slice.len(), self.slice.dtype())
    }
}

impl<D: Device> Drop for UnitGather<D> {
    fn drop(&mut self) {
        if let Some(block) = &mut self.block {
            // A stream that refuses is closed, and uses the block no more.
            let _closed = block.record_use(&self.comm_stream);
        }
    }
}

impl<D: Device> UnitGather<D> {
    /// Enqueues the gathering of `shard` from all ranks on `comm_stream`, into a block of `pool`.
    ///
    /// # Errors
    /// The pool has no room, or the collective was refused.
    pub fn start(
        pool: &Pool<D>,
        comm: &dyn Communicator<D>,
        comm_stream: &D::Stream,
        shard: AnySlice,
    ) -> Result<Self, PrefetchError> {
        let len = shard.len() * comm.world_size();
        let mut block = pool.allocate(len, shard.dtype(), Purpose::Buckets, comm_stream)?;
        // SAFETY: every stream that uses the slice is noted before the block is dropped: the communication
        // stream below or by `Drop`, the others by `Unsharded`.
        let slice = unsafe { block.slice() };
        let enqueued = comm.all_gather(comm_stream, shard, slice);
        block.record_use(comm_stream)?;
        enqueued?;
        let event = comm_stream.record()?;
        Ok(Self { block: Some(block), comm_stream: comm_stream.clone(), event, slice })
    }

    /// Makes `stream` wait for the gather; the unit is its to use.
    ///
    /// # Errors
    /// The stream refused.
    pub fn wait_on(mut self, stream: &D::Stream) -> Result<Unsharded<D>, DeviceError> {
        stream.wait(&self.event)?;
        let users = vec![stream.clone()];
        Ok(Unsharded { block: self.block.take(), slice: self.slice, users, lease: None })
    }
}

/// A gathered unit. Dropping or resharding it gives its memory back, in stream order.
#[must_use = "dropping it gives the gathered unit back"]
pub struct Unsharded<D: Device> {
    block: Option<Block<D>>,
    slice: AnySlice,
    users: Vec<D::Stream>,
    /// None for a unit that no `Prefetcher` counts.
    pub(super) lease: Option<Lease>,
}

impl<D: Device> fmt::Debug for Unsharded<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Unsharded({} x {})", self.slice.len(), self.slice.dtype())
    }
}

impl<D: Device> Drop for Unsharded<D> {
    fn drop(&mut self) {
        if let Some(block) = &mut self.block {
            for user in &self.users {
                // A stream that refuses is closed, and uses the block no more.
                let _closed = block.record_use(user);
            }
        }
    }
}

impl<D: Device> Unsharded<D> {
    /// The whole unit: the shards of all ranks end to end.
    ///
    /// # Safety
    /// The slice is used only by operations enqueued on the stream that waited for it, or on streams added by
    /// [`Unsharded::add_user`], before this value is dropped or resharded; nothing writes to it.
    pub unsafe fn slice(&self) -> AnySlice {
        self.slice
    }

    /// How many elements.
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.slice.is_empty()
    }

    /// Lets `stream` use the unit too; it waits for what the first user waits for.
    ///
    /// # Errors
    /// A stream refused.
    pub fn add_user(&mut self, stream: &D::Stream) -> Result<(), DeviceError> {
        if let Some(first) = self.users.first() {
            stream.wait(&first.record()?)?;
        }
        if self.users.iter().all(|known| known.id() != stream.id()) {
            self.users.push(stream.clone());
        }
        Ok(())
    }
}
