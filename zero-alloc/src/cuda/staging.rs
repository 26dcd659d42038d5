//! Copies between pageable host memory and the device, with a limit.
//!
//! The driver can copy from and to pageable memory, but then the call waits, holding locks, for
//! everything enqueued before: behind a collective whose peer needs those locks it deadlocks. So
//! bytes go through pinned buffers, and the host polls.
//!
//! Memory of [`PinnedMemory`](super::PinnedMemory) that could not be pinned has one more buffer for
//! each device, which all streams use in turn: host operations copy between it and the memory, so
//! that the host does not wait.
//!
//! A buffer's life: free; filled and in flight until its point is reached; free again. A buffer
//! whose copy exceeded its limit becomes free when the point is reached; if it is still in flight
//! on drop, it is leaked. The buffers of a dropped device stay with its context, for the next
//! device: freeing them may wait for the whole device.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::CudaStream;
use super::driver::{BUFFER_BYTES, Context, Point};
use super::poll::Deadline;
use crate::device::{AnySlice, DType, DeviceError, DeviceId, Stream};

/// The host fills or empties one buffer while the other is in flight.
const IN_FLIGHT: usize = 2;

/// A buffer of pinned host memory.
struct Buffer {
    context: Arc<Context>,
    ptr: NonNull<u8>,
    /// Once this is reached, nothing uses the buffer.
    busy: Option<Point>,
    /// Set if a copy's point could not be recorded: then a copy may use it at any time.
    lost: bool,
}

// SAFETY: it owns its memory, which any thread may use.
unsafe impl Send for Buffer {}

impl Buffer {
    fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let ptr = context.take_buffer()?;
        Ok(Self {
            context: Arc::clone(context),
            ptr,
            busy: None,
            lost: false,
        })
    }

    /// Whether nothing uses the buffer. A failed point counts as reached.
    fn is_free(&self) -> bool {
        !self.lost
            && self
                .busy
                .as_ref()
                .is_none_or(|point| point.query().unwrap_or(true))
    }

    /// Enqueues a copy from or to the buffer.
    fn copy(
        &mut self,
        stream: &CudaStream,
        src: AnySlice,
        dst: AnySlice,
    ) -> Result<(), DeviceError> {
        stream.queue().copy(src, dst)?;
        self.lost = true;
        self.busy = Some(stream.queue().record(false)?);
        self.lost = false;
        Ok(())
    }

    fn settle(&mut self, stream: &CudaStream, deadline: &mut Deadline) -> Result<(), DeviceError> {
        if let Some(point) = &self.busy {
            let ready = || point.query().map_err(|error| stream.lost(error));
            deadline.wait(|| format!("stream {}", stream.name()), ready)?;
            self.busy = None;
        }
        Ok(())
    }

    /// The first bytes as a slice for the driver.
    fn slice(&self, bytes: usize) -> AnySlice {
        // SAFETY: at most BUFFER_BYTES, freed only when the buffer's point is reached; one user at
        // a time.
        unsafe { AnySlice::from_raw_parts(self.ptr.as_ptr(), bytes, DType::U8, DeviceId::PINNED) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Otherwise a copy still uses it, and it is leaked.
        if self.is_free() {
            // SAFETY: taken by `new`, returned once; its point is reached.
            unsafe { self.context.return_buffer(self.ptr) };
        }
    }
}

/// The buffers of one device.
pub(super) struct Staging {
    context: Arc<Context>,
    free: Mutex<Vec<Buffer>>,
    /// The buffer of pageable memory, with the last copy through it.
    through: Mutex<Option<Buffer>>,
}

