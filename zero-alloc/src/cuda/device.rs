//! A GPU as a device.

use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use parking_lot::Mutex;

use super::clock::Clock;
use super::driver::{Code, Context, Driver, Pages, Queue, Shareable};
use super::poll::Deadline;
use super::staging::Staging;
use super::{CudaEvent, CudaStream, Module};
use crate::device::{AnySlice, Device, DeviceError, DeviceKind, Memory, VirtualMemory};
use crate::planner::CostModel;
use crate::timeline::Timeline;

/// The alignment of all that the driver allocates.
const ALIGN_BYTES: usize = 256;
/// For the driver's own pool to answer: it may have to wait for other frees, never for a kernel of ours.
const ALLOCATION_LIMIT: Duration = Duration::from_secs(60);

/// What all handles of a device share.
struct Shared {
    context: Arc<Context>,
    name: String,
    arch: (u32, u32),
    multiprocessors: u32,
    pages: Option<Pages>,
    staging: Staging,
    /// Orders allocations of the driver's own pool.
    allocations: OnceLock<Queue>,
}

/// Where backings come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Pages, where the device has them; backings by `cuMemAlloc` otherwise.
    Pages,
    /// Backings by `cuMemAlloc`.
    Plain,
    /// Backings of the driver's own pool, by `cuMemAllocAsync`.
    StreamOrdered,
    /// Backings that other processes may open, each one handle.
    Shareable,
}

/// Relates the device to a timeline; made with the first stream.
struct Recorder {
    timeline: Timeline,
    clock: Mutex<Option<Arc<Clock>>>,
}

/// A GPU. Cloning gives another handle of the same one.
///
/// Pools take pages of it where the device has virtual memory: then live addresses never move and compaction can map
/// instead of copy. [`CudaDevice::with_backings`], [`CudaDevice::with_stream_ordered_memory`] and
/// [`CudaDevice::with_shareable_backings`] are the others.
#[derive(Clone)]
pub struct CudaDevice {
    shared: Arc<Shared>,
    kind: Kind,
    /// There where the kind is [`Kind::Shareable`].
    shareable: Option<Arc<Shareable>>,
    recorder: Option<Arc<Recorder>>,
}

impl std::fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaDevice({}, {})", self.ordinal(), self.name())
    }
}

impl CudaDevice {
    /// How many GPUs there are; 0 where there is a driver and no device.
    ///
    /// # Errors
    /// [`DeviceError::NoDriver`], or the driver failed to start.
    pub fn count() -> Result<usize, DeviceError> {
        Driver::get()?.count()
    }

    /// The GPU with this number, counted from 0. It shares the primary context with everything in the process that
    /// uses CUDA's runtime (PyTorch, NCCL).
    ///
    /// # Errors
    /// [`DeviceError::NoDriver`], or there is no such device.
    pub fn open(ordinal: usize) -> Result<Self, DeviceError> {
        Self::in_context(Context::primary(ordinal)?)
    }

