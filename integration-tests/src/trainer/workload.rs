//! What a run is given and what it gives: a model with its data, how long, and how it ended.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use zero_alloc::Pool;
use zero_alloc::device::Device;
use zero_alloc::host::OpSpan;
use zero_shard::UnitSpec;

use super::metrics::StepMetrics;
use crate::data::BatchAt;
use crate::error::TrainError;
use crate::model::{Model, Pass};

/// What is trained on what: a model with its first weights, and data.
pub trait Workload<D: Device>: Sync {
    /// The units of the model.
    fn units(&self) -> Vec<UnitSpec>;

    /// The passes of the model over its units, in forward order.
    fn passes(&self) -> Vec<Pass>;

    /// A rank's model, with its activations from `pool`.
    ///
    /// # Errors
    /// There is no memory for it, or its settings do not fit.
    fn model(&self, pool: &Pool<D>, compute: &D::Stream) -> Result<Box<dyn Model<D>>, TrainError>;

    /// Fills `out` with elements `range` of the first value of parameter `name`.
    ///
    /// # Errors
    /// The weights cannot be read.
    fn weights(&self, name: &str, range: std::ops::Range<u64>, out: &mut [f32]) -> Result<(), TrainError>;

    /// The micro-batch at `at`.
    ///
    /// # Errors
    /// The data cannot be read.
    fn batch(&self, at: BatchAt, inputs: &mut [u32], targets: &mut [u32]) -> Result<(), TrainError>;

    /// A checksum of the data.
    fn data_fingerprint(&self) -> u64;

    /// The model's `config.json`, for export from a checkpoint.
    fn model_config(&self) -> serde_json::Value;
}

/// How long, on how much at a time, and what to keep of it.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The step to end at.
    pub steps: u64,
    /// Sequences of a micro-batch, on each rank.
    pub micro_batch: usize,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Seed of the order of the data.
    pub seed: u64,
    /// Where to save, and after how many steps (0: only at the end).
    pub checkpoint: Option<(PathBuf, u64)>,
    /// Keep this many checkpoints; `None` keeps all.
    pub keep_last: Option<usize>,
    /// Where to resume from.
    pub resume: Option<PathBuf>,
    /// Set from outside to end the run after the step under way.
    pub cancel: Arc<AtomicBool>,
}

/// How a run ended, as one rank saw it.
#[derive(Clone, Debug)]
pub struct RankSummary {
    /// The step it ended at.
    pub step: u64,
    /// It ended before its last step because it was asked to.
    pub cancelled: bool,
    /// The step it started from.
    pub resumed_at: u64,
    /// The last step's figures on this rank; none if there was nothing to do.
    pub last: Option<StepMetrics>,
    /// The newest checkpoint of this run.
    pub checkpoint: Option<PathBuf>,
    /// Backings that the pool took from the device up to the second step, and in all.
    pub backing_allocations: [u64; 2],
    /// What ran when in the last step.
    pub last_spans: Vec<OpSpan>,
}
