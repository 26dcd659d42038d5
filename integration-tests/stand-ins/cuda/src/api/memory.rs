//! Device memory.

use super::{Out, driver};
use crate::driver::capture::forbid_while_capturing;
use crate::driver::device::{current, device};
use crate::driver::op::Op;
use crate::driver::space::Kind;
use crate::driver::{memory, stream};
use crate::error::{Failure, Outcome};

/// Checks that an allocation of device memory starts at `address`.
fn device_start(address: u64) -> Outcome {
    let (_, start, _, kind) = memory::describe(address)?;
    if start == address && kind == Kind::Device {
        Ok(())
    } else {
        Err(Failure::InvalidValue)
    }
}

/// The handle of a device's memory pool: the ordinal plus 1, so that it is not 0.
fn pool(ordinal: i32) -> Outcome<usize> {
    device(ordinal).map(|_| ordinal as usize + 1)
}

fn of_pool(pool: usize) -> Outcome {
    device(i32::try_from(pool).map_err(|_| Failure::InvalidValue)? - 1)
        .map(drop)
        .map_err(|_| Failure::InvalidValue)
}

driver! {
    cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let device = current()?;
        free.put_if_wanted(device.free_bytes() as usize);
        total.put_if_wanted(device.total_bytes() as usize);
        Ok(())
    }

    cuMemAlloc_v2(address: Out<u64>, bytes: usize) {
        let device = current()?;
        forbid_while_capturing()?;
        address.put(memory::allocate(device, bytes)?)
    }

    cuMemFree_v2(address: u64) {
        current()?;
        forbid_while_capturing()?;
        if address == 0 { Ok(()) } else { memory::free(address) }
    }

    cuMemAllocAsync(address: Out<u64>, bytes: usize, on: usize) {
        let stream = stream::stream(on)?;
        current()?;
        if stream.part().is_some() {
            return Err(Failure::NotSupported);
        }
        address.put(memory::allocate(stream.device, bytes)?)
    }

    cuMemFreeAsync(address: u64, on: usize) {
        let stream = stream::stream(on)?;
        current()?;
        if stream.part().is_some() {
            return Err(Failure::NotSupported);
        }
        if address == 0 {
            return Ok(());
        }
        device_start(address)?;
        stream.submit(Op::Free(address))
    }

    cuDeviceGetDefaultMemPool(found: Out<usize>, ordinal: i32) {
        found.put(pool(ordinal)?)
    }

    cuDeviceGetMemPool(found: Out<usize>, ordinal: i32) {
        found.put(pool(ordinal)?)
    }

    cuMemPoolSetAttribute(pool: usize, _attribute: u32, value: usize) {
        of_pool(pool)?;
        if value == 0 { Err(Failure::InvalidValue) } else { Ok(()) }
    }

    cuMemPoolTrimTo(pool: usize, _bytes: usize) {
        of_pool(pool)
    }

    cuPointerGetAttribute(value: *mut u8, attribute: u32, address: u64) {
        let (device, start, bytes, kind) = memory::describe(address)?;
        let is_device = kind != Kind::Pinned;
        match attribute {
            1 => Out(value.cast::<usize>()).put(device.context),
            2 => Out(value.cast::<u32>()).put(if is_device { 2 } else { 1 }),
            3 => Out(value.cast::<u64>()).put(address),
            4 if !is_device => Out(value.cast::<u64>()).put(address),
            8 => Out(value.cast::<u32>()).put(0),
            9 => Out(value.cast::<i32>()).put(device.ordinal as i32),
            11 => Out(value.cast::<u64>()).put(start),
            12 => Out(value.cast::<usize>()).put(bytes as usize),
            13 => Out(value.cast::<u32>()).put(1),
            _ => Err(Failure::InvalidValue),
        }
    }

    cuMemGetAddressRange_v2(start: Out<u64>, bytes: Out<usize>, address: u64) {
        current()?;
        let (_, at, len, _) = memory::describe(address).map_err(|_| Failure::NotFound)?;
        start.put_if_wanted(at);
        bytes.put_if_wanted(len as usize);
        Ok(())
    }
}
