//! The driver API; no other module calls it. The types here own their handles. They are safe to use
//! from the rest of the back end, except where a `# Safety` section states conditions.
//!
//! Two facts of CUDA are the basis of most proofs below: any thread may use any handle, and the
//! driver checks arguments other than pointers itself.

/// Calls a function of the driver by name. Its error names the function.
macro_rules! call {
    ($driver:expr, $function:ident($($arg:expr),* $(,)?)) => {
        $driver.check(stringify!($function), ($driver.table.$function)($($arg),*))
    };
}

/// As `call!`, for calls that allocate this many bytes.
macro_rules! call_memory {
    ($driver:expr, $bytes:expr, $function:ident($($arg:expr),* $(,)?)) => {
        $driver.check_memory(stringify!($function), ($driver.table.$function)($($arg),*), $bytes)
    };
}

mod context;
mod memory;
mod module;
mod queue;
mod table;
mod words;

use std::ffi::{CStr, c_char, c_int};
use std::ptr::NonNull;
use std::sync::OnceLock;

use cudarc::driver::sys;

use self::table::Table;
use crate::device::DeviceError;
use crate::library::{Library, MissingFunction};

pub(super) use context::Context;
pub(super) use memory::{BUFFER_BYTES, Pages};
pub(super) use module::{Code, Entry};
pub(super) use queue::{Point, Queue, Recording};

const SUCCESS: c_int = 0;
const OUT_OF_MEMORY: c_int = 2;
/// The codes with which the driver refuses to pin memory: out of memory, a failed system call, not
/// permitted (limits of the system), not supported.
const PINNING_REFUSED: [c_int; 4] = [OUT_OF_MEMORY, 304, 800, 801];
const NO_DEVICE: c_int = 100;
const NOT_READY: c_int = 600;

/// The library's names, best first.
const NAMES: &[&str] = if cfg!(windows) {
    &["nvcuda.dll"]
} else {
    &["libcuda.so.1", "libcuda.so"]
};

/// The address that the call `call` returned.
fn non_null(call: &'static str, ptr: *mut u8) -> Result<NonNull<u8>, DeviceError> {
    NonNull::new(ptr).ok_or_else(|| DeviceError::Driver {
        call,
        message: "it returned a null address".into(),
    })
}

/// The loaded driver.
pub(super) struct Driver {
    table: Table,
    /// The code that `cuInit` returned.
    init: c_int,
}

