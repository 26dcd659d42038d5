//! What can go wrong with an operation on CUDA.

use thiserror::Error;
use zero_alloc::device::{DType, DeviceError};
use zero_kernels::KernelError;

use super::matmul::LibraryError;

/// Why an operation was not enqueued, or its kernels are not there.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpError {
    /// Lengths that must agree do not.
    #[error("{what}: expected {expected} elements, got {got}")]
    Length {
        /// The operation and argument.
        what: &'static str,
        /// Elements expected.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// An argument is of another type than the kernels.
    #[error("{what}: the kernels are for {expected}, got {got}")]
    DType {
        /// The operation and argument.
        what: &'static str,
        /// What they are for.
        expected: DType,
        /// What was given.
        got: DType,
    },
    /// A size that no kernel is made for.
    #[error("{what} is {got}; the kernels take {takes}")]
    Size {
        /// Which size.
        what: &'static str,
        /// What it is.
        got: usize,
        /// What it may be.
        takes: &'static str,
    },
    /// A kernel that is not loaded.
    #[error("no kernel {entry} for {dtype}")]
    NoKernel {
        /// Its name.
        entry: String,
        /// The type of storage.
        dtype: DType,
    },
    /// Matrix products.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// There are no kernels for this type, or they cannot be compiled and loaded.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Checks a length.
pub(super) fn check_len(what: &'static str, got: usize, expected: usize) -> Result<(), OpError> {
    if got == expected { Ok(()) } else { Err(OpError::Length { what, expected, got }) }
}
