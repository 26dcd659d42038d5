//! An owned piece of device memory.

use std::fmt;
use std::sync::Arc;

use super::Purpose;
use super::lane::Lane;
use super::state::Allocation;
use crate::device::{AnySlice, DType, Device, DeviceError, DeviceId, DeviceSlice, Element, Stream};

/// An owned piece of device memory. Dropping it frees it in stream order.
#[must_use = "dropping a block frees its memory"]
pub struct Block<D: Device> {
    lane: Arc<Lane<D>>,
    ptr: *mut u8,
    len: usize,
    device: DeviceId,
    dtype: DType,
    purpose: Purpose,
    allocation: Allocation,
    home: D::Stream,
    /// The last recorded use on each stream, by stream id.
    uses: Vec<(u64, D::Event)>,
}

// SAFETY: the block owns its memory; the address is not tied to a thread.
unsafe impl<D: Device> Send for Block<D> {}
// SAFETY: `&Block` provides addresses only; accesses are ordered by the makers of slices.
unsafe impl<D: Device> Sync for Block<D> {}

impl<D: Device> fmt::Debug for Block<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Block({:?}: {} x {})",
            self.purpose, self.len, self.dtype
        )
    }
}

impl<D: Device> Block<D> {
    pub(super) fn new(
        lane: Arc<Lane<D>>,
        ptr: *mut u8,
        (len, dtype): (usize, DType),
        purpose: Purpose,
        allocation: Allocation,
        home: D::Stream,
    ) -> Self {
        let device = lane.central.device.id();
        Self {
            lane,
            ptr,
            len,
            device,
            dtype,
            purpose,
            allocation,
            home,
            uses: Vec::new(),
        }
    }

    /// The address of the first byte; null if the block is empty.
    pub(super) fn address(&self) -> *mut u8 {
        self.ptr
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the block has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The purpose under which the block is accounted.
    pub fn purpose(&self) -> Purpose {
        self.purpose
    }

    /// The whole block as a slice.
    ///
    /// # Safety
    /// The block outlives every use of the slice, or the streams of those uses are recorded by
    /// [`Block::record_use`] before it is dropped; conflicting accesses are ordered by streams and
    /// events.
    pub unsafe fn slice(&self) -> AnySlice {
        // SAFETY: the block is valid for its length; the rest is the caller's promise.
        unsafe { AnySlice::from_raw_parts(self.ptr, self.len, self.dtype, self.device) }
    }

    /// The whole block as a slice of `T`.
    ///
    /// # Errors
    /// The block has a different dtype.
    ///
    /// # Safety
    /// As for [`Block::slice`].
    pub unsafe fn typed<T: Element>(&self) -> Result<DeviceSlice<T>, DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.slice() }.typed()
    }

    /// Records that everything enqueued on `stream` so far may use the block: another stream reuses
    /// the memory only after that point.
    ///
    /// # Errors
    /// The stream failed, or is of another device.
    pub fn record_use(&mut self, stream: &D::Stream) -> Result<(), DeviceError> {
        self.lane
            .central
            .device
            .check_stream("record_use", stream)?;
        let event = stream.record()?;
        match self.uses.iter_mut().find(|(id, _)| *id == stream.id()) {
            Some((_, last)) => *last = event,
            None => self.uses.push((stream.id(), event)),
        }
        Ok(())
    }

    /// Records that uses of the block on `stream` have ended when `event` is reached, which may be
    /// an event of another stream: for streams that can no longer record one.
    ///
    /// # Safety
    /// Once the event is reached, everything that uses the block on `stream` has run, and nothing
    /// more is enqueued there that does.
    pub unsafe fn record_end_of_use(&mut self, stream: &D::Stream, event: D::Event) {
        self.uses.retain(|(id, _)| *id != stream.id());
        self.uses.push((stream.id(), event));
    }
}

impl<D: Device> Drop for Block<D> {
    fn drop(&mut self) {
        let bytes = self.len * self.dtype.size_bytes();
        let uses = std::mem::take(&mut self.uses);
        self.lane.free(
            self.allocation,
            (self.ptr, bytes),
            self.purpose,
            &self.home,
            uses,
        );
    }
}