impl Driver {
    /// The driver of this machine; loaded once in a process.
    pub(super) fn get() -> Result<&'static Self, DeviceError> {
        static FOUND: OnceLock<Result<Driver, DeviceError>> = OnceLock::new();
        FOUND
            .get_or_init(|| Self::find_among(NAMES))
            .as_ref()
            .map_err(Clone::clone)
    }

    /// Loads the first library of `names` that loads.
    fn find_among(names: &[&str]) -> Result<Self, DeviceError> {
        // SAFETY: the names are the driver's.
        let library =
            unsafe { Library::open(names) }.map_err(|tried| DeviceError::NoDriver { tried })?;
        let missing = |e: MissingFunction| DeviceError::Driver {
            call: e.function,
            message: e.to_string(),
        };
        let table = Table::load(&library).map_err(missing)?;
        // SAFETY: 0 is the only valid flag.
        let init = unsafe { (table.cuInit)(0) };
        Ok(Self { table, init })
    }

    /// The driver, if it started.
    fn started() -> Result<&'static Self, DeviceError> {
        let driver = Self::get()?;
        driver.check("cuInit", driver.init)?;
        Ok(driver)
    }

    /// The newest version of CUDA that the driver supports, major and minor.
    pub(super) fn version(&self) -> Result<(u32, u32), DeviceError> {
        let mut version = 0;
        // SAFETY: writes one number; needs no initialised driver.
        unsafe { call!(self, cuDriverGetVersion(&raw mut version)) }?;
        let version = u32::try_from(version).unwrap_or(0);
        Ok((version / 1000, version % 1000 / 10))
    }

    /// The number of devices.
    pub(super) fn count(&self) -> Result<usize, DeviceError> {
        if self.init == NO_DEVICE {
            return Ok(0);
        }
        self.check("cuInit", self.init)?;
        let mut count = 0;
        // SAFETY: writes one number.
        unsafe { call!(self, cuDeviceGetCount(&raw mut count)) }?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Runs `f`, and makes the context current again that was current on this thread before.
    pub(super) fn with_context_kept<R>(f: impl FnOnce() -> R) -> Result<R, DeviceError> {
        let driver = Self::started()?;
        let mut before = std::ptr::null_mut();
        // SAFETY: writes one handle, null if no context is current.
        unsafe { call!(driver, cuCtxGetCurrent(&raw mut before)) }?;
        let result = f();
        // SAFETY: it was current when the call began, so its owner keeps it.
        unsafe { call!(driver, cuCtxSetCurrent(before)) }?;
        Ok(result)
    }

    /// The address of a device on the PCI bus, such as `0000:3b:00.0`. Needs no context.
    pub(super) fn pci_address(ordinal: usize) -> Result<String, DeviceError> {
        let driver = Self::started()?;
        let mut device = 0;
        let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: writes one number.
        unsafe { call!(driver, cuDeviceGet(&raw mut device, ordinal)) }?;
        let mut text = [0u8; 32];
        let at = text.as_mut_ptr().cast();
        let len = text.len() as c_int;
        // SAFETY: writes a C string of at most `len` bytes.
        unsafe { call!(driver, cuDeviceGetPCIBusId(at, len, device)) }?;
        Ok(CStr::from_bytes_until_nul(&text)
            .unwrap_or_default()
            .to_string_lossy()
            .to_lowercase())
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), DeviceError> {
        if code == SUCCESS {
            Ok(())
        } else {
            Err(self.error(call, code))
        }
    }

    /// As [`Driver::check`], for calls that allocate `requested_bytes`.
    fn check_memory(
        &self,
        call: &'static str,
        code: c_int,
        requested_bytes: usize,
    ) -> Result<(), DeviceError> {
        self.check(call, code).map_err(|error| match code {
            OUT_OF_MEMORY => DeviceError::OutOfMemory {
                requested_bytes,
                detail: error.to_string(),
            },
            _ => error,
        })
    }

    /// Makes a call that neither allocates nor waits, such as a query, although other threads
    /// record graphs: in CUDA's global mode, which PyTorch uses, their recordings would refuse it
    /// and become invalid.
    fn during_captures(&self, call: impl FnOnce() -> c_int) -> c_int {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: exchanges the mode of this thread, one of the three values of the enum.
        let code = unsafe { (self.table.cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
        if code != SUCCESS {
            return code;
        }
        let code = call();
        // SAFETY: as above; restores the thread's mode, which the first exchange returned.
        unsafe { (self.table.cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
        code
    }

    /// The state of a stream or event from the code of a query.
    fn check_ready(&self, call: &'static str, code: c_int) -> Result<bool, DeviceError> {
        if code == NOT_READY {
            Ok(false)
        } else {
            self.check(call, code).map(|()| true)
        }
    }

    /// The error for a code, with CUDA's name and description of it.
    fn error(&self, call: &'static str, code: c_int) -> DeviceError {
        let name = self
            .text(self.table.cuGetErrorName, code)
            .unwrap_or_else(|| format!("error {code}"));
        let text = self
            .text(self.table.cuGetErrorString, code)
            .unwrap_or_else(|| "no text".to_owned());
        // Omits the version suffix of exported names, as CUDA's documentation does.
        DeviceError::Driver {
            call: call.trim_end_matches("_v2"),
            message: format!("{name}: {text}"),
        }
    }

    fn text(
        &self,
        get: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
        code: c_int,
    ) -> Option<String> {
        let mut text = std::ptr::null();
        // SAFETY: accepts any code; writes one pointer, null for an unknown code.
        let known = unsafe { get(code, &raw mut text) };
        if known != SUCCESS || text.is_null() {
            return None;
        }
        // SAFETY: a C string of the library, which is never unloaded.
        Some(
            unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "loads a library")]
    fn missing_driver_names_the_paths_tried() {
        let Err(error) = Driver::find_among(&["libno-such-cuda.so.1", "libnor-this.so"]) else {
            panic!("there is no such library");
        };
        let DeviceError::NoDriver { tried } = &error else {
            panic!("{error}")
        };
        assert_eq!(tried.len(), 2);
        let text = error.to_string();
        assert!(
            text.contains("libno-such-cuda.so.1") && text.contains("libnor-this.so"),
            "{text}"
        );
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[cfg_attr(miri, ignore = "loads a library")]
    fn wrong_library_names_the_missing_function() {
        let Err(error) = Driver::find_among(&["libc.so.6"]) else {
            panic!("libc is no driver")
        };
        assert!(
            matches!(error, DeviceError::Driver { call: "cuInit", .. }),
            "{error}"
        );
        assert!(error.to_string().contains("libc.so.6"), "{error}");
    }
}
