//! Why a command failed.

use std::io;

use rustix::io::Errno;
use thiserror::Error;

/// Why a command failed.
#[derive(Debug, Error)]
pub enum CliError {
    /// Wrong flags, configuration or input: exit code 2.
    #[error("{}{}", .0, remedy(.0))]
    Usage(String),
    /// A failure: exit code 1.
    #[error("{}{}", .0, remedy(.0))]
    Failure(String),
    /// A failure caused by that of another process: exit code 1. The launcher reports the cause
    /// instead.
    #[error("{0}")]
    Echo(String),
    /// A signal ended the run early, after it saved: exit code 128 + signal, as shells have it.
    #[error("ended by signal {signal}")]
    Interrupted {
        /// The signal.
        signal: i32,
    },
}

/// [`CliError::Usage`] with a formatted message.
macro_rules! usage {
    ($($message:tt)+) => {
        $crate::error::CliError::Usage(format!($($message)+))
    };
}

/// [`CliError::Failure`] with a formatted message.
macro_rules! failure {
    ($($message:tt)+) => {
        $crate::error::CliError::Failure(format!($($message)+))
    };
}

impl CliError {
    /// The process's exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Failure(_) | Self::Echo(_) => 1,
            Self::Interrupted { signal } => {
                128_u8.saturating_add(u8::try_from(*signal).unwrap_or(u8::MAX))
            }
        }
    }

    /// An error of wrong flags, configuration or input.
    pub fn usage(error: impl std::fmt::Display) -> Self {
        Self::Usage(error.to_string())
    }

    /// A failure.
    pub fn failure(error: impl std::fmt::Display) -> Self {
        Self::Failure(error.to_string())
    }
}

/// The remedy for the error of the system whose text is in `message`; empty if `message` has it.
///
/// Why by text: a message may come from another thread or process, and every error of a command
/// passes here, whichever of its many files could not be opened.
pub(crate) fn remedy(message: &str) -> &'static str {
    let is_named = ["ulimit -n", "fs.file-max"]
        .iter()
        .any(|limit| message.contains(limit));
    if is_named {
        return "";
    }

    let error = [Errno::MFILE, Errno::NFILE]
        .map(io::Error::from)
        .into_iter()
        .find(|error| message.contains(&error.to_string()));
    error.map_or("", |error| zero_ckpt::files::remedy(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_of_open_files_is_named_once() {
        for (errno, limit) in [(Errno::MFILE, "ulimit -n"), (Errno::NFILE, "fs.file-max")] {
            let error = CliError::usage(format_args!("a.txt: {}", io::Error::from(errno)));
            let outer = CliError::failure(format_args!("rank 1: {error}")).to_string();
            assert!(outer.ends_with(limit), "{outer}");
            assert_eq!(outer.matches(limit).count(), 1, "{outer}");
        }
        assert_eq!(remedy(&io::Error::from(Errno::NOENT).to_string()), "");
    }
}
