//! The host back end: the machine's own memory, and streams that are real queues on worker threads.
//!
//! Streams have teeth here: two streams really run at once, ordered by nothing but recorded events, so a
//! forgotten wait fails on a machine without a GPU.

mod event;
mod memory;
mod monitor;
mod op;
mod pages;
mod seeded;
mod stream;
mod worker;

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use self::memory::Kind;
use self::seeded::Scheduler;
use crate::device::{AnySlice, BlockNote, Device, DeviceError, DeviceKind, Memory, VirtualMemory};
pub use crate::timeline::{OpSpan, Timeline};
pub use event::HostEvent;
pub use monitor::{Monitor, SpinPolicy};
pub use pages::HostPages;
pub use seeded::{Violation, ViolationKind};
pub use stream::HostStream;

/// The host as a device.
#[derive(Clone, Debug, Default)]
pub struct HostDevice {
    timeline: Option<Timeline>,
    scheduler: Option<Scheduler>,
    memory: Kind,
}

impl HostDevice {
    /// The host.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same, where streams made from now on record their operations in `timeline`.
    #[must_use]
    pub fn with_timeline(self, timeline: Timeline) -> Self {
        Self { timeline: Some(timeline), ..self }
    }

    /// The host for tests: its streams interleave in an order that follows from `seed`, any order that streams and
    /// events allow can come up, and an operation that touches memory out of order fails: a missing
    /// wait or a use after free is named with the block and the streams.
    ///
    /// Only one operation runs at a time. Operations are seen through
    /// [`DeviceSlice::as_host`](crate::device::DeviceSlice::as_host) and
    /// [`as_host_mut`](crate::device::DeviceSlice::as_host_mut), on the stream's own thread; they must wait for each
    /// other only in [`Monitor`]s.
    pub fn seeded(seed: u64) -> Self {
        Self { scheduler: Some(Scheduler::new(seed)), ..Self::default() }
    }

    /// The same, with memory that is locked in place, in huge pages where the system offers them: for offload, and
    /// for copies to and from other devices.
    #[must_use]
    pub fn with_pinned_memory(self) -> Self {
        Self { memory: Kind::Pinned, ..self }
    }

    /// The same, with the virtual memory of `pages`: pools then can map free pages under new addresses.
    #[must_use]
    pub fn with_pages(self, pages: Arc<HostPages>) -> Self {
        Self { memory: Kind::Pages(pages), ..self }
    }

    /// The same, with host memory of another kind: for pools of a GPU's
    /// [`PinnedMemory`](crate::cuda::PinnedMemory).
    ///
    /// # Safety
    /// What `memory` gives is the host's: readable and writable by any thread.
    #[must_use]
    pub unsafe fn with_memory(self, memory: Arc<dyn Memory>) -> Self {
        Self { memory: Kind::Other(memory), ..self }
    }

    /// What the seeded scheduler has found so far, in the order of finding; empty elsewhere.
    pub fn violations(&self) -> Vec<Violation> {
        self.scheduler.as_ref().map(Scheduler::violations).unwrap_or_default()
    }
}

// SAFETY: allocations are the system's, at the alignment asked of it.
unsafe impl Memory for HostDevice {
    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        match &self.memory {
            Kind::Pinned => memory::allocate_pinned(bytes),
            Kind::Plain | Kind::Pages(_) => memory::allocate_plain(bytes),
            Kind::Other(memory) => memory.allocate(bytes),
        }
    }

    unsafe fn deallocate(&self, ptr: NonNull<u8>, bytes: usize) {
        match &self.memory {
            // SAFETY: the caller's promise; the kind of a device never changes.
            Kind::Pinned => unsafe { memory::deallocate_pinned(ptr, bytes) },
            // SAFETY: as above.
            Kind::Plain | Kind::Pages(_) => unsafe { memory::deallocate_plain(ptr, bytes) },
            // SAFETY: as above.
            Kind::Other(memory) => unsafe { memory.deallocate(ptr, bytes) },
        }
    }

    fn granularity_bytes(&self) -> usize {
        match &self.memory {
            Kind::Other(memory) => memory.granularity_bytes(),
            _ => memory::ALIGN_BYTES,
        }
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        match &self.memory {
            Kind::Pages(pages) => Some(&**pages),
            Kind::Plain | Kind::Pinned => None,
            Kind::Other(memory) => memory.virtual_memory(),
        }
    }
}

fn same_len(what: &'static str, expected: usize, got: usize) -> Result<(), DeviceError> {
    if expected == got { Ok(()) } else { Err(DeviceError::LengthMismatch { what, expected, got }) }
}

// SAFETY: copies run on the stream that is named, over the slices alone.
unsafe impl Device for HostDevice {
    type Stream = HostStream;
    type Event = HostEvent;

    fn kind(&self) -> DeviceKind {
        DeviceKind::Host
    }

    fn create_stream(&self, name: &str) -> Result<HostStream, DeviceError> {
        HostStream::spawn(name, self.timeline.clone(), self.scheduler.as_ref())
    }

    fn note_block(&self, note: BlockNote<'_, HostStream, HostEvent>) {
        if let Some(scheduler) = &self.scheduler {
            scheduler.note(&note);
        }
    }

    fn copy(&self, stream: &HostStream, src: AnySlice, dst: AnySlice) -> Result<(), DeviceError> {
        same_len("copy", src.len(), dst.len())?;
        if src.dtype() != dst.dtype() {
            return Err(DeviceError::DTypeMismatch { expected: src.dtype(), got: dst.dtype() });
        }
        let (src, dst) = (src.bytes().typed::<u8>()?, dst.bytes().typed::<u8>()?);
        stream.enqueue("copy", move || {
            // SAFETY: host memory, and the slice's maker promised ordered accesses.
            let src = unsafe { src.as_host() };
            // SAFETY: as above; the two do not overlap.
            unsafe { dst.as_host_mut() }.copy_from_slice(src);
            Ok(())
        })
    }

    fn fill_zero(&self, stream: &HostStream, dst: AnySlice) -> Result<(), DeviceError> {
        let dst = dst.bytes().typed::<u8>()?;
        stream.enqueue("fill_zero", move || {
            // SAFETY: host memory, and the slice's maker promised ordered accesses.
            unsafe { dst.as_host_mut() }.fill(0);
            Ok(())
        })
    }

    fn upload(&self, stream: &HostStream, src: &[u8], dst: AnySlice, limit: Duration) -> Result<(), DeviceError> {
        use crate::device::Stream;
        same_len("upload", dst.len_bytes(), src.len())?;
        let (src, dst) = (src.to_vec(), dst.bytes().typed::<u8>()?);
        stream.enqueue("upload", move || {
            // SAFETY: host memory, and the slice's maker promised ordered accesses.
            unsafe { dst.as_host_mut() }.copy_from_slice(&src);
            Ok(())
        })?;
        stream.synchronize(limit)
    }

    fn download(
        &self,
        stream: &HostStream,
        src: AnySlice,
        dst: &mut [u8],
        limit: Duration,
    ) -> Result<(), DeviceError> {
        use crate::device::Stream;
        same_len("download", src.len_bytes(), dst.len())?;
        stream.synchronize(limit)?;
        let src = src.bytes().typed::<u8>()?;
        // SAFETY: host memory; the stream is drained, and the slice's maker promised ordered accesses.
        dst.copy_from_slice(unsafe { src.as_host() });
        Ok(())
    }
}
