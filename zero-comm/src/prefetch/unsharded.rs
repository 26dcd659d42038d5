//! A gathered unit and its memory.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use zero_alloc::Block;
use zero_alloc::device::{
    AnySlice, DType, Device, DeviceError, DeviceKind, Element, Event, Stream,
};

use super::live::Lease;
use super::{PrefetchError, ShardSource};
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

/// Memory of the caller for what belongs to a unit, in place of blocks of the pool: see
/// [`Prefetcher::set_memory`](crate::Prefetcher::set_memory).
///
/// # Safety
/// The slice that `allocate` returns is valid memory of the user's device, of this length and
/// dtype, that nothing else uses until its owner is dropped. On other devices than the host, memory
/// is in the order of the compute stream, as that of a caching allocator for this stream: what is
/// enqueued on it before `allocate` may still use the slice, and what is enqueued on it after the
/// drop of the owner may use it again.
pub unsafe trait CallerMemory: Send {
    /// Memory for `elems` elements of a unit, and its owner. On the host the owner is dropped when no
    /// stream uses the memory any more: that of a gathered unit on the thread that drops or reshards
    /// it, which waits for them. On other devices it is dropped when only work that the compute
    /// stream waits for uses it, and the host does not wait.
    ///
    /// # Errors
    /// There is no memory.
    fn allocate(
        &mut self,
        unit: usize,
        elems: usize,
        dtype: DType,
    ) -> Result<(AnySlice, Box<dyn Any + Send + Sync>), PrefetchError>;
}

/// The memory of a gathered unit.
pub(super) enum UnitMemory<D: Device> {
    Pool(Block<D>),
    /// Memory of the caller, and the limit of the wait for what uses it.
    Caller(Option<Box<dyn Any + Send + Sync>>, Duration),
}

/// A gathered unit. Dropping it frees its memory in stream order; pass it to
/// `PrefetchStep::reshard` so that it can be kept.
#[must_use = "dropping it frees the gathered unit"]
pub struct Unsharded<D: Device> {
    memory: UnitMemory<D>,
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
        match (&mut self.memory, &self.user) {
            (UnitMemory::Pool(block), Some(user)) => {
                // A stream that returns an error is closed, and uses the block no more.
                let _closed = block.record_use(user);
            }
            (UnitMemory::Pool(_), None) => {}
            // In the order of the user's stream, which has waited for the gather.
            (UnitMemory::Caller(..), Some(_)) if self.device.kind() != DeviceKind::Host => {}
            (UnitMemory::Caller(owner, limit), user) => {
                // The user's stream has waited for the gather.
                let end = user.as_ref().map(|user| user.record());
                let has_ended = match end {
                    Some(Ok(end)) => end.synchronize(*limit).is_ok(),
                    _ => self.gathered.synchronize(*limit).is_ok(),
                };
                if !has_ended {
                    // An operation that still runs may write to it.
                    std::mem::forget(owner.take());
                }
            }
        }
    }
}

impl<D: Device> Unsharded<D> {
    /// Enqueues the gather of the shards of `unit`, of `len` elements each, on `comm_stream`, into
    /// `memory`, whose slice is `slice`.
    ///
    /// # Errors
    /// The pool is out of memory, `shards` failed, or the collective was not enqueued.
    pub(super) fn gather(
        (device, gather, comm_stream): (&D, &Gather<D>, &D::Stream),
        (mut memory, slice): (UnitMemory<D>, AnySlice),
        (unit, len): (usize, usize),
        shards: &mut dyn ShardSource<D>,
        lease: Lease,
    ) -> Result<Self, PrefetchError> {
        let rank = gather.comm().rank();
        let own = slice.slice(rank * len..(rank + 1) * len);
        let place = OwnShard {
            slice: own,
            _call: PhantomData,
        };
        // SAFETY: the source uses the slice on `comm_stream`, which is recorded below.
        let enqueued = unsafe { shards.gather(comm_stream, unit, slice) }.and_then(|is_gathered| {
            if is_gathered {
                return Ok(());
            }
            let shard = shards.fetch(comm_stream, unit, place)?;
            Ok(gather.enqueue(comm_stream, shard.unwrap_or(own), slice)?)
        });
        if let UnitMemory::Pool(block) = &mut memory {
            block.record_use(comm_stream)?;
        }
        let gathered = comm_stream.record();
        let has_failed = enqueued.is_err() || gathered.is_err();
        if let (UnitMemory::Caller(owner, _), true) = (&mut memory, has_failed) {
            // The gather may be enqueued, and nothing tells when it ends.
            std::mem::forget(owner.take());
        }
        enqueued?;
        let gathered = gathered?;

        Ok(Self {
            memory,
            slice,
            device: device.clone(),
            comm_stream: comm_stream.clone(),
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
    pub(super) fn hold_writers(&mut self, stream: &D::Stream) {
        // A stream that refuses the wait is closed, and writes nothing.
        let _closed = self.wait_on(stream);
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
