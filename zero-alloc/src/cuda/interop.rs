//! Conversion from and to a framework's raw handles: a `*mut c_void` is a `CUcontext`, `CUstream`
//! or `CUevent` (the runtime API's `cudaStream_t` and `cudaEvent_t` are the same handles).
//!
//! [`DeviceSlice::from_raw_parts`](crate::device::DeviceSlice::from_raw_parts) makes slices of a
//! framework's pointers.
//! ```no_run
//! use zero_alloc::cuda::{CudaDevice, interop};
//! use zero_alloc::device::{Device, DeviceError, DeviceSlice, Memory};
//!
//! /// # Safety
//! /// `grads` are `len` floats on the device, and `stream` is a stream of its primary context; both outlive this.
//! unsafe fn clear(grads: *mut f32, len: usize, stream: *mut std::ffi::c_void) -> Result<(), DeviceError> {
//!     let device = CudaDevice::open(0)?;
//!     // SAFETY: the caller's promise.
//!     let stream = unsafe { interop::stream_from_raw(&device, stream, "framework") }?;
//!     // SAFETY: the caller's promise.
//!     let grads = unsafe { DeviceSlice::from_raw_parts(grads, len, device.id()) };
//!     device.fill_zero(&stream, grads.erase())
//! }
//! ```

use std::ffi::c_void;
use std::sync::Arc;

use super::driver::{Context, Driver, Point, Queue};
use super::sticky::Sticky;
use super::{CudaDevice, CudaEvent, CudaStream};
use crate::device::DeviceError;

/// The handles of CUDA's default streams.
const DEFAULT_STREAMS: [usize; 3] = [0, 1, 2];

/// Makes a device of a framework's context. Dropping it does not destroy the context.
///
/// # Errors
/// [`DeviceError::NoDriver`], or the driver rejects the context.
///
/// # Safety
/// `context` is a context that outlives the device and everything made from it.
pub unsafe fn device_from_context(context: *mut c_void) -> Result<CudaDevice, DeviceError> {
    if context.is_null() {
        return Err(DeviceError::Driver {
            call: "device_from_context",
            message: "the context is null".into(),
        });
    }
    // SAFETY: the caller's promise.
    CudaDevice::in_context(unsafe { Context::foreign(context.cast()) }?)
}

/// The device's context.
pub fn raw_context(device: &CudaDevice) -> *mut c_void {
    device.context().raw().cast()
}

/// Makes a stream of a framework's stream. Dropping it does not destroy the framework's.
///
/// # Errors
/// The stream is a default stream, which orders itself against other streams of the context
/// ([`pool_stream_from_raw`] accepts it); or it belongs to another context.
///
/// # Safety
/// `stream` is a stream that outlives all handles of the result.
pub unsafe fn stream_from_raw(
    device: &CudaDevice,
    stream: *mut c_void,
    name: &str,
) -> Result<CudaStream, DeviceError> {
    if DEFAULT_STREAMS.contains(&stream.addr()) {
        let message = format!(
            "{name} is a default stream, which orders itself against others; use a separate stream"
        );
        return Err(DeviceError::Driver {
            call: "stream_from_raw",
            message,
        });
    }
    // SAFETY: the caller's promise.
    device.stream_on(
        unsafe { Queue::foreign(device.context(), stream.cast()) }?,
        name,
    )
}

/// Makes a stream for the blocks of a pool of a framework's stream, which may be a default stream,
/// and which the framework may destroy: a pool only records events on it and waits on it. What is
/// freed with its uses recorded is not affected by the stream's end; nothing else may use the
/// result after it.
///
/// The handle 2 is a different stream in every thread, so its result is for one thread.
///
/// # Errors
/// The stream belongs to another context.
///
/// # Safety
/// `stream` is a stream now, and while operations are enqueued on the result, blocks are allocated
/// on it, or blocks of it are freed without an event of it among their uses.
pub unsafe fn pool_stream_from_raw(
    device: &CudaDevice,
    stream: *mut c_void,
    name: &str,
) -> Result<CudaStream, DeviceError> {
    // SAFETY: the caller's promise; the result lives longer, but then records and waits no more.
    let queue = unsafe { Queue::foreign(device.context(), stream.cast()) }?;
    let may_end = !matches!(stream.addr(), 0 | 1);
    Ok(CudaStream::with_owner(name, queue, may_end, None))
}

/// The driver's id of a stream, which no other stream of the process ever has, even one with the
/// handle of a destroyed stream; `None` if the driver is older than CUDA 12, or the stream is being
/// recorded into a graph: then the driver refuses the question.
///
/// # Errors
/// The driver failed, or noticed that the stream is destroyed.
///
/// # Safety
/// `stream` is a stream.
pub unsafe fn unique_stream_id(
    device: &CudaDevice,
    stream: *mut c_void,
) -> Result<Option<u64>, DeviceError> {
    // SAFETY: the caller's promise.
    unsafe { Queue::unique_id(device.context(), stream.cast()) }
}

/// Blocks the host until everything in the device's context has run, also in default and destroyed
/// streams. It has no time limit, so it is only for what no event can express.
///
/// # Errors
/// The driver failed.
pub fn synchronize_context(device: &CudaDevice) -> Result<(), DeviceError> {
    device.context().synchronize()
}

/// Runs `f`, in which this thread may allocate although it or another thread records a graph in
/// CUDA's global mode, which PyTorch uses.
///
/// # Errors
/// The driver failed.
pub fn with_relaxed_captures<R>(
    device: &CudaDevice,
    f: impl FnOnce() -> R,
) -> Result<R, DeviceError> {
    device.context().with_relaxed_captures(f)
}

/// Runs `f`, and makes the context current again that was current on this thread before. Methods of
/// this crate make their device's context current, which changes the current device of CUDA's
/// runtime.
///
/// # Errors
/// There is no driver, or it failed.
pub fn with_context_kept<R>(f: impl FnOnce() -> R) -> Result<R, DeviceError> {
    Driver::with_context_kept(f)
}

/// The stream's raw handle; valid while a [`CudaStream`] handle of it lives.
pub fn raw_stream(stream: &CudaStream) -> *mut c_void {
    stream.queue().raw().cast()
}

/// Makes an event of a framework's event, as recorded last. Dropping it does not destroy the
/// framework's.
///
/// # Safety
/// `event` is an event that outlives all handles of the result.
pub unsafe fn event_from_raw(device: &CudaDevice, event: *mut c_void, name: &str) -> CudaEvent {
    // SAFETY: the caller's promise.
    let point = unsafe { Point::foreign(device.context(), event.cast()) };
    CudaEvent::new(point, name.into(), (Arc::<Sticky>::default(), 0), None)
}

/// The event's raw handle; valid while a [`CudaEvent`] handle of it lives.
pub fn raw_event(event: &CudaEvent) -> *mut c_void {
    event.point().raw().cast()
}
