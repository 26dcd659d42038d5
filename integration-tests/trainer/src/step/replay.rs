//! Graphs of a device, as the recorder needs them.

use zero_alloc::device::{Device, DeviceError};

/// A recorded graph.
pub(crate) trait Replay<D: Device> {
    /// Enqueues the graph on `stream`.
    ///
    /// # Safety
    /// As for `zero_alloc::cuda::Graph::launch`.
    unsafe fn launch(&self, stream: &D::Stream) -> Result<(), DeviceError>;
}

/// Records the work that a closure enqueues on a stream and on streams forked from and joined to
/// it; does not run it.
pub(crate) type Record<D> = fn(
    &<D as Device>::Stream,
    &mut dyn FnMut() -> Result<(), DeviceError>,
) -> Result<Box<dyn Replay<D>>, DeviceError>;
