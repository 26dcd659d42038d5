//! Operations of the host in a stream: their failures get names, and panics become failures.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::DeviceError;

/// Runs an operation; its error or panic gets the names of the stream and the operation.
pub(crate) fn run_named(
    stream: &str,
    label: &str,
    op: impl FnOnce() -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    let names = || (stream.to_owned(), label.to_owned());
    match catch_unwind(AssertUnwindSafe(op)) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(e @ (DeviceError::Operation { .. } | DeviceError::Panicked { .. }))) => Err(e),
        Ok(Err(e)) => {
            let (stream, op) = names();
            Err(DeviceError::Operation { stream, op, message: e.to_string() })
        }
        Err(panic) => {
            let (stream, op) = names();
            Err(DeviceError::Panicked { stream, op, message: message_of(&*panic) })
        }
    }
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}