    pub(super) fn in_context(context: Context) -> Result<Self, DeviceError> {
        let context = Arc::new(context);
        context.bind()?;
        let arch = (
            context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let multiprocessors = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let paged = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?;
        let pages = if paged == 1 { Some(Pages::new(&context)?) } else { None };
        let (name, staging) = (context.name()?, Staging::new(&context)?);
        let shared = Shared { context, name, arch, multiprocessors, pages, staging, allocations: OnceLock::new() };
        Ok(Self { shared: Arc::new(shared), kind: Kind::Pages, shareable: None, recorder: None })
    }

    /// The same, where streams made from now on record their operations in `timeline`. Times are read from events on
    /// the device when the timeline is asked, so recording waits for nothing.
    #[must_use]
    pub fn with_timeline(self, timeline: Timeline) -> Self {
        Self { recorder: Some(Arc::new(Recorder { timeline, clock: Mutex::default() })), ..self }
    }

    /// The same without virtual memory: pools take backings, by `cuMemAlloc`. Taking and giving back one may wait
    /// for the whole device.
    #[must_use]
    pub fn with_backings(self) -> Self {
        Self { kind: Kind::Plain, ..self }
    }

    /// The same with backings from the driver's own pool, by `cuMemAllocAsync`: taking and giving back wait for no
    /// kernel, so they are safe beside a pending collective. The driver keeps what is given back, until
    /// [`CudaDevice::trim`].
    #[must_use]
    pub fn with_stream_ordered_memory(self) -> Self {
        Self { kind: Kind::StreamOrdered, ..self }
    }

    /// The same with backings that other processes may open, and network cards too where the device allows it: what a
    /// library of collectives can work in directly once it is told of it. Each backing is one handle of the driver,
    /// since NCCL has taken ranges over several wrongly; so nothing is stitched, and free memory does not help
    /// another pool. Meant for a pool of its own beside that of pages, for what collectives read and write.
    ///
    /// Where the device or its driver has no such memory, this is [`CudaDevice::with_backings`];
    /// [`CudaDevice::shareable_allocation`] then says so.
    ///
    /// # Errors
    /// The driver failed.
    pub fn with_shareable_backings(self) -> Result<Self, DeviceError> {
        Ok(match Shareable::new(self.context())? {
            Some(shareable) => Self { kind: Kind::Shareable, shareable: Some(Arc::new(shareable)), ..self },
            None => self.with_backings(),
        })
    }

    /// The whole allocation that `memory` lies in, its first address and its bytes, if other processes may open it.
    ///
    /// # Errors
    /// It lies in several, or in one that this process has for itself, or the driver failed.
    pub fn shareable_allocation(&self, memory: AnySlice) -> Result<(*mut u8, usize), DeviceError> {
        self.context().shareable(memory.as_ptr(), memory.len_bytes())
    }

    /// The name that the driver gives it.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Its number, counted from 0.
    pub fn ordinal(&self) -> usize {
        self.shared.context.ordinal()
    }

    /// The compute capability: (9, 0) for sm_90.
    pub fn arch(&self) -> (u32, u32) {
        self.shared.arch
    }

    /// The newest CUDA that the driver serves, as (13, 0): PTX of a newer one is refused.
    ///
    /// # Errors
    /// The driver failed.
    pub fn driver_version(&self) -> Result<(u32, u32), DeviceError> {
        self.shared.context.driver_version()
    }

    /// How many multiprocessors it has.
    pub fn multiprocessors(&self) -> u32 {
        self.shared.multiprocessors
    }

    /// Free and total bytes of its memory, whoever uses it.
    ///
    /// # Errors
    /// The driver failed.
    pub fn memory_bytes(&self) -> Result<(usize, usize), DeviceError> {
        self.shared.context.memory_bytes()
    }

    /// Takes what the driver's own pool holds in reserve away from it, for whoever else wants it.
    ///
    /// # Errors
    /// The driver failed.
    pub fn trim(&self) -> Result<(), DeviceError> {
        self.shared.context.trim()
    }

    /// Makes the device's context current on this thread, for libraries that expect that (cuBLASLt, NCCL). Our
    /// own methods do it themselves.
    ///
    /// # Errors
    /// The driver failed.
    pub fn bind(&self) -> Result<(), DeviceError> {
        self.shared.context.bind()
    }

    /// A stream whose blocks the device schedules before those of other streams: for communication, which otherwise
    /// waits for compute to drain.
    ///
    /// # Errors
    /// The driver failed.
    pub fn create_urgent_stream(&self, name: &str) -> Result<CudaStream, DeviceError> {
        self.stream_on(Queue::new(&self.shared.context, true)?, name)
    }

    /// Loads kernels: a cubin or fatbin for this device, or PTX that ends in a zero byte.
    ///
    /// # Errors
    /// The driver does not take it; its compiler's log is in the message.
    pub fn load_module(&self, image: &[u8]) -> Result<Module, DeviceError> {
        Ok(Module::new(Code::load(&self.shared.context, image)?))
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.shared.context
    }

    pub(super) fn stream_on(&self, queue: Queue, name: &str) -> Result<CudaStream, DeviceError> {
        let Some(recorder) = &self.recorder else { return Ok(CudaStream::new(name, queue, None)) };
        let mut clock = recorder.clock.lock();
        let clock = match &*clock {
            Some(clock) => Arc::clone(clock),
            None => {
                let new = Arc::new(Clock::new(&self.shared.context, recorder.timeline.clone())?);
                Arc::clone(clock.insert(new))
            }
        };
        Ok(CudaStream::new(name, queue, Some(clock)))
    }

    fn shareable(&self) -> Option<&Shareable> {
        self.shareable.as_deref().filter(|_| self.kind == Kind::Shareable)
    }

    fn allocations(&self) -> Result<&Queue, DeviceError> {
        if self.shared.allocations.get().is_none() {
            // Another thread may be first: then this one goes.
            let _ = self.shared.allocations.set(Queue::new(&self.shared.context, false)?);
        }
        let none = || DeviceError::Driver { call: "cuStreamCreate", message: "no stream for allocations".into() };
        self.shared.allocations.get().ok_or_else(none)
    }
}

// SAFETY: allocations are the driver's, aligned as it promises.
unsafe impl Memory for CudaDevice {
    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        if let Some(shareable) = self.shareable() {
            return shareable.allocate(bytes);
        }
        if self.kind != Kind::StreamOrdered {
            return self.shared.context.allocate(bytes);
        }
        let queue = self.allocations()?;
        let ptr = queue.allocate(bytes)?;
        // Any stream may use it from now on, so the host sees to it that it is there.
        let waited = Deadline::after(ALLOCATION_LIMIT).wait(|| "cuMemAllocAsync".into(), || queue.query());
        if let Err(error) = waited {
            // SAFETY: allocated just now; nobody knows it.
            unsafe { queue.deallocate(ptr) };
            return Err(error);
        }
        Ok(ptr)
    }

