//! Devices and their attributes.

use std::ffi::c_char;

use super::{Out, driver};
use crate::driver::device::{all, device, init};
use crate::error::Failure;
use crate::settings::settings;

/// The device's name.
const NAME: &[u8] = b"stand-in (PTX on the host)\0";

/// The version of the driver API: CUDA 13.0.
const VERSION: i32 = 13000;

/// The maximum of dynamic plus static shared memory of a block, without and with opt-in.
pub(crate) const SHARED_BYTES: i32 = 48 << 10;
pub(crate) const SHARED_OPTIN_BYTES: i32 = 227 << 10;

/// An attribute of the device by its number in `CUdevice_attribute`.
fn attribute(number: u32, ordinal: i32) -> Option<i32> {
    Some(match number {
        1..=3 => [1024, 1024, 64][number as usize - 1],
        4 => i32::MAX,
        5 | 6 => 65535,
        8 => SHARED_BYTES,
        9 => 64 << 10,
        10 => 32,
        11 => i32::MAX,
        12 | 82 => 65536,
        13 | 36 => 1_000_000,
        // Multiprocessors.
        16 => settings().multiprocessors as i32,
        // A time limit of kernels, an integrated GPU, the compute mode, ECC.
        17 | 18 | 20 | 32 => 0,
        19 | 31 => 1,
        33 => ordinal + 1,
        34 | 50 => 0,
        37 => 64,
        38 => 1 << 20,
        39 => 2048,
        40 => 2,
        // Unified addresses, stream priorities, caches.
        41 | 78 | 79 | 80 => 1,
        75 => 99,
        76 => 0,
        81 => 228 << 10,
        // Managed memory, pageable access and related features.
        83 | 86 | 88 | 89 | 90 | 95 | 98 | 100 | 101 => 0,
        91 | 99 => 1,
        // Waits of streams for 64-bit values.
        93 | 122 => i32::from(settings().memory_waits),
        97 => SHARED_OPTIN_BYTES,
        // Virtual memory management, and sharing by file descriptor.
        102 => 1,
        103 => i32::from(settings().sharing),
        104 | 105 | 107 | 110 | 113 | 116 | 119 | 120 | 121 | 124 | 125 | 128 | 132 => 0,
        106 => 16,
        111 => 1024,
        115 => 1,
        _ => return None,
    })
}

driver! {
    cuInit(flags: u32) {
        if flags != 0 {
            return Err(Failure::InvalidValue);
        }
        init();
        Ok(())
    }

    cuDriverGetVersion(version: Out<i32>) {
        version.put(VERSION)
    }

    cuDeviceGetCount(count: Out<i32>) {
        count.put(all()?.len() as i32)
    }

    cuDeviceGet(found: Out<i32>, ordinal: i32) {
        device(ordinal)?;
        found.put(ordinal)
    }

    cuDeviceGetName(name: *mut c_char, bytes: i32, ordinal: i32) {
        device(ordinal)?;
        let room = usize::try_from(bytes).map_err(|_| Failure::InvalidValue)?;
        if name.is_null() || room == 0 {
            return Err(Failure::InvalidValue);
        }
        for (index, &byte) in NAME.iter().take(room).enumerate() {
            let last = if index + 1 == room { 0 } else { byte };
            Out(name.wrapping_add(index)).put(last as c_char)?;
        }
        Ok(())
    }

    cuDeviceGetAttribute(value: Out<i32>, number: u32, ordinal: i32) {
        device(ordinal)?;
        value.put(attribute(number, ordinal).ok_or(Failure::InvalidValue)?)
    }

    cuDeviceGetPCIBusId(text: *mut c_char, bytes: i32, ordinal: i32) {
        device(ordinal)?;
        // A domain that no machine has.
        let id = format!("FFFE:{ordinal:02X}:00.0\0");
        if text.is_null() || usize::try_from(bytes).map_err(|_| Failure::InvalidValue)? < id.len() {
            return Err(Failure::InvalidValue);
        }
        id.bytes().enumerate().try_for_each(|(index, byte)| Out(text.wrapping_add(index)).put(byte as c_char))
    }

    cuDeviceTotalMem_v2(bytes: Out<usize>, ordinal: i32) {
        bytes.put(device(ordinal)?.total_bytes() as usize)
    }

    cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, ordinal: i32) {
        device(ordinal)?;
        let mut bytes = *b"zero-stand-in\0\0\0";
        bytes[12..].copy_from_slice(&ordinal.to_be_bytes());
        uuid.put(bytes)
    }

    cuDeviceCanAccessPeer(can: Out<i32>, from: i32, to: i32) {
        device(from)?;
        device(to)?;
        can.put(i32::from(from != to))
    }
}
