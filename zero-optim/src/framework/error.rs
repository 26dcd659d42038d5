//! Errors of the facade.

use thiserror::Error;
use zero_alloc::AllocError;
use zero_alloc::device::{DType, DeviceError};
use zero_ckpt::CkptError;
use zero_comm::{BucketError, CommError, PrefetchError};
use zero_kernels::KernelError;
use zero_shard::ShardError;

use crate::{AgreementError, CheckpointError, OptimError};

impl FrameworkError {
    /// The error without the calls that it occurred in.
    pub fn cause(&self) -> &Self {
        match self {
            Self::At { error, .. } => error.cause(),
            _ => self,
        }
    }

    /// The error of a closure.
    pub(super) fn of_closure(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        match error.into().downcast() {
            Ok(own) => *own,
            Err(other) => Self::Framework(other),
        }
    }

    pub(super) fn at(self, at: impl FnOnce() -> String) -> Self {
        let error = Box::new(self);
        Self::At { at: at(), error }
    }
}

/// An error of a [`Zero`](super::Zero).
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum FrameworkError {
    /// No parameter, or unit, has this name.
    #[error("there is no {what} {name:?}; there are {known}")]
    Unknown {
        what: &'static str,
        name: String,
        known: String,
    },
    /// A gradient of another length than its parameter.
    #[error("the gradient of {name} has {got} elements, expected {expected}")]
    Length {
        name: String,
        got: usize,
        expected: usize,
    },
    /// A second gradient in one micro-batch.
    #[error(
        "{name} has a gradient already; sum its uses, call next_micro_batch before the next backward pass, or set \
         Builder::add_gradients"
    )]
    Twice { name: String },
    /// Parameters without a gradient at the end of a micro-batch.
    #[error(
        "{count} of {all} parameters have no gradient: {names}; call Step::unused for one that the loss does not depend on"
    )]
    Missing {
        count: usize,
        all: usize,
        names: String,
    },
    /// Another number of micro-batches than that of the run.
    #[error("the step has {got} micro-batches, expected {expected}; set Builder::micro_batches")]
    MicroBatches { got: usize, expected: usize },
    /// Losses of one step that are means, and others that are sums with weights.
    #[error(
        "a loss with a weight beside one without in one step: end all micro-batches with next_micro_batch and end, or all with \
         next_micro_batch_of and end_of"
    )]
    MixedLosses,
    /// Ranks that are in different calls.
    #[error(
        "rank {rank} called {call} where rank 0 called {expected}; all ranks make the same calls in the same order"
    )]
    OtherCall {
        rank: usize,
        call: &'static str,
        expected: &'static str,
    },
    /// Ranks that differ in a call, such as in the learning rate or in the order of units.
    #[error(
        "{call}: rank {rank} differs from rank {reference}: {what} is {got} on rank {rank} and {expected} on rank {reference}; \
         all ranks make the same calls with the same values"
    )]
    Differs {
        call: &'static str,
        rank: usize,
        reference: usize,
        what: String,
        got: String,
        expected: String,
    },
    /// Ranks that hold the same parameters have different ones.
    #[error(
        "the parameters of {unit} on rank {rank} differ from those of rank {reference}: a program wrote into them, or a memory or a \
         link is faulty; nothing was saved; resume from an earlier checkpoint"
    )]
    Replicas {
        rank: usize,
        reference: usize,
        unit: String,
    },
    /// A parameter that another rule updated before the checkpoint.
    #[error(
        "{checkpoint}: {param} was updated by {saved}, and is by {now} in this run, for which the checkpoint has no \
         state; give its group the rule {saved}"
    )]
    OtherUpdateRule {
        checkpoint: String,
        param: String,
        saved: String,
        now: String,
    },
    /// Elements of another type than those of the run.
    #[error("{name} is {run} in this run, not {asked}")]
    Type {
        name: String,
        run: DType,
        asked: DType,
    },
    /// An error in a call.
    #[error("{at}: {error}")]
    At { at: String, error: Box<Self> },
    /// An error of the framework, in a closure.
    #[error(transparent)]
    Framework(Box<dyn std::error::Error + Send + Sync>),
    /// Parameters are whole within forward and backward only.
    #[error(
        "parameter {name} at stage 3, where parameters are whole within Step::forward and Step::backward only"
    )]
    NotWhole { name: String },
    /// A tensor outside of the call still uses gathered parameters.
    #[error(
        "parameters of {unit} are still in use after its forward or backward; drop every tensor that views them, or copy it"
    )]
    Kept { unit: String },
    /// A unit that an earlier step has made whole.
    #[error("{unit} was made whole in an earlier step; call Step::unshard again in this one")]
    Old { unit: String },
    /// Memory that the host cannot read.
    #[error("{name} is in memory of a device; use ParamView::slice on the compute stream")]
    OnDevice { name: String },
    /// A setting that does not fit.
    #[error("{0}")]
    Setting(String),
    /// An earlier step failed, was dropped, or was not ended.
    #[error("an earlier step did not end: {0}; make a new Zero and resume from a checkpoint")]
    Broken(String),
    /// The layout could not be made.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// An allocation failed.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// A stream failed, or a type or device does not match.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A kernel was not enqueued.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A reduction was not enqueued.
    #[error(transparent)]
    Bucket(#[from] BucketError),
    /// A unit could not be gathered.
    #[error(transparent)]
    Prefetch(#[from] PrefetchError),
    /// The optimizer failed.
    #[error(transparent)]
    Optim(#[from] OptimError),
    /// Ranks differ, or one could not start.
    #[error(transparent)]
    Agreement(#[from] AgreementError),
    /// The optimizer could not be saved or loaded.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A checkpoint could not be opened.
    #[error(transparent)]
    Ckpt(#[from] CkptError),
}