    unsafe fn deallocate(&self, ptr: NonNull<u8>, bytes: usize) {
        if let Some(shareable) = self.shareable() {
            // SAFETY: the caller's promise; the kind of a device never changes.
            unsafe { shareable.deallocate(ptr, bytes) };
        } else if self.kind != Kind::StreamOrdered {
            // SAFETY: the caller's promise; the kind of a device never changes.
            unsafe { self.shared.context.deallocate(ptr) };
        } else if let Some(queue) = self.shared.allocations.get() {
            // SAFETY: the caller's promise: no operation at all uses it any more.
            unsafe { queue.deallocate(ptr) };
        }
    }

    fn granularity_bytes(&self) -> usize {
        self.shareable().map_or(ALIGN_BYTES, Shareable::granularity_bytes)
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        let pages = self.shared.pages.as_ref().filter(|_| self.kind == Kind::Pages);
        pages.map(|pages| pages as &dyn VirtualMemory)
    }

    fn cost(&self) -> CostModel {
        CostModel::H200
    }
}

fn same_len(what: &'static str, expected: usize, got: usize) -> Result<(), DeviceError> {
    if expected == got { Ok(()) } else { Err(DeviceError::LengthMismatch { what, expected, got }) }
}

// SAFETY: copies are the driver's, on the stream that is named; the kind is not the host.
unsafe impl Device for CudaDevice {
    type Stream = CudaStream;
    type Event = CudaEvent;

    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn create_stream(&self, name: &str) -> Result<CudaStream, DeviceError> {
        self.stream_on(Queue::new(&self.shared.context, false)?, name)
    }

    /// Either side may be [`PinnedMemory`](super::PinnedMemory) instead of device memory.
    fn copy(&self, stream: &CudaStream, src: AnySlice, dst: AnySlice) -> Result<(), DeviceError> {
        same_len("copy", src.len(), dst.len())?;
        if src.dtype() != dst.dtype() {
            return Err(DeviceError::DTypeMismatch { expected: src.dtype(), got: dst.dtype() });
        }
        stream.labelled("copy", || stream.queue().copy(src, dst))
    }

    fn fill_zero(&self, stream: &CudaStream, dst: AnySlice) -> Result<(), DeviceError> {
        stream.labelled("fill_zero", || stream.queue().fill_zero(dst))
    }

    fn upload(&self, stream: &CudaStream, src: &[u8], dst: AnySlice, limit: Duration) -> Result<(), DeviceError> {
        same_len("upload", dst.len_bytes(), src.len())?;
        stream.refuse_in_capture("upload")?;
        let deadline = Deadline::after(limit);
        stream.labelled("upload", || self.shared.staging.upload(stream, src, dst.bytes(), deadline))?;
        stream.check()
    }

    fn download(
        &self,
        stream: &CudaStream,
        src: AnySlice,
        dst: &mut [u8],
        limit: Duration,
    ) -> Result<(), DeviceError> {
        same_len("download", src.len_bytes(), dst.len())?;
        stream.refuse_in_capture("download")?;
        let deadline = Deadline::after(limit);
        stream.labelled("download", || self.shared.staging.download(stream, src.bytes(), dst, deadline))?;
        stream.check()
    }
}
