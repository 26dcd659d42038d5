//! Errors of devices, and how failed operations of a stream are named.

use std::any::Any;
use std::error::Error;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::{DType, DeviceId};

/// Why an enqueued operation failed: an error, or a text. Cheap to clone. Two are equal if their
/// texts are.
#[derive(Clone)]
pub struct Cause(Arc<dyn Error + Send + Sync>);

impl Cause {
    /// The cause `error`.
    pub fn new(error: impl Error + Send + Sync + 'static) -> Self {
        Self(Arc::new(error))
    }
}

impl<T: Into<String>> From<T> for Cause {
    fn from(text: T) -> Self {
        Self(Box::<dyn Error + Send + Sync>::from(text.into()).into())
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl PartialEq for Cause {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Eq for Cause {}

/// Why a device, stream or event operation failed. Cheap to clone: a poisoned stream returns its
/// first error repeatedly.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
#[non_exhaustive]
pub enum DeviceError {
    /// The device is out of memory.
    #[error("failed to allocate {requested_bytes} bytes: device out of memory ({detail})")]
    OutOfMemory {
        requested_bytes: usize,
        detail: String,
    },
    /// The device's driver was not found.
    #[error("no driver found; tried {}", tried.join(", "))]
    NoDriver {
        /// Libraries tried, each with the loader's message.
        tried: Vec<String>,
    },
    /// Two lengths must be equal and are not.
    #[error("{what}: expected {expected} elements, got {got}")]
    LengthMismatch {
        /// The operation and argument.
        what: &'static str,
        expected: usize,
        got: usize,
    },
    /// Elements have another type than expected.
    #[error("expected elements of {expected}, got {got}")]
    DTypeMismatch { expected: DType, got: DType },
    /// A slice is in memory that the operation cannot access, or its stream is another device's.
    #[error(
        "{what}: the argument is of {got}, and operations of {expected} cannot access it; pass memory and streams of {expected}, or transfer the contents with `download` and `upload`"
    )]
    AnotherDevice {
        /// The operation and argument.
        what: &'static str,
        /// The device that runs the operation.
        expected: DeviceId,
        /// The device of the argument.
        got: DeviceId,
    },
    /// A stream or an event of a device that runs its operations in another way, such as a recorder
    /// among threads: neither would wait for the other.
    #[error("{what}: {expected}, and {got}; use streams and events of one device")]
    AnotherExecution {
        /// The operation.
        what: &'static str,
        /// The device or the stream that it is an operation of.
        expected: String,
        /// The stream, or that of the event, which it was passed.
        got: String,
    },
    /// Source and destination of a copy overlap.
    #[error("copy of {bytes} bytes: source and destination overlap")]
    Overlap {
        /// The length of each.
        bytes: usize,
    },
    /// An argument is invalid.
    #[error("{what}: {message}")]
    Argument {
        what: &'static str,
        /// The argument, its value and what is allowed.
        message: String,
    },
    /// An enqueued operation failed; later operations of the stream were skipped.
    #[error("{op} on stream {stream}: {cause}")]
    Operation {
        stream: String,
        op: String,
        /// Its error; see [`DeviceError::cause`].
        cause: Cause,
    },
    /// An enqueued operation panicked; later operations of the stream were skipped.
    #[error("{op} on stream {stream} panicked: {message}")]
    Panicked {
        stream: String,
        op: String,
        message: String,
    },
    /// A wait exceeded its limit.
    #[error("{what} took longer than {limit:?}")]
    TimedOut { what: String, limit: Duration },
    /// The stream's queue is closed.
    #[error("stream {stream} is closed")]
    Closed { stream: String },
    /// A call of the driver or the operating system failed.
    #[error("{call}: {message}")]
    Driver { call: &'static str, message: String },
}

impl DeviceError {
    /// The error of the enqueued operation that failed, if it is an `E`, such as `CommError` of
    /// zero-comm.
    pub fn cause<E: Error + 'static>(&self) -> Option<&E> {
        match self {
            Self::Operation { cause, .. } => cause.0.downcast_ref(),
            _ => None,
        }
    }

    /// Adds the names of the stream and the operation, unless the error already has them.
    pub(crate) fn in_operation(self, stream: &str, op: &str) -> Self {
        match self {
            Self::Operation { .. } | Self::Panicked { .. } => self,
            error => Self::Operation {
                stream: stream.into(),
                op: op.into(),
                cause: Cause::new(error),
            },
        }
    }
}

/// Runs a host operation of a stream. Its error or panic names the stream and the operation.
pub(crate) fn run_named(
    stream: &str,
    op: &str,
    run: impl FnOnce() -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(result) => result.map_err(|error| error.in_operation(stream, op)),
        Err(panic) => Err(DeviceError::Panicked {
            stream: stream.into(),
            op: op.into(),
            message: message_of(&*panic),
        }),
    }
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

/// Checks two lengths of the argument `what`.
pub(crate) fn same_len(what: &'static str, expected: usize, got: usize) -> Result<(), DeviceError> {
    if expected == got {
        Ok(())
    } else {
        Err(DeviceError::LengthMismatch {
            what,
            expected,
            got,
        })
    }
}
