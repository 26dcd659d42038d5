//! Allocations: device memory and page-locked host memory.

use std::sync::Arc;

use super::device::{self, Device};
use super::mapping::Mapping;
use super::space::{self, Kind};
use crate::error::{Failure, Outcome};

/// Offset of an allocation in its first page: CUDA guarantees an alignment of 256 bytes and no more.
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
    space::insert(start, bytes as u64, Kind::Device, device.ordinal, Arc::new(mapping))?;
    charge.keep();
    Ok(start)
}

/// Frees an allocation. A running operation keeps the memory mapped until it ends; a later one fails. The bytes count
/// as free at once. (A GPU's driver waits for all work here; this workspace does not rely on that.)
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
    space::insert(start, bytes as u64, Kind::Pinned, device.ordinal, Arc::new(mapping)).map(|()| start)
}

/// Owner of registered host memory, which belongs to the caller.
struct Registered;

/// Registers host memory of the caller as page-locked.
pub(crate) fn register(device: &'static Device, start: u64, bytes: usize) -> Outcome {
    if start == 0 || bytes == 0 {
        return Err(Failure::InvalidValue);
    }
    space::insert(start, bytes as u64, Kind::Pinned, device.ordinal, Arc::new(Registered))
}

/// Frees or unregisters page-locked memory.
pub(crate) fn free_pinned(start: u64) -> Outcome {
    space::remove(start, Kind::Pinned).map(drop)
}

/// The device that an address belongs to, with the start, length and kind of its range.
pub(crate) fn describe(address: u64) -> Outcome<(&'static Device, u64, u64, Kind)> {
    let space = space::now();
    let (start, range) = space.find(address).ok_or(Failure::InvalidValue)?;
    let device = device::all()?.get(range.device as usize).ok_or(Failure::InvalidDevice)?;
    Ok((device, start, range.bytes, range.kind))
}
