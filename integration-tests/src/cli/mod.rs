//! The commands of the binary `zero`.

pub mod ckpt;
mod output;
pub mod plan;
pub mod train;

use thiserror::Error;

use crate::launcher::Report;

/// Why a command ended without success.
#[derive(Debug, Error)]
pub enum CliError {
    /// Wrong use or configuration: exit code 2.
    #[error("{0}")]
    Usage(String),
    /// Failure: exit code 1.
    #[error("{0}")]
    Failure(String),
    /// Failure that another process's failure caused: exit code 1.
    #[error("{0}")]
    Echo(String),
}

impl CliError {
    /// The process's exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Failure(_) | Self::Echo(_) => 1,
        }
    }

    /// Says it: to the launcher that started this process as a rank, or on standard error.
    pub fn tell(&self) {
        let echo = matches!(self, Self::Echo(_));
        let report = Report { code: self.exit_code(), echo, message: self.to_string() };
        if !report.deliver() {
            output::note(format_args!("error: {self}"));
        }
    }

    /// Wrong use or configuration.
    pub fn usage(error: impl std::fmt::Display) -> Self {
        Self::Usage(error.to_string())
    }

    /// Failure.
    pub fn failure(error: impl std::fmt::Display) -> Self {
        Self::Failure(error.to_string())
    }
}
