//! The host back end: the machine's own memory, and streams that are queues on worker threads.
//!
//! Streams run concurrently, ordered only by events, so that a missing wait can fail on a machine
//! without a GPU.

mod event;
pub(crate) mod execution;
#[cfg(target_os = "linux")]
mod host_pages;
pub(crate) mod mapping;
#[cfg(any(test, feature = "testing"))]
mod model;
mod monitor;
pub(crate) mod queue;
#[cfg(any(test, feature = "testing"))]
mod seeded;
#[cfg(not(any(test, feature = "testing")))]
#[path = "seeded_stub.rs"]
mod seeded;
mod stream;
mod worker;

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use self::execution::Execution;
use self::queue::StreamInfo;
use self::worker::Worker;
use crate::device::{
    AnySlice, Device, DeviceError, DeviceId, DeviceKind, Memory, Stream, check_copy,
    next_stream_id, same_len,
};
use crate::schedule::{Causality, RecordedQueue, Recorder};
use crate::timeline::Work;
pub use crate::timeline::{OpSpan, Timeline};
pub use event::HostEvent;
#[cfg(target_os = "linux")]
pub use host_pages::HostPages;
pub use monitor::{Monitor, Polling};
#[cfg(any(test, feature = "testing"))]
pub use seeded::{Violation, ViolationKind};
pub use stream::HostStream;

/// The alignment of backings, in bytes.
const ALIGN_BYTES: usize = 4096;

/// The host as a device. Its memory is mapped from the system, zeroed, unless
/// [`HostDevice::with_pages`] adds pages or [`HostDevice::with_memory`] selects other memory.
#[derive(Clone, Debug, Default)]
pub struct HostDevice {
    timeline: Option<Timeline>,
    #[cfg(any(test, feature = "testing"))]
    scheduler: Option<seeded::Scheduler>,
    #[cfg(any(test, feature = "testing"))]
    model: Option<Arc<model::Model>>,
    recorder: Option<Recorder>,
    #[cfg(target_os = "linux")]
    pages: Option<Arc<HostPages>>,
    memory: Option<Arc<dyn Memory>>,
}

impl HostDevice {
    /// A device whose streams are threads and whose memory is mapped from the system.
    pub fn new() -> Self {
        Self::default()
    }

    /// A host whose streams record and run nothing: [`Recorder::host`].
    pub(crate) fn recorded(recorder: Recorder) -> Self {
        Self {
            recorder: Some(recorder),
            ..Self::default()
        }
    }

    /// Whether its streams record and run nothing.
    pub(crate) fn is_recorded(&self) -> bool {
        self.recorder.is_some()
    }

    /// The same device; streams made from now on record their operations in `timeline`.
    #[must_use]
    pub fn with_timeline(self, timeline: Timeline) -> Self {
        Self {
            timeline: Some(timeline),
            ..self
        }
    }

    /// The same device with the virtual memory of `pages`: pools then map free pages under new
    /// addresses. Linux only.
    #[cfg(target_os = "linux")]
    #[must_use]
    pub fn with_pages(self, pages: Arc<HostPages>) -> Self {
        Self {
            pages: Some(pages),
            memory: None,
            ..self
        }
    }

    /// The same device with backings from `memory`, whose id its slices carry. With
    /// `zero_alloc::cuda::PinnedMemory` the copies of CUDA devices accept the blocks of a
    /// `Pool<HostDevice>`, and host operations use them as any other host memory. The pool does not
    /// see those copies: a block must live until they have run.
    ///
    /// # Errors
    /// [`DeviceError::AnotherDevice`]: `memory` is neither [`DeviceId::HOST`] nor [`DeviceId::PINNED`].
    pub fn with_memory(self, memory: Arc<dyn Memory>) -> Result<Self, DeviceError> {
        let expected = DeviceId::HOST;
        let got = memory.id();
        if !expected.accesses(got) {
            return Err(DeviceError::AnotherDevice {
                what: "HostDevice::with_memory",
                expected,
                got,
            });
        }
        Ok(Self {
            memory: Some(memory),
            #[cfg(target_os = "linux")]
            pages: None,
            ..self
        })
    }
}

#[cfg(any(test, feature = "testing"))]
impl HostDevice {
    /// The host for tests: operations of its streams interleave in an order that follows from
    /// `seed`, and every order that streams and events allow can occur. An operation whose memory
    /// access is not ordered fails; its error names the block and the streams of the missing wait
    /// or the use after free.
    ///
    /// One operation runs at a time. The checker sees accesses through
    /// [`DeviceSlice::as_host`](crate::device::DeviceSlice::as_host) and
    /// [`as_host_mut`](crate::device::DeviceSlice::as_host_mut), on the stream's own thread.
    /// Operations must wait for each other only through [`Monitor`]s.
    pub fn seeded(seed: u64) -> Self {
        Self {
            scheduler: Some(seeded::Scheduler::new(seed)),
            ..Self::default()
        }
    }

