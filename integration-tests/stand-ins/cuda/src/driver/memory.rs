//! Allocations: device memory and page-locked host memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::device::{self, Device};
use super::mapping::Mapping;
use super::space::{self, Kind};
use crate::error::{Failure, Outcome, say};
use crate::settings::settings;

/// Offset of an allocation in its first page: CUDA guarantees an alignment of 256 bytes and no
/// more.
const WITHIN_PAGE: usize = 256;

/// Memory of `bytes` at offset [`WITHIN_PAGE`] of a page, and its address.
fn within_a_page(bytes: usize) -> Outcome<(Mapping, u64)> {
    let whole = bytes.checked_add(WITHIN_PAGE).ok_or(Failure::OutOfMemory)?;
    let mapping = Mapping::memory(whole).map_err(|_| Failure::OutOfMemory)?;
    let start = mapping.start() + WITHIN_PAGE as u64;
    Ok((mapping, start))
}

/// Device memory of exactly `bytes`.
pub(crate) fn allocate(device: &'static Device, bytes: usize) -> Outcome<u64> {
    if bytes == 0 {
        return Err(Failure::InvalidValue);
    }
    let charge = device.charge(bytes as u64)?;
    let (mapping, start) = within_a_page(bytes)?;
    space::insert(
        start,
        bytes as u64,
        Kind::Device,
        device.ordinal,
        Arc::new(mapping),
    )?;
    charge.keep();
    Ok(start)
}

/// Frees an allocation. A running operation keeps the memory mapped until it ends; a later one
/// fails. The bytes count as free at once. (A GPU's driver waits for all work here; this workspace
/// does not rely on that.)
pub(crate) fn free(start: u64) -> Outcome {
    let range = space::remove(start, Kind::Device)?;
    device::device(range.device as i32)?.uncharge(range.bytes);
    Ok(())
}

/// Frees all allocations of a device, as the end of its context does.
pub(crate) fn free_all(device: &'static Device) {
    device.uncharge(space::forget(device.ordinal));
}

/// Page-locked host memory.
pub(crate) fn allocate_pinned(device: &'static Device, bytes: usize) -> Outcome<u64> {
    if bytes == 0 {
        return Err(Failure::InvalidValue);
    }
    let (mapping, start) = within_a_page(bytes)?;
    space::insert(
        start,
        bytes as u64,
        Kind::Pinned,
        device.ordinal,
        Arc::new(mapping),
    )
    .map(|()| start)
}

/// Bytes of registered host memory, of all devices.
static REGISTERED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Registered host memory, which belongs to the caller.
struct Registered(u64);

impl Drop for Registered {
    fn drop(&mut self) {
        REGISTERED_BYTES.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Whether the process has memory at all of these addresses.
fn is_mapped(start: u64, bytes: u64) -> bool {
    const PAGE: u64 = 4096;
    let (first, Some(end)) = (start / PAGE * PAGE, start.checked_add(bytes)) else {
        return false;
    };
    let mut resident = vec![0u8; end.saturating_sub(first).div_ceil(PAGE) as usize];
    // SAFETY: reads no memory at the address; `resident` has a byte for each page.
    unsafe {
        libc::mincore(
            first as *mut libc::c_void,
            (end - first) as usize,
            resident.as_mut_ptr(),
        ) == 0
    }
}

/// Registers host memory of the caller as page-locked. Fails as without a right to lock memory
/// above the limit of `ZERO_STANDIN_PINNED_BYTES`.
pub(crate) fn register(device: &'static Device, start: u64, bytes: usize) -> Outcome {
    let bytes = bytes as u64;
    if start == 0 || bytes == 0 {
        return Err(Failure::InvalidValue);
    }

    if !is_mapped(start, bytes) {
        say!("registering {bytes} bytes at {start:#x}, of which not all are mapped");
        return Err(Failure::InvalidValue);
    }

    let limit = settings().pinned_bytes;
    let added = |all: u64| {
        all.checked_add(bytes)
            .filter(|&all| limit.is_none_or(|limit| all <= limit))
    };

    REGISTERED_BYTES
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, added)
        .map_err(|_| Failure::OutOfMemory)?;
    space::insert(
        start,
        bytes,
        Kind::Pinned,
        device.ordinal,
        Arc::new(Registered(bytes)),
    )
}

fn is_registered(start: u64) -> bool {
    space::now()
        .find(start)
        .is_some_and(|(at, range)| at == start && range.is_kept_by::<Registered>())
}

/// Unregisters memory, which must still be mapped.
pub(crate) fn unregister(start: u64) -> Outcome {
    if !is_registered(start) {
        return Err(Failure::HostMemoryNotRegistered);
    }
    let range = space::remove(start, Kind::Pinned)?;
    if !is_mapped(start, range.bytes) {
        say!(
            "{} bytes at {start:#x} were unmapped before they were unregistered",
            range.bytes
        );
        return Err(Failure::InvalidValue);
    }
    Ok(())
}

/// Frees page-locked memory.
pub(crate) fn free_pinned(start: u64) -> Outcome {
    if is_registered(start) {
        say!("memory at {start:#x} is registered, not allocated: unregister it");
        return Err(Failure::InvalidValue);
    }
    space::remove(start, Kind::Pinned).map(drop)
}

/// The device that an address belongs to, with the start, length and kind of its range.
pub(crate) fn describe(address: u64) -> Outcome<(&'static Device, u64, u64, Kind)> {
    let space = space::now();
    let (start, range) = space.find(address).ok_or(Failure::InvalidValue)?;
    let device = device::all()?
        .get(range.device as usize)
        .ok_or(Failure::InvalidDevice)?;
    Ok((device, start, range.bytes, range.kind))
}
