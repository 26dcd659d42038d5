//! The error of operations on CUDA.

use thiserror::Error;
use zero_alloc::device::{DType, DeviceError};
use zero_alloc::library::MissingFunction;
use zero_kernels::KernelError;

/// An error of cuBLASLt.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages name the fields")]
#[non_exhaustive]
pub enum LibraryError {
    /// The library was not found.
    #[error(
        "cuBLASLt was not found; tried {}. Install it (pip install nvidia-cublas, or the CUDA toolkit) and set \
         ZERO_CUBLASLT to the library's path if the loader does not find it",
        tried.join("; ")
    )]
    NotFound {
        /// The names that were tried, each with the loader's message.
        tried: Vec<String>,
    },
    /// The library lacks a function.
    #[error(transparent)]
    MissingFunction(#[from] MissingFunction),
    /// The library has no algorithm for this product.
    #[error("cuBLASLt has no algorithm for {product}")]
    NoAlgorithm {
        /// A description of the product.
        product: String,
    },
    /// A call failed.
    #[error("{call}: {message}")]
    Call { call: &'static str, message: String },
}

/// An operation was not enqueued, or its kernels could not be loaded.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
#[non_exhaustive]
pub enum OpError {
    /// A length differs from the expected one.
    #[error("{what}: expected {expected} elements, got {got}")]
    Length {
        /// The operation and argument.
        what: &'static str,
        expected: usize,
        got: usize,
    },
    /// A collective was not enqueued.
    #[error("{0}")]
    Comm(#[from] zero_comm::CommError),
    /// An argument's type differs from the kernels'.
    #[error("{what}: the kernels are for {expected}, got {got}")]
    DType {
        /// The operation and argument.
        what: &'static str,
        expected: DType,
        got: DType,
    },
    /// A size that no kernel supports.
    #[error("{what} is {got}; the kernels support {takes}")]
    Size {
        /// The name of the size.
        what: &'static str,
        got: usize,
        /// The supported values.
        takes: &'static str,
    },
    /// A kernel that is not loaded.
    #[error("no kernel {entry} for {dtype}")]
    NoKernel {
        entry: String,
        /// The type of storage.
        dtype: DType,
    },
    /// Another process measures a matrix product and does not end.
    #[error(
        "another process has locked {path}, the choice of a matrix product, for more than {limit:?}: end it, or set \
         ZERO_MATMUL_CACHE to another folder"
    )]
    ChoiceLocked {
        path: String,
        /// The limit of the wait.
        limit: std::time::Duration,
    },
    /// An error of cuBLASLt.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// There are no kernels for this type, or they cannot be compiled and loaded.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// An error of the device.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Checks a length.
pub(super) fn check_len(what: &'static str, got: usize, expected: usize) -> Result<(), OpError> {
    if got == expected {
        Ok(())
    } else {
        Err(OpError::Length {
            what,
            expected,
            got,
        })
    }
}

/// Checks that a slice has at least `least` elements.
pub(super) fn at_least(what: &'static str, got: usize, least: usize) -> Result<(), OpError> {
    if got >= least {
        Ok(())
    } else {
        Err(OpError::Length {
            what,
            expected: least,
            got,
        })
    }
}
