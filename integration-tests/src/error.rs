//! What ends a training run.

use thiserror::Error;
use zero_alloc::AllocError;
use zero_alloc::device::DeviceError;
use zero_ckpt::CkptError;
use zero_comm::{BucketError, CommError, PrefetchError};
use zero_kernels::KernelError;
use zero_optim::OptimError;
use zero_shard::ShardError;

use crate::cuda::OpError;
use crate::data::DataError;
use crate::hf::HfError;
use crate::model::config::ConfigError;

/// Why training could not start or go on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TrainError {
    /// Settings that do not fit together.
    #[error("{0}")]
    Usage(String),
    /// The model's configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The layout.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// Memory.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// A stream or an operation on it.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A collective.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A launch.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// An operation of a model on CUDA.
    #[error(transparent)]
    Op(#[from] OpError),
    /// A gradient bucket.
    #[error(transparent)]
    Bucket(#[from] BucketError),
    /// The gathering of a unit.
    #[error(transparent)]
    Prefetch(#[from] PrefetchError),
    /// The optimizer.
    #[error(transparent)]
    Optim(#[from] OptimError),
    /// A checkpoint.
    #[error(transparent)]
    Ckpt(#[from] CkptError),
    /// The trainer's state in a checkpoint.
    #[error("{0}")]
    State(String),
    /// The data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A Hugging Face folder.
    #[error(transparent)]
    Hf(#[from] HfError),
    /// A file of the run: metrics, report.
    #[error("{what} {path}: {source}")]
    File {
        /// What was done.
        what: &'static str,
        /// To which file.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The threads of a rank.
    #[error("no threads for a rank: {0}")]
    Threads(#[from] rayon::ThreadPoolBuildError),
    /// Gradients are not finite any more.
    #[error(
        "step {step}: {skipped} steps in a row were skipped, since their gradients are not finite: the run diverges; \
         go on from a checkpoint before that, with a lower learning rate"
    )]
    Diverged {
        /// The last step.
        step: u64,
        /// Steps skipped, up to it.
        skipped: u64,
    },
    /// A rank failed, and the run ended with it.
    #[error("rank {rank}: {message}")]
    Rank {
        /// Which rank.
        rank: usize,
        /// What it said.
        message: String,
    },
}
