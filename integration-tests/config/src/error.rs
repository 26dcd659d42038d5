//! Errors of a configuration file.

use std::io;
use std::path::PathBuf;

use thiserror::Error;
use zero_optim::OptimError;

/// Why a configuration file cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigFileError {
    /// The file could not be read.
    #[error("{}: failed to read the file: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// An error in the content of a file.
    #[error("{}: {source}", path.display())]
    In {
        /// The file.
        path: PathBuf,
        /// The error.
        source: Box<ConfigFileError>,
    },
    /// Not a JSON object (with comments): the parser's message, with line and column.
    #[error("not a JSON object: {0}")]
    Json(String),
    /// A key, with its block, that DeepSpeed rejects, too.
    #[error("unknown key {0}, which DeepSpeed rejects, too: correct or remove it")]
    UnknownKey(String),
    /// A value of another type or outside its range.
    #[error("{key} is {got}; expected {expected}")]
    WrongType {
        /// The key with its block.
        key: String,
        /// The valid values.
        expected: &'static str,
        /// The value.
        got: String,
    },
    /// An unsupported setting that would change the results.
    #[error("{key} {got} is not supported, and ignoring it would change the results: {why}")]
    Unsupported {
        /// The key with its block.
        key: String,
        /// The value.
        got: String,
        /// The supported behavior or a remedy.
        why: &'static str,
    },
    /// Two keys for one setting.
    #[error("{one} and {other} conflict; remove one of them")]
    Conflict {
        /// A key with its block.
        one: String,
        /// The other.
        other: String,
    },
    /// A required key.
    #[error("{key} is missing: {why}")]
    Missing {
        /// The key with its block.
        key: &'static str,
        /// Why it is required.
        why: &'static str,
    },
    /// Invalid parameters of a schedule: the deserializer's message.
    #[error("scheduler.params: {0}")]
    Schedule(String),
    /// Invalid parameter groups: the deserializer's message.
    #[error("param_groups: {0}")]
    ParamGroups(String),
    /// A number outside the optimizer's ranges.
    #[error(transparent)]
    Optim(#[from] OptimError),
    /// Inconsistent batch sizes.
    #[error(
        "train_batch_size {train_batch_size} is not micro-batch {} x accumulation {} x {ranks} ranks",
        or_any(micro_batch),
        or_any(grad_accum)
    )]
    Batch {
        /// Rows of a step.
        train_batch_size: u64,
        /// Rows of a micro-batch, if set.
        micro_batch: Option<u64>,
        /// Micro-batches of a step, if set.
        grad_accum: Option<u64>,
        /// Ranks of the run.
        ranks: u64,
    },
}

fn or_any(n: &Option<u64>) -> String {
    n.map_or("any".to_owned(), |n| n.to_string())
}
