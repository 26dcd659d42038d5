//! An owned piece of device memory.

use std::fmt;
use std::sync::Arc;

use super::Purpose;
use super::lane::Lane;
use super::state::Allocation;
use crate::device::{AnySlice, DType, Device, DeviceError, DeviceSlice, Element, Stream};

/// An owned piece of device memory. Dropping it gives it back in stream order.
#[must_use = "dropping a block gives its memory back"]
pub struct Block<D: Device> {
    lane: Arc<Lane<D>>,
    ptr: *mut u8,
    len: usize,
    dtype: DType,
    purpose: Purpose,
    hold: Allocation,
    home: D::Stream,
    /// The last noted use on each stream.
    uses: Vec<(u64, D::Event)>,
}

// SAFETY: the block owns its memory; the address is not tied to a thread.
unsafe impl<D: Device> Send for Block<D> {}
// SAFETY: `&Block` gives out addresses only; accesses are ordered by the makers of slices.
unsafe impl<D: Device> Sync for Block<D> {}

impl<D: Device> fmt::Debug for Block<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({:?}: {} x {})", self.purpose, self.len, self.dtype)
    }
}

impl<D: Device> Block<D> {
    pub(super) fn new(
        lane: Arc<Lane<D>>,
        ptr: *mut u8,
        (len, dtype): (usize, DType),
        purpose: Purpose,
        hold: Allocation,
        home: D::Stream,
    ) -> Self {
        Self { lane, ptr, len, dtype, purpose, hold, home, uses: Vec::new() }
    }

    /// How many elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// What it is held for.
    pub fn purpose(&self) -> Purpose {
        self.purpose
    }

    /// The whole block as a slice.
    ///
    /// # Safety
    /// The block outlives every use of the slice, or the streams of those uses are noted by
    /// [`Block::record_use`] before it is dropped; conflicting accesses are ordered by streams and events.
    pub unsafe fn slice(&self) -> AnySlice {
        // SAFETY: the block is valid for its length; the rest is the caller's promise.
        unsafe { AnySlice::from_raw_parts(self.ptr, self.len, self.dtype) }
    }

    /// The whole block as a slice of `T`.
    ///
    /// # Errors
    /// The block is of another dtype.
    ///
    /// # Safety
    /// As for [`Block::slice`].
    pub unsafe fn typed<T: Element>(&self) -> Result<DeviceSlice<T>, DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.slice() }.typed()
    }

    /// Notes that everything enqueued on `stream` so far may use the block: it is reused elsewhere only
    /// behind that point.
    ///
    /// # Errors
    /// The stream is gone.
    pub fn record_use(&mut self, stream: &D::Stream) -> Result<(), DeviceError> {
        let event = stream.record()?;
        match self.uses.iter_mut().find(|(id, _)| *id == stream.id()) {
            Some((_, last)) => *last = event,
            None => self.uses.push((stream.id(), event)),
        }
        Ok(())
    }
}

impl<D: Device> Drop for Block<D> {
    fn drop(&mut self) {
        let bytes = self.len * self.dtype.size_bytes();
        let uses = std::mem::take(&mut self.uses);
        self.lane.give_back(self.hold, (self.ptr, bytes), self.purpose, &self.home, uses);
    }
}
