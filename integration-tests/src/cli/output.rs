//! Output of the commands.

use std::io::{ErrorKind, Write, stderr, stdout};
use std::time::Duration;

use console::Term;
use indicatif::{HumanCount, HumanDuration, ProgressBar, ProgressStyle};

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
    // One write, so that the lines of several processes do not mix.
    let _ = stderr().write_all(format!("{line}\n").as_bytes());
}

/// A number of things: `1 rank`, `1,000 steps`.
pub(super) fn counted(n: u64, thing: &str) -> String {
    format!("{} {thing}{}", HumanCount(n), if n == 1 { "" } else { "s" })
}

/// The narrowest terminal with room for the bar beside its text.
const BAR_COLUMNS: u16 = 100;

/// A progress bar over `steps` on standard error, in one line of the terminal.
pub(super) fn progress_bar(steps: u64) -> ProgressBar {
    // A wide message is cut at the edge of the terminal; all else would wrap.
    let columns = Term::stderr().size().1;
    let template = if columns < BAR_COLUMNS { "{wide_msg}" } else { "{bar:30} {wide_msg}" };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(steps).with_style(style)
}

/// Shows that `step` is done; `text` are its figures, `left` the time until the end.
pub(super) fn show_progress(bar: &ProgressBar, step: u64, text: &str, left: Duration) {
    bar.set_position(step);
    let (steps, elapsed, left) = (bar.length().unwrap_or(step), HumanDuration(bar.elapsed()), HumanDuration(left));
    bar.set_message(format!("step {step}/{steps}  {text}  {elapsed:#} (eta {left:#})"));
}
