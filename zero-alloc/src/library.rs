//! Libraries found at run time: where they are looked for, and how functions are taken from them. The driver is found
//! so; NVRTC, NCCL and cuBLASLt are by the crates that call them.

use std::fmt;
use std::mem::ManuallyDrop;

use thiserror::Error;

/// Where a library is looked for.
#[derive(Clone, Copy, Debug)]
pub struct Search {
    /// The environment variable that names the library's path; where it is set, it alone counts.
    pub variable: &'static str,
    /// The library's names, best first. Each is looked for as the system's loader does it.
    pub names: &'static [&'static str],
    /// Look in the CUDA toolkit as well: where `CUDA_HOME` and `CUDA_PATH` say it is, and at its usual place.
    pub in_toolkit: bool,
}

impl Search {
    /// What to try, best first.
    pub fn paths(&self) -> Vec<String> {
        self.paths_with(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn paths_with(&self, variable: impl Fn(&str) -> Option<String>) -> Vec<String> {
        if let Some(path) = variable(self.variable) {
            return vec![path];
        }
        let mut paths: Vec<String> = self.names.iter().map(|&name| name.to_owned()).collect();
        if self.in_toolkit {
            let (folder, usual) =
                if cfg!(windows) { ("bin", None) } else { ("lib64", Some("/usr/local/cuda".to_owned())) };
            for home in ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| variable(name)).chain(usual) {
                paths.extend(self.names.iter().map(|name| format!("{home}/{folder}/{name}")));
            }
        }
        paths
    }
}

/// A loaded library. It is never unloaded, so that its functions can be kept and its own threads can run on.
pub struct Library {
    path: String,
    handle: ManuallyDrop<libloading::Library>,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Library({})", self.path)
    }
}

/// A library lacks a function.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{library} has no function {function} ({message}): it is too old, or not the library that its name says")]
pub struct MissingFunction {
    /// The library's path.
    pub library: String,
    /// The function's name.
    pub function: &'static str,
    /// What the loader said.
    pub message: String,
}

impl Library {
    /// Loads the first of `paths` that loads.
    ///
    /// # Errors
    /// None does: each path with the loader's answer.
    ///
    /// # Safety
    /// Loading runs the library's initialisers: `paths` must name libraries that may be loaded here.
    pub unsafe fn open(paths: &[impl AsRef<str>]) -> Result<Self, Vec<String>> {
        let mut tried = Vec::new();
        for path in paths.iter().map(AsRef::as_ref) {
            // SAFETY: the caller's promise.
            match unsafe { libloading::Library::new(path) } {
                Ok(library) => return Ok(Self { path: path.to_owned(), handle: ManuallyDrop::new(library) }),
                Err(error) => tried.push(format!("{path} ({})", words(&error))),
            }
        }
        Err(tried)
    }

    /// The path it was loaded by.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The function `name`, valid for as long as the process runs.
    ///
    /// # Errors
    /// The library lacks it.
    ///
    /// # Safety
    /// `F` must be a function pointer with the signature that the library gives the function.
    pub unsafe fn function<F: Copy>(&self, name: &'static str) -> Result<F, MissingFunction> {
        // SAFETY: the caller's promise.
        let found = unsafe { self.handle.get::<F>(name.as_bytes()) };
        found.map(|function| *function).map_err(|error| MissingFunction {
            library: self.path.clone(),
            function: name,
            message: words(&error),
        })
    }
}

/// The loader's own words, which lie below the error's.
fn words(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEARCH: Search = Search { variable: "ZERO_X", names: &["libx.so.2", "libx.so"], in_toolkit: false };

    #[test]
    fn the_users_choice_is_the_only_one_tried() {
        let chosen = |name: &str| (name == "ZERO_X").then(|| "/opt/mine.so".to_owned());
        assert_eq!(SEARCH.paths_with(chosen), ["/opt/mine.so"]);
        assert_eq!(SEARCH.paths_with(|_| None), ["libx.so.2", "libx.so"]);
    }

    #[test]
    #[cfg(unix)]
    fn the_toolkit_comes_after_the_loaders_own_search() {
        let search = Search { in_toolkit: true, ..SEARCH };
        let at_home = |name: &str| (name == "CUDA_HOME").then(|| "/cuda".to_owned());
        let usual = ["/usr/local/cuda/lib64/libx.so.2", "/usr/local/cuda/lib64/libx.so"];
        assert_eq!(search.paths_with(|_| None), [&["libx.so.2", "libx.so"], &usual[..]].concat());
        let home = ["/cuda/lib64/libx.so.2", "/cuda/lib64/libx.so"];
        assert_eq!(search.paths_with(at_home), [&["libx.so.2", "libx.so"], &home[..], &usual[..]].concat());
    }

    #[test]
    #[cfg_attr(miri, ignore = "loads a library")]
    fn what_was_tried_is_named_with_the_loaders_words() {
        // SAFETY: there are no such libraries.
        let tried = unsafe { Library::open(&["libno-such.so.1", "libnor-this.so"]) }.err().unwrap();
        assert!(tried[0].starts_with("libno-such.so.1 (") && tried[1].starts_with("libnor-this.so ("), "{tried:?}");
        // SAFETY: nothing is loaded.
        assert_eq!(unsafe { Library::open(&[] as &[&str]) }.err(), Some(Vec::new()));
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[cfg_attr(miri, ignore = "loads a library")]
    fn a_function_is_found_or_named() {
        type Abs = unsafe extern "C" fn(std::ffi::c_int) -> std::ffi::c_int;
        // SAFETY: the C library is loaded already.
        let library = unsafe { Library::open(&["libno-such.so.1", "libc.so.6"]) }.unwrap();
        assert_eq!(library.path(), "libc.so.6");
        // SAFETY: the signature of `abs`.
        let abs = unsafe { library.function::<Abs>("abs") }.unwrap();
        // SAFETY: it takes any small number.
        assert_eq!(unsafe { abs(-5) }, 5);
        // SAFETY: there is no such function.
        let error = unsafe { library.function::<Abs>("cuInit") }.unwrap_err();
        assert!(error.to_string().starts_with("libc.so.6 has no function cuInit ("), "{error}");
    }
}
