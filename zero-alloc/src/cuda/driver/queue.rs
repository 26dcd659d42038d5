//! Streams, events, and recorded graphs.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use cudarc::driver::sys;

use super::Context;
use super::context::Spare;
use crate::device::{AnySlice, DeviceError, DeviceId};

/// A stream that is not ordered against the default stream.
const NON_BLOCKING: c_uint = 1;
/// An event without timing, which is cheaper.
const DISABLE_TIMING: c_uint = 2;
/// The codes of errors about a capture, which say nothing about the event: 907 for an event in a
/// graph that is being recorded, which is reached only when the graph runs; 900 to 908 without 907
/// for others.
const CAPTURE_ERRORS: std::ops::RangeInclusive<c_int> = 900..=908;

/// A stream, owned or foreign.
pub(crate) struct Queue {
    context: Arc<Context>,
    raw: sys::CUstream,
    owned: bool,
}

// SAFETY: any thread may use any handle.
unsafe impl Send for Queue {}
// SAFETY: as above; the driver synchronizes its own state.
unsafe impl Sync for Queue {}

impl Queue {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        Self::with_priority(context, 0)
    }

    /// A stream of the greatest priority: the driver raises the number, of which the least is the
    /// greatest priority, to its range.
    pub(crate) fn urgent(context: &Arc<Context>) -> Result<Self, DeviceError> {
        Self::with_priority(context, c_int::MIN)
    }

    fn with_priority(context: &Arc<Context>, priority: c_int) -> Result<Self, DeviceError> {
        let driver = context.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe {
            call!(
                driver,
                cuStreamCreateWithPriority(&raw mut raw, NON_BLOCKING, priority)
            )
        }?;
        Ok(Self {
            context: Arc::clone(context),
            raw,
            owned: true,
        })
    }

    /// A stream of a framework.
    ///
    /// # Safety
    /// `raw` is a stream that outlives the result.
    pub(crate) unsafe fn foreign(
        context: &Arc<Context>,
        raw: sys::CUstream,
    ) -> Result<Self, DeviceError> {
        let driver = context.bind()?;
        let mut of = std::ptr::null_mut();
        // SAFETY: a stream, by the caller's promise; writes one handle.
        unsafe { call!(driver, cuStreamGetCtx(raw, &raw mut of)) }?;
        if of != context.raw() {
            let message = "the stream belongs to another context than the device".to_owned();
            return Err(DeviceError::Driver {
                call: "cuStreamGetCtx",
                message,
            });
        }
        Ok(Self {
            context: Arc::clone(context),
            raw,
            owned: false,
        })
    }

    /// The driver's id of a stream, which no other stream of the process ever has; `None` before
    /// CUDA 12, and while the stream is recorded into a graph.
    ///
    /// # Safety
    /// `raw` is a stream.
    pub(crate) unsafe fn unique_id(
        context: &Context,
        raw: sys::CUstream,
    ) -> Result<Option<u64>, DeviceError> {
        let driver = context.bind()?;
        let Some(get) = driver.table.cuStreamGetId else {
            return Ok(None);
        };
        let mut id = 0;
        // SAFETY: a stream, by the caller's promise; writes one number.
        let code = unsafe { get(raw, &raw mut id) };
        if code == sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED as i32 {
            return Ok(None);
        }
        driver.check("cuStreamGetId", code).map(|()| Some(id))
    }

    /// The id of its context's memory.
    pub(crate) fn device(&self) -> DeviceId {
        self.context.id()
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Whether all operations have run.
    pub(crate) fn query(&self) -> Result<bool, DeviceError> {
        let driver = self.context.bind()?;
        // SAFETY: the stream is live.
        let code = driver.during_captures(|| unsafe { (driver.table.cuStreamQuery)(self.raw) });
        driver.check_ready("cuStreamQuery", code)
    }

    /// Records the point after everything enqueued so far.
    pub(crate) fn record(&self, timed: bool) -> Result<Point, DeviceError> {
        let driver = self.context.bind()?;
        let point = Point::new(&self.context, timed)?;
        // SAFETY: event and stream are live.
        unsafe { call!(driver, cuEventRecord(point.raw, self.raw)) }?;
        Ok(point)
    }

    /// Makes everything enqueued from now on wait for `point`.
    pub(crate) fn wait(&self, point: &Point) -> Result<(), DeviceError> {
        let driver = self.context.bind()?;
        // SAFETY: event and stream are live; the event may be reused or destroyed before the wait
        // is over.
        unsafe { call!(driver, cuStreamWaitEvent(self.raw, point.raw, 0)) }
    }

    /// Enqueues a copy of the length of the shorter slice. Each side is device memory or pinned
    /// host memory.
    pub(crate) fn copy(&self, src: AnySlice, dst: AnySlice) -> Result<(), DeviceError> {
        let bytes = src.len_bytes().min(dst.len_bytes());
        if bytes == 0 {
            return Ok(());
        }
        let driver = self.context.bind()?;
        let to = dst.as_ptr().expose_provenance() as u64;
        let from = src.as_ptr().expose_provenance() as u64;
        // SAFETY: the makers of the slices promised validity and order while the copy runs.
        unsafe { call!(driver, cuMemcpyAsync(to, from, bytes, self.raw)) }
    }

    pub(crate) fn fill_zero(&self, dst: AnySlice) -> Result<(), DeviceError> {
        if dst.is_empty() {
            return Ok(());
        }
        let driver = self.context.bind()?;
        let to = dst.as_ptr().expose_provenance() as u64;
        // SAFETY: the maker of the slice promised validity and order while the operation runs.
        unsafe { call!(driver, cuMemsetD8Async(to, 0, dst.len_bytes(), self.raw)) }
    }

    /// Enqueues a host operation, which must not panic; a thread of the driver runs it.
    pub(crate) fn call_host(&self, op: HostOp) -> Result<(), DeviceError> {
        let driver = self.context.bind()?;
        let op = Box::into_raw(Box::new(op));
        // SAFETY: the stream is live; `run_host` takes ownership of `op`, and is called once.
        let enqueued = unsafe {
            call!(
                driver,
                cuLaunchHostFunc(self.raw, Some(run_host), op.cast())
            )
        };
        if enqueued.is_err() {
            // SAFETY: made above; the driver did not accept it.
            drop(unsafe { Box::from_raw(op) });
        }
        enqueued
    }

    /// Starts recording: later operations are recorded and do not run.
    pub(crate) fn begin_capture(&self) -> Result<(), DeviceError> {
        let driver = self.context.bind()?;
        // Relaxed mode does not restrict calls of other threads, nor queries of earlier events.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is live.
        unsafe { call!(driver, cuStreamBeginCapture_v2(self.raw, mode)) }
    }

    /// Whether a framework may record this stream without our knowledge.
    pub(crate) fn is_foreign(&self) -> bool {
        !self.owned
    }

    /// Whether operations are being recorded, by us or by a framework.
    pub(crate) fn is_capturing(&self) -> Result<bool, DeviceError> {
        let none = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let driver = self.context.bind()?;
        let mut status = none;
        // SAFETY: the stream is live; writes one of the three values of the enum.
        unsafe { call!(driver, cuStreamIsCapturing(self.raw, &raw mut status)) }?;
        Ok(status != none)
    }

    /// Ends the recording.
    pub(crate) fn end_capture(&self) -> Result<Recording, DeviceError> {
        let driver = self.context.bind()?;
        let mut graph = std::ptr::null_mut();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the stream is live; writes one handle, null if the recording failed.
        unsafe { call!(driver, cuStreamEndCapture(self.raw, &raw mut graph)) }?;
        // SAFETY: the graph was made above; writes one handle.
        let instantiated =
            unsafe { call!(driver, cuGraphInstantiateWithFlags(&raw mut raw, graph, 0)) };
        // SAFETY: the graph was made above and has no other user; the instance does not need it.
        unsafe { (driver.table.cuGraphDestroy)(graph) };
        instantiated?;
        Ok(Recording {
            context: Arc::clone(&self.context),
            raw,
        })
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.owned
            && let Ok(driver) = self.context.bind()
        {
            // SAFETY: made by `new`, destroyed once; enqueued operations still run.
            unsafe { (driver.table.cuStreamDestroy_v2)(self.raw) };
        }
    }
}

