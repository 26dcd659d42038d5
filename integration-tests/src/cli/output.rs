//! Output of the commands.

use std::io::{ErrorKind, Write, stderr, stdout};

use super::CliError;

/// Writes `text` to standard output. A closed pipe (`zero train | head`) is not an error.
///
/// # Errors
/// Standard output cannot be written.
pub(super) fn print_text(text: impl AsRef<str>) -> Result<(), CliError> {
    let mut out = stdout().lock();
    match out.write_all(text.as_ref().as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(CliError::Failure(format!("failed to write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

/// Writes a line to standard error; failures are ignored.
pub(super) fn print_note(line: impl std::fmt::Display) {
    let _ = writeln!(stderr(), "{line}");
}
