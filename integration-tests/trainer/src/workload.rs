//! The inputs and the result of a run.

use std::ops::Range;
use std::path::PathBuf;

use zero_alloc::Pool;
use zero_alloc::device::Device;
use zero_alloc::host::OpSpan;
use zero_shard::{ParamSpec, TensorCut, UnitSpec};

use crate::batch::{Batch, BatchRows};
use crate::error::TrainError;
use crate::model::{Model, ModelError, ModelRanks, Pass};
use crate::telemetry::memory_trace::MemoryTrace;
use crate::telemetry::metrics::{Best, NvmeBytes, StepMetrics};

/// A model with its initial weights, and data to train on.
pub trait Workload<D: Device>: Sync {
    /// The units of the model.
    fn units(&self) -> Vec<UnitSpec>;

    /// The passes of the model over its units, in forward order.
    fn passes(&self) -> Vec<Pass>;

    /// How a parameter is divided among the ranks of tensor parallelism. Without one that is cut the
    /// model has none.
    fn tensor_cut(&self, _param: &ParamSpec) -> TensorCut {
        TensorCut::Replicated
    }

    /// Creates a rank's model, with its activations from `pool`, which computes each micro-batch with
    /// the other `ranks`. They load the same micro-batches: each has the whole batch. The sum of
    /// their losses is that of the batch, and so is the sum of the gradients of ranks with the same
    /// part of the parameters.
    ///
    /// # Errors
    /// Out of memory, invalid settings, or the model cannot share a micro-batch.
    fn model(
        &self,
        pool: &Pool<D>,
        compute: &D::Stream,
        ranks: &ModelRanks<D>,
    ) -> Result<Box<dyn Model<D>>, ModelError>;

    /// The initial weights.
    ///
    /// # Errors
    /// Threads to compute them cannot be started.
    fn weights(&self) -> Result<Box<InitialWeights<'_>>, ModelError>;

    /// Writes the micro-batch at `at` to `batch`, which has the micro-batch before it.
    ///
    /// # Errors
    /// The data cannot be read.
    fn batch(&self, at: BatchAt, batch: &mut Batch) -> Result<(), ModelError>;

    /// A checksum of the data, by which a resumed run notices other data; 0 for all data by
    /// default.
    fn data_fingerprint(&self) -> u64 {
        0
    }

    /// The model's `config.json`, for export from a checkpoint; null by default.
    fn model_config(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}

/// A position in training: one micro-batch of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchAt {
    /// Index of the optimizer step.
    pub step: u64,
    /// Index of the micro-batch in the step, below `grad_accum`.
    pub micro_batch_index: u64,
    /// Micro-batches a step, A.
    pub grad_accum: u64,
    /// This rank, among those with different micro-batches.
    pub rank: u64,
    /// Ranks with different micro-batches, N.
    pub world_size: u64,
    /// Rows of a rank's micro-batch, B.
    pub micro_batch: usize,
    /// Tokens of a row, T.
    pub seq_len: usize,
    /// Seed of the run, for random windows.
    pub seed: u64,
}

impl BatchAt {
    /// The rows of the micro-batch among those of the run.
    pub fn rows(&self) -> BatchRows {
        let before = self.micro_batch_index * self.world_size + self.rank;
        BatchRows {
            seed: self.seed,
            step: self.step,
            first: before * self.micro_batch as u64,
        }
    }
}

/// Fills a buffer with elements `range` of the initial values of a parameter; the arguments are its
/// name, the range and the buffer. An error if the weights cannot be read.
pub type InitialWeights<'a> =
    dyn FnMut(&str, Range<u64>, &mut [f32]) -> Result<(), ModelError> + 'a;

/// The result of a run on one rank.
#[derive(Clone, Debug)]
pub struct RankSummary {
    /// The last completed step.
    pub step: u64,
    /// Whether a request ended the run before its last step, or during the evaluation after it.
    pub cancelled: bool,
    /// The signal that made the request, on whichever rank.
    pub signal: Option<i32>,
    /// The step that the run started from.
    pub resumed_at: u64,
    /// The metrics of the last step on this rank; `None` if no step ran.
    pub last: Option<StepMetrics>,
    /// The newest checkpoint of this run.
    pub checkpoint: Option<PathBuf>,
    /// The lowest validation loss so far, and its checkpoint.
    pub best: Option<(Best, Option<PathBuf>)>,
    /// The pool's allocations from the device: up to the end of the second step, and in total.
    pub backing_allocations: [u64; 2],
    /// The operations of the last step with their times.
    pub last_spans: Vec<OpSpan>,
    /// The memory over the last step, if it was logged.
    pub memory: Option<MemoryTrace>,
    /// Scratch files, with the bytes of the whole run; `None` if there were none.
    pub nvme: Option<NvmeBytes>,
}

impl RankSummary {
    /// A run that starts after step `step`.
    pub(crate) fn starting_at(step: u64) -> Self {
        Self {
            step,
            cancelled: false,
            signal: None,
            resumed_at: step,
            last: None,
            checkpoint: None,
            best: None,
            backing_allocations: [0; 2],
            last_spans: Vec::new(),
            memory: None,
            nvme: None,
        }
    }
}

/// Fills a buffer with the weights of a range.
pub(crate) type Fill<'a> = &'a mut dyn FnMut(Range<usize>, &mut Vec<f32>) -> Result<(), TrainError>;