impl Staging {
    /// Allocates the first buffers now, because allocating pinned memory later may wait for the
    /// whole device.
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let staging = Self {
            context: Arc::clone(context),
            free: Mutex::default(),
            through: Mutex::default(),
        };
        drop(staging.acquire()?);
        Ok(staging)
    }

    /// Free buffers for one copy.
    fn acquire(&self) -> Result<Acquired<'_>, DeviceError> {
        let mut free = self.free.lock();
        let mut buffers = Vec::with_capacity(IN_FLIGHT);
        let mut at = free.len();
        while at > 0 && buffers.len() < IN_FLIGHT {
            at -= 1;
            if free[at].is_free() {
                buffers.push(free.swap_remove(at));
            }
        }
        drop(free);
        let mut acquired = Acquired {
            staging: self,
            buffers,
        };
        while acquired.buffers.len() < IN_FLIGHT {
            acquired.buffers.push(Buffer::new(&self.context)?);
        }
        Ok(acquired)
    }

    /// Copies `src` to `dst`, of the same length, in the order of `stream`, and waits.
    pub(super) fn upload(
        &self,
        stream: &CudaStream,
        src: &[u8],
        dst: AnySlice,
        mut deadline: Deadline,
    ) -> Result<(), DeviceError> {
        let mut acquired = self.acquire()?;
        for (nth, chunk) in src.chunks(BUFFER_BYTES).enumerate() {
            let buffer = &mut acquired.buffers[nth % IN_FLIGHT];
            buffer.settle(stream, &mut deadline)?;
            let staged = buffer.slice(chunk.len());
            // SAFETY: pinned host memory of at least this length, which nothing uses, because its
            // point is reached.
            unsafe {
                staged
                    .as_ptr()
                    .copy_from_nonoverlapping(chunk.as_ptr(), chunk.len())
            };
            let start = nth * BUFFER_BYTES;
            buffer.copy(stream, staged, dst.slice(start..start + chunk.len()))?;
        }
        acquired
            .buffers
            .iter_mut()
            .try_for_each(|buffer| buffer.settle(stream, &mut deadline))
    }

    /// Enqueues a copy of `src` to `dst`, of the same length; one or both are pageable memory with
    /// the id of pinned memory.
    pub(super) fn copy_pageable(
        &self,
        stream: &CudaStream,
        src: AnySlice,
        dst: AnySlice,
    ) -> Result<(), DeviceError> {
        let from_host = src.device() == DeviceId::PINNED;
        let to_host = dst.device() == DeviceId::PINNED;
        if from_host && to_host {
            return copy_on_host(stream, src, dst);
        }
        let mut through = self.through.lock();
        let buffer = match &mut *through {
            Some(buffer) if !buffer.lost => buffer,
            // A lost buffer is leaked.
            other => other.insert(Buffer::new(&self.context)?),
        };

        // A copy waits only for copies that were enqueued before it, so copies never wait for one
        // another.
        if let Some(point) = &buffer.busy {
            stream.queue().wait(point)?;
        }
        buffer.lost = true;

        for start in (0..src.len()).step_by(BUFFER_BYTES) {
            let range = start..src.len().min(start + BUFFER_BYTES);
            let staged = buffer.slice(range.len());
            let src = src.slice(range.clone());
            let dst = dst.slice(range);
            if from_host {
                copy_on_host(stream, src, staged)?;
                stream.queue().copy(staged, dst)?;
            } else {
                stream.queue().copy(src, staged)?;
                copy_on_host(stream, staged, dst)?;
            }
        }

        buffer.busy = Some(stream.queue().record(false)?);
        buffer.lost = false;
        Ok(())
    }

    /// Copies `src` to `dst`, of the same length, in the order of `stream`, and waits.
    pub(super) fn download(
        &self,
        stream: &CudaStream,
        src: AnySlice,
        dst: &mut [u8],
        mut deadline: Deadline,
    ) -> Result<(), DeviceError> {
        let mut acquired = self.acquire()?;
        let mut chunks = dst.chunks_mut(BUFFER_BYTES);
        let mut in_flight = std::collections::VecDeque::with_capacity(IN_FLIGHT);
        for nth in 0.. {
            // Start the next copy before emptying the buffer of the previous one.
            let start = nth * BUFFER_BYTES;
            let chunk = if in_flight.len() < IN_FLIGHT {
                chunks.next()
            } else {
                None
            };
            let started = chunk.is_some();
            if let Some(chunk) = chunk {
                let buffer = &mut acquired.buffers[nth % IN_FLIGHT];
                buffer.copy(
                    stream,
                    src.slice(start..start + chunk.len()),
                    buffer.slice(chunk.len()),
                )?;
                in_flight.push_back((nth, chunk));
            }
            if in_flight.len() == IN_FLIGHT || !started {
                let Some((nth, chunk)) = in_flight.pop_front() else {
                    break;
                };
                let buffer = &mut acquired.buffers[nth % IN_FLIGHT];
                buffer.settle(stream, &mut deadline)?;
                let staged = buffer.slice(chunk.len());
                // SAFETY: pinned host memory of this length, which the copy has filled, because its
                // point is reached.
                unsafe {
                    staged
                        .as_ptr()
                        .copy_to_nonoverlapping(chunk.as_mut_ptr(), chunk.len())
                };
            }
        }

        Ok(())
    }
}

/// Enqueues a copy between slices of host memory of the same length, by a thread of the driver.
fn copy_on_host(stream: &CudaStream, src: AnySlice, dst: AnySlice) -> Result<(), DeviceError> {
    stream.queue().call_host(Box::new(move || {
        let word = |slice: AnySlice| slice.as_ptr().cast::<AtomicU64>();
        if src.len_bytes() == size_of::<AtomicU64>()
            && word(src).is_aligned()
            && word(dst).is_aligned()
        {
            // SAFETY: as below; the host may store to it as an atomic.
            let value = unsafe { &*word(src) }.load(Ordering::Relaxed);
            // SAFETY: as below.
            unsafe { word(dst).cast::<u64>().write(value) };
            return;
        }
        // SAFETY: host memory by the ids of the slices or because it is a buffer of this module, of
        // equal lengths and apart (`check_copy`); the makers of the slices promised validity and
        // order while the operation runs.
        unsafe {
            dst.as_ptr()
                .copy_from_nonoverlapping(src.as_ptr(), src.len_bytes())
        };
    }))
}

/// Buffers of one copy. They return to the free buffers on drop, with their points.
struct Acquired<'a> {
    staging: &'a Staging,
    buffers: Vec<Buffer>,
}

impl Drop for Acquired<'_> {
    fn drop(&mut self) {
        self.staging.free.lock().append(&mut self.buffers);
    }
}
