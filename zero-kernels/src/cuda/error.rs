//! Errors of run-time compilation.

use zero_alloc::library::MissingFunction;

use super::{Arch, Target};

/// An error of run-time compilation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
#[non_exhaustive]
pub enum CudaError {
    /// NVRTC's library was not found.
    #[error(
        "NVRTC was not found; tried {}. Install it (pip install nvidia-cuda-nvrtc, or the CUDA toolkit) and set \
         ZERO_NVRTC to the library's path if the loader does not find it",
        tried.join("; ")
    )]
    NoNvrtc {
        /// The names tried, each with the loader's error.
        tried: Vec<String>,
    },
    /// The library does not export a function.
    #[error(transparent)]
    MissingFunction(#[from] MissingFunction),
    /// This NVRTC does not support the architecture.
    #[error(
        "NVRTC {version} does not compile for {arch}, only for {}; install another NVRTC and set ZERO_NVRTC to its path",
        supported.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
    )]
    UnsupportedArch {
        version: String,
        /// The architecture of the device.
        arch: Arch,
        /// The architectures that NVRTC supports.
        supported: Vec<u32>,
    },
    /// The source does not compile.
    #[error("{source_name} does not compile for {target}:\n{log}")]
    Compilation {
        source_name: String,
        target: Target,
        log: String,
    },
    /// Another NVRTC call failed.
    #[error("{call}: {message}")]
    Call { call: &'static str, message: String },
}
