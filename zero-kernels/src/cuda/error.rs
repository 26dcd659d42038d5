//! Why a kernel is not there.

use zero_alloc::library::MissingFunction;

use super::{Arch, Target};

/// Why a kernel could not be compiled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The compiler's library is not on this machine.
    #[error(
        "NVRTC was not found; tried {}. Install it (pip install nvidia-cuda-nvrtc, or the CUDA toolkit) and set \
         ZERO_NVRTC to the library's path if the loader does not find it",
        tried.join("; ")
    )]
    NoNvrtc {
        /// What was tried, each with the loader's answer.
        tried: Vec<String>,
    },
    /// The library lacks a function.
    #[error(transparent)]
    MissingFunction(#[from] MissingFunction),
    /// This NVRTC does not compile for the architecture.
    #[error("NVRTC {version} does not compile for {arch}; it knows {}", supported.iter().map(u32::to_string).collect::<Vec<_>>().join(", "))]
    UnsupportedArch {
        /// NVRTC's version.
        version: String,
        /// The architecture asked for.
        arch: Arch,
        /// Those it compiles for.
        supported: Vec<u32>,
    },
    /// The source does not compile.
    #[error("{source_name} does not compile for {target}:\n{log}")]
    Compilation {
        /// The source file.
        source_name: String,
        /// What it was to become.
        target: Target,
        /// What the compiler said.
        log: String,
    },
    /// A call of NVRTC failed otherwise.
    #[error("{call}: {message}")]
    Call {
        /// The function.
        call: &'static str,
        /// What it said.
        message: String,
    },
}
