//! Copies between ordinary host memory and the device, with a limit.
//!
//! The driver copies from and to ordinary (pageable) memory by itself, but then it waits inside the call, holding
//! locks, for whatever is enqueued before: behind a collective whose peer needs those locks that never ends. So bytes
//! go through pinned buffers, and the host polls.
//!
//! A buffer's life: free, then filled and under way until its point is reached, then free again. One whose copy
//! outlived its limit is free only when the point is reached; at the end it is leaked rather than pulled away.

use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;

use super::CudaStream;
use super::driver::{Context, Point};
use super::poll::Deadline;
use crate::device::{AnySlice, DType, DeviceError, Stream};

/// Large enough that starting a copy costs nothing beside it.
const BUFFER_BYTES: usize = 4 << 20;
/// One is filled or emptied while the other is under way.
const IN_FLIGHT: usize = 2;

/// Pinned host memory.
struct Buffer {
    context: Arc<Context>,
    ptr: NonNull<u8>,
    /// Behind this nothing uses it.
    busy: Option<Point>,
}

// SAFETY: it owns its memory, which any thread may use.
unsafe impl Send for Buffer {}

impl Buffer {
    fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let ptr = context.allocate_pinned(BUFFER_BYTES)?;
        Ok(Self { context: Arc::clone(context), ptr, busy: None })
    }

    /// Whether nothing uses it. A failed point is reached too.
    fn is_free(&self) -> bool {
        self.busy.as_ref().is_none_or(|point| point.query().unwrap_or(true))
    }

    fn settle(&mut self, stream: &CudaStream, deadline: Deadline) -> Result<(), DeviceError> {
        if let Some(point) = &self.busy {
            let ready = || point.query().map_err(|error| stream.lost(error));
            deadline.wait(|| format!("stream {}", stream.name()), ready)?;
            self.busy = None;
        }
        Ok(())
    }

    /// The first bytes as a slice for the driver.
    fn slice(&self, bytes: usize) -> AnySlice {
        // SAFETY: at most BUFFER_BYTES, valid until the buffer goes, which waits for its point; one user at a time.
        unsafe { AnySlice::from_raw_parts(self.ptr.as_ptr(), bytes, DType::U8) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Otherwise a copy still runs on it, and it stays for good.
        if self.is_free() {
            // SAFETY: allocated by `new`, given back once; its point is reached.
            unsafe { self.context.deallocate_pinned(self.ptr) };
        }
    }
}

/// The buffers of one device.
pub(super) struct Staging {
    context: Arc<Context>,
    free: Mutex<Vec<Buffer>>,
}

impl Staging {
    /// Takes the first buffers at once: taking pinned memory later may wait for the whole device.
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let staging = Self { context: Arc::clone(context), free: Mutex::default() };
        drop(staging.take()?);
        Ok(staging)
    }

    /// Buffers that nobody uses, for one copy of ours.
    fn take(&self) -> Result<Lent<'_>, DeviceError> {
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
        let mut lent = Lent { staging: self, buffers };
        while lent.buffers.len() < IN_FLIGHT {
            lent.buffers.push(Buffer::new(&self.context)?);
        }
        Ok(lent)
    }

    /// Copies `src` to `dst`, of the same length, in the order of `stream`, and waits.
    pub(super) fn upload(
        &self,
        stream: &CudaStream,
        src: &[u8],
        dst: AnySlice,
        deadline: Deadline,
    ) -> Result<(), DeviceError> {
        let mut lent = self.take()?;
        for (nth, chunk) in src.chunks(BUFFER_BYTES).enumerate() {
            let buffer = &mut lent.buffers[nth % IN_FLIGHT];
            buffer.settle(stream, deadline)?;
            let staged = buffer.slice(chunk.len());
            // SAFETY: pinned host memory of at least this length, which nothing uses: its point is reached.
            unsafe { staged.as_ptr().copy_from_nonoverlapping(chunk.as_ptr(), chunk.len()) };
            let start = nth * BUFFER_BYTES;
            stream.queue().copy(staged, dst.slice(start..start + chunk.len()))?;
            buffer.busy = Some(stream.queue().record(false)?);
        }
        lent.buffers.iter_mut().try_for_each(|buffer| buffer.settle(stream, deadline))
    }

    /// Copies `src` to `dst`, of the same length, in the order of `stream`, and waits.
    pub(super) fn download(
        &self,
        stream: &CudaStream,
        src: AnySlice,
        dst: &mut [u8],
        deadline: Deadline,
    ) -> Result<(), DeviceError> {
        let mut lent = self.take()?;
        let mut chunks = dst.chunks_mut(BUFFER_BYTES);
        let mut under_way = std::collections::VecDeque::with_capacity(IN_FLIGHT);
        for nth in 0.. {
            // Start the next copy, then empty the buffer of the one before.
            let start = nth * BUFFER_BYTES;
            let chunk = if under_way.len() < IN_FLIGHT { chunks.next() } else { None };
            let started = chunk.is_some();
            if let Some(chunk) = chunk {
                let buffer = &mut lent.buffers[nth % IN_FLIGHT];
                stream.queue().copy(src.slice(start..start + chunk.len()), buffer.slice(chunk.len()))?;
                buffer.busy = Some(stream.queue().record(false)?);
                under_way.push_back((nth, chunk));
            }
            if under_way.len() == IN_FLIGHT || !started {
                let Some((nth, chunk)) = under_way.pop_front() else { break };
                let buffer = &mut lent.buffers[nth % IN_FLIGHT];
                buffer.settle(stream, deadline)?;
                let staged = buffer.slice(chunk.len());
                // SAFETY: pinned host memory of this length, which the copy has filled: its point is reached.
                unsafe { staged.as_ptr().copy_to_nonoverlapping(chunk.as_mut_ptr(), chunk.len()) };
            }
        }
        Ok(())
    }
}

/// Buffers on loan; they go back whatever happens, with the points behind which they are free.
struct Lent<'a> {
    staging: &'a Staging,
    buffers: Vec<Buffer>,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.staging.free.lock().append(&mut self.buffers);
    }
}
