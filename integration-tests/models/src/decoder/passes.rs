//! The passes of a decoder, and the check of its batches.

use zero_shard::{Layout, UnitSpec};
use zero_trainer::{Batch, IGNORED, ModelError, Pass};

use super::config::DecoderConfig;
use crate::lora;
use crate::options::ModelOptions;

/// The passes of a decoder, one per unit: the embedding, each block, the head. A block with adapters
/// reads them behind its own unit.
pub(crate) fn passes(config: &DecoderConfig) -> Vec<Pass> {
    let head = config.layers + 1;
    let mut passes = vec![Pass {
        forward_reads: vec![0],
        backward_reads: vec![],
        grads: vec![0],
    }];

    passes.extend((1..head).map(Pass::of_unit));
    let reads = if config.tied_head {
        vec![head, 0]
    } else {
        vec![head]
    };
    passes.push(Pass {
        forward_reads: reads.clone(),
        backward_reads: reads.clone(),
        grads: reads,
    });
    match config.adapter_units() {
        0 => passes,
        adapters => lora::passes(passes, adapters),
    }
}

pub(super) fn widest_pass(
    passes: &[Pass],
    units: &[UnitSpec],
    options: &ModelOptions,
) -> Result<usize, ModelError> {
    let layout = Layout::with_options(units, 1, options.layout.clone())?;
    let used = |&unit: &usize| layout.units()[unit].used_elems() as usize;
    let reads = passes
        .iter()
        .map(|p| p.forward_reads.iter().map(used).sum());
    Ok(reads.max().unwrap_or(0))
}

/// Checks the lengths of a batch, and that documents begin before their tokens.
pub(super) fn check_batch(
    batch: &Batch,
    options: &ModelOptions,
    vocab: usize,
) -> Result<(), ModelError> {
    let tokens = options.micro_batch * options.seq_len;
    let seq = options.seq_len;
    let lens = [&batch.inputs, &batch.targets, &batch.starts].map(Vec::len);
    if lens[..2] != [tokens; 2] || ![0, tokens].contains(&lens[2]) {
        let [inputs, targets, starts] = lens;
        return Err(ModelError::from(format!(
            "a batch of {inputs} inputs, {targets} targets and {starts} starts of documents; the model needs {tokens} (starts may be empty)"
        )));
    }

    let starts = batch.starts.iter().enumerate();
    let mut early = starts.filter(|&(row, &start)| start as usize > row % seq);
    if let Some((row, start)) = early.next() {
        let at = row % seq;
        return Err(ModelError::from(format!(
            "the document of token {at} of row {} begins at token {start}, after it",
            row / seq
        )));
    }

    // A kernel reads the row of a token, and writes that of its gradient.
    let is_token = |token: u32| (token as usize) < vocab;
    let input = batch.inputs.iter().position(|&token| !is_token(token));
    let is_target = |token: u32| is_token(token) || token == IGNORED;
    let target = batch.targets.iter().position(|&token| !is_target(token));
    for (what, tokens, at) in [
        ("input", &batch.inputs, input),
        ("target", &batch.targets, target),
    ] {
        if let Some(at) = at {
            return Err(ModelError::from(format!(
                "{what} {at} of the batch is token {}, and the model has {vocab}: use data of its tokenizer",
                tokens[at]
            )));
        }
    }

    Ok(())
}
