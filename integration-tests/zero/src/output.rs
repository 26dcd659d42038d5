//! Output of the commands.

use std::fs::File;
use std::io::{self, ErrorKind, Write, stderr, stdout};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::time::Duration;

use console::Term;
use indicatif::{HumanBytes, HumanCount, HumanDuration, ProgressBar, ProgressStyle};

use crate::error::CliError;

/// Writes `text` to standard output. A closed pipe (`zero train | head`) or terminal is not an
/// error.
///
/// # Errors
/// Standard output cannot be written.
pub(crate) fn print_text(text: impl AsRef<[u8]>) -> Result<(), CliError> {
    let mut out = stdout().lock();
    match out.write_all(text.as_ref()).and_then(|()| out.flush()) {
        Err(error) if !is_closed(&error) => Err(CliError::Failure(format!(
            "failed to write to standard output: {error}"
        ))),
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

/// Writes a line to standard error; failures are ignored.
pub(crate) fn print_note(line: impl std::fmt::Display) {
    // One write, so that the lines of several processes do not mix.
    let _ = stderr().write_all(format!("{line}\n").as_bytes());
}

/// The text in one line, without control characters.
pub(crate) fn printable(text: &str) -> String {
    let escaped = |c: char| match c {
        c if c.is_control() => c.escape_default().to_string(),
        c => c.to_string(),
    };
    text.chars().map(escaped).collect()
}

/// The beginning of a text in one line, of `most` characters, in quotes.
pub(crate) fn beginning(text: &str, most: usize) -> String {
    let start: String = text.chars().take(most).collect();
    let dots = if start.len() < text.len() { "..." } else { "" };
    format!("\"{}{dots}\"", printable(&start))
}

/// A number of things: `1 rank`, `1,000 steps`.
pub(crate) fn counted(n: u64, thing: &str) -> String {
    format!("{} {thing}{}", HumanCount(n), if n == 1 { "" } else { "s" })
}

/// A number of bytes: `1.25 MiB`.
pub(crate) fn bytes(n: u64) -> String {
    HumanBytes(n).to_string()
}

/// The narrowest terminal with room for the bar beside its text.
const BAR_COLUMNS: u16 = 132;

/// A progress bar over `steps` on standard error, in one line of the terminal.
pub(crate) fn progress_bar(steps: u64) -> ProgressBar {
    // A wide message is cut at the edge of the terminal; all else would wrap.
    let columns = Term::stderr().size().1;
    let template = if columns < BAR_COLUMNS {
        "{wide_msg}"
    } else {
        "{bar:30} {wide_msg}"
    };
    let style =
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(steps).with_style(style)
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
    fn beginning_is_one_line() {
        assert_eq!(beginning("a\n\u{1b}[1mé", 9), "\"a\\n\\u{1b}[1mé\"");
        assert_eq!(beginning("éab", 2), "\"éa...\"");
        assert_eq!(beginning("", 2), "\"\"");
    }

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
