//! Streams, events, and recorded graphs.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use cudarc::driver::sys;

use super::context::Spare;
use super::{Context, NOT_READY, SUCCESS};
use crate::device::{AnySlice, DeviceError};

/// No ordering against the default stream.
const NON_BLOCKING: c_uint = 1;
/// An event without timing is cheaper.
const DISABLE_TIMING: c_uint = 2;
/// An event that lies in a graph being recorded: it is reached when the graph runs, not now.
const CAPTURED_EVENT: i32 = 907;

/// A stream, ours or another's.
pub(in super::super) struct Queue {
    pub(super) context: Arc<Context>,
    pub(super) raw: sys::CUstream,
    owned: bool,
}

// SAFETY: any thread may use any handle.
unsafe impl Send for Queue {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for Queue {}

impl Queue {
    /// A stream whose blocks are scheduled before those of others if it is `urgent`.
    pub(in super::super) fn new(context: &Arc<Context>, urgent: bool) -> Result<Self, DeviceError> {
        context.bind()?;
        let mut raw = std::ptr::null_mut();
        // 0 is the least; lower is more urgent, and the driver takes its greatest for what is beyond that.
        let priority = if urgent { c_int::MIN } else { 0 };
        // SAFETY: writes one handle.
        let code = unsafe { (context.driver.table.cuStreamCreateWithPriority)(&raw mut raw, NON_BLOCKING, priority) };
        context.driver.check("cuStreamCreateWithPriority", code)?;
        Ok(Self { context: Arc::clone(context), raw, owned: true })
    }

    /// Another's stream.
    ///
    /// # Safety
    /// `raw` is a stream that outlives the result.
    pub(in super::super) unsafe fn foreign(context: &Arc<Context>, raw: sys::CUstream) -> Result<Self, DeviceError> {
        context.bind()?;
        let (driver, mut of) = (context.driver, std::ptr::null_mut());
        // SAFETY: a stream, by the caller's promise; writes one handle.
        driver.check("cuStreamGetCtx", unsafe { (driver.table.cuStreamGetCtx)(raw, &raw mut of) })?;
        if of != context.raw {
            let message = "the stream is of another context than the device".to_owned();
            return Err(DeviceError::Driver { call: "cuStreamGetCtx", message });
        }
        Ok(Self { context: Arc::clone(context), raw, owned: false })
    }

