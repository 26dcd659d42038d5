//! Shared libraries that are loaded at run time: the CUDA driver here; NVRTC, NCCL and cuBLASLt in
//! other crates.
//!
//! `ZERO_NCCL`, `ZERO_NVRTC` and `ZERO_CUBLASLT` name a library's path in place of the usual names.

use std::fmt;
use std::mem::ManuallyDrop;

use thiserror::Error;

/// The paths at which a library is searched.
#[derive(Clone, Copy, Debug)]
pub struct Search {
    /// The environment variable with the library's path; if set, no other path is tried.
    pub variable: &'static str,
    /// The library's names, best first, for the system loader to find.
    pub names: &'static [&'static str],
    /// Also search the CUDA toolkit: `CUDA_HOME`, `CUDA_PATH`, and its default folder.
    pub in_toolkit: bool,
}

impl Search {
    /// The paths to try, best first.
    pub fn paths(&self) -> Vec<String> {
        self.paths_with(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// [`Search::paths`] for libraries that run on a driver of CUDA's `major` version: those whose
    /// names have a newer major version come last, because such a driver cannot run them.
    pub fn paths_for_driver(&self, major: Option<u32>) -> Vec<String> {
        let mut paths = self.paths();
        if let Some(major) = major {
            paths.sort_by_key(|path| major_version(path).is_some_and(|library| library > major));
        }
        paths
    }

    fn paths_with(&self, variable: impl Fn(&str) -> Option<String>) -> Vec<String> {
        if let Some(path) = variable(self.variable) {
            return vec![path];
        }
        let mut paths: Vec<String> = self.names.iter().map(|&name| name.to_owned()).collect();

        if self.in_toolkit {
            let (folder, usual) = if cfg!(windows) {
                ("bin", None)
            } else {
                ("lib64", Some("/usr/local/cuda".to_owned()))
            };
            for home in ["CUDA_HOME", "CUDA_PATH"]
                .iter()
                .filter_map(|name| variable(name))
                .chain(usual)
            {
                paths.extend(
                    self.names
                        .iter()
                        .map(|name| format!("{home}/{folder}/{name}")),
                );
            }
        }

        paths
    }
}

/// CUDA's major version in a library's name: 13 in `libx.so.13` and in `x64_130_0.dll`.
fn major_version(path: &str) -> Option<u32> {
    match path.rsplit_once(".so.") {
        Some((_, version)) => version.split('.').next()?.parse().ok(),
        None => path
            .split_once("64_")?
            .1
            .split('_')
            .next()?
            .parse::<u32>()
            .ok()
            .map(|version| version / 10),
    }
}

/// A loaded library. It is never unloaded, because its functions may be in use and its threads may
/// run.
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
#[error("{library} has no function {function} ({message}); it is too old or a different library")]
#[non_exhaustive]
pub struct MissingFunction {
    /// The library's path.
    pub library: String,
    /// The function's name.
    pub function: &'static str,
    /// The loader's message.
    pub message: String,
}

impl Library {
    /// Loads the first of `paths` that loads.
    ///
    /// # Errors
    /// No path loads; the error has each path with the loader's message.
    ///
    /// # Safety
    /// Loading runs the library's initializers, so `paths` must name libraries that are safe to
    /// load.
    pub unsafe fn open(paths: &[impl AsRef<str>]) -> Result<Self, Vec<String>> {
        let mut tried = Vec::new();
        for path in paths.iter().map(AsRef::as_ref) {
            // SAFETY: the caller's promise.
            match unsafe { libloading::Library::new(path) } {
                Ok(library) => {
                    return Ok(Self {
                        path: path.to_owned(),
                        handle: ManuallyDrop::new(library),
                    });
                }
                Err(error) => tried.push(format!("{path} ({})", message(&error))),
            }
        }
        Err(tried)
    }

    /// The path from which the library was loaded.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The function `name`, valid for as long as the process runs.
    ///
    /// # Errors
    /// The library lacks the function.
    ///
    /// # Safety
    /// `F` must be a function pointer type with the function's signature.
    pub unsafe fn function<F: Copy>(&self, name: &'static str) -> Result<F, MissingFunction> {
        // SAFETY: the caller's promise.
        let found = unsafe { self.handle.get::<F>(name.as_bytes()) };
        found
            .map(|function| *function)
            .map_err(|error| MissingFunction {
                library: self.path.clone(),
                function: name,
                message: message(&error),
            })
    }
}

/// The loader's message: the error's source, if it has one.
fn message(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEARCH: Search = Search {
        variable: "ZERO_X",
        names: &["libx.so.2", "libx.so"],
        in_toolkit: false,
    };

    #[test]
    fn variable_overrides_the_search() {
        let chosen = |name: &str| (name == "ZERO_X").then(|| "/opt/mine.so".to_owned());
        assert_eq!(SEARCH.paths_with(chosen), ["/opt/mine.so"]);
        assert_eq!(SEARCH.paths_with(|_| None), ["libx.so.2", "libx.so"]);
    }

    #[test]
    #[cfg(unix)]
    fn toolkit_is_searched_last() {
        let search = Search {
            in_toolkit: true,
            ..SEARCH
        };
        let at_home = |name: &str| (name == "CUDA_HOME").then(|| "/cuda".to_owned());
        let usual = [
            "/usr/local/cuda/lib64/libx.so.2",
            "/usr/local/cuda/lib64/libx.so",
        ];
        assert_eq!(
            search.paths_with(|_| None),
            [&["libx.so.2", "libx.so"], &usual[..]].concat()
        );
        let home = ["/cuda/lib64/libx.so.2", "/cuda/lib64/libx.so"];
        assert_eq!(
            search.paths_with(at_home),
            [&["libx.so.2", "libx.so"], &home[..], &usual[..]].concat()
        );
    }

    #[test]
    fn libraries_newer_than_the_driver_come_last() {
        let search = Search {
            names: &["libx.so.13", "libx.so.12", "libx.so"],
            ..SEARCH
        };
        let order = |major| search.paths_for_driver(major);
        assert_eq!(order(Some(12)), ["libx.so.12", "libx.so", "libx.so.13"]);
        for major in [None, Some(13), Some(14)] {
            assert_eq!(order(major), search.paths());
        }
        let search = Search {
            names: &["x64_130_0.dll", "x64_120_0.dll"],
            ..SEARCH
        };
        assert_eq!(
            search.paths_for_driver(Some(12)),
            ["x64_120_0.dll", "x64_130_0.dll"]
        );
    }

    #[test]
    #[cfg_attr(miri, ignore = "loads a library")]
    fn failed_paths_are_in_the_error() {
        // SAFETY: there are no such libraries.
        let tried = unsafe { Library::open(&["libno-such.so.1", "libnor-this.so"]) }
            .err()
            .unwrap();
        assert!(
            tried[0].starts_with("libno-such.so.1 (") && tried[1].starts_with("libnor-this.so ("),
            "{tried:?}"
        );
        // SAFETY: nothing is loaded.
        let of_none = unsafe { Library::open(&[] as &[&str]) };
        assert_eq!(of_none.err(), Some(Vec::new()));
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[cfg_attr(miri, ignore = "loads a library")]
    fn missing_function_is_named() {
        type Abs = unsafe extern "C" fn(std::ffi::c_int) -> std::ffi::c_int;
        // SAFETY: the C library is loaded already.
        let library = unsafe { Library::open(&["libno-such.so.1", "libc.so.6"]) }.unwrap();
        assert_eq!(library.path(), "libc.so.6");
        // SAFETY: the signature of `abs`.
        let abs = unsafe { library.function::<Abs>("abs") }.unwrap();
        // SAFETY: `abs` accepts every number but the lowest.
        assert_eq!(unsafe { abs(-5) }, 5);
        // SAFETY: there is no such function.
        let error = unsafe { library.function::<Abs>("cuInit") }.unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("libc.so.6 has no function cuInit ("),
            "{error}"
        );
    }
}
