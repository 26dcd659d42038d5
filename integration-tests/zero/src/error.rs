//! Why a command failed.

use thiserror::Error;

/// Why a command failed.
#[derive(Debug, Error)]
pub enum CliError {
    /// Wrong flags, configuration or input: exit code 2.
    #[error("{0}")]
    Usage(String),
    /// A failure: exit code 1.
    #[error("{0}")]
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
