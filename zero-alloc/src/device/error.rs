//! What can go wrong on a device.

use std::time::Duration;

use super::DType;

/// Why a device, stream or event operation failed. Cheap to clone: a stream hands out its first error again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device itself has no memory left.
    #[error("the device has no {asked_bytes} bytes left: {detail}")]
    OutOfMemory {
        /// What was asked for.
        asked_bytes: usize,
        /// What the device said.
        detail: String,
    },
    /// No driver of the device was found.
    #[error("no driver found; tried {}", tried.join(", "))]
    NoDriver {
        /// Libraries that were tried.
        tried: Vec<String>,
    },
    /// Lengths that must agree do not.
    #[error("{what}: expected {expected} elements, got {got}")]
    LengthMismatch {
        /// The operation and argument.
        what: &'static str,
        /// Elements expected.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// Elements of another type than asked for.
    #[error("expected elements of {expected}, got {got}")]
    DTypeMismatch {
        /// Type expected.
        expected: DType,
        /// Type given.
        got: DType,
    },
    /// An enqueued operation failed; everything behind it on the stream was skipped.
    #[error("{op} on stream {stream}: {message}")]
    Operation {
        /// The stream.
        stream: String,
        /// The operation.
        op: String,
        /// What it said.
        message: String,
    },
    /// An enqueued operation panicked; everything behind it on the stream was skipped.
    #[error("{op} on stream {stream} panicked: {message}")]
    Panicked {
        /// The stream.
        stream: String,
        /// The operation.
        op: String,
        /// The panic's message.
        message: String,
    },
    /// A wait took longer than its limit.
    #[error("{what} took longer than {limit:?}")]
    TimedOut {
        /// What was waited for.
        what: String,
        /// The limit.
        limit: Duration,
    },
    /// The stream's queue is closed (its worker ended).
    #[error("stream {stream} is closed")]
    Closed {
        /// The stream.
        stream: String,
    },
    /// A call of the driver or the operating system failed.
    #[error("{call}: {message}")]
    Driver {
        /// The call.
        call: &'static str,
        /// What it said.
        message: String,
    },
}