    pub(in super::super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Whether everything has run.
    pub(in super::super) fn query(&self) -> Result<bool, DeviceError> {
        self.context.bind()?;
        // SAFETY: the stream lives.
        match unsafe { (self.context.driver.table.cuStreamQuery)(self.raw) } {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => Err(self.context.driver.error("cuStreamQuery", code)),
        }
    }

    /// Marks the point after everything enqueued so far.
    pub(in super::super) fn record(&self, timed: bool) -> Result<Point, DeviceError> {
        self.context.bind()?;
        let point = Point::new(&self.context, timed)?;
        // SAFETY: both live.
        let code = unsafe { (self.context.driver.table.cuEventRecord)(point.raw, self.raw) };
        self.context.driver.check("cuEventRecord", code)?;
        Ok(point)
    }

    /// Makes everything enqueued from now on wait for `point`.
    pub(in super::super) fn wait(&self, point: &Point) -> Result<(), DeviceError> {
        self.context.bind()?;
        // SAFETY: both live; the stream keeps what it needs of the event.
        let code = unsafe { (self.context.driver.table.cuStreamWaitEvent)(self.raw, point.raw, 0) };
        self.context.driver.check("cuStreamWaitEvent", code)
    }

    /// Enqueues a copy between device memory, pinned host memory, or one and the other; as many bytes as the shorter
    /// of the two has.
    pub(in super::super) fn copy(&self, src: AnySlice, dst: AnySlice) -> Result<(), DeviceError> {
        let bytes = src.len_bytes().min(dst.len_bytes());
        if bytes == 0 {
            return Ok(());
        }
        self.context.bind()?;
        let (to, from) = (dst.as_ptr().expose_provenance() as u64, src.as_ptr().expose_provenance() as u64);
        // SAFETY: the makers of the slices promised validity and order for as long as the copy runs.
        let code = unsafe { (self.context.driver.table.cuMemcpyAsync)(to, from, bytes, self.raw) };
        self.context.driver.check("cuMemcpyAsync", code)
    }

    pub(in super::super) fn fill_zero(&self, dst: AnySlice) -> Result<(), DeviceError> {
        if dst.is_empty() {
            return Ok(());
        }
        self.context.bind()?;
        let to = dst.as_ptr().expose_provenance() as u64;
        // SAFETY: the maker of the slice promised validity and order for as long as the operation runs.
        let code = unsafe { (self.context.driver.table.cuMemsetD8Async)(to, 0, dst.len_bytes(), self.raw) };
        self.context.driver.check("cuMemsetD8Async", code)
    }

    /// Enqueues an operation of the host, which must not panic; a thread of the driver runs it.
    pub(in super::super) fn call_host(&self, op: HostOp) -> Result<(), DeviceError> {
        self.context.bind()?;
        let op = Box::into_raw(Box::new(op));
        // SAFETY: the stream lives; `run_host` takes what `op` points to, and is called once.
        let code = unsafe { (self.context.driver.table.cuLaunchHostFunc)(self.raw, Some(run_host), op.cast()) };
        let enqueued = self.context.driver.check("cuLaunchHostFunc", code);
        if enqueued.is_err() {
            // SAFETY: made above; the driver did not take it.
            drop(unsafe { Box::from_raw(op) });
        }
        enqueued
    }

    /// From now on what is enqueued is recorded, and does not run.
    pub(in super::super) fn begin_capture(&self) -> Result<(), DeviceError> {
        self.context.bind()?;
        // Relaxed: other threads, and our own polling of earlier events, go on as ever.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives.
        let code = unsafe { (self.context.driver.table.cuStreamBeginCapture_v2)(self.raw, mode) };
        self.context.driver.check("cuStreamBeginCapture", code)
    }

    /// Whether somebody else may record this stream without our knowledge.
    pub(in super::super) fn is_foreign(&self) -> bool {
        !self.owned
    }

    /// Whether what is enqueued is recorded, by whomever.
    pub(in super::super) fn is_capturing(&self) -> Result<bool, DeviceError> {
        self.context.bind()?;
        let none = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (driver, mut status) = (self.context.driver, none);
        // SAFETY: the stream lives; writes one of the three states that CUDA has had since it records streams.
        let code = unsafe { (driver.table.cuStreamIsCapturing)(self.raw, &raw mut status) };
        driver.check("cuStreamIsCapturing", code)?;
        Ok(status != none)
    }

    /// Ends the recording.
    pub(in super::super) fn end_capture(&self) -> Result<Recording, DeviceError> {
        self.context.bind()?;
        let (driver, mut graph) = (self.context.driver, std::ptr::null_mut());
        // SAFETY: the stream lives; writes one handle, null where the recording failed.
        let code = unsafe { (driver.table.cuStreamEndCapture)(self.raw, &raw mut graph) };
        driver.check("cuStreamEndCapture", code)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the graph was made just now; writes one handle.
        let code = unsafe { (driver.table.cuGraphInstantiateWithFlags)(&raw mut raw, graph, 0) };
        // SAFETY: what was made of the graph does not need it; nobody else knows it.
        unsafe { (driver.table.cuGraphDestroy)(graph) };
        driver.check("cuGraphInstantiate", code)?;
        Ok(Recording { context: Arc::clone(&self.context), raw })
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.owned && self.context.bind().is_ok() {
            // SAFETY: made by `new`, destroyed once; what is enqueued still runs.
            unsafe { (self.context.driver.table.cuStreamDestroy_v2)(self.raw) };
        }
    }
}

/// An operation of the host.
pub(in super::super) type HostOp = Box<dyn FnOnce() + Send>;

unsafe extern "C" fn run_host(op: *mut c_void) {
    // SAFETY: `call_host` made it for this one call.
    let op = unsafe { Box::from_raw(op.cast::<HostOp>()) };
    op();
}

/// An event that was recorded once; the driver's event is used again when this goes.
pub(in super::super) struct Point {
    context: Arc<Context>,
    raw: sys::CUevent,
    timed: bool,
    owned: bool,
}

// SAFETY: any thread may use any handle.
unsafe impl Send for Point {}
// SAFETY: as above.
unsafe impl Sync for Point {}

impl Point {
    fn new(context: &Arc<Context>, timed: bool) -> Result<Self, DeviceError> {
        let spare = context.spare[usize::from(timed)].lock().pop();
        let raw = match spare {
            Some(Spare(raw)) => raw,
            None => {
                let mut raw = std::ptr::null_mut();
                let flags = if timed { 0 } else { DISABLE_TIMING };
                // SAFETY: writes one handle; the context is current.
                let code = unsafe { (context.driver.table.cuEventCreate)(&raw mut raw, flags) };
                context.driver.check("cuEventCreate", code)?;
                raw
            }
        };
        Ok(Self { context: Arc::clone(context), raw, timed, owned: true })
    }

