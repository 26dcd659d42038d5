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

use super::driver::{Context, Point, Queue};
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
/// The stream is a default stream, which orders itself against other streams of the context; or it
/// belongs to another context.
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
