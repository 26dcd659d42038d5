//! A GPU as a device.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use parking_lot::Mutex;

use super::clock::Clock;
use super::driver::{Code, Context, Driver, Pages, Queue};
use super::pageable;
use super::pinned::Pins;
use super::poll::Deadline;
use super::staging::Staging;
use super::{CudaEvent, CudaStream, Module, host_wait};
use crate::device::{
    AnySlice, Device, DeviceError, DeviceId, DeviceKind, Memory, VirtualMemory, check_copy,
    same_len,
};
use crate::host::HostEvent;
use crate::timeline::Timeline;

/// The alignment of the driver's allocations, in bytes.
const ALIGN_BYTES: usize = 256;

/// The state that all handles of a device share.
struct Shared {
    context: Arc<Context>,
    name: String,
    arch: (u32, u32),
    pages: Option<Pages>,
    staging: Staging,
    pins: Arc<Pins>,
}

/// The kind of memory that pools of a device use.
#[derive(Clone)]
enum Kind {
    /// Pages if the device has virtual memory, otherwise backings by `cuMemAlloc`.
    Pages,
    /// Backings by `cuMemAlloc`.
    Backings,
}

/// Relates the device to a timeline; the first stream creates the clock.
struct Recorder {
    timeline: Timeline,
    clock: Mutex<Option<Arc<Clock>>>,
}

/// A GPU. Clones refer to the same GPU.
///
/// By default its pools use pages if the device has virtual memory: live addresses never move, and
/// a block can be made of free pages from several places. [`CudaDevice::with_backings`] selects
/// other memory.
#[derive(Clone)]
pub struct CudaDevice {
    shared: Arc<Shared>,
    kind: Kind,
    recorder: Option<Arc<Recorder>>,
}

impl std::fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaDevice({}, {})", self.ordinal(), self.name())
    }
}

impl CudaDevice {
    /// The number of GPUs; 0 if there is a driver and no device.
    ///
    /// # Errors
    /// [`DeviceError::NoDriver`], or the driver failed to start.
    pub fn count() -> Result<usize, DeviceError> {
        Driver::get()?.count()
    }

    /// The newest version of CUDA that the driver supports, major and minor: (13, 0). Libraries of
    /// a newer major version do not run on it.
    ///
    /// # Errors
    /// [`DeviceError::NoDriver`], or the driver failed.
    pub fn driver_version() -> Result<(u32, u32), DeviceError> {
        Driver::get()?.version()
    }

    /// Opens the GPU with this index, counted from 0. It shares the primary context with all users
    /// of CUDA's runtime in the process (PyTorch, NCCL).
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
        let paged =
            context.has(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?;
        let pages = if paged {
            Some(Pages::new(&context)?)
        } else {
            None
        };

        let name = context.name()?;
        let staging = Staging::new(&context)?;
        let pins = Arc::new(Pins::new(&context));
        let shared = Arc::new(Shared {
            context,
            name,
            arch,
            pages,
            staging,
            pins,
        });

        Ok(Self {
            shared,
            kind: Kind::Pages,
            recorder: None,
        })
    }

    /// The same device; streams made from now on record their operations in `timeline`. Times come
    /// from events on the device, which are read when the timeline is read, so that recording does
    /// not wait.
    #[must_use]
    pub fn with_timeline(self, timeline: Timeline) -> Self {
        Self {
            recorder: Some(Arc::new(Recorder {
                timeline,
                clock: Mutex::default(),
            })),
            ..self
        }
    }

    /// The same device without virtual memory: pools use backings from `cuMemAlloc`. Allocating and
    /// freeing a backing may wait for the whole device.
    #[must_use]
    pub fn with_backings(self) -> Self {
        Self {
            kind: Kind::Backings,
            ..self
        }
    }

    /// The driver's name of the device.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// The device's index, counted from 0.
    pub fn ordinal(&self) -> usize {
        self.shared.context.ordinal()
    }

    /// The compute capability: (9, 0) for sm_90.
    pub fn arch(&self) -> (u32, u32) {
        self.shared.arch
    }

    /// The number of streaming multiprocessors.
    ///
    /// # Errors
    /// The driver failed.
    pub fn multiprocessors(&self) -> Result<usize, DeviceError> {
        let count = Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        Ok(self.shared.context.attribute(count)? as usize)
    }

    /// Free and total bytes of the device's memory, for all processes.
    ///
    /// # Errors
    /// The driver failed.
    pub fn memory_bytes(&self) -> Result<(usize, usize), DeviceError> {
        self.shared.context.memory_bytes()
    }

    /// Makes the device's context current on this thread, for libraries that require it (cuBLASLt,
    /// NCCL). Methods of this crate do it themselves.
    ///
    /// # Errors
    /// The driver failed.
    pub fn bind(&self) -> Result<(), DeviceError> {
        self.shared.context.bind().map(drop)
    }

