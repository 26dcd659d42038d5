//! Settings of the batch.

use super::sources::Sources;
use crate::error::CliError;
use zero_config::{Batch, BatchKeys};

/// Sequences per micro-batch and rank by default.
const DEFAULT_MICRO_BATCH: usize = 4;

/// Tokens per sequence by default, or the model's positions if fewer.
const DEFAULT_SEQ_LEN: usize = 128;

/// The highest number of micro-batches per step; stage 3 lists the uses of units for each.
const MAX_MICRO_BATCHES: u64 = 1 << 16;

/// The batch sizes of a run of `ranks` ranks with different sequences. Without a flag the sizes of
/// the file, of the resumed run and the default complete each other: the recorded sizes complete a
/// file without `train_batch_size`.
///
/// # Errors
/// Sizes that contradict each other, or too many micro-batches.
pub(crate) fn resolve(
    from: &Sources,
    mut keys: BatchKeys,
    ranks: usize,
) -> Result<Batch, CliError> {
    let size = |size: Option<usize>| size.map(|size| size as u64);
    let recorded = &from.recorded;
    if keys.train_batch_size.is_none() {
        keys.micro_batch = keys.micro_batch.or(size(recorded.micro_batch));
        keys.grad_accum = keys.grad_accum.or(size(recorded.grad_accum));
    }

    let micro_batch = size(from.flags.micro_batch);
    let grad_accum = size(from.flags.grad_accum);
    let default = recorded.micro_batch.unwrap_or(DEFAULT_MICRO_BATCH) as u64;
    let batch = keys
        .resolve(ranks as u64, micro_batch, grad_accum, default)
        .map_err(CliError::usage)?;

    if batch.grad_accum > MAX_MICRO_BATCHES {
        return Err(usage!(
            "--grad-accum {}: expected at most {MAX_MICRO_BATCHES}",
            batch.grad_accum
        ));
    }

    Ok(batch)
}

/// The tokens of a sequence by default, of a model with `positions` positions.
pub(crate) fn default_seq_len(positions: usize) -> usize {
    positions.min(DEFAULT_SEQ_LEN)
}
