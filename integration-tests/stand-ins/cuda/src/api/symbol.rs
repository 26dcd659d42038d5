//! Names of error codes and addresses of functions. Host functions may call these.

use std::ffi::c_char;

use super::{Out, Text, address_of};
use crate::error::{Failure, describe, say};

/// `cuGetErrorName` of the CUDA driver.
///
/// # Safety
/// `name` is null or valid for a write.
#[allow(non_snake_case)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: u32, name: Out<*const c_char>) -> u32 {
    put(describe(code).map(|(name, _)| name), &name)
}

/// `cuGetErrorString` of the CUDA driver.
///
/// # Safety
/// `text` is null or valid for a write.
#[allow(non_snake_case)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(code: u32, text: Out<*const c_char>) -> u32 {
    put(describe(code).map(|(_, text)| text), &text)
}

fn put(found: Option<&'static str>, place: &Out<*const c_char>) -> u32 {
    let pointer = found.map_or(std::ptr::null(), |text| text.as_ptr().cast());
    match place.put(pointer) {
        Ok(()) if found.is_some() => 0,
        _ => Failure::InvalidValue as u32,
    }
}

/// `cuGetProcAddress_v2` of the CUDA driver: the newest version of the function, whatever version
/// is requested.
///
/// # Safety
/// `symbol` is null or a string, `found` and `status` are null or valid for a write.
#[allow(non_snake_case)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: Text,
    found: Out<*const std::ffi::c_void>,
    _version: i32,
    _flags: u64,
    status: Out<u32>,
) -> u32 {
    let Ok(name) = symbol.get() else {
        return Failure::InvalidValue as u32;
    };
    let address = address_of(&name);
    // 0: found; 1: no such symbol.
    status.put_if_wanted(u32::from(address.is_none()));
    if found.put(address.unwrap_or(std::ptr::null())).is_err() {
        return Failure::InvalidValue as u32;
    }
    if address.is_none() {
        say!("cuGetProcAddress: there is no {name}");
    }
    if address.is_some() {
        0
    } else {
        Failure::NotFound as u32
    }
}

/// `cuGetExportTable` of the CUDA driver: always fails. NVRTC calls it and crashes if the function
/// is missing.
///
/// # Safety
/// `table` is null or valid for a write.
#[allow(non_snake_case)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetExportTable(
    table: Out<*const std::ffi::c_void>,
    _id: *const [u8; 16],
) -> u32 {
    table.put_if_wanted(std::ptr::null());
    Failure::NotFound as u32
}

pub(super) fn lookup(name: &str) -> Option<*const std::ffi::c_void> {
    match name {
        "cuGetErrorName" => Some(cuGetErrorName as *const std::ffi::c_void),
        "cuGetExportTable" => Some(cuGetExportTable as *const std::ffi::c_void),
        "cuGetErrorString" => Some(cuGetErrorString as *const std::ffi::c_void),
        "cuGetProcAddress_v2" => Some(cuGetProcAddress_v2 as *const std::ffi::c_void),
        _ => None,
    }
}
