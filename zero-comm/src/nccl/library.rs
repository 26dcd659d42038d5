//! The NCCL library, found at run time, and its functions.
//!
//! The types are those of cudarc, generated from NVIDIA's headers. cudarc's functions are not used:
//! they panic if the library or a function is missing, return a Rust enum that cannot hold the
//! codes of newer libraries, and never try `libnccl.so.2`, the only name that NCCL's packages
//! install. The signatures below are checked against cudarc's at compile time.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use cudarc::nccl::sys;
use zero_alloc::library::{Library, MissingFunction, Search};

use crate::CommError;
use crate::error::nccl_failure;
use crate::world::error::version_text;

/// `ncclSuccess` and `ncclInProgress`.
pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 7;

/// The minimum version, 2.18: the first that splits communicators.
const OLDEST: c_int = 21_800;

macro_rules! table {
    ($($field:ident = $symbol:ident($($arg:ty),*);)*) => {
        /// The functions used.
        pub(super) struct Table {
            $(pub(super) $field: unsafe extern "C" fn($($arg),*) -> c_int,)*
            /// Accepts any code, so its argument is not cudarc's enum.
            error_string: unsafe extern "C" fn(c_int) -> *const c_char,
            last_error: unsafe extern "C" fn(sys::ncclComm_t) -> *const c_char,
            /// Writes any code, so its result is not cudarc's enum.
            pub(super) async_error: unsafe extern "C" fn(sys::ncclComm_t, *mut c_int) -> c_int,
        }

        $(const _: unsafe fn($($arg),*) -> sys::ncclResult_t = sys::$symbol;)*

        impl Table {
            #[allow(clippy::multiple_unsafe_ops_per_block, reason = "one proof holds for all of them")]
            fn load(library: &Library) -> Result<Self, MissingFunction> {
                // SAFETY: each field has the signature of its function in NVIDIA's headers.
                unsafe {
                    Ok(Self {
                        $($field: library.function(stringify!($symbol))?,)*
                        error_string: library.function("ncclGetErrorString")?,
                        last_error: library.function("ncclGetLastError")?,
                        async_error: library.function("ncclCommGetAsyncError")?,
                    })
                }
            }
        }
    };
}

table! {
    get_version = ncclGetVersion(*mut c_int);
    get_unique_id = ncclGetUniqueId(*mut sys::ncclUniqueId);
    init = ncclCommInitRankConfig(*mut sys::ncclComm_t, c_int, sys::ncclUniqueId, c_int, *mut sys::ncclConfig_t);
    split = ncclCommSplit(sys::ncclComm_t, c_int, c_int, *mut sys::ncclComm_t, *mut sys::ncclConfig_t);
    finalize = ncclCommFinalize(sys::ncclComm_t);
    destroy = ncclCommDestroy(sys::ncclComm_t);
    abort = ncclCommAbort(sys::ncclComm_t);
    group_start = ncclGroupStart();
    group_end = ncclGroupEnd();
    all_reduce = ncclAllReduce(
        *const c_void, *mut c_void, usize, sys::ncclDataType_t, sys::ncclRedOp_t, sys::ncclComm_t, sys::cudaStream_t
    );
    reduce = ncclReduce(
        *const c_void, *mut c_void, usize, sys::ncclDataType_t, sys::ncclRedOp_t, c_int, sys::ncclComm_t, sys::cudaStream_t
    );
    reduce_scatter = ncclReduceScatter(
        *const c_void, *mut c_void, usize, sys::ncclDataType_t, sys::ncclRedOp_t, sys::ncclComm_t, sys::cudaStream_t
    );
    all_gather = ncclAllGather(
        *const c_void, *mut c_void, usize, sys::ncclDataType_t, sys::ncclComm_t, sys::cudaStream_t
    );
    broadcast = ncclBroadcast(
        *const c_void, *mut c_void, usize, sys::ncclDataType_t, c_int, sys::ncclComm_t, sys::cudaStream_t
    );
    send = ncclSend(*const c_void, usize, sys::ncclDataType_t, c_int, sys::ncclComm_t, sys::cudaStream_t);
    receive = ncclRecv(*mut c_void, usize, sys::ncclDataType_t, c_int, sys::ncclComm_t, sys::cudaStream_t);
}

