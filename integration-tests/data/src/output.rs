//! Texts for a terminal, also those of the program: numbers, notes and a progress bar.

use std::io::{Write, stderr};

use console::Term;
use indicatif::{HumanBytes, HumanCount, ProgressBar, ProgressStyle};

/// Writes a line to standard error; failures are ignored.
pub fn print_note(line: impl std::fmt::Display) {
    // One write, so that the lines of several processes do not mix.
    let _ = stderr().write_all(format!("{line}\n").as_bytes());
}

/// The text in one line, without control characters.
pub fn printable(text: &str) -> String {
    let escaped = |c: char| match c {
        c if c.is_control() => c.escape_default().to_string(),
        c => c.to_string(),
    };
    text.chars().map(escaped).collect()
}

/// The beginning of a text in one line, of `most` characters, in quotes.
pub fn beginning(text: &str, most: usize) -> String {
    let start: String = text.chars().take(most).collect();
    let dots = if start.len() < text.len() { "..." } else { "" };
    format!("\"{}{dots}\"", printable(&start))
}

/// A number of things: `1 rank`, `1,000 steps`.
pub fn counted(n: u64, thing: &str) -> String {
    format!("{} {thing}{}", HumanCount(n), if n == 1 { "" } else { "s" })
}

/// A number of bytes: `1.25 MiB`.
pub fn bytes(n: u64) -> String {
    HumanBytes(n).to_string()
}

/// The narrowest terminal with room for the bar beside its text.
const BAR_COLUMNS: u16 = 132;

/// A progress bar over `steps` on standard error, in one line of the terminal.
pub fn progress_bar(steps: u64) -> ProgressBar {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beginning_is_one_line() {
        assert_eq!(beginning("a\n\u{1b}[1mé", 9), "\"a\\n\\u{1b}[1mé\"");
        assert_eq!(beginning("éab", 2), "\"éa...\"");
        assert_eq!(beginning("", 2), "\"\"");
    }
}