/// A host operation.
pub(crate) type HostOp = Box<dyn FnOnce() + Send>;

unsafe extern "C" fn run_host(op: *mut c_void) {
    // SAFETY: `call_host` made it for this one call.
    let op = unsafe { Box::from_raw(op.cast::<HostOp>()) };
    op();
}

/// An event that was recorded once. The driver's event returns to the context's unused events on
/// drop.
pub(crate) struct Point {
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
                let driver = context.bind()?;
                let mut raw = std::ptr::null_mut();
                let flags = if timed { 0 } else { DISABLE_TIMING };
                // SAFETY: writes one handle; the context is current.
                unsafe { call!(driver, cuEventCreate(&raw mut raw, flags)) }?;
                raw
            }
        };
        Ok(Self {
            context: Arc::clone(context),
            raw,
            timed,
            owned: true,
        })
    }

    /// An event of a framework.
    ///
    /// # Safety
    /// `raw` is an event that outlives the result.
    pub(crate) unsafe fn foreign(context: &Arc<Context>, raw: sys::CUevent) -> Self {
        Self {
            context: Arc::clone(context),
            raw,
            timed: false,
            owned: false,
        }
    }

    /// The id of its context's memory.
    pub(crate) fn device(&self) -> DeviceId {
        self.context.id()
    }

    pub(crate) fn raw(&self) -> sys::CUevent {
        self.raw
    }

    /// Whether the point is reached.
    pub(crate) fn query(&self) -> Result<bool, DeviceError> {
        let driver = self.context.bind()?;
        // SAFETY: the event is live.
        let code = driver.during_captures(|| unsafe { (driver.table.cuEventQuery)(self.raw) });
        if CAPTURE_ERRORS.contains(&code) {
            Ok(false)
        } else {
            driver.check_ready("cuEventQuery", code)
        }
    }

    /// Milliseconds from `earlier` to this point, with a resolution of about half a microsecond.
    /// Both points are reached and have timing.
    pub(crate) fn since_ms(&self, earlier: &Self) -> Result<f32, DeviceError> {
        let driver = self.context.bind()?;
        let mut ms = 0.0;
        // SAFETY: both events are live; writes one number.
        unsafe {
            call!(
                driver,
                cuEventElapsedTime(&raw mut ms, earlier.raw, self.raw)
            )
        }?;
        Ok(ms)
    }
}