    /// The host in modelled time: an operation costs what `cost` returns for the name of its stream
    /// and its label. Streams run as usual, but [`Self::modelled_spans`] have times that follow
    /// from the order of operations, events and waits alone. Threads that start later begin at time
    /// zero; waits through a [`Monitor`] take no time.
    pub fn modelled(cost: impl Fn(&str, &str) -> Duration + Send + Sync + 'static) -> Self {
        Self {
            model: Some(Arc::new(model::Model::new(cost))),
            ..Self::default()
        }
    }

    /// All operations of [`HostDevice::modelled`] so far, with modelled times; empty for other host
    /// devices.
    pub fn modelled_spans(&self) -> Vec<OpSpan> {
        self.model
            .as_ref()
            .map(|model| model.spans())
            .unwrap_or_default()
    }

    /// The violations that the seeded scheduler has found so far, in order; empty for other host
    /// devices.
    pub fn violations(&self) -> Vec<Violation> {
        self.scheduler
            .as_ref()
            .map(seeded::Scheduler::violations)
            .unwrap_or_default()
    }
}

impl HostDevice {
    /// How its streams run.
    fn execution(&self) -> Execution {
        #[cfg(any(test, feature = "testing"))]
        if let Some(scheduler) = &self.scheduler {
            return scheduler.execution();
        }
        #[cfg(any(test, feature = "testing"))]
        if let Some(model) = &self.model {
            return model.execution();
        }
        self.recorder
            .as_ref()
            .map_or(Execution::Threads, Recorder::execution)
    }

    /// The streams of the program, if their time is modelled or recorded.
    fn causality(&self) -> Option<&Causality> {
        #[cfg(any(test, feature = "testing"))]
        if let Some(model) = &self.model {
            return Some(model.causality());
        }
        self.recorder.as_ref().map(Recorder::causality)
    }
}

/// The size of the mapping of a backing.
fn mapped_bytes(bytes: usize) -> Option<usize> {
    bytes.max(1).checked_next_multiple_of(ALIGN_BYTES)
}

// SAFETY: mappings have no other owner, and the system aligns them to its pages, which have
// `ALIGN_BYTES` or more. Other memory keeps the contract itself; it is host memory by
// `with_memory`, which is the only place that sets it.
unsafe impl Memory for HostDevice {
    fn id(&self) -> DeviceId {
        self.memory
            .as_ref()
            .map_or(DeviceId::HOST, |memory| memory.id())
    }

    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        if let Some(memory) = &self.memory {
            return memory.allocate(bytes);
        }
        let out_of_memory = |detail: String| DeviceError::OutOfMemory {
            requested_bytes: bytes,
            detail,
        };
        let len =
            mapped_bytes(bytes).ok_or_else(|| out_of_memory("beyond the address space".into()))?;
        let map = match self.recorder {
            // A recorded program touches little of it.
            Some(_) => mapping::map_unbacked,
            None => mapping::map,
        };
        map(len).map_err(|error| out_of_memory(error.to_string()))
    }

    unsafe fn deallocate(&self, ptr: NonNull<u8>, bytes: usize) {
        if let Some(memory) = &self.memory {
            // SAFETY: the caller's promise; the memory of a device never changes.
            unsafe { memory.deallocate(ptr, bytes) };
        } else if let Some(len) = mapped_bytes(bytes) {
            // SAFETY: by the caller's promise `ptr` came from `allocate(bytes)` and is freed once.
            unsafe { mapping::unmap(ptr, len) };
        }
    }

    fn granularity_bytes(&self) -> usize {
        self.memory
            .as_ref()
            .map_or(ALIGN_BYTES, |memory| memory.granularity_bytes())
    }

    fn virtual_memory(&self) -> Option<&dyn crate::device::VirtualMemory> {
        #[cfg(target_os = "linux")]
        if let Some(pages) = &self.pages {
            return Some(&**pages);
        }
        self.memory.as_ref()?.virtual_memory()
    }
}

/// The buffer of a caller of [`Device::download`]. Dropping it waits for a copy in progress and
/// prevents a later one.
struct Destination(Arc<Mutex<Option<BufferPtr>>>);

struct BufferPtr(NonNull<u8>);

// SAFETY: used under a lock that the buffer's borrower holds before it returns the buffer.
unsafe impl Send for BufferPtr {}

impl Destination {
    fn lend(buffer: &mut [u8]) -> Self {
        Self(Arc::new(Mutex::new(
            NonNull::new(buffer.as_mut_ptr()).map(BufferPtr),
        )))
    }
}

impl Drop for Destination {
    fn drop(&mut self) {
        *self.0.lock() = None;
    }
}

// SAFETY: copies run on the given stream and touch only their slices.
unsafe impl Device for HostDevice {
    type Stream = HostStream;
    type Event = HostEvent;

    fn kind(&self) -> DeviceKind {
        DeviceKind::Host
    }

