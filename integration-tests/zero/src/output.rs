//! Output of the commands.

use std::fs::File;
use std::io::{self, ErrorKind, Write, stdout};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::time::Duration;

use indicatif::{HumanDuration, ProgressBar};

pub(crate) use zero_data::output::{bytes, counted, print_note, printable, progress_bar};

use crate::error::CliError;

/// Writes `text` to standard output. A closed pipe (`zero train | head`) or terminal is not an
/// error.
///
/// # Errors
/// Standard output cannot be written.
pub(crate) fn print_text(text: impl AsRef<[u8]>) -> Result<(), CliError> {
    let mut out = stdout().lock();
    match out.write_all(text.as_ref()).and_then(|()| out.flush()) {
        Err(error) if !is_closed(&error) => {
            Err(failure!("failed to write to standard output: {error}"))
        }
        _ => Ok(()),
    }
}

/// Whether nobody reads standard output any longer: the error of a pipe, or of a terminal, which is
/// a device.
fn is_closed(error: &io::Error) -> bool {
    let is_device = || {
        let out = stdout().as_fd().try_clone_to_owned();
        let metadata = out.and_then(|out| File::from(out).metadata());
        metadata.is_ok_and(|metadata| metadata.file_type().is_char_device())
    };
    error.kind() == ErrorKind::BrokenPipe
        || (error.raw_os_error() == Some(libc::EIO) && is_device())
}

/// Shows that `step` is done; `text` are its figures, `left` the time until the end.
pub(crate) fn show_progress(bar: &ProgressBar, step: u64, text: &str, left: Duration) {
    bar.set_position(step);
    bar.set_message(progress(
        step,
        bar.length().unwrap_or(step),
        text,
        bar.elapsed(),
        left,
    ));
}

/// The text of a step. What matters most is first, since the end is cut at the edge of a narrow
/// terminal.
fn progress(step: u64, steps: u64, text: &str, elapsed: Duration, left: Duration) -> String {
    let [elapsed, left] = [elapsed, left].map(HumanDuration);
    format!("step {step}/{steps}  {left:#} left  {text}  after {elapsed:#}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remaining_time_fits_a_narrow_terminal() {
        let [elapsed, left] = [90_000, 7200].map(Duration::from_secs);
        let figures = "loss 10.1234  validation 10.1234  1,234,567 tokens/s  12,345,678,901 tokens";
        let text = progress(100_000, 1_000_000, figures, elapsed, left);
        assert_eq!(
            text,
            format!("step 100000/1000000  2h left  {figures}  after 25h")
        );
        let loss = text.find("validation").unwrap();
        assert!(loss < 80, "{text}");
    }
}
