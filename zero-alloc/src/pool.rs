//! The pool: where all model state, buckets, gathered units and activations come from.
//!
//! A [`Block`] is an owned piece of device memory with a [`Purpose`]. Dropping it gives it back in stream
//! order: what [`Block::record_use`] noted must have run before another stream may use the memory again.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::device::{AnySlice, DType, Device, DeviceError, DeviceSlice, Element, Stream};

/// What a block is held for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Purpose {
    /// Parameters, or this rank's shard of them.
    Params,
    /// Gradients kept between micro-batches, or this rank's shard of them.
    Grads,
    /// Master weights and moments.
    Optimizer,
    /// Communication buckets and gathered units.
    Buckets,
    /// Activations and the checkpoints of them.
    Activations,
    /// Scratch of operations.
    Workspace,
}

impl Purpose {
    /// All of them, in the order of [`Report::purposes`].
    pub const ALL: [Self; 6] =
        [Self::Params, Self::Grads, Self::Optimizer, Self::Buckets, Self::Activations, Self::Workspace];
}

/// Why a block could not be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// The budget or the device has no room.
    #[error("out of memory: asked for {asked_bytes} bytes for {purpose:?}, {live_bytes} of {budget_bytes} are live")]
    OutOfMemory {
        /// What was asked for.
        asked_bytes: usize,
        /// For what.
        purpose: Purpose,
        /// Live in the pool.
        live_bytes: usize,
        /// The pool's limit.
        budget_bytes: usize,
    },
    /// The device failed otherwise.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// What one purpose holds, in bytes as asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Now.
    pub live_bytes: usize,
    /// At most, since the pool was made or [`Pool::reset_peaks`].
    pub peak_bytes: usize,
}

/// What a pool holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// By purpose, in the order of [`Purpose::ALL`].
    pub purposes: [Held; 6],
    /// All purposes together.
    pub total: Held,
    /// Taken from the device.
    pub reserved_bytes: usize,
    /// Calls of [`crate::device::Memory::allocate`] so far: it stands still in a steady step.
    pub backing_allocations: u64,
}

impl Report {
    /// What `purpose` holds.
    pub fn of(&self, purpose: Purpose) -> Held {
        self.purposes[purpose as usize]
    }
}

struct Inner<D: Device> {
    device: D,
    budget_bytes: usize,
    report: Mutex<Report>,
}

/// A pool of blocks of one device. Cloning gives another handle of the same pool.
pub struct Pool<D: Device>(Arc<Inner<D>>);

impl<D: Device> Clone for Pool<D> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<D: Device> fmt::Debug for Pool<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("device", &self.0.device).field("report", &*self.0.report.lock()).finish()
    }
}

impl<D: Device> Pool<D> {
    /// A pool that holds at most `budget_bytes` live.
    pub fn new(device: D, budget_bytes: usize) -> Self {
        Self(Arc::new(Inner { device, budget_bytes, report: Mutex::default() }))
    }

    /// The device whose memory this is.
    pub fn device(&self) -> &D {
        &self.0.device
    }

    /// A block of `len` elements of `dtype`, first used on `stream`; contents are undefined.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`], or the device failed.
    pub fn allocate(
        &self,
        len: usize,
        dtype: DType,
        purpose: Purpose,
        _stream: &D::Stream,
    ) -> Result<Block<D>, AllocError> {
        let bytes = len * dtype.size_bytes();
        let ptr = self.0.device.allocate(bytes)?;
        let mut report = self.0.report.lock();
        let report = &mut *report;
        for held in [&mut report.purposes[purpose as usize], &mut report.total] {
            held.live_bytes += bytes;
            held.peak_bytes = held.peak_bytes.max(held.live_bytes);
        }
        report.backing_allocations += 1;
        report.reserved_bytes += bytes;
        Ok(Block { pool: self.clone(), ptr: ptr.as_ptr(), len, dtype, purpose, uses: Vec::new() })
    }

    /// What the pool holds.
    pub fn report(&self) -> Report {
        self.0.report.lock().clone()
    }

    /// Starts the peaks anew from what is live.
    pub fn reset_peaks(&self) {
        let mut report = self.0.report.lock();
        let report = &mut *report;
        for held in report.purposes.iter_mut().chain([&mut report.total]) {
            held.peak_bytes = held.live_bytes;
        }
    }
}

/// An owned piece of device memory. Dropping it gives it back in stream order.
#[must_use = "dropping a block gives its memory back"]
pub struct Block<D: Device> {
    pool: Pool<D>,
    ptr: *mut u8,
    len: usize,
    dtype: DType,
    purpose: Purpose,
    uses: Vec<D::Event>,
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
        self.uses.push(stream.record()?);
        Ok(())
    }
}
