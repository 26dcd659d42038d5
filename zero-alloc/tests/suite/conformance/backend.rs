//! The back ends under test.

use std::sync::Arc;
use std::time::Duration;

use zero_alloc::device::{AnySlice, Device, DeviceError};
use zero_alloc::host::{HostDevice, HostPages, HostStream, Monitor};
use zero_alloc::{Block, Pool};

pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// A device, and its function to enqueue a host operation.
pub(crate) trait Backend {
    type Device: Device;

    fn device(&self) -> Self::Device;

    fn enqueue(
        stream: &Stream<Self>,
        label: &'static str,
        op: impl FnOnce() -> Result<(), DeviceError> + Send + 'static,
    ) -> Result<(), DeviceError>;

    fn stream(device: &Self::Device, name: &str) -> Stream<Self> {
        device.create_stream(name).expect("a stream")
    }

    /// Enqueues an operation that blocks the stream until [`open`].
    fn hold(stream: &Stream<Self>) -> Arc<Monitor<bool>> {
        let monitor = Arc::new(Monitor::new(false));
        let held = Arc::clone(&monitor);
        let op = move || held.wait_until(LIMIT, || "the test".into(), |open| open.then_some(()));
        Self::enqueue(stream, "hold", op).expect("enqueued");
        monitor
    }
}

pub(crate) type Stream<B> = <<B as Backend>::Device as Device>::Stream;

pub(crate) fn open(monitor: &Monitor<bool>) {
    monitor.update(|open| *open = true);
}

pub(crate) fn address(block: &Block<impl Device>) -> usize {
    // SAFETY: the address is not dereferenced.
    unsafe { block.slice() }.as_ptr().addr()
}

/// Writes `value` to all of a block, in the order of `stream`.
pub(crate) fn fill<D: Device>(pool: &Pool<D>, stream: &D::Stream, slice: AnySlice, value: u8) {
    pool.device()
        .upload(stream, &vec![value; slice.len_bytes()], slice, LIMIT)
        .expect("uploaded");
}

/// Reads all of a block, in the order of `stream`.
pub(crate) fn check<D: Device>(pool: &Pool<D>, stream: &D::Stream, slice: AnySlice, value: u8) {
    let mut seen = vec![!value; slice.len_bytes()];
    pool.device()
        .download(stream, slice, &mut seen, LIMIT)
        .expect("downloaded");
    let wrong = seen.iter().position(|byte| *byte != value);
    assert_eq!(
        wrong,
        None,
        "of {} bytes that should be {value}",
        seen.len()
    );
}

/// The host, with backings or with pages of 64 KiB.
#[derive(Default)]
pub(crate) struct Host {
    pub paged: bool,
}

impl Backend for Host {
    type Device = HostDevice;

    fn device(&self) -> HostDevice {
        let host = HostDevice::new();
        if self.paged {
            host.with_pages(Arc::new(
                HostPages::new(1 << 16, 256 << 20).expect("memory files"),
            ))
        } else {
            host
        }
    }

    fn enqueue(
        stream: &HostStream,
        label: &'static str,
        op: impl FnOnce() -> Result<(), DeviceError> + Send + 'static,
    ) -> Result<(), DeviceError> {
        stream.enqueue(label, op)
    }
}

#[cfg(feature = "cuda")]
pub(crate) use cuda::Cuda;

#[cfg(feature = "cuda")]
mod cuda {
    use std::sync::LazyLock;

    use zero_alloc::cuda::{CudaDevice, CudaStream};
    use zero_alloc::device::{DeviceError, Stream};

    use super::Backend;

    /// One for all tests: each new context takes a third of a second on a GPU.
    static DEVICE: LazyLock<CudaDevice> =
        LazyLock::new(|| CudaDevice::open(0).expect("a CUDA device"));

    /// The first GPU, with each kind of memory.
    pub(crate) enum Cuda {
        Pages,
        Backings,
    }

    impl Backend for Cuda {
        type Device = CudaDevice;

        fn device(&self) -> CudaDevice {
            let device = DEVICE.clone();
            match self {
                Self::Pages => device,
                Self::Backings => device.with_backings(),
            }
        }

        fn enqueue(
            stream: &CudaStream,
            label: &'static str,
            op: impl FnOnce() -> Result<(), DeviceError> + Send + 'static,
        ) -> Result<(), DeviceError> {
            stream.enqueue_host(label, op)
        }
    }
}
