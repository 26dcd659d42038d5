//! What can be wrong with a configuration file.

use std::io;
use std::path::PathBuf;

use thiserror::Error;
use zero_optim::OptimError;

/// Why a configuration file cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigFileError {
    /// The file could not be read.
    #[error("{}: cannot read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// What is wrong in a file, with its path.
    #[error("{}: {source}", path.display())]
    In {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        source: Box<ConfigFileError>,
    },
    /// Not JSON (with comments).
    #[error("not a JSON object: {message}")]
    Json {
        /// What the parser says, with line and column.
        message: String,
    },
    /// A key that DeepSpeed would refuse too.
    #[error("unknown key {key}")]
    UnknownKey {
        /// The key with its block.
        key: String,
    },
    /// A value of another type or outside its range.
    #[error("{key} is {got}; expected {expected}")]
    WrongType {
        /// The key with its block.
        key: String,
        /// What its value should be.
        expected: &'static str,
        /// What its value is.
        got: String,
    },
    /// A feature whose absence would change the results.
    #[error("{key} {got} is not supported, and ignoring it would change the results: {why}")]
    Unsupported {
        /// The key with its block.
        key: String,
        /// What its value is.
        got: String,
        /// What is done here, or what to do.
        why: &'static str,
    },
    /// Two keys that say the same thing.
    #[error("{one} and {other} are one setting; give one of them")]
    Conflict {
        /// A key with its block.
        one: String,
        /// The other.
        other: String,
    },
    /// A key that another one makes necessary.
    #[error("{key} is missing: {why}")]
    Missing {
        /// The key with its block.
        key: &'static str,
        /// What needs it.
        why: &'static str,
    },
    /// A schedule whose parameters are wrong.
    #[error("scheduler.params: {message}")]
    Schedule {
        /// What is wrong with them.
        message: String,
    },
    /// A number outside the optimizer's ranges.
    #[error(transparent)]
    Optim(#[from] OptimError),
    /// Batch sizes that do not agree.
    #[error(
        "train_batch_size {train_batch_size} is not micro-batch {} x accumulation {} x {ranks} ranks",
        or_any(micro_batch),
        or_any(grad_accum)
    )]
    Batch {
        /// Rows of a step.
        train_batch_size: u64,
        /// Rows of a micro-batch, where given.
        micro_batch: Option<u64>,
        /// Micro-batches of a step, where given.
        grad_accum: Option<u64>,
        /// Ranks of the run.
        ranks: u64,
    },
}

fn or_any(n: &Option<u64>) -> String {
    n.map_or("any".to_owned(), |n| n.to_string())
}
