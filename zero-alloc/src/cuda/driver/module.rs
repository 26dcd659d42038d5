//! Modules of machine code, and their kernels.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::sys;

use super::{Context, Queue, SUCCESS};
use crate::device::DeviceError;

const LOG_BYTES: usize = 8 << 10;

/// A loaded module.
pub(crate) struct Code {
    context: Arc<Context>,
    raw: sys::CUmodule,
}

// SAFETY: any thread may use any handle.
unsafe impl Send for Code {}
// SAFETY: as above; the driver synchronizes its own state.
unsafe impl Sync for Code {}

impl Code {
    /// Loads a cubin or fatbin, or PTX that ends in a zero byte.
    ///
    /// # Safety
    /// Machine code is complete: the driver reads as many bytes as its headers declare.
    pub(crate) unsafe fn load(context: &Arc<Context>, image: &[u8]) -> Result<Self, DeviceError> {
        let call = "cuModuleLoadData";
        let refused = |message: &str| {
            Err(DeviceError::Driver {
                call,
                message: message.to_owned(),
            })
        };

        // The driver receives an address without a length: machine code contains its length, PTX
        // ends in a zero byte.
        let machine_code =
            image.starts_with(b"\x7fELF") || image.starts_with(&0xba55_ed50u32.to_le_bytes());
        if image.len() < 4 {
            return refused("the image is neither machine code nor PTX");
        }
        if !machine_code && image.last() != Some(&0) {
            return refused("the image is not machine code, and PTX must end in a zero byte");
        }
        let driver = context.bind()?;
        let mut log = vec![0u8; LOG_BYTES];
        let mut options = [
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        // The second value is a number that is passed as an address.
        let mut values = [
            log.as_mut_ptr().cast(),
            std::ptr::without_provenance_mut::<c_void>(LOG_BYTES),
        ];
        let load = driver.table.cuModuleLoadDataEx;
        let mut raw = std::ptr::null_mut();

        // SAFETY: PTX with its end, as checked above, or complete machine code, as the caller
        // promises; two options with their values, a buffer of LOG_BYTES; writes one handle.
        let code = unsafe {
            load(
                &raw mut raw,
                image.as_ptr().cast(),
                2,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };

        if code != SUCCESS {
            let mut error = driver.error(call, code);
            let log = String::from_utf8_lossy(&log);
            let log = log.split('\0').next().unwrap_or_default().trim();
            if let DeviceError::Driver { message, .. } = &mut error
                && !log.is_empty()
            {
                *message = format!("{message}: {log}");
            }
            return Err(error);
        }

        Ok(Self {
            context: Arc::clone(context),
            raw,
        })
    }
}

impl Drop for Code {
    fn drop(&mut self) {
        if let Ok(driver) = self.context.bind() {
            // SAFETY: loaded by `load`, unloaded once; every entry holds this alive.
            unsafe { (driver.table.cuModuleUnload)(self.raw) };
        }
    }
}

/// A kernel of a module.
pub(crate) struct Entry {
    code: Arc<Code>,
    raw: sys::CUfunction,
}

// SAFETY: any thread may use any handle.
unsafe impl Send for Entry {}
// SAFETY: as above; the driver synchronizes its own state.
unsafe impl Sync for Entry {}

impl Entry {
    /// Finds and loads a kernel. Loading at its first launch could wait for the whole device;
    /// reading an attribute loads it now.
    pub(crate) fn find(code: &Arc<Code>, name: &str) -> Result<Self, DeviceError> {
        let call = "cuModuleGetFunction";
        let c_name = CString::new(name).map_err(|_| DeviceError::Driver {
            call,
            message: format!("{name:?} contains a zero byte"),
        })?;

        let driver = code.context.bind()?;
        let mut raw = std::ptr::null_mut();
        let mut registers = 0;
        // SAFETY: the module is loaded; the name is a C string; writes one handle.
        unsafe {
            call!(
                driver,
                cuModuleGetFunction(&raw mut raw, code.raw, c_name.as_ptr())
            )
        }
        .map_err(|error| match error {
            DeviceError::Driver { message, .. } => DeviceError::Driver {
                call,
                message: format!("{message}: {name}"),
            },
            other => other,
        })?;

        let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
        // SAFETY: a kernel of the module; writes one number.
        unsafe { call!(driver, cuFuncGetAttribute(&raw mut registers, which, raw)) }?;
        Ok(Self {
            code: Arc::clone(code),
            raw,
        })
    }

    pub(crate) fn allow_shared_bytes(&self, bytes: u32) -> Result<(), DeviceError> {
        let driver = self.code.context.bind()?;
        let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
        // SAFETY: the kernel's module is loaded.
        unsafe { call!(driver, cuFuncSetAttribute(self.raw, which, bytes)) }
    }

    /// Enqueues the kernel.
    ///
    /// # Safety
    /// `args` point to values of the kernel's parameters, one each; memory that the kernel accesses
    /// is valid, and conflicting accesses are ordered by streams and events.
    pub(crate) unsafe fn launch(
        &self,
        queue: &Queue,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        args: &mut [*mut c_void],
    ) -> Result<(), DeviceError> {
        let driver = self.code.context.bind()?;
        let ([gx, gy, gz], [bx, by, bz], launch) = (grid, block, driver.table.cuLaunchKernel);
        let args = args.as_mut_ptr();
        let none = std::ptr::null_mut();
        // SAFETY: kernel and stream are live; the rest is the caller's promise. The arguments are
        // read before the call returns.
        let code = unsafe {
            launch(
                self.raw,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                shared_bytes,
                queue.raw(),
                args,
                none,
            )
        };

        driver.check("cuLaunchKernel", code)
    }
}
