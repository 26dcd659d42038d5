//! How the operations of a stream run, and which streams can order each other.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::DeviceError;

/// The way in which the operations of a stream run. A stream waits only for events of the same
/// execution.
///
/// Why: an event of a recorder is reached at once, since nothing runs, and a stream of a recorder
/// waits for nothing. Between real streams either would be a wait that does not happen, after which
/// safe code has memory that an operation still uses. Modelled times and the checks of the seeded
/// scheduler are wrong, too, where a stream of another device takes part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Execution {
    /// At once, each stream on its thread: all devices that neither model, schedule nor record.
    #[default]
    Threads,
    /// At once, in the modelled time of the device with this number.
    #[cfg(any(test, feature = "testing"))]
    Modelled(u64),
    /// In the order of the seeded scheduler with this number.
    #[cfg(any(test, feature = "testing"))]
    Seeded(u64),
    /// Not at all: the recorder with this number has them.
    Recorded(u64),
}

impl fmt::Display for Execution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Threads => f.write_str("runs at once"),
            #[cfg(any(test, feature = "testing"))]
            Self::Modelled(number) => write!(f, "runs in the modelled time of device {number}"),
            #[cfg(any(test, feature = "testing"))]
            Self::Seeded(number) => write!(f, "runs in the order of seeded scheduler {number}"),
            Self::Recorded(number) => write!(f, "is recorded by recorder {number}, and never runs"),
        }
    }
}

impl Execution {
    /// Checks that `other`, which is executed as `got`, is of the execution of `own`, before the
    /// operation `what`.
    pub(crate) fn check(
        self,
        what: &'static str,
        own: fmt::Arguments<'_>,
        (other, got): (fmt::Arguments<'_>, Self),
    ) -> Result<(), DeviceError> {
        if self == got {
            return Ok(());
        }
        Err(DeviceError::AnotherExecution {
            what,
            expected: format!("{own} {self}"),
            got: format!("{other} {got}"),
        })
    }
}

/// Checks that the operations of `stream` run, so that a device of another kind can be ordered
/// behind or before them.
pub(crate) fn check_runs(
    what: &'static str,
    stream: &str,
    execution: Execution,
) -> Result<(), DeviceError> {
    match execution {
        Execution::Recorded(_) => Err(DeviceError::AnotherExecution {
            what,
            expected: "the device runs its operations".into(),
            got: format!("stream {stream} {execution}"),
        }),
        _ => Ok(()),
    }
}

/// A number that no other device of the process has.
pub(crate) fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
