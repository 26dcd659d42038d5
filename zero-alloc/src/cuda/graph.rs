//! Recorded sequences of operations.

use std::sync::Arc;

use parking_lot::Mutex;

use super::CudaStream;
use super::driver::Recording;
use super::stream::Capture;
use crate::device::DeviceError;

/// Operations of one or more streams, recorded by [`CudaStream::capture`] and enqueued as one: a
/// step of many launches costs the host one call.
pub struct Graph(Mutex<Recording>);

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Graph")
    }
}

impl CudaStream {
    /// Records the operations that `enqueue` enqueues, instead of running them: those on this
    /// stream, and those on streams that wait for its events and for which it waits before
    /// `enqueue` returns. The host cannot wait for these streams meanwhile. A wait for an earlier
    /// event is skipped if the event is reached, and otherwise fails. After the recording, its
    /// events are reached when what these streams had enqueued before it has run.
    ///
    /// # Errors
    /// The stream is poisoned or is being recorded already, `enqueue` failed, or an operation
    /// cannot be recorded.
    pub fn capture(
        &self,
        enqueue: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<Graph, DeviceError> {
        self.check()?;
        self.refuse_in_capture("capture")?;
        let capture = Arc::<Capture>::default();
        self.enter(&capture)?;
        self.queue()
            .begin_capture()
            .inspect_err(|_| capture.end())?;
        let running = Running {
            stream: self,
            capture,
            open: true,
        };
        let enqueued = enqueue();
        let recording = running.end();
        enqueued?;
        Ok(Graph(Mutex::new(recording?)))
    }
}

/// A recording that also ends if `enqueue` panics.
struct Running<'a> {
    stream: &'a CudaStream,
    capture: Arc<Capture>,
    open: bool,
}

impl Running<'_> {
    fn end(mut self) -> Result<Recording, DeviceError> {
        self.open = false;
        self.capture.end();
        self.stream.queue().end_capture()
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if self.open {
            self.capture.end();
            let _ = self.stream.queue().end_capture();
        }
    }
}

impl Graph {
    /// Enqueues the graph on `stream`. Launches of one graph run one after the other, also on
    /// different streams.
    ///
    /// # Errors
    /// The stream is poisoned, or the driver refuses the launch, which poisons the stream.
    ///
    /// # Safety
    /// The memory and the modules that the recorded operations use stay valid until the launch has
    /// run: neither pools nor their other owners know of it. Conflicting accesses are ordered by
    /// streams and events.
    pub unsafe fn launch(&self, stream: &CudaStream) -> Result<(), DeviceError> {
        let recording = self.0.lock();
        // SAFETY: the caller's promise; the lock orders launches of one recording.
        stream.labelled("graph", || unsafe { recording.launch(stream.queue()) })
    }
}