    /// Another's event.
    ///
    /// # Safety
    /// `raw` is an event that outlives the result.
    pub(in super::super) unsafe fn foreign(context: &Arc<Context>, raw: sys::CUevent) -> Self {
        Self { context: Arc::clone(context), raw, timed: false, owned: false }
    }

    pub(in super::super) fn raw(&self) -> sys::CUevent {
        self.raw
    }

    /// Whether it is reached.
    pub(in super::super) fn query(&self) -> Result<bool, DeviceError> {
        self.context.bind()?;
        // SAFETY: the event lives.
        match unsafe { (self.context.driver.table.cuEventQuery)(self.raw) } {
            SUCCESS => Ok(true),
            NOT_READY | CAPTURED_EVENT => Ok(false),
            code => Err(self.context.driver.error("cuEventQuery", code)),
        }
    }

    /// Milliseconds from `earlier` to this, about half a microsecond exact; both are reached and have timing.
    pub(in super::super) fn since_ms(&self, earlier: &Self) -> Result<f32, DeviceError> {
        self.context.bind()?;
        let (driver, mut ms) = (self.context.driver, 0.0);
        // SAFETY: both live; writes one number.
        let code = unsafe { (driver.table.cuEventElapsedTime)(&raw mut ms, earlier.raw, self.raw) };
        driver.check("cuEventElapsedTime", code)?;
        Ok(ms)
    }
}

impl Drop for Point {
    fn drop(&mut self) {
        if self.owned {
            // Recording it again leaves what already waits for this point as it is.
            self.context.spare[usize::from(self.timed)].lock().push(Spare(self.raw));
        }
    }
}

/// Operations that were recorded, to be enqueued as one.
pub(in super::super) struct Recording {
    context: Arc<Context>,
    raw: sys::CUgraphExec,
}

// SAFETY: any thread may use any handle.
unsafe impl Send for Recording {}
// SAFETY: `launch` is the only use; the caller keeps launches of one recording apart by a lock.
unsafe impl Sync for Recording {}

impl Recording {
    pub(in super::super) fn launch(&self, queue: &Queue) -> Result<(), DeviceError> {
        self.context.bind()?;
        // SAFETY: both live. The memory that the operations use is valid by the promise of who recorded them.
        let code = unsafe { (self.context.driver.table.cuGraphLaunch)(self.raw, queue.raw) };
        self.context.driver.check("cuGraphLaunch", code)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made by `end_capture`, destroyed once; a launch that runs still ends.
            unsafe { (self.context.driver.table.cuGraphExecDestroy)(self.raw) };
        }
    }
}
