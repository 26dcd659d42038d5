//! Allocations: device memory and page-locked host memory.

use std::sync::Arc;

use super::device::{self, Charge, Device};
use super::mapping::Mapping;
use super::space::{self, Kind};
use crate::error::{Failure, Outcome};

/// What keeps an allocation's memory.
struct Allocation {
    _mapping: Mapping,
    _charge: Option<Charge>,
}

/// CUDA promises 256, and small allocations share pages: here none begins a page.
const WITHIN_PAGE: usize = 256;

/// Memory of exactly `bytes`, and where it begins.
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
    let keep = Arc::new(Allocation { _mapping: mapping, _charge: Some(charge) });
    space::insert(start, bytes as u64, Kind::Device, device.ordinal, keep).map(|()| start)
}

/// Ends an allocation's life: an operation that runs keeps the memory until its end, one that comes later fails.
/// (A GPU's driver waits for all work here; this workspace promises not to rely on that.)
pub(crate) fn free(start: u64) -> Outcome {
    space::remove(start, Kind::Device).map(drop)
}

/// Page-locked host memory.
pub(crate) fn allocate_pinned(device: &'static Device, bytes: usize) -> Outcome<u64> {
    if bytes == 0 {
        return Err(Failure::InvalidValue);
    }
    let (mapping, start) = within_a_page(bytes)?;
    let keep = Arc::new(Allocation { _mapping: mapping, _charge: None });
    space::insert(start, bytes as u64, Kind::Pinned, device.ordinal, keep).map(|()| start)
}

/// What marks memory as the caller's own, only registered.
struct Registered;

/// Page-locks memory of the caller.
pub(crate) fn register(device: &'static Device, start: u64, bytes: usize) -> Outcome {
    if start == 0 || bytes == 0 {
        return Err(Failure::InvalidValue);
    }
    space::insert(start, bytes as u64, Kind::Pinned, device.ordinal, Arc::new(Registered))
}

/// Ends page-locked memory's life.
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
