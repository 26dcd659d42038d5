//! Pinned host memory.

use std::ptr::NonNull;
use std::sync::Arc;

use super::CudaDevice;
use super::driver::Context;
use crate::device::{DeviceError, DeviceId, Memory};

/// The alignment that CUDA guarantees for all its allocations, in bytes.
const ALIGN_BYTES: usize = 256;

/// Pinned host memory of a device's context (`cuMemHostAlloc`, flags 0: cached, so that the host reads it fast).
///
/// Host code reads and writes it, and [`CudaDevice`]'s `copy` accepts its slices on either side; an allocation must
/// live until those copies have run. Allocating and freeing may wait for the device.
#[derive(Clone)]
pub struct PinnedMemory(Arc<Context>);

impl std::fmt::Debug for PinnedMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PinnedMemory(of device {})", self.0.ordinal())
    }
}

impl PinnedMemory {
    /// Pinned memory for copies from and to `device`.
    pub fn new(device: &CudaDevice) -> Self {
        Self(Arc::clone(device.context()))
    }
}

// SAFETY: the driver's allocations have no other owner; `allocate` checks their alignment.
unsafe impl Memory for PinnedMemory {
    fn id(&self) -> DeviceId {
        DeviceId::PINNED
    }

    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        let ptr = self.0.allocate_pinned(bytes)?;
        let at = ptr.addr().get();
        if at % ALIGN_BYTES != 0 {
            // SAFETY: allocated above and unused.
            unsafe { self.0.deallocate_pinned(ptr) };
            let message = format!("{at:#x} is not aligned to {ALIGN_BYTES} bytes");
            return Err(DeviceError::Driver { call: "cuMemHostAlloc", message });
        }
        Ok(ptr)
    }

    unsafe fn deallocate(&self, ptr: NonNull<u8>, _bytes: usize) {
        // SAFETY: the caller's promise: it came from `allocate`, nothing uses it, and it is freed once.
        unsafe { self.0.deallocate_pinned(ptr) };
    }

    fn granularity_bytes(&self) -> usize {
        ALIGN_BYTES
    }
}
