//! A gradient that was reduced over ranks, and the event after which it is complete.
//!
//! Why a type: a forgotten wait for the gradients corrupted training without an error. An optimizer
//! that accepts only `Reduced` waits for its event, in the statistics and in the update. A later
//! micro-batch consumes the value that it adds to, so an old sum cannot be used. The type is here
//! and not in zero-comm, so that zero-optim does not depend on zero-comm.

use std::fmt;

use parking_lot::Mutex;

use super::{AnySlice, DType, Device, DeviceError, Stream};

/// The reduced gradient of a unit: this rank's shard, or at stage 0 the whole unit, summed over
/// ranks. The only way to the elements is [`Self::slice_on`], which makes a stream wait for the
/// sum; the slice that it returns is for this stream. The event of a gradient that was reduced
/// while a graph was recorded orders nothing after the recording: within the graph and its
/// launches, the streams do.
#[must_use = "pass it to the optimizer, which waits for the gradient"]
pub struct Reduced<D: Device> {
    slice: AnySlice,
    uses: Mutex<Uses<D>>,
}

struct Uses<D: Device> {
    /// The last write.
    done: D::Event,
    /// The streams that were given the slice.
    readers: Vec<D::Stream>,
}

impl<D: Device> fmt::Debug for Reduced<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Reduced({} x {}, {:?})",
            self.slice.len(),
            self.slice.dtype(),
            self.uses.lock().done
        )
    }
}

impl<D: Device> Reduced<D> {
    /// The result of a reduction: `slice` is complete after `done`.
    ///
    /// # Safety
    /// All writes to `slice` precede `done`. Later writes, and the release of the memory, are
    /// ordered after all work that was enqueued with this value: on the streams of
    /// [`Self::slice_on`], which [`Self::wait_for_readers`] waits for.
    pub unsafe fn new(slice: AnySlice, done: D::Event) -> Self {
        Self {
            slice,
            uses: Mutex::new(Uses {
                done,
                readers: Vec::new(),
            }),
        }
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

    /// Makes `stream` wait for the sum.
    ///
    /// # Errors
    /// The stream is closed or poisoned.
    pub fn wait_on(&self, stream: &D::Stream) -> Result<(), DeviceError> {
        stream.wait(&self.uses.lock().done)
    }

    /// Makes `stream` wait for the sum, and returns it for operations on `stream`.
    ///
    /// # Errors
    /// The stream is closed or poisoned.
    ///
    /// # Safety
    /// The slice is used only by operations that are enqueued on `stream` while this value lives,
    /// or the caller orders what writes or frees the elements next after its other uses. Uses write
    /// only behind [`Self::wait_for_readers`], and before [`Self::record_write`].
    pub unsafe fn slice_on(&self, stream: &D::Stream) -> Result<AnySlice, DeviceError> {
        let mut uses = self.uses.lock();
        stream.wait(&uses.done)?;
        if uses.readers.iter().all(|reader| reader.id() != stream.id()) {
            uses.readers.push(stream.clone());
        }
        Ok(self.slice)
    }

    /// Makes `stream` wait for the work on all streams that were given the elements: before
    /// `stream` writes to them.
    ///
    /// # Errors
    /// A stream is closed or poisoned.
    pub fn wait_for_readers(&self, stream: &D::Stream) -> Result<(), DeviceError> {
        let uses = self.uses.lock();
        let mut others = uses
            .readers
            .iter()
            .filter(|reader| reader.id() != stream.id());
        others.try_for_each(|reader| stream.wait(&reader.record()?))
    }

    /// Adds the work that was enqueued on `stream` so far to that after which the elements are
    /// complete: after `stream` has written to them.
    ///
    /// # Errors
    /// The stream is closed or poisoned.
    pub fn record_write(&self, stream: &D::Stream) -> Result<(), DeviceError> {
        let mut uses = self.uses.lock();
        stream.wait(&uses.done)?;
        uses.done = stream.record()?;
        Ok(())
    }
}
