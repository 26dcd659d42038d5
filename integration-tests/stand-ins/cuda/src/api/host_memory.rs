//! Page-locked host memory.

use super::{Out, driver};
use crate::driver::capture::forbid_while_capturing;
use crate::driver::device::current;
use crate::driver::memory;
use crate::driver::space::Kind;
use crate::error::Failure;

/// `CU_MEMHOSTREGISTER_PORTABLE` and `CU_MEMHOSTREGISTER_DEVICEMAP`.
const PORTABLE: u32 = 1;
const DEVICE_MAP: u32 = 2;

driver! {
    cuMemHostAlloc(address: Out<u64>, bytes: usize, _flags: u32) {
        let device = current()?;
        forbid_while_capturing()?;
        address.put(memory::allocate_pinned(device, bytes)?)
    }

    cuMemAllocHost_v2(address: Out<u64>, bytes: usize) {
        let device = current()?;
        forbid_while_capturing()?;
        address.put(memory::allocate_pinned(device, bytes)?)
    }

    cuMemFreeHost(address: u64) {
        current()?;
        forbid_while_capturing()?;
        memory::free_pinned(address)
    }

    cuMemHostRegister_v2(address: u64, bytes: usize, flags: u32) {
        let device = current()?;
        forbid_while_capturing()?;
        if flags & !(PORTABLE | DEVICE_MAP) != 0 {
            return Err(Failure::InvalidValue);
        }
        memory::register(device, address, bytes)
    }

    cuMemHostUnregister(address: u64) {
        current()?;
        forbid_while_capturing()?;
        memory::unregister(address)
    }

    cuMemHostGetDevicePointer_v2(found: Out<u64>, address: u64, _flags: u32) {
        current()?;
        match memory::describe(address)? {
            (_, _, _, Kind::Pinned) => found.put(address),
            _ => Err(Failure::InvalidValue),
        }
    }
}