impl Drop for Point {
    fn drop(&mut self) {
        if self.owned {
            // Recording the event again does not affect streams that already wait for this point.
            self.context.spare[usize::from(self.timed)]
                .lock()
                .push(Spare(self.raw));
        }
    }
}

/// Recorded operations that are enqueued as one.
pub(crate) struct Recording {
    context: Arc<Context>,
    raw: sys::CUgraphExec,
}

// SAFETY: any thread may use any handle.
unsafe impl Send for Recording {}
// SAFETY: `launch` is the only use, and its callers promise that launches of one recording do not
// overlap.
unsafe impl Sync for Recording {}

impl Recording {
    /// # Safety
    /// The memory and modules of the recorded operations are valid until they have run, conflicting
    /// accesses are ordered, and no other thread launches the recording at the same time.
    pub(crate) unsafe fn launch(&self, queue: &Queue) -> Result<(), DeviceError> {
        let driver = self.context.bind()?;
        // SAFETY: graph and stream are live; the rest is the caller's promise.
        unsafe { call!(driver, cuGraphLaunch(self.raw, queue.raw)) }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if let Ok(driver) = self.context.bind() {
            // SAFETY: made by `end_capture`, destroyed once; a running launch still completes.
            unsafe { (driver.table.cuGraphExecDestroy)(self.raw) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "needs a CUDA device"]
    fn cuda_urgent_streams_have_the_greatest_priority() {
        // SAFETY: loading runs the library's initialisers; the name is the driver's.
        let library = unsafe { libloading::Library::new("libcuda.so.1") }.expect("a driver");
        // SAFETY: the driver's function has this type.
        let priority = unsafe {
            library.get::<unsafe extern "C" fn(sys::CUstream, *mut c_int) -> c_int>(
                b"cuStreamGetPriority",
            )
        };

        // SAFETY: the driver's function has this type.
        let range = unsafe {
            library.get::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(
                b"cuCtxGetStreamPriorityRange",
            )
        };

        let priority = priority.expect("found");
        let range = range.expect("found");
        let context = Arc::new(Context::primary(0).expect("a device"));
        let plain = Queue::new(&context).expect("a stream");
        let urgent = Queue::urgent(&context).expect("a stream");
        let priority = |queue: &Queue| {
            let mut found = 1;
            // SAFETY: the stream is live; writes one number.
            assert_eq!(unsafe { priority(queue.raw, &raw mut found) }, 0);
            found
        };

        let mut least = 1;
        let mut greatest = 1;
        // SAFETY: a context is current; writes two numbers.
        assert_eq!(unsafe { range(&raw mut least, &raw mut greatest) }, 0);
        assert_eq!((priority(&plain), priority(&urgent)), (0, greatest));
        assert!(greatest < least);
    }

    /// PyTorch records in global mode, in which potentially unsafe calls of all threads invalidate
    /// the recording.
    #[test]
    #[ignore = "needs a CUDA device"]
    fn cuda_queries_spare_global_captures_of_other_threads() {
        let context = Arc::new(Context::primary(0).expect("a device"));
        let recorded = Queue::new(&context).expect("a stream");
        let other = Queue::new(&context).expect("a stream");
        let point = other.record(false).expect("recorded");
        let driver = context.bind().expect("current");
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: the stream is live.
        unsafe { call!(driver, cuStreamBeginCapture_v2(recorded.raw, mode)) }.expect("began");

        std::thread::scope(|scope| {
            let queries =
                || while !point.query().expect("a query") || !other.query().expect("a query") {};
            scope.spawn(queries).join().expect("no panic");
            // This thread's own recording is spared, too.
            queries();
        });

        drop(recorded.end_capture().expect("valid"));
        // A query in the thread's own mode invalidates the recording.
        // SAFETY: the stream is live.
        unsafe { call!(driver, cuStreamBeginCapture_v2(recorded.raw, mode)) }.expect("began");
        // SAFETY: the event is live.
        let refused = unsafe { (driver.table.cuEventQuery)(point.raw) };
        assert!(CAPTURE_ERRORS.contains(&refused), "{refused}");
        assert!(recorded.end_capture().is_err());
        // The mode of a thread is as before.
        let mut now = mode;
        // SAFETY: exchanges the mode of this thread.
        unsafe { call!(driver, cuThreadExchangeStreamCaptureMode(&raw mut now)) }
            .expect("exchanged");
        assert_eq!(now, mode);
    }
}