const SEARCH: Search = Search {
    variable: "ZERO_NCCL",
    names: &["libnccl.so.2", "libnccl.so"],
    in_toolkit: false,
};

pub(super) struct Nccl {
    pub(super) table: Table,
    /// NCCL's version number; 23007 is 2.30.7.
    pub(super) version: c_int,
}

impl Nccl {
    /// Returns the library of this machine, searched once per process.
    pub(super) fn get() -> Result<&'static Self, CommError> {
        static FOUND: OnceLock<Result<Nccl, CommError>> = OnceLock::new();
        FOUND
            .get_or_init(|| Self::find_among(&SEARCH.paths()))
            .as_ref()
            .map_err(Clone::clone)
    }

    /// Loads the first library of `paths` that can be loaded.
    fn find_among(paths: &[impl AsRef<str>]) -> Result<Self, CommError> {
        // SAFETY: the paths name NCCL, or a library that the user chose; its initializers are sound
        // to run.
        let library = unsafe { Library::open(paths) }.map_err(|tried| CommError::NoLibrary {
            name: "NCCL",
            tried,
        })?;

        let table = Table::load(&library).map_err(|error| nccl_failure(error.to_string()))?;
        let mut version = 0;
        // SAFETY: the function writes one `c_int` to the pointer, which is valid.
        let code = unsafe { (table.get_version)(&raw mut version) };
        let nccl = Self { table, version };
        nccl.check("ncclGetVersion", code)?;

        if version < OLDEST {
            let has = version_text(version as u64);
            let needs = version_text(OLDEST as u64);
            let path = library.path();
            return Err(nccl_failure(format!(
                "{path} is NCCL {has}, but {needs} or later is needed"
            )));
        }

        Ok(nccl)
    }

    /// Returns an error for any code but success. Calls with a communicator may also return
    /// [`IN_PROGRESS`]; they must not use this.
    pub(super) fn check(&self, call: &str, code: c_int) -> Result<(), CommError> {
        if code == SUCCESS {
            Ok(())
        } else {
            Err(nccl_failure(self.message(call, code)))
        }
    }

    /// Formats an error of `call`: NCCL's description of the code, and its last error.
    pub(super) fn message(&self, call: &str, code: c_int) -> String {
        // SAFETY: the function accepts any code and returns a static string.
        let name = text(unsafe { (self.table.error_string)(code) });
        // SAFETY: the function ignores the communicator; its string is valid until this thread's
        // next error.
        let detail = text(unsafe { (self.table.last_error)(std::ptr::null_mut()) });
        let name = name.unwrap_or_else(|| format!("error {code}"));
        match detail
            .map(|detail| detail.trim().to_owned())
            .filter(|detail| !detail.is_empty())
        {
            Some(detail) => format!("{call}: {name}: {detail}"),
            None => format!("{call}: {name}"),
        }
    }
}

fn text(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: not null, so a C string of the library, which is never unloaded.
    Some(
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "loads a library")]
    fn missing_library_error_names_the_paths() {
        let Err(error) = Nccl::find_among(&["libno-such-nccl.so.2", "libnor-this.so"]) else {
            panic!("a library that does not exist was found")
        };
        let CommError::NoLibrary {
            name: "NCCL",
            tried,
        } = &error
        else {
            panic!("{error}")
        };
        assert_eq!(tried.len(), 2);
        let text = error.to_string();
        assert!(
            text.contains("libno-such-nccl.so.2") && text.contains("libnor-this.so"),
            "{text}"
        );
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[cfg_attr(miri, ignore = "loads a library")]
    fn wrong_library_error_names_the_function() {
        let Err(error) = Nccl::find_among(&["libc.so.6"]) else {
            panic!("libc is not NCCL")
        };
        assert!(
            error
                .to_string()
                .contains("libc.so.6 has no function ncclGetVersion"),
            "{error}"
        );
    }
}