    /// Loads kernels: a cubin or fatbin for this device, or PTX that ends in a zero byte.
    ///
    /// # Errors
    /// The driver rejects the image; the message contains its compiler's log.
    ///
    /// # Safety
    /// `image` is a compiler's whole output: the driver receives no length, and trusts the sizes in
    /// machine code.
    pub unsafe fn load_module(&self, image: &[u8]) -> Result<Module, DeviceError> {
        // SAFETY: the caller's promise.
        Ok(Module::new(unsafe {
            Code::load(&self.shared.context, image)
        }?))
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.shared.context
    }

    pub(super) fn pins(&self) -> &Arc<Pins> {
        &self.shared.pins
    }

    pub(super) fn stream_on(&self, queue: Queue, name: &str) -> Result<CudaStream, DeviceError> {
        let Some(recorder) = &self.recorder else {
            return Ok(CudaStream::new(name, queue, None));
        };
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
}

// SAFETY: the driver's allocations have no other owner and at least this alignment.
unsafe impl Memory for CudaDevice {
    fn id(&self) -> DeviceId {
        self.shared.context.id()
    }

    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        self.shared.context.allocate(bytes)
    }

    unsafe fn deallocate(&self, ptr: NonNull<u8>, _bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.shared.context.deallocate(ptr) };
    }

    fn granularity_bytes(&self) -> usize {
        ALIGN_BYTES
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        let pages = self
            .shared
            .pages
            .as_ref()
            .filter(|_| matches!(self.kind, Kind::Pages));
        pages.map(|pages| pages as &dyn VirtualMemory)
    }
}

// SAFETY: the driver's copies run on the given stream; the kind is not the host.
unsafe impl Device for CudaDevice {
    type Stream = CudaStream;
    type Event = CudaEvent;

    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn check_stream(&self, what: &'static str, stream: &CudaStream) -> Result<(), DeviceError> {
        stream.check_device(what, self.id())
    }

    fn create_stream(&self, name: &str) -> Result<CudaStream, DeviceError> {
        self.stream_on(Queue::new(&self.shared.context)?, name)
    }

    /// A stream of the greatest priority.
    fn create_urgent_stream(&self, name: &str) -> Result<CudaStream, DeviceError> {
        self.stream_on(Queue::urgent(&self.shared.context)?, name)
    }

    /// Either slice may be [`PinnedMemory`](super::PinnedMemory) instead of device memory. What the
    /// system refused to pin is copied through a pinned buffer by a host operation of the stream.
    /// While one aligned `u64` of pinned memory is copied, the host may store to it as `AtomicU64`;
    /// the copy has the old value or the new one.
    fn copy(&self, stream: &CudaStream, src: AnySlice, dst: AnySlice) -> Result<(), DeviceError> {
        check_copy(src, dst)?;
        stream.check_device("copy, stream", self.id())?;
        for (what, slice) in [("copy, source", src), ("copy, destination", dst)] {
            if slice.device() != DeviceId::PINNED {
                slice.check_device(what, self.id())?;
            }
        }
        if pageable::contains(src) || pageable::contains(dst) {
            stream.refuse_in_capture("copy of memory that is not pinned")?;
            return stream.labelled("copy", || {
                self.shared
                    .staging
                    .copy_pageable(stream, src.bytes(), dst.bytes())
            });
        }
        stream.labelled("copy", || stream.queue().copy(src, dst))
    }

    fn fill_zero(&self, stream: &CudaStream, dst: AnySlice) -> Result<(), DeviceError> {
        dst.check_device("fill_zero", self.id())?;
        stream.check_device("fill_zero, stream", self.id())?;
        stream.labelled("fill_zero", || stream.queue().fill_zero(dst))
    }

    /// The stream waits for memory of the host. If the device has no such waits or 512 are pending,
    /// the calling thread waits instead, at most `limit`. The limit of a wait in the stream counts
    /// while a thread waits for the device.
    fn wait_for_host(
        &self,
        stream: &CudaStream,
        event: &HostEvent,
        limit: Duration,
    ) -> Result<(), DeviceError> {
        stream.check_device("wait_for_host, stream", self.id())?;
        host_wait::wait(stream, event, limit)
    }

    fn upload(
        &self,
        stream: &CudaStream,
        src: &[u8],
        dst: AnySlice,
        limit: Duration,
    ) -> Result<(), DeviceError> {
        same_len("upload", dst.len_bytes(), src.len())?;
        dst.check_device("upload", self.id())?;
        stream.check_device("upload, stream", self.id())?;
        stream.refuse_in_capture("upload")?;
        let deadline = Deadline::after(limit);
        stream.labelled("upload", || {
            self.shared
                .staging
                .upload(stream, src, dst.bytes(), deadline)
        })?;
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
        src.check_device("download", self.id())?;
        stream.check_device("download, stream", self.id())?;
        stream.refuse_in_capture("download")?;
        let deadline = Deadline::after(limit);
        stream.labelled("download", || {
            self.shared
                .staging
                .download(stream, src.bytes(), dst, deadline)
        })?;
        stream.check()
    }
}
