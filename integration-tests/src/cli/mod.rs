//! The commands of the binary `zero`.

pub mod ckpt;
pub mod plan;
pub mod train;

use thiserror::Error;

/// Why a command ended without success.
#[derive(Debug, Error)]
pub enum CliError {
    /// Wrong use or configuration: exit code 2.
    #[error("{0}")]
    Usage(String),
    /// Failure: exit code 1.
    #[error("{0}")]
    Failure(String),
}

impl CliError {
    /// The process's exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Failure(_) => 1,
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
