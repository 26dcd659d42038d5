//! The configuration of a non-blocking NCCL communicator.

use std::ffi::{c_char, c_int, c_uint};
use std::mem::offset_of;

use cudarc::nccl::sys;

/// `ncclConfig_t` of NCCL 2.18. Newer libraries accept it and use defaults for the fields that it
/// lacks. NCCL's environment variables determine undefined fields.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

// The fields are a prefix of cudarc's `ncclConfig_t`.
const _: () = assert!(offset_of!(Config, blocking) == offset_of!(sys::ncclConfig_t, blocking));
const _: () = assert!(offset_of!(Config, net_name) == offset_of!(sys::ncclConfig_t, netName));
const _: () = assert!(offset_of!(Config, split_share) == offset_of!(sys::ncclConfig_t, splitShare));

/// The size to report to NCCL, without the padding after the last field, where later versions have
/// another field.
const BYTES: usize = offset_of!(Config, split_share) + size_of::<c_int>();

const UNDEFINED: c_int = c_int::MIN;

impl Config {
    pub(super) const fn without_blocking() -> Self {
        Self {
            size: BYTES,
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }

    pub(super) fn as_ptr(&mut self) -> *mut sys::ncclConfig_t {
        std::ptr::from_mut(self).cast()
    }
}
