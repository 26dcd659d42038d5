//! Modules of machine code, and the kernels in them.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::sys;

use super::{Context, Queue, SUCCESS};
use crate::device::DeviceError;

const LOG_BYTES: usize = 8 << 10;

/// A loaded module.
pub(in super::super) struct Code {
    context: Arc<Context>,
    raw: sys::CUmodule,
}

// SAFETY: any thread may use any handle.
unsafe impl Send for Code {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for Code {}

impl Code {
    /// Loads a cubin or fatbin, or PTX that ends in a zero byte.
    pub(in super::super) fn load(context: &Arc<Context>, image: &[u8]) -> Result<Self, DeviceError> {
        let refused =
            |message: &str| Err(DeviceError::Driver { call: "cuModuleLoadData", message: message.to_owned() });
        // The driver takes an address without a length: machine code says its own, text ends in a zero byte.
        let machine_code = image.starts_with(b"\x7fELF") || image.starts_with(&0xba55_ed50u32.to_le_bytes());
        if image.len() < 4 {
            return refused("the image is neither machine code nor PTX");
        }
        if !machine_code && image.last() != Some(&0) {
            return refused("the image is no machine code, and PTX must end in a zero byte");
        }
        context.bind()?;
        let mut log = vec![0u8; LOG_BYTES];
        let mut options =
            [sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER, sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        // The second value is the number itself, in the place of an address.
        let mut values = [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut::<c_void>(LOG_BYTES)];
        let (driver, mut raw) = (context.driver, std::ptr::null_mut());
        let load = driver.table.cuModuleLoadDataEx;
        // SAFETY: an image with its own end, two options with their values, a buffer of the size said; writes one
        // handle.
        let code = unsafe { load(&raw mut raw, image.as_ptr().cast(), 2, options.as_mut_ptr(), values.as_mut_ptr()) };
        if code != SUCCESS {
            let mut error = driver.error("cuModuleLoadData", code);
            let said = String::from_utf8_lossy(&log);
            let said = said.split('\0').next().unwrap_or_default().trim();
            if let DeviceError::Driver { message, .. } = &mut error
                && !said.is_empty()
            {
                *message = format!("{message}: {said}");
            }
            return Err(error);
        }
        Ok(Self { context: Arc::clone(context), raw })
    }
}

impl Drop for Code {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: loaded by `load`, unloaded once; every entry holds this alive.
            unsafe { (self.context.driver.table.cuModuleUnload)(self.raw) };
        }
    }
}

/// A kernel of a module.
pub(in super::super) struct Entry {
    code: Arc<Code>,
    raw: sys::CUfunction,
}

// SAFETY: any thread may use any handle.
unsafe impl Send for Entry {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for Entry {}

impl Entry {
    pub(in super::super) fn find(code: &Arc<Code>, name: &str) -> Result<Self, DeviceError> {
        let call = "cuModuleGetFunction";
        let context = &code.context;
        let c_name = CString::new(name)
            .map_err(|_| DeviceError::Driver { call, message: format!("{name:?} has a zero byte in it") })?;
        context.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module lives; the name ends in a zero byte; writes one handle.
        let found = unsafe { (context.driver.table.cuModuleGetFunction)(&raw mut raw, code.raw, c_name.as_ptr()) };
        context.driver.check(call, found).map_err(|error| match error {
            DeviceError::Driver { message, .. } => {
                DeviceError::Driver { call, message: format!("{message}: {name}") }
            }
            other => other,
        })?;
        Ok(Self { code: Arc::clone(code), raw })
    }

    pub(in super::super) fn raw(&self) -> sys::CUfunction {
        self.raw
    }

    pub(in super::super) fn attribute(&self, which: sys::CUfunction_attribute) -> Result<u32, DeviceError> {
        let context = &self.code.context;
        context.bind()?;
        let mut value = 0;
        // SAFETY: the function lives; writes one number.
        let code = unsafe { (context.driver.table.cuFuncGetAttribute)(&raw mut value, which, self.raw) };
        context.driver.check("cuFuncGetAttribute", code)?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    pub(in super::super) fn allow_shared_bytes(&self, bytes: u32) -> Result<(), DeviceError> {
        let context = &self.code.context;
        context.bind()?;
        let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
        // SAFETY: the function lives.
        let code = unsafe { (context.driver.table.cuFuncSetAttribute)(self.raw, which, bytes) };
        context.driver.check("cuFuncSetAttribute", code)
    }

    /// How many blocks of `threads` run on one multiprocessor at once.
    pub(in super::super) fn blocks_per_multiprocessor(
        &self,
        threads: u32,
        shared_bytes: u32,
    ) -> Result<u32, DeviceError> {
        let context = &self.code.context;
        context.bind()?;
        let (mut blocks, threads) = (0, i32::try_from(threads).unwrap_or(i32::MAX));
        let ask = context.driver.table.cuOccupancyMaxActiveBlocksPerMultiprocessor;
        // SAFETY: the function lives; writes one number.
        let code = unsafe { ask(&raw mut blocks, self.raw, threads, shared_bytes as usize) };
        context.driver.check("cuOccupancyMaxActiveBlocksPerMultiprocessor", code)?;
        Ok(u32::try_from(blocks).unwrap_or(0))
    }

    /// Enqueues the kernel.
    ///
    /// # Safety
    /// `args` point to values of the kernel's parameters, as many as it has; what the kernel touches is valid, and
    /// conflicting accesses are ordered by streams and events.
    pub(in super::super) unsafe fn launch(
        &self,
        queue: &Queue,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        args: &mut [*mut c_void],
    ) -> Result<(), DeviceError> {
        let context = &self.code.context;
        context.bind()?;
        let ([gx, gy, gz], [bx, by, bz]) = (grid, block);
        let launch = context.driver.table.cuLaunchKernel;
        let (args, none) = (args.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: function and stream live; the rest is the caller's promise. The arguments are read before the call
        // returns.
        let code = unsafe { launch(self.raw, gx, gy, gz, bx, by, bz, shared_bytes, queue.raw, args, none) };
        context.driver.check("cuLaunchKernel", code)
    }
}
