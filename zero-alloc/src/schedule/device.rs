//! A device without memory, whose streams record.

use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::Recorder;
use crate::device::{
    AnySlice, Device, DeviceError, DeviceId, DeviceKind, Memory, check_copy, same_len,
};
use crate::host::{HostDevice, HostEvent, HostStream};
use crate::timeline::Work;

/// The alignment of backings.
const ALIGN_BYTES: usize = 4096;
/// Above what programs map.
const FIRST_ADDRESS: usize = 1 << 48;

impl Recorder {
    /// The host as a device that records. Its memory is the host's, and takes no pages until
    /// something touches it; no operation runs, and `download` leaves its buffer as it is.
    pub fn host(&self) -> HostDevice {
        HostDevice::recorded(self.clone())
    }

    /// A device that is not the host, with fictitious addresses. Its streams and the host's make
    /// one schedule.
    ///
    /// # Panics
    /// The process has had 2^30 of them.
    pub fn device(&self) -> ScheduledDevice {
        ScheduledDevice::with_streams_of(self.host())
    }
}

/// A device that [`Recorder::device`] makes: of no host, and of any size.
/// Its addresses must not be accessed. Copies accept host memory, too, as a GPU's do that of pinned
/// pages.
#[derive(Clone, Debug)]
pub struct ScheduledDevice {
    id: DeviceId,
    host: HostDevice,
    next_address: Arc<AtomicUsize>,
}

impl ScheduledDevice {
    /// The device whose streams are those of `host`, a device that records
    /// ([`Recorder::host`]).
    ///
    /// # Panics
    /// The process has had 2^30 of them.
    pub fn with_streams_of(host: HostDevice) -> Self {
        Self {
            id: DeviceId::new(DeviceKind::Simulated).expect("fewer than 2^30 devices"),
            host,
            next_address: Arc::new(AtomicUsize::new(FIRST_ADDRESS)),
        }
    }

    fn check(&self, what: &'static str, slice: AnySlice) -> Result<(), DeviceError> {
        if DeviceId::HOST.accesses(slice.device()) {
            return Ok(());
        }
        slice.check_device(what, self.id)
    }
}

// SAFETY: nothing accesses these addresses, and each is returned once.
unsafe impl Memory for ScheduledDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        let out = || DeviceError::OutOfMemory {
            requested_bytes: bytes,
            detail: "no addresses left".into(),
        };
        let len = bytes
            .max(1)
            .checked_next_multiple_of(ALIGN_BYTES)
            .ok_or_else(out)?;
        let next = |start: usize| start.checked_add(len);
        let start = self
            .next_address
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
            .map_err(|_| out())?;
        NonZeroUsize::new(start)
            .map(NonNull::without_provenance)
            .ok_or_else(out)
    }

    unsafe fn deallocate(&self, _ptr: NonNull<u8>, _bytes: usize) {}

    fn granularity_bytes(&self) -> usize {
        ALIGN_BYTES
    }
}

// SAFETY: no operation accesses memory, and the kind is not the host.
unsafe impl Device for ScheduledDevice {
    type Stream = HostStream;
    type Event = HostEvent;

    fn kind(&self) -> DeviceKind {
        DeviceKind::Simulated
    }

    fn check_stream(&self, what: &'static str, stream: &HostStream) -> Result<(), DeviceError> {
        self.host.check_stream(what, stream)
    }

    fn create_stream(&self, name: &str) -> Result<HostStream, DeviceError> {
        self.host.create_stream(name)
    }

    fn copy(&self, stream: &HostStream, src: AnySlice, dst: AnySlice) -> Result<(), DeviceError> {
        check_copy(src, dst)?;
        self.check("copy, source", src)?;
        self.check("copy, destination", dst)?;
        let between = src.device() != dst.device();
        let label = if between {
            "copy to or from the host"
        } else {
            "copy"
        };
        let moved = src.len_bytes() as u64 * if between { 1 } else { 2 };
        stream.enqueue_sized(label, Work::bytes(moved), || Ok(()))
    }

    fn fill_zero(&self, stream: &HostStream, dst: AnySlice) -> Result<(), DeviceError> {
        self.check("fill_zero", dst)?;
        let written = Work::bytes(dst.len_bytes() as u64);
        stream.enqueue_sized("fill_zero", written, || Ok(()))
    }

    fn upload(
        &self,
        stream: &HostStream,
        src: &[u8],
        dst: AnySlice,
        limit: Duration,
    ) -> Result<(), DeviceError> {
        same_len("upload", dst.len_bytes(), src.len())?;
        self.check("upload", dst)?;
        stream.enqueue_sized("upload", Work::bytes(src.len() as u64), || Ok(()))?;
        crate::device::Stream::synchronize(stream, limit)
    }

    /// Leaves `dst` as it is.
    fn download(
        &self,
        stream: &HostStream,
        src: AnySlice,
        dst: &mut [u8],
        limit: Duration,
    ) -> Result<(), DeviceError> {
        same_len("download", src.len_bytes(), dst.len())?;
        self.check("download", src)?;
        stream.enqueue_sized("download", Work::bytes(dst.len() as u64), || Ok(()))?;
        crate::device::Stream::synchronize(stream, limit)
    }

    fn wait_for_host(
        &self,
        stream: &HostStream,
        event: &HostEvent,
        _limit: Duration,
    ) -> Result<(), DeviceError> {
        crate::device::Stream::wait(stream, event)
    }

    fn host_waits(
        &self,
        host: &HostStream,
        event: &HostEvent,
        _limit: Duration,
    ) -> Result<(), DeviceError> {
        crate::device::Stream::wait(host, event)
    }
}
