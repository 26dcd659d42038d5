//! cuBLASLt, loaded at run time: its functions and a handle. They are called here and in `product`.
//!
//! Signatures, constants and structure sizes are those of cublasLt.h, versions 12 and 13.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use zero_alloc::cuda::CudaDevice;
use zero_alloc::library::{Library, MissingFunction, Search};

use crate::cuda::error::LibraryError;

pub(super) type Status = c_int;
pub(super) type Raw = *mut c_void;

/// The library's description of an algorithm (`cublasLtMatmulHeuristicResult_t`).
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Algorithm {
    pub(super) data: [u64; 8],
    pub(super) workspace_bytes: usize,
    pub(super) state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// The functions that are used.
pub(super) struct Calls {
    pub(super) create: unsafe extern "C" fn(*mut Raw) -> Status,
    pub(super) destroy: unsafe extern "C" fn(Raw) -> Status,
    pub(super) version: unsafe extern "C" fn() -> usize,
    pub(super) status_string: unsafe extern "C" fn(Status) -> *const c_char,
    pub(super) desc_create: unsafe extern "C" fn(*mut Raw, c_int, c_int) -> Status,
    pub(super) desc_destroy: unsafe extern "C" fn(Raw) -> Status,
    pub(super) desc_set: unsafe extern "C" fn(Raw, c_int, *const c_void, usize) -> Status,
    pub(super) layout_create: unsafe extern "C" fn(*mut Raw, c_int, u64, u64, i64) -> Status,
    pub(super) layout_destroy: unsafe extern "C" fn(Raw) -> Status,
    pub(super) preference_create: unsafe extern "C" fn(*mut Raw) -> Status,
    pub(super) preference_destroy: unsafe extern "C" fn(Raw) -> Status,
    pub(super) preference_set: unsafe extern "C" fn(Raw, c_int, *const c_void, usize) -> Status,
    pub(super) heuristic: unsafe extern "C" fn(
        Raw,
        Raw,
        Raw,
        Raw,
        Raw,
        Raw,
        Raw,
        c_int,
        *mut Algorithm,
        *mut c_int,
    ) -> Status,
    pub(super) check_algorithm:
        unsafe extern "C" fn(Raw, Raw, Raw, Raw, Raw, Raw, *const c_void, *mut Algorithm) -> Status,
    pub(super) algorithm_attribute:
        unsafe extern "C" fn(*const c_void, c_int, *mut c_void, usize, *mut usize) -> Status,
    #[allow(clippy::type_complexity)]
    pub(super) matmul: unsafe extern "C" fn(
        Raw,
        Raw,
        *const c_void,
        *const c_void,
        Raw,
        *const c_void,
        Raw,
        *const c_void,
        *const c_void,
        Raw,
        *mut c_void,
        Raw,
        *const c_void,
        *mut c_void,
        usize,
        Raw,
    ) -> Status,
}

impl Calls {
    #[allow(
        clippy::multiple_unsafe_ops_per_block,
        reason = "one proof for all of one kind"
    )]
    fn load(library: &Library) -> Result<Self, MissingFunction> {
        // SAFETY: each field has the function's signature in cublasLt.h.
        unsafe {
            Ok(Self {
                create: library.function("cublasLtCreate")?,
                destroy: library.function("cublasLtDestroy")?,
                version: library.function("cublasLtGetVersion")?,
                status_string: library.function("cublasLtGetStatusString")?,
                desc_create: library.function("cublasLtMatmulDescCreate")?,
                desc_destroy: library.function("cublasLtMatmulDescDestroy")?,
                desc_set: library.function("cublasLtMatmulDescSetAttribute")?,
                layout_create: library.function("cublasLtMatrixLayoutCreate")?,
                layout_destroy: library.function("cublasLtMatrixLayoutDestroy")?,
                preference_create: library.function("cublasLtMatmulPreferenceCreate")?,
                preference_destroy: library.function("cublasLtMatmulPreferenceDestroy")?,
                preference_set: library.function("cublasLtMatmulPreferenceSetAttribute")?,
                heuristic: library.function("cublasLtMatmulAlgoGetHeuristic")?,
                check_algorithm: library.function("cublasLtMatmulAlgoCheck")?,
                algorithm_attribute: library.function("cublasLtMatmulAlgoConfigGetAttribute")?,
                matmul: library.function("cublasLtMatmul")?,
            })
        }
    }

    /// Loads the first of `paths` that can be loaded.
    fn find_among(paths: &[impl AsRef<str>]) -> Result<Self, LibraryError> {
        // SAFETY: the names are cuBLASLt's, or the user's choice.
        let library =
            unsafe { Library::open(paths) }.map_err(|tried| LibraryError::NotFound { tried })?;
        Ok(Self::load(&library)?)
    }

    pub(super) fn check(&self, call: &'static str, status: Status) -> Result<(), LibraryError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: accepts any status and returns a static string or null.
        let text = unsafe { (self.status_string)(status) };
        let message = if text.is_null() {
            format!("status {status}")
        } else {
            // SAFETY: a string of the library, which is loaded.
            unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned()
        };
        Err(LibraryError::Call { call, message })
    }
}

/// A handle of the library, bound to the context that was current when it was created.
pub(super) struct CublasLt {
    pub(super) calls: Calls,
    pub(super) handle: Raw,
}

// SAFETY: a handle may be used from any thread, also by several at once (cuBLASLt's documentation).
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

const SEARCH: Search = Search {
    variable: "ZERO_CUBLASLT",
    names: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
    in_toolkit: true,
};

/// The paths to try. Libraries of a newer major version than the driver's come last, because they
/// need a newer driver.
fn paths() -> Vec<String> {
    SEARCH.paths_for_driver(CudaDevice::driver_version().ok().map(|(major, _)| major))
}

/// Checks that the library can be loaded; creates no handle.
pub(super) fn is_there() -> Result<(), LibraryError> {
    Calls::find_among(&paths()).map(drop)
}

impl CublasLt {
    /// Loads the library and creates a handle for the context that is current on this thread.
    pub(super) fn find() -> Result<Arc<Self>, LibraryError> {
        let calls = Calls::find_among(&paths())?;
        let mut handle: Raw = ptr::null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { (calls.create)(&raw mut handle) };
        calls.check("cublasLtCreate", status)?;
        Ok(Arc::new(Self { calls, handle }))
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: created by `create`, destroyed once.
        unsafe { (self.calls.destroy)(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_names_what_was_tried() {
        let error = Calls::find_among(&["libno-such-blas.so.1", "libnor-this.so"])
            .err()
            .unwrap();
        let LibraryError::NotFound { tried } = &error else {
            panic!("{error}")
        };
        assert_eq!(tried.len(), 2);
        let text = error.to_string();
        assert!(
            text.contains("libno-such-blas.so.1") && text.contains("libnor-this.so"),
            "{text}"
        );
    }

    #[test]
    fn wrong_library_error_names_the_function() {
        let error = Calls::find_among(&["libc.so.6"]).err().unwrap();
        assert!(
            matches!(
                &error,
                LibraryError::MissingFunction(MissingFunction {
                    function: "cublasLtCreate",
                    ..
                })
            ),
            "{error}"
        );
    }
}
