//! A gathered unit and its memory.

use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use zero_alloc::device::{
    AnySlice, DType, Device, DeviceError, DeviceKind, Element, Event, Stream,
};
use zero_alloc::{Block, Pool, Purpose};

use super::PrefetchError;
use super::live::Lease;
use crate::Gather;

/// The place of this rank's shard in a unit that is about to be gathered, for one call of
/// [`ShardSource::fetch`](crate::ShardSource::fetch).
///
/// Why it is no slice: the memory is the prefetcher's, who frees it, and later gathers have it
/// again. A source that keeps the place does not compile:
///
/// ```compile_fail
/// # use zero_alloc::device::{AnySlice, DType};
/// # use zero_alloc::host::{HostDevice, HostStream};
/// # use zero_comm::{OwnShard, PrefetchError, ShardSource};
/// struct Keep(Option<OwnShard<'static>>);
///
/// impl ShardSource<HostDevice> for Keep {
/// #   fn dtype(&self, _unit: usize) -> DType { DType::F32 }
/// #   fn shard_elems(&self) -> Vec<usize> { vec![4] }
///     fn fetch(
///         &mut self,
///         _comm_stream: &HostStream,
///         _unit: usize,
///         own: OwnShard<'_>,
///     ) -> Result<Option<AnySlice>, PrefetchError> {
///         self.0 = Some(own);
///         Ok(None)
///     }
/// }
/// ```
///
/// Nor does one that has a slice of it without `unsafe`:
///
/// ```compile_fail,E0133
/// # use zero_alloc::device::AnySlice;
/// # use zero_comm::OwnShard;
/// fn slice(own: &OwnShard<'_>) -> AnySlice {
///     own.slice()
/// }
/// ```
#[derive(Debug)]
pub struct OwnShard<'a> {
    slice: AnySlice,
    _call: PhantomData<&'a mut ()>,
}

impl OwnShard<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.slice.is_empty()
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.slice.dtype()
    }

    /// The elements.
    ///
    /// # Safety
    /// The slice is used only by operations that this call of
    /// [`ShardSource::fetch`](crate::ShardSource::fetch) enqueues: on its stream, or on streams
    /// that wait for it before them and that it waits for after them.
    pub unsafe fn slice(&self) -> AnySlice {
        self.slice
    }
}

/// A gathered unit. Dropping it frees its memory in stream order; pass it to
/// `PrefetchStep::reshard` so that it can be kept.
#[must_use = "dropping it frees the gathered unit"]
pub struct Unsharded<D: Device> {
    block: Block<D>,
    slice: AnySlice,
    device: D,
    comm_stream: D::Stream,
    /// The end of the gather.
    gathered: D::Event,
    /// The stream that uses the unit; `None` while it is in flight.
    user: Option<D::Stream>,
    pub(super) lease: Lease,
}

impl<D: Device> fmt::Debug for Unsharded<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Unsharded({} x {})",
            self.slice.len(),
            self.slice.dtype()
        )
    }
}

impl<D: Device> Drop for Unsharded<D> {
    fn drop(&mut self) {
        if let Some(user) = &self.user {
            // A stream that returns an error is closed, and uses the block no more.
            let _closed = self.block.record_use(user);
        }
    }
}

impl<D: Device> Unsharded<D> {
    /// Enqueues the gather of this rank's shard and those of the others on `comm_stream`, into a
    /// block of `pool`. `shard` fills its place in the block, or returns it elsewhere; it has `len`
    /// elements of `dtype`.
    ///
    /// # Errors
    /// The pool is out of memory, `shard` failed, or the collective was not enqueued.
    pub(super) fn gather(
        pool: &Pool<D>,
        gather: &Gather<D>,
        comm_stream: &D::Stream,
        (len, dtype): (usize, DType),
        shard: impl FnOnce(OwnShard<'_>) -> Result<Option<AnySlice>, PrefetchError>,
        lease: Lease,
    ) -> Result<Self, PrefetchError> {
        let mut block = pool.allocate(
            len * gather.comm().world_size(),
            dtype,
            Purpose::Buckets,
            comm_stream,
        )?;
        // SAFETY: every stream that uses the slice is recorded before the block is dropped: the
        // communication stream below, the user's stream by `Drop`.
        let slice = unsafe { block.slice() };
        let rank = gather.comm().rank();
        let own = slice.slice(rank * len..(rank + 1) * len);
        let place = OwnShard {
            slice: own,
            _call: PhantomData,
        };
        let enqueued = shard(place)
            .and_then(|shard| Ok(gather.enqueue(comm_stream, shard.unwrap_or(own), slice)?));
        block.record_use(comm_stream)?;
        enqueued?;
        let gathered = comm_stream.record()?;
        let device = pool.device().clone();
        let comm_stream = comm_stream.clone();

        Ok(Self {
            block,
            slice,
            device,
            comm_stream,
            gathered,
            user: None,
            lease,
        })
    }

    /// Makes `stream` wait for the gather and records it as the unit's user.
    pub(super) fn wait_on(&mut self, stream: &D::Stream) -> Result<(), DeviceError> {
        stream.wait(&self.gathered)?;
        self.user = Some(stream.clone());
        Ok(())
    }

    /// Makes `stream` wait for the gather, so that it can then write the shard.
    pub(super) fn hold_writers(&self, stream: &D::Stream) {
        // A stream that refuses the wait is closed, and writes nothing.
        let _closed = stream.wait(&self.gathered);
    }

    /// Whether no stream has used it yet.
    pub(super) fn is_in_flight(&self) -> bool {
        self.user.is_none()
    }

    /// The whole unit: the concatenated shards of all ranks.
    ///
    /// # Safety
    /// The slice is used only by operations enqueued on the prefetcher's compute stream, or by the
    /// host after [`Self::synchronize`], before this value is dropped or resharded; nothing writes
    /// to it.
    pub unsafe fn slice(&self) -> AnySlice {
        self.slice
    }

    /// Waits at most `limit` for the gather, for a host that then reads the slice in host memory.
    ///
    /// # Errors
    /// The gather failed, or the limit passed.
    pub fn synchronize(&self, limit: Duration) -> Result<(), DeviceError> {
        self.gathered.synchronize(limit)
    }

    /// Waits at most `limit` for the gather and calls `read` with the whole unit in host memory:
    /// the elements themselves on the host, a copy on other devices.
    ///
    /// # Errors
    /// The unit has another dtype, the gather failed, or the limit passed.
    pub fn read<T: Element, R>(
        &self,
        limit: Duration,
        read: impl FnOnce(&[T]) -> R,
    ) -> Result<R, DeviceError> {
        let slice = self.slice.typed::<T>()?;
        if self.device.kind() == DeviceKind::Host {
            self.gathered.synchronize(limit)?;
            // SAFETY: host memory that the gather has written. Nothing writes to it before the
            // drop: `slice` forbids it.
            return Ok(read(unsafe { slice.as_host() }));
        }
        let mut copy = vec![T::zeroed(); slice.len()];
        let stream = self.user.as_ref().unwrap_or(&self.comm_stream);
        self.device.download(
            stream,
            self.slice,
            bytemuck::cast_slice_mut(&mut copy),
            limit,
        )?;
        Ok(read(&copy))
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.slice.is_empty()
    }
}
