//! Validation: the mean loss of tokens that the run is not trained on.
//!
//! An evaluation reads windows of the validation data, spread evenly over it and the same every
//! time. Rank r of N evaluates windows (k N + r) B to (k N + r + 1) B in round k, for micro-batches
//! of B windows; ranks that share a sequence count as one. In the last round some ranks have fewer windows; they repeat the last one and do
//! not count it, because every rank takes part in the collectives of stage 3.
//!
//! An evaluation runs between two steps and changes nothing that a step reads. In each round the
//! ranks exchange whether the run is to stop; if one requests it, the evaluation ends without a
//! result on all of them.

use std::sync::atomic::Ordering;

use zero_alloc::device::{Device, Event, Stream};

use crate::batch::Batch;
use crate::error::TrainError;
use crate::model::Model;
use crate::options::RunOptions;
use crate::options::ValidationOptions;
use crate::rank::Rank;
use crate::rank_exchange::RankExchange;
use crate::stages::stage::Stage;
use crate::telemetry::metrics::{Best, Validation};
use crate::telemetry::phase::Phase;
use crate::telemetry::phased::run_in;

/// The evaluations of one rank.
pub(crate) struct Evaluations<'a> {
    options: &'a RunOptions,
    /// The lowest loss so far.
    pub(crate) best: Option<Best>,
}

impl<'a> Evaluations<'a> {
    /// Continues from the lowest loss of the resumed checkpoint.
    pub(crate) fn new(options: &'a RunOptions, resumed: Option<Best>) -> Self {
        let current = options
            .validation
            .as_ref()
            .map(|v| v.fingerprint(options.seq_len));
        let comparable = |best: &Best| current.is_none_or(|current| current == best.fingerprint);
        Self {
            options,
            best: resumed.filter(comparable),
        }
    }

    /// Whether to evaluate after `step`.
    pub(crate) fn is_due(&self, step: u64) -> bool {
        self.options
            .validation
            .as_ref()
            .is_some_and(|validation| validation.is_due(step, self.options.steps))
    }

    /// Evaluates; returns nothing if a request to stop ended the evaluation. Collective.
    pub(crate) fn run<D: Device>(
        &self,
        rank: &Rank<D>,
        stage: &mut dyn Stage<D>,
        model: &mut dyn Model<D>,
    ) -> Result<Option<Validation>, TrainError> {
        let Some(validation) = &self.options.validation else {
            return Ok(None);
        };
        run_in(rank, Phase::Validation, || {
            evaluate(rank, stage, model, self.options, validation)
        })
    }

    /// Records the loss after `step` if it is the lowest so far, and returns whether it is. `saved`
    /// tells whether the step's checkpoint is saved for another reason.
    pub(crate) fn is_best(&mut self, step: u64, result: Option<Validation>, saved: bool) -> bool {
        let (Some(result), Some(options)) = (result, &self.options.validation) else {
            return false;
        };
        let is_best =
            result.loss.is_finite() && self.best.is_none_or(|best| result.loss < best.loss);
        if is_best {
            let fingerprint = options.fingerprint(self.options.seq_len);
            self.best = Some(Best {
                step,
                loss: result.loss,
                fingerprint,
                only_best: !saved,
            });
        }
        is_best
    }
}

/// Computes the mean loss of the validation's windows, the same on all ranks; nothing after a
/// request to stop.
fn evaluate<D: Device>(
    rank: &Rank<D>,
    stage: &mut dyn Stage<D>,
    model: &mut dyn Model<D>,
    options: &RunOptions,
    validation: &ValidationOptions,
) -> Result<Option<Validation>, TrainError> {
    let Rank {
        compute,
        comm,
        pool,
        settings,
        ..
    } = rank;

    let RunOptions {
        micro_batch,
        seq_len,
        ..
    } = *options;

    let ValidationOptions { data, windows, .. } = validation;
    let mut batch = Batch::zeros(micro_batch * seq_len);
    let mut trained = 0;
    let all = data.windows(seq_len);
    let [batches, index] = rank.batches();
    let of_round = (batches * micro_batch) as u64;
    let mut previous: Option<D::Event> = None;
    // SAFETY: used below on the compute stream, that of the passes, while the model is borrowed.
    let loss = unsafe { model.loss() }.erase();
    pool.device().fill_zero(compute, loss)?;

    for round in 0..windows.div_ceil(of_round) {
        let stop = options.cancel.load(Ordering::Relaxed);
        if RankExchange::of(rank)
            .all_gather(&[u8::from(stop)])?
            .contains(&1)
        {
            return Ok(None);
        }
        let own = round * of_round + (index * micro_batch) as u64;
        let inputs = batch.inputs.chunks_exact_mut(seq_len);
        let rows = inputs.zip(batch.targets.chunks_exact_mut(seq_len));
        for (index, (inputs, targets)) in (own..).zip(rows) {
            let index = index.min(windows - 1);
            let window = u128::from(index) * u128::from(all) / u128::from(*windows);
            data.window(window as u64, inputs, targets)?;
        }
        model.set_batch(compute, &batch)?;
        let counted = windows.saturating_sub(own).min(micro_batch as u64) as usize * seq_len;
        if comm.rank() % settings.mesh.ranks_of_batch() == 0 {
            trained += batch.trained(counted);
        }
        stage.evaluate(rank, model, &mut |model, params| {
            Ok(model.add_losses(compute, params, counted)?)
        })?;
        // The host is one round ahead of the device, so that its time limit is that of a round.
        if let Some(previous) = previous.replace(compute.record()?) {
            previous.synchronize(settings.host_limit())?;
        }
    }

    let mut sum = [0; size_of::<f64>()];
    pool.device()
        .download(compute, loss, &mut sum, settings.host_limit())?;
    let exchange = RankExchange::of(rank);
    let sums = exchange.all_gather(&sum)?;
    let counts = exchange.all_gather(&trained.to_le_bytes())?;
    let sums = sums.as_chunks().0.iter();
    let counts = counts.as_chunks().0.iter();
    let sum: f64 = sums.map(|bytes| f64::from_le_bytes(*bytes)).sum();
    let tokens: u64 = counts.map(|bytes| u64::from_le_bytes(*bytes)).sum();
    let loss = sum / tokens as f64;
    Ok(Some(Validation {
        loss,
        perplexity: loss.exp(),
        tokens,
    }))
}
