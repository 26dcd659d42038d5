//! The error of a training run.

use std::error::Error;

use thiserror::Error;
use zero_alloc::AllocError;
use zero_alloc::device::DeviceError;
use zero_alloc::swap::SwapError;
use zero_ckpt::CkptError;
use zero_comm::{BucketError, CommError, PrefetchError};
use zero_kernels::KernelError;
use zero_optim::{AgreementError, CheckpointError, OptimError};
use zero_shard::ShardError;

use crate::model::ModelError;

/// Why training failed to start or to continue.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
#[non_exhaustive]
pub enum TrainError {
    /// Invalid settings.
    #[error("{0}")]
    Usage(String),
    /// The model or its data.
    #[error(transparent)]
    Model(ModelError),
    /// The layout of the parameters.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// A memory allocation.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// A stream or an operation on it.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A collective.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A kernel launch.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A gradient bucket.
    #[error(transparent)]
    Bucket(#[from] BucketError),
    /// The all-gather of a unit.
    #[error(transparent)]
    Prefetch(#[from] PrefetchError),
    /// The optimizer.
    #[error(transparent)]
    Optim(#[from] OptimError),
    /// A scratch file of offloaded state.
    #[error(transparent)]
    Swap(#[from] SwapError),
    /// A checkpoint.
    #[error(transparent)]
    Ckpt(#[from] CkptError),
    /// The optimizer's state in a checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The trainer's state in a checkpoint.
    #[error("{0}")]
    State(String),
    /// Two ranks that hold the same parameters hold different ones.
    #[error(
        "step {step}: rank {rank} holds other parameters than rank {reference}, unit {unit} first: a card, its memory or a link \
         is faulty; check the machines of both, and resume from an earlier checkpoint"
    )]
    Replicas {
        /// The step after which they were compared.
        step: u64,
        /// The lowest rank outside of the largest group with equal parameters.
        rank: usize,
        /// The lowest rank of that group.
        reference: usize,
        /// The first unit that differs.
        unit: String,
    },
    /// The comparison of the ranks.
    #[error(transparent)]
    Agreement(#[from] AgreementError),
    /// The gradients stopped being finite.
    #[error(
        "step {step}: {skipped} steps in a row were skipped because their gradients were not finite: training \
         diverged; resume from an earlier checkpoint with a lower learning rate"
    )]
    Diverged {
        step: u64,
        /// Consecutive skipped steps up to `step`.
        skipped: u64,
    },
    /// Another rank failed, and this one with it.
    #[error("{0}")]
    Echo(String),
    /// A rank failed, and the run ended with it.
    #[error("rank {rank}: {message}")]
    Rank { rank: usize, message: String },
}

/// An error of a stream or of a collective stays one, so that the failure of another rank is known.
impl From<ModelError> for TrainError {
    fn from(error: ModelError) -> Self {
        let other = match error.downcast::<DeviceError>() {
            Ok(device) => return Self::Device(*device),
            Err(other) => other,
        };
        let mut cause: Option<&(dyn Error + 'static)> = Some(&*other);
        while let Some(error) = cause {
            if let Some(comm) = error.downcast_ref::<CommError>() {
                return Self::Comm(comm.clone());
            }
            cause = error.source();
        }
        Self::Model(other)
    }
}

impl TrainError {
    /// Adds a remedy to the error of a checkpoint that was damaged after the run verified it.
    pub(crate) fn unreadable(error: CheckpointError) -> Self {
        match error {
            CheckpointError::Ckpt(CkptError::Corrupt { .. }) => Self::State(format!(
                "{error}; `zero ckpt verify DIR` names the newest whole checkpoint, and --resume DIR starts from it"
            )),
            other => other.into(),
        }
    }
}
