//! Settings of the batch.

use serde::{Deserialize, Serialize};

use super::row::{Row, Setting, Sources};
use crate::config::{Batch, BatchKeys};
use crate::error::CliError;

/// The batch of a run in `run.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BatchRecord {
    pub(crate) ranks: usize,
    /// Sequences per micro-batch and rank.
    pub(crate) micro_batch: u64,
    /// Micro-batches per step.
    pub(crate) grad_accum: u64,
    /// Tokens per sequence.
    pub(crate) seq_len: usize,
    /// Tokens of all ranks in a step.
    pub(crate) step_tokens: u64,
}

/// Without a flag the sizes of the file, of the resumed run and the default complete each other;
/// see [`resolve`].
const MICRO_BATCH: Setting<u64, BatchRecord> = Setting {
    of_flags: |args| args.micro_batch.map(|rows| rows as u64),
    of_run: |run| Some(run.micro_batch),
    ..Setting::new(
        Row::new("batch.micro_batch", "--micro-batch").key("train_micro_batch_size_per_gpu"),
        || 4,
    )
};

const GRAD_ACCUM: Setting<u64, BatchRecord> = Setting {
    of_flags: |args| args.grad_accum.map(|micro_batches| micro_batches as u64),
    of_run: |run| Some(run.grad_accum),
    ..Setting::new(
        Row::new("batch.grad_accum", "--grad-accum").key("gradient_accumulation_steps"),
        || 1,
    )
};

/// By default [`DEFAULT_SEQ_LEN`], or the model's positions if fewer.
const SEQ_LEN: Setting<Option<usize>, BatchRecord> = Setting {
    of_flags: |args| args.seq_len.map(Some),
    of_run: |run| Some(Some(run.seq_len)),
    ..Setting::new(Row::new("batch.seq_len", "--seq-len"), || None)
};

const DEFAULT_SEQ_LEN: usize = 128;

pub(crate) const ROWS: &[Row] = &[
    MICRO_BATCH.row,
    GRAD_ACCUM.row,
    SEQ_LEN.row,
    Row::new("batch", ""),
];

/// The highest number of micro-batches per step; stage 3 lists the uses of units for each.
const MAX_MICRO_BATCHES: u64 = 1 << 16;

/// The batch sizes of a run of `ranks` ranks with different sequences. The recorded sizes complete a file without
/// `train_batch_size`.
///
/// # Errors
/// Sizes that contradict each other, or too many micro-batches.
pub(crate) fn resolve(from: &Sources<'_, BatchRecord>, ranks: usize) -> Result<Batch, CliError> {
    let mut keys: BatchKeys = from.file.map(|file| file.batch).unwrap_or_default();
    if let (Some(run), None) = (from.recorded, keys.train_batch_size) {
        keys.micro_batch.get_or_insert(run.micro_batch);
        keys.grad_accum.get_or_insert(run.grad_accum);
    }

    let micro_batch = from.given(&MICRO_BATCH);
    let grad_accum = from.given(&GRAD_ACCUM);
    let default = from
        .recorded(&MICRO_BATCH)
        .unwrap_or_else(MICRO_BATCH.default);
    let batch = keys
        .resolve(ranks as u64, micro_batch, grad_accum, default)
        .map_err(CliError::usage)?;

    if batch.grad_accum > MAX_MICRO_BATCHES {
        return Err(CliError::Usage(format!(
            "--grad-accum {}: expected at most {MAX_MICRO_BATCHES}",
            batch.grad_accum
        )));
    }

    Ok(batch)
}

/// The tokens of a sequence of a model with `positions` positions.
pub(crate) fn seq_len(from: &Sources<'_, BatchRecord>, positions: usize) -> usize {
    from.value(&SEQ_LEN)
        .unwrap_or_else(|| default_seq_len(positions))
}

/// The tokens of a sequence by default.
pub(crate) fn default_seq_len(positions: usize) -> usize {
    positions.min(DEFAULT_SEQ_LEN)
}

impl BatchRecord {
    /// Sequences of all ranks in a step.
    pub(crate) fn rows_of_step(&self) -> u64 {
        self.step_tokens / (self.seq_len as u64).max(1)
    }
}
