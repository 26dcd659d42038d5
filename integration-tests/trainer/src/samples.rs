//! Samples: continuations of a text by the model as it is after a step.
//!
//! A sample runs as an evaluation does: all ranks compute the forward of one row, unit by unit at
//! stage 3, and rank 0 chooses the next token from the logits of the last one; of ranks that share
//! a sequence, the rank that has that token does. There is no cache,
//! so a token costs the forward of a micro-batch (and at stage 3 gathers all units once); memory is
//! that of training and one row of logits on the host. A text that is longer than a row is
//! continued by its last tokens. Training is not changed: no state is written, and the next batch
//! is loaded again.

use std::sync::atomic::Ordering;

use half::{bf16, f16};
use zero_alloc::device::{AnySlice, DType, Device};

use crate::batch::Batch;
use crate::error::TrainError;
use crate::model::{Model, ModelError};
use crate::options::{RunOptions, SampleOptions};
use crate::rank::Rank;
use crate::rank_exchange::RankExchange;
use crate::stages::stage::Stage;

/// The message of the choosing rank that the text ends.
const TEXT_ENDS: u32 = u32::MAX;

/// Continues the prompt; returns nothing if a request to stop ended the sample. Collective.
pub(crate) fn run<D: Device>(
    rank: &Rank<D>,
    stage: &mut dyn Stage<D>,
    model: &mut dyn Model<D>,
    options: &RunOptions,
    samples: &SampleOptions,
) -> Result<Option<Vec<u32>>, TrainError> {
    let mut text = samples.prompt.clone();
    let mut batch = Batch::zeros(options.micro_batch * options.seq_len);
    while text.len() < samples.prompt.len() + samples.tokens {
        let row = &text[text.len().saturating_sub(options.seq_len)..];
        batch.inputs.fill(0);
        batch.inputs[..row.len()].copy_from_slice(row);
        let last = row.len() - 1;
        // The first data ranks share a sequence, in the order of its tokens.
        let chooser = last / (options.seq_len / rank.settings.mesh.sequence_ranks());
        let logits = last_logits(rank, stage, model, &batch, last, chooser)?;

        let index = (text.len() - samples.prompt.len()) as u64;
        let own = logits.and_then(|logits| samples.next.choose(&logits, index));
        let own = own.unwrap_or(TEXT_ENDS);
        let stop = options.cancel.load(Ordering::Relaxed);
        let messages = RankExchange::of(rank).all_gather(&message(own, stop))?;
        let messages = messages.as_chunks::<MESSAGE_BYTES>().0;
        if messages.iter().any(|message| message[0] != 0) {
            return Ok(None);
        }
        let [_, token @ ..] = messages
            .get(chooser * rank.tensor_ranks())
            .copied()
            .unwrap_or_default();
        match u32::from_le_bytes(token) {
            TEXT_ENDS => break,
            token => text.push(token),
        }
    }
    Ok(Some(text.split_off(samples.prompt.len())))
}

/// Bytes of a message between ranks.
const MESSAGE_BYTES: usize = 5;

/// Whether to stop, and the chosen token, of which that of the choosing rank counts.
fn message(token: u32, stop: bool) -> [u8; MESSAGE_BYTES] {
    let [a, b, c, d] = token.to_le_bytes();
    [u8::from(stop), a, b, c, d]
}

/// The logits of token `token` of a batch on the data rank `chooser`; `None` on the others.
fn last_logits<D: Device>(
    rank: &Rank<D>,
    stage: &mut dyn Stage<D>,
    model: &mut dyn Model<D>,
    batch: &Batch,
    token: usize,
    chooser: usize,
) -> Result<Option<Vec<f32>>, TrainError> {
    let Rank {
        mesh,
        compute,
        pool,
        settings,
        ..
    } = rank;
    model.set_batch(compute, batch)?;
    let mut logits: Option<AnySlice> = None;
    let chooses = mesh.data.rank() == chooser;
    stage.evaluate(rank, model, &mut |model, params| {
        if chooses {
            logits = Some(model.token_logits(compute, params, token)?);
        }
        Ok(())
    })?;
    if !chooses {
        return Ok(None);
    }
    let Some(logits) = logits else {
        return Err(ModelError::from("the model has no passes").into());
    };

    let mut bytes = vec![0; logits.len_bytes()];
    pool.device()
        .download(compute, logits, &mut bytes, settings.host_limit())?;
    let pairs = || bytes.as_chunks().0.iter().copied();
    Ok(Some(match logits.dtype() {
        DType::Bf16 => pairs().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
        DType::F16 => pairs().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
        _ => {
            let fours = bytes.as_chunks().0.iter();
            fours.map(|b| f32::from_le_bytes(*b)).collect()
        }
    }))
}
