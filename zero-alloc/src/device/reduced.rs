//! A gradient that was reduced over ranks, and the event after which it is complete.

use std::fmt;

use super::{AnySlice, DType, Device, DeviceError, Stream};

/// The reduced gradient of a unit: this rank's shard, or at stage 0 the whole unit, summed over ranks. The only access to
/// the elements makes a stream wait for the sum, so a forgotten wait does not compile.
#[must_use = "pass it to the optimizer, which waits for the gradient"]
pub struct Reduced<D: Device> {
    slice: AnySlice,
    done: D::Event,
}

impl<D: Device> fmt::Debug for Reduced<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reduced({} x {}, {:?})", self.slice.len(), self.slice.dtype(), self.done)
    }
}

impl<D: Device> Reduced<D> {
    /// The result of a reduction: `slice` is complete after `done`.
    ///
    /// # Safety
    /// All writes to `slice` precede `done`. Later writes are ordered after all work that was enqueued with this value,
    /// and follow its drop; so does the release of the memory.
    pub unsafe fn new(slice: AnySlice, done: D::Event) -> Self {
        Self { slice, done }
    }

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

    /// Makes `stream` wait for the sum, and returns it for operations on `stream`.
    ///
    /// # Errors
    /// The stream is closed or poisoned.
    pub fn wait_on(&self, stream: &D::Stream) -> Result<AnySlice, DeviceError> {
        stream.wait(&self.done)?;
        Ok(self.slice)
    }
}
