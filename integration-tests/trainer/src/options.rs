//! What a run is asked to do.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use zero_ckpt::{ModelFiles, StoreOptions};

use crate::model::ModelError;

/// The length of a run, its batches and its checkpoints.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// The last step.
    pub steps: u64,
    /// Sequences per micro-batch and rank.
    pub micro_batch: usize,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// Seed of the data order.
    pub seed: u64,
    /// Folder of checkpoints, and the interval in steps (0: only at the end).
    pub checkpoint: Option<(PathBuf, u64)>,
    /// Number of checkpoints to keep; `None` keeps all.
    pub keep_last: Option<usize>,
    /// When the parameters that all ranks hold are compared.
    pub check_replicas: ReplicaChecks,
    /// Evaluations on other data.
    pub validation: Option<ValidationOptions>,
    /// Continuations of a text.
    pub samples: Option<SampleOptions>,
    /// Checkpoint to resume from.
    pub resume: Option<PathBuf>,
    /// The id of this run, which its checkpoints carry. Rank 0's counts; empty for a run without an
    /// id.
    pub run_id: String,
    /// The ids of the runs that this one resumed, oldest first.
    pub resumed_runs: Vec<String>,
    /// Named JSON documents for every checkpoint: `run.json`.
    pub documents: BTreeMap<String, serde_json::Value>,
    /// Files to keep beside the checkpoints, such as the model's tokenizer.
    pub model_files: Option<ModelFiles>,
    /// Request to end the run after the current step.
    pub cancel: Arc<AtomicBool>,
    /// The number of the signal that requested it, set before `cancel`; 0: no signal did.
    pub signal: Arc<AtomicUsize>,
    /// Whether each step's metrics include its wall time by part. On CUDA the device must record a
    /// timeline.
    pub breakdown: bool,
    /// Whether to log the memory of each step, for `RankSummary::memory`.
    pub log_memory: bool,
}

impl RunOptions {
    /// The run and its predecessors, as a store of checkpoints needs them.
    pub fn store(&self) -> StoreOptions {
        let mut options = StoreOptions::default()
            .keep_last(self.keep_last)
            .resumed_runs(self.resumed_runs.clone())
            .model_files(self.model_files.clone());
        options.run = Some(self.run_id.clone()).filter(|id| !id.is_empty());
        options
    }

    /// The ids of the runs that this one resumed, oldest first, and its own.
    pub fn runs(&self) -> Vec<&str> {
        self.resumed_runs
            .iter()
            .chain([&self.run_id])
            .map(String::as_str)
            .collect()
    }

    /// Whether the run saves to the folder of the checkpoint that it resumes.
    pub fn saves_in_place(&self) -> bool {
        let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let (Some(from), Some((to, _))) = (&self.resume, &self.checkpoint) else {
            return false;
        };
        let from = real(from);
        let to = real(to);
        from == to || from.parent() == Some(&to)
    }
}

/// When a run compares its replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReplicaChecks {
    /// Never.
    Never,
    /// Before each checkpoint.
    #[default]
    AtSaves,
    /// Before each checkpoint, and after every this many steps.
    Every(u64),
}

impl ReplicaChecks {
    /// Whether a check is due after `step`, which is saved if `saves`.
    pub(crate) fn is_due(self, step: u64, saves: bool) -> bool {
        match self {
            Self::Never => false,
            Self::AtSaves => saves,
            Self::Every(steps) => saves || step.is_multiple_of(steps.max(1)),
        }
    }
}

/// Windows of tokens to evaluate.
pub trait ValidationData: fmt::Debug + Send + Sync {
    /// A checksum of the data.
    fn fingerprint(&self) -> u64;

    /// One line of text for a person: the source and its size.
    fn describe(&self) -> &str;

    /// The number of windows of `seq_len` tokens.
    fn windows(&self, seq_len: usize) -> u64;

    /// Reads window `index`: its tokens, and the tokens that follow them.
    ///
    /// # Errors
    /// The data cannot be read.
    fn window(&self, index: u64, inputs: &mut [u32], targets: &mut [u32])
    -> Result<(), ModelError>;
}

/// The validation of a run.
#[derive(Clone, Debug)]
pub struct ValidationOptions {
    /// The data.
    pub data: Arc<dyn ValidationData>,
    /// Steps from one evaluation to the next; 0 evaluates after the last step only.
    pub every: u64,
    /// Windows of an evaluation, at most those of the data; at least 1.
    pub windows: u64,
}

impl ValidationOptions {
    /// Whether to evaluate after `step` of `steps`.
    pub(crate) fn is_due(&self, step: u64, steps: u64) -> bool {
        step == steps || self.every > 0 && step.is_multiple_of(self.every)
    }

    /// Identifies the evaluated tokens: only losses of the same tokens are compared.
    pub(crate) fn fingerprint(&self, seq_len: usize) -> u64 {
        let numbers = [self.data.fingerprint(), self.windows, seq_len as u64];
        crc_fast::checksum(
            crc_fast::CrcAlgorithm::Crc64Nvme,
            bytemuck::cast_slice(&numbers),
        )
    }
}

/// The choice of the next token of a text.
pub trait NextToken: fmt::Debug + Send + Sync {
    /// Chooses the token at place `index` of the continuation; `None` ends the text.
    fn choose(&self, logits: &[f32], index: u64) -> Option<u32>;
}

/// The samples of a run: how it continues a text as it trains. They change nothing of training.
#[derive(Clone, Debug)]
pub struct SampleOptions {
    /// Steps from one sample to the next; 0 samples after the last step only.
    pub every: u64,
    /// The tokens to continue; at least one.
    pub prompt: Vec<u32>,
    /// Most tokens of a continuation.
    pub tokens: usize,
    /// Chooses each token, on the rank that has its logits.
    pub next: Arc<dyn NextToken>,
}

impl SampleOptions {
    /// Whether to sample after `step` of `steps`.
    pub(crate) fn is_due(&self, step: u64, steps: u64) -> bool {
        step == steps || self.every > 0 && step.is_multiple_of(self.every)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_are_due_at_saves_and_intervals() {
        let due = |checks: ReplicaChecks| {
            [(4, false), (4, true), (5, false)].map(|(step, saves)| checks.is_due(step, saves))
        };
        assert_eq!(due(ReplicaChecks::Never), [false, false, false]);
        assert_eq!(due(ReplicaChecks::AtSaves), [false, true, false]);
        assert_eq!(due(ReplicaChecks::Every(2)), [true, true, false]);
        assert_eq!(due(ReplicaChecks::Every(0)), [true, true, true]);
    }
}
