//! Pinned host memory.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::CudaDevice;
use super::driver::Context;
use super::{numa, pageable};
use crate::device::{DeviceError, DeviceId, Memory};
use crate::host::mapping;

/// The pinned memory of a device.
pub(super) struct Pins {
    context: Arc<Context>,
    page_bytes: usize,
    live_bytes: AtomicUsize,
    /// Bytes that the system refused to pin so far, and its message.
    refused: Mutex<Option<(usize, String)>>,
    /// Why pages could not be placed on the device's NUMA node.
    misplaced: Mutex<Option<String>>,
}

impl Pins {
    pub(super) fn new(context: &Arc<Context>) -> Self {
        let page_bytes = mapping::page_bytes();
        let live_bytes = AtomicUsize::new(0);
        Self {
            context: Arc::clone(context),
            page_bytes,
            live_bytes,
            refused: Mutex::default(),
            misplaced: Mutex::default(),
        }
    }

    fn whole_pages(&self, bytes: usize) -> Option<usize> {
        bytes.max(1).checked_next_multiple_of(self.page_bytes)
    }
}

/// Pinned host memory of a GPU, in whole pages: mapped from the system on the GPU's NUMA node,
/// where there are several, and registered with the driver (`cuMemHostRegister`). It is zeroed.
///
/// Host code reads and writes it, and [`CudaDevice`]'s `copy` accepts its slices on either side; an
/// allocation must live until those copies have run. Allocating and freeing may wait for the
/// device. Pinning takes time for each page, so allocate large pieces at the start, before the
/// first collective.
///
/// If the system refuses to pin memory (`ulimit -l`), an allocation stays pageable: the same copies
/// work, slower, and [`PinnedMemory::notices`] says so.
///
/// All handles of one [`CudaDevice`] and its clones have the same counters and notices.
#[derive(Clone)]
pub struct PinnedMemory(Arc<Pins>);

impl std::fmt::Debug for PinnedMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PinnedMemory(of device {})", self.0.context.ordinal())
    }
}

impl PinnedMemory {
    /// Pinned memory for copies from and to `device`.
    pub fn new(device: &CudaDevice) -> Self {
        Self(Arc::clone(device.pins()))
    }

    /// Bytes of live allocations: whole pages, and nothing else.
    pub fn live_bytes(&self) -> usize {
        self.0.live_bytes.load(Ordering::Relaxed)
    }

    /// The parts that are slower than requested, with reason and remedy; empty if none is.
    pub fn notices(&self) -> Vec<String> {
        let refused = self.0.refused.lock().as_ref().map(|(bytes, message)| {
            format!(
                "{bytes} bytes of host memory for GPU {} are not pinned ({message}): a host thread copies them once more \
                 through a small buffer, one copy at a time, which does not overlap; raise the limit of locked memory \
                 (ulimit -l{})",
                self.0.context.ordinal(),
                locked_limit_bytes().map(|bytes| format!(", now {bytes} bytes")).unwrap_or_default()
            )
        });
        let misplaced = self.0.misplaced.lock().as_ref().map(|message| {
            format!(
                "host memory for GPU {} may be on another NUMA node than the GPU ({message}): copies can be slower; allow \
                 the system call mbind, or start the program with numactl --preferred",
                self.0.context.ordinal()
            )
        });
        refused.into_iter().chain(misplaced).collect()
    }
}

/// The limit of locked memory, if there is one.
fn locked_limit_bytes() -> Option<u64> {
    #[cfg(target_os = "linux")]
    {
        rustix::process::getrlimit(rustix::process::Resource::Memlock).current
    }
    #[cfg(not(target_os = "linux"))]
    None
}

// SAFETY: mappings have no other owner, the system aligns them to its pages, and they are zeroed
// host memory.
unsafe impl Memory for PinnedMemory {
    fn id(&self) -> DeviceId {
        DeviceId::PINNED
    }

    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        let pins = &*self.0;
        let out_of_memory = |detail: String| DeviceError::OutOfMemory {
            requested_bytes: bytes,
            detail,
        };

        let len = pins
            .whole_pages(bytes)
            .ok_or_else(|| out_of_memory("beyond the address space".into()))?;
        let ptr = mapping::map(len).map_err(|error| {
            out_of_memory(format!(
                "host memory to pin: {error}; check the memory of the machine and ulimit -v"
            ))
        })?;

        // Before the driver touches the pages.
        if let Some(node) = numa::node_of(pins.context.ordinal())
            && let Err(error) = numa::prefer(ptr, len, node)
        {
            *pins.misplaced.lock() = Some(format!("mbind to node {node}: {error}"));
        }

        // SAFETY: mapped above, and unmapped by `deallocate` after it is unregistered.
        match unsafe { pins.context.register(ptr, len) } {
            Ok(None) => {}
            Ok(Some(message)) => {
                pageable::insert(ptr.addr().get(), len);
                let before = pins.refused.lock().take().map_or(0, |(bytes, _)| bytes);
                *pins.refused.lock() = Some((before.saturating_add(len), message));
            }
            Err(error) => {
                // SAFETY: mapped above with this length, and unused.
                unsafe { mapping::unmap(ptr, len) };
                return Err(error);
            }
        }

        pins.live_bytes.fetch_add(len, Ordering::Relaxed);
        Ok(ptr)
    }

    unsafe fn deallocate(&self, ptr: NonNull<u8>, bytes: usize) {
        let pins = &*self.0;
        let Some(len) = pins.whole_pages(bytes) else {
            return;
        };
        if !pageable::remove(ptr.addr().get()) {
            // SAFETY: the caller's promise: `allocate` registered it, nothing uses it, and it is
            // freed once.
            unsafe { pins.context.unregister(ptr) };
        }
        // SAFETY: as above; `allocate` mapped it with this length.
        unsafe { mapping::unmap(ptr, len) };
        pins.live_bytes.fetch_sub(len, Ordering::Relaxed);
    }

    fn granularity_bytes(&self) -> usize {
        self.0.page_bytes
    }
}
