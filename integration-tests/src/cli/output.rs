//! What a command says. Nobody may be reading any more (`zero train | head`): that is no failure of the command.

use std::io::{ErrorKind, Write, stderr, stdout};

use super::CliError;

/// Writes `text` to standard output, as it is.
///
/// # Errors
/// It cannot be written, for another reason than that its reader has gone.
pub(super) fn say(text: impl AsRef<str>) -> Result<(), CliError> {
    let mut out = stdout().lock();
    match out.write_all(text.as_ref().as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(CliError::Failure(format!("writing to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

/// Writes a line to standard error, if that can be.
pub(super) fn note(line: impl std::fmt::Display) {
    let _ = writeln!(stderr(), "{line}");
}
