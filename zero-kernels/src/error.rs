//! The errors of operations.

use std::fmt;

use zero_alloc::device::DeviceError;

/// An argument of an operation, as errors name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Argument {
    /// The operation and the argument.
    Named(&'static str),
    /// The slot of this name, of an update.
    Slot(&'static str),
}

impl Argument {
    /// The operation and the argument, without the name of a slot.
    pub(crate) const fn without_slot(self) -> &'static str {
        match self {
            Self::Named(name) => name,
            Self::Slot(_) => "update: slots",
        }
    }
}

impl From<&'static str> for Argument {
    fn from(name: &'static str) -> Self {
        Self::Named(name)
    }
}

impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(name) => f.write_str(name),
            Self::Slot(name) => write!(f, "update: {name}"),
        }
    }
}

/// An error that kept an operation from being enqueued.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum KernelError {
    /// Arguments have different lengths.
    #[error("{what}: expected {expected} elements, got {got}")]
    LengthMismatch {
        /// The operation and argument.
        what: Argument,
        expected: usize,
        /// Elements of the argument.
        got: usize,
    },
    /// The operation is not defined for this dtype.
    #[error("{what}: {dtype} is not supported; use fp32, bf16 or fp16")]
    Unsupported {
        /// The operation and argument.
        what: &'static str,
        dtype: zero_alloc::device::DType,
    },
    /// A slice does not start at a multiple of its element's size.
    #[error("{what}: address {address:#x} is not a multiple of {align_bytes} bytes")]
    Misaligned {
        /// The operation and argument.
        what: Argument,
        /// The slice's first byte.
        address: usize,
        /// The alignment of an element.
        align_bytes: usize,
    },
    /// A written slice shares memory with another argument.
    #[error("{first} and {second} overlap")]
    Overlap {
        /// The operation and the written argument.
        first: Argument,
        /// The other argument.
        second: Argument,
    },
    /// A part of a unit starts before the end of the one before it.
    #[error(
        "pack: part {index} starts before the end of the part before it; pass parts in ascending order"
    )]
    PartOrder {
        /// Position of the part.
        index: usize,
    },
    /// The host's threads could not be started.
    #[error("failed to start {threads} threads: {message}")]
    Threads { threads: usize, message: String },
    /// The rule has no CUDA kernel for these dtypes.
    #[error(
        "the update rule {rule} has no CUDA kernel for a gradient of {grad}: train on the host, or add the kernel"
    )]
    NoKernel {
        /// The rule's name.
        rule: &'static str,
        grad: zero_alloc::device::DType,
    },
    /// The operation does not work on such arguments or on this device.
    #[error("{what}: {reason}")]
    Refused {
        /// The operation or rule.
        what: &'static str,
        /// The fault, and the remedy.
        reason: &'static str,
    },
    /// A CUDA kernel could not be compiled.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] crate::cuda::CudaError),
    /// The stream or device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
