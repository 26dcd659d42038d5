//! The driver API: the only place of the crate that calls it. What is here owns its handles and is safe to use from
//! the rest of the back end, or says in a `# Safety` section what it takes.
//!
//! Two facts of CUDA carry most proofs below: any thread may use any handle, and the driver checks arguments other
//! than pointers itself.

mod context;
mod memory;
mod module;
mod queue;
mod shareable;
mod table;

use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

use self::table::Table;
use crate::device::DeviceError;
use crate::library::{Library, MissingFunction};

pub(super) use context::Context;
pub(super) use memory::Pages;
pub(super) use module::{Code, Entry};
pub(super) use queue::{Point, Queue, Recording};
pub(super) use shareable::Shareable;

/// Codes that are no failures, or failures of their own kind.
const SUCCESS: c_int = 0;
const OUT_OF_MEMORY: c_int = 2;
const NO_DEVICE: c_int = 100;
const NOT_READY: c_int = 600;

/// The library's names, best first.
const NAMES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };

/// The driver.
pub(super) struct Driver {
    table: Table,
    /// What `cuInit` said.
    init: c_int,
}

impl Driver {
    /// The driver of this machine; looked for once in a process.
    pub(super) fn get() -> Result<&'static Self, DeviceError> {
        static FOUND: OnceLock<Result<Driver, DeviceError>> = OnceLock::new();
        FOUND.get_or_init(|| Self::find_among(NAMES)).as_ref().map_err(Clone::clone)
    }

    /// Loads the first library of `names` that loads.
    pub(super) fn find_among(names: &[&str]) -> Result<Self, DeviceError> {
        // SAFETY: the names are the driver's.
        let library = unsafe { Library::open(names) }.map_err(|tried| DeviceError::NoDriver { tried })?;
        let missing = |e: MissingFunction| DeviceError::Driver { call: e.function, message: e.to_string() };
        let table = Table::load(&library).map_err(missing)?;
        // SAFETY: the one flag that is allowed.
        let init = unsafe { (table.cuInit)(0) };
        Ok(Self { table, init })
    }

    /// How many devices there are.
    pub(super) fn count(&self) -> Result<usize, DeviceError> {
        if self.init == NO_DEVICE {
            return Ok(0);
        }
        self.check("cuInit", self.init)?;
        let mut count = 0;
        // SAFETY: writes one number.
        self.check("cuDeviceGetCount", unsafe { (self.table.cuDeviceGetCount)(&raw mut count) })?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// The newest CUDA that the driver serves, as (13, 0).
    pub(super) fn version(&self) -> Result<(u32, u32), DeviceError> {
        let mut version = 0;
        // SAFETY: writes one number.
        self.check("cuDriverGetVersion", unsafe { (self.table.cuDriverGetVersion)(&raw mut version) })?;
        let version = u32::try_from(version).unwrap_or(0);
        Ok((version / 1000, version % 1000 / 10))
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), DeviceError> {
        if code == SUCCESS { Ok(()) } else { Err(self.error(call, code)) }
    }

    /// As `check`, for calls that take memory.
    fn check_memory(&self, call: &'static str, code: c_int, requested_bytes: usize) -> Result<(), DeviceError> {
        match self.check(call, code) {
            Err(error) if code == OUT_OF_MEMORY => {
                Err(DeviceError::OutOfMemory { requested_bytes, detail: error.to_string() })
            }
            result => result,
        }
    }

    /// CUDA's own name and text of a code.
    fn error(&self, call: &'static str, code: c_int) -> DeviceError {
        let name = self.text(self.table.cuGetErrorName, code).unwrap_or_else(|| format!("error {code}"));
        let text = self.text(self.table.cuGetErrorString, code).unwrap_or_else(|| "no text".to_owned());
        DeviceError::Driver { call, message: format!("{name}: {text}") }
    }

    fn text(&self, get: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int, code: c_int) -> Option<String> {
        let mut text = std::ptr::null();
        // SAFETY: takes any code; writes one pointer, null for a code it does not know.
        let known = unsafe { get(code, &raw mut text) };
        if known != SUCCESS || text.is_null() {
            return None;
        }
        // SAFETY: a string of the library, which is never unloaded.
        Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "loads a library")]
    fn a_missing_library_is_an_error_that_names_what_was_tried() {
        let Err(error) = Driver::find_among(&["libno-such-cuda.so.1", "libnor-this.so"]) else {
            panic!("there is no such library");
        };
        let DeviceError::NoDriver { tried } = &error else { panic!("{error}") };
        assert_eq!(tried.len(), 2);
        let text = error.to_string();
        assert!(text.contains("libno-such-cuda.so.1") && text.contains("libnor-this.so"), "{text}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[cfg_attr(miri, ignore = "loads a library")]
    fn another_library_in_its_place_is_an_error_that_names_the_function() {
        let Err(error) = Driver::find_among(&["libc.so.6"]) else { panic!("libc is no driver") };
        assert!(matches!(error, DeviceError::Driver { call: "cuInit", .. }), "{error}");
        assert!(error.to_string().contains("libc.so.6"), "{error}");
    }
}
