//! What ends a training run.

use thiserror::Error;
use zero_alloc::AllocError;
use zero_alloc::device::DeviceError;
use zero_comm::CommError;
use zero_kernels::KernelError;
use zero_shard::ShardError;

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
}
