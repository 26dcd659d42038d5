//! The commands of the binary `zero`.

pub mod ckpt;

/// How a command fails, and with which exit code.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// Wrong use or configuration: exit code 2.
    #[error("{0}")]
    Usage(String),
    /// Anything else: exit code 1.
    #[error("{0}")]
    Failure(String),
}