    fn check_stream(&self, what: &'static str, stream: &HostStream) -> Result<(), DeviceError> {
        // One expression: the arguments live as long as it.
        self.execution().check(
            what,
            format_args!("the device"),
            (format_args!("stream {}", stream.name()), stream.execution()),
        )
    }

    fn create_stream(&self, name: &str) -> Result<HostStream, DeviceError> {
        let info = StreamInfo {
            name: name.into(),
            id: next_stream_id(),
            execution: self.execution(),
            timeline: self.timeline.clone(),
            causal: self.causality().map(Causality::add_stream),
            #[cfg(any(test, feature = "testing"))]
            model: self.model.clone(),
        };
        #[cfg(any(test, feature = "testing"))]
        if let Some(scheduler) = &self.scheduler {
            return Ok(HostStream(Arc::new(scheduler.create_stream(info)?)));
        }
        if let Some(recorder) = &self.recorder {
            return Ok(HostStream(Arc::new(RecordedQueue::new(recorder, info))));
        }
        Ok(HostStream(Arc::new(Worker::spawn(info)?)))
    }

    #[cfg(any(test, feature = "testing"))]
    fn note_block(&self, note: crate::device::BlockNote<'_, HostStream, HostEvent>) {
        if let Some(scheduler) = &self.scheduler {
            scheduler.note_block(&note);
        }
    }

    fn copy(&self, stream: &HostStream, src: AnySlice, dst: AnySlice) -> Result<(), DeviceError> {
        check_copy(src, dst)?;
        self.check_stream("copy", stream)?;
        src.check_device("copy, source", DeviceId::HOST)?;
        dst.check_device("copy, destination", DeviceId::HOST)?;
        let src = src.bytes().typed::<u8>()?;
        let dst = dst.bytes().typed::<u8>()?;
        let moved = Work::bytes(2 * src.len() as u64);
        stream.enqueue_sized("copy", moved, move || {
            // SAFETY: checked above to be host memory; its maker promised validity and ordered
            // accesses.
            let src = unsafe { src.as_host() };
            // SAFETY: as above; the two do not overlap.
            unsafe { dst.as_host_mut() }.copy_from_slice(src);
            Ok(())
        })
    }

    fn fill_zero(&self, stream: &HostStream, dst: AnySlice) -> Result<(), DeviceError> {
        self.check_stream("fill_zero", stream)?;
        dst.check_device("fill_zero", DeviceId::HOST)?;
        let dst = dst.bytes().typed::<u8>()?;
        let written = Work::bytes(dst.len() as u64);
        stream.enqueue_sized("fill_zero", written, move || {
            // SAFETY: checked above to be host memory; its maker promised validity and ordered
            // accesses.
            unsafe { dst.as_host_mut() }.fill(0);
            Ok(())
        })
    }

    fn upload(
        &self,
        stream: &HostStream,
        src: &[u8],
        dst: AnySlice,
        limit: Duration,
    ) -> Result<(), DeviceError> {
        same_len("upload", dst.len_bytes(), src.len())?;
        self.check_stream("upload", stream)?;
        dst.check_device("upload", DeviceId::HOST)?;
        let src = src.to_vec();
        let dst = dst.bytes().typed::<u8>()?;
        let copied = Work::bytes(src.len() as u64);
        stream.enqueue_sized("upload", copied, move || {
            // SAFETY: checked above to be host memory; its maker promised validity and ordered
            // accesses.
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
        same_len("download", src.len_bytes(), dst.len())?;
        self.check_stream("download", stream)?;
        src.check_device("download", DeviceId::HOST)?;
        if (src.as_ptr() as usize).abs_diff(dst.as_ptr() as usize) < dst.len() {
            return Err(DeviceError::Overlap { bytes: dst.len() });
        }
        let src = src.bytes().typed::<u8>()?;
        let destination = Destination::lend(dst);
        let lent = Arc::clone(&destination.0);

        // A copy on the stream: other threads may enqueue writes of `src` behind it.
        let copied = Work::bytes(src.len() as u64);
        stream.enqueue_sized("download", copied, move || {
            if let Some(dst) = &mut *lent.lock() {
                // SAFETY: checked above to be host memory; its maker promised validity and ordered
                // accesses.
                let src = unsafe { src.as_host() };
                // SAFETY: `download` waits for this lock before it returns, and the buffer is lent
                // to it until then; it has the length of `src` and is apart from it.
                unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst.0.as_ptr(), src.len()) };
            }
            Ok(())
        })?;

        stream.synchronize(limit)
    }

    fn wait_for_host(
        &self,
        stream: &HostStream,
        event: &HostEvent,
        _limit: Duration,
    ) -> Result<(), DeviceError> {
        stream.wait(event)
    }

    fn host_waits(
        &self,
        host: &HostStream,
        event: &HostEvent,
        _limit: Duration,
    ) -> Result<(), DeviceError> {
        host.wait(event)
    }
}
