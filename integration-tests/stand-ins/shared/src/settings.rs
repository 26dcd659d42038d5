//! Settings from environment variables, and messages to the user.

use std::io::Write;
use std::str::FromStr;

/// Prints `cuda stand-in: TEXT` to stderr, with the library's name in place of `cuda`.
///
/// It writes to stderr directly, since the test harness captures `eprintln!`, and in one write, so
/// that threads do not mix their lines. Errors are ignored.
pub fn print(library: &str, text: &str) {
    let line = format!("{library} stand-in: {text}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Reads variables. A value that cannot be parsed is reported and ignored.
pub struct Settings<F> {
    library: &'static str,
    variable: F,
}

impl Settings<fn(&str) -> Option<String>> {
    /// The environment of the process; empty variables count as unset.
    pub fn of_process(library: &'static str) -> Self {
        Self::new(library, |name| {
            std::env::var(name).ok().filter(|value| !value.is_empty())
        })
    }
}

impl<F: Fn(&str) -> Option<String>> Settings<F> {
    /// Settings from another source, for tests.
    pub fn new(library: &'static str, variable: F) -> Self {
        Self { library, variable }
    }

    /// The text of a variable.
    pub fn text(&self, name: &str) -> Option<String> {
        (self.variable)(name)
    }

    /// The number in a variable.
    pub fn number<T: FromStr>(&self, name: &str) -> Option<T> {
        let text = self.text(name)?;
        let value = text.trim().parse().ok();
        if value.is_none() {
            print(
                self.library,
                &format!("{name}={text} is ignored: not a number in range"),
            );
        }
        value
    }

    /// Whether a switch is on; `default` if it is unset.
    pub fn switch(&self, name: &str, default: bool) -> bool {
        self.number::<u64>(name).map_or(default, |n| n > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_number_leaves_the_default() {
        let settings = Settings::new("test", |name| match name {
            "BYTES" => Some("4096".to_owned()),
            "ON" => Some("1".to_owned()),
            "OFF" => Some("0".to_owned()),
            "SEED" => Some("soon".to_owned()),
            _ => None,
        });

        assert_eq!(settings.number("BYTES"), Some(4096u64));
        assert_eq!(settings.number::<u8>("BYTES"), None);
        assert_eq!(settings.number::<u64>("SEED"), None);
        assert!(settings.switch("ON", false));
        assert!(!settings.switch("OFF", true));
        assert!(settings.switch("SEED", true));
    }
}
