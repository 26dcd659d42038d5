//! Virtual memory management: address ranges, physical memory, mappings.

use super::{In, Out, driver};
use crate::driver::device::{all, current, device};
use crate::driver::pages;
use crate::error::{Failure, Outcome};
use crate::settings::settings;

/// `CUmemAllocationHandleType`: POSIX file descriptor and fabric (NVLink) handle.
const DESCRIPTOR: u32 = 1;
const FABRIC: u32 = 8;

/// `CUmemLocation`: a kind (1 is a device) and an id.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Location {
    kind: u32,
    id: i32,
}

/// `CUmemAllocationProp`: properties of physical memory. Only pinned device memory is supported.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AllocationProperties {
    kind: u32,
    handle_types: u32,
    location: Location,
    windows: usize,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`: a device and its access (0 none, 1 read, 3 read and write).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AccessDescription {
    location: Location,
    flags: u32,
}

impl Location {
    /// The device of this ordinal.
    pub fn of_device(ordinal: i32) -> Self {
        Self {
            kind: 1,
            id: ordinal,
        }
    }

    fn device(self) -> Outcome<i32> {
        if self.kind != 1 {
            return Err(Failure::InvalidValue);
        }
        device(self.id).map(|_| self.id)
    }
}

impl AllocationProperties {
    /// Memory of the device of this ordinal.
    pub fn of_device(ordinal: i32) -> Self {
        Self::shared(ordinal, 0)
    }

    /// Memory of the device that can be exported by handles of these types.
    pub fn shared(ordinal: i32, handle_types: u32) -> Self {
        Self {
            kind: 1,
            handle_types,
            location: Location::of_device(ordinal),
            windows: 0,
            flags: [0; 8],
        }
    }

    fn device(self) -> Outcome<i32> {
        if self.kind != 1 {
            return Err(Failure::InvalidValue);
        }
        // Fabric handles fail as on a machine without the permission for them. Windows handles are
        // not supported.
        match self.handle_types {
            0 => {}
            DESCRIPTOR if settings().sharing => {}
            both if both == DESCRIPTOR | FABRIC && settings().sharing => {
                return Err(Failure::NotPermitted);
            }
            _ => return Err(Failure::NotSupported),
        }
        self.location.device()
    }
}

impl AccessDescription {
    /// Read and write access of the device of this ordinal, or no access.
    pub fn of_device(ordinal: i32, allow: bool) -> Self {
        Self {
            location: Location::of_device(ordinal),
            flags: if allow { 3 } else { 0 },
        }
    }
}

driver! {
    cuMemGetAllocationGranularity(bytes: Out<usize>, properties: In<AllocationProperties>, _option: u32) {
        all()?;
        properties.get()?.device()?;
        bytes.put(pages::GRANULARITY)
    }

    cuMemAddressReserve(address: Out<u64>, bytes: usize, alignment: usize, _wish: u64, flags: u64) {
        all()?;
        if flags != 0 {
            return Err(Failure::InvalidValue);
        }
        address.put(pages::reserve(bytes, alignment)?)
    }

    cuMemAddressFree(address: u64, bytes: usize) {
        all()?;
        pages::free_reservation(address, bytes)
    }

    cuMemCreate(handle: Out<u64>, bytes: usize, properties: In<AllocationProperties>, flags: u64) {
        all()?;
        if flags != 0 {
            return Err(Failure::InvalidValue);
        }
        let properties = properties.get()?;
        let ordinal = properties.device()?;
        handle.put(pages::create(device(ordinal)?, bytes, properties.handle_types)? as u64)
    }

    cuMemRetainAllocationHandle(handle: Out<u64>, address: u64) {
        all()?;
        handle.put(pages::retain(address)? as u64)
    }

    cuMemGetAllocationPropertiesFromHandle(properties: Out<AllocationProperties>, handle: u64) {
        all()?;
        let (ordinal, handle_types) = pages::properties(handle as usize)?;
        properties.put(AllocationProperties::shared(ordinal, handle_types))
    }

    cuMemRelease(handle: u64) {
        all()?;
        pages::release(handle as usize)
    }

    cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) {
        all()?;
        if flags != 0 {
            return Err(Failure::InvalidValue);
        }
        pages::map(address, bytes, offset, handle as usize)
    }

    cuMemUnmap(address: u64, bytes: usize) {
        all()?;
        pages::unmap_range(address, bytes)
    }

    cuMemSetAccess(address: u64, bytes: usize, descriptions: In<AccessDescription>, count: usize) {
        all()?;
        if count == 0 {
            return Err(Failure::InvalidValue);
        }
        for index in 0..count {
            let description = descriptions.at(index)?;
            description.location.device()?;
            match description.flags {
                0 => pages::set_access(address, bytes, false)?,
                3 => pages::set_access(address, bytes, true)?,
                _ => return Err(Failure::NotSupported),
            }
        }
        // As on a GPU, no context needs to be current, but a failed current context is an error.
        match current() {
            Err(Failure::InvalidContext) | Ok(_) => Ok(()),
            Err(failed) => Err(failed),
        }
    }
}
