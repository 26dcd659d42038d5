//! Micro-batches on their way from the data into the model.

use zero_alloc::device::Device;

use super::rank::Rank;
use super::workload::{RunOptions, Workload};
use crate::data::BatchAt;
use crate::error::TrainError;
use crate::model::Model;

/// Gives a model its micro-batches: the first one of a step already while the device works on the step before, so that
/// reading and sorting tokens costs the device no time.
pub(super) struct BatchLoader<'a, D: Device> {
    rank: &'a Rank<D>,
    workload: &'a dyn Workload<D>,
    options: &'a RunOptions,
    inputs: Vec<u32>,
    targets: Vec<u32>,
    /// Steps done before it, and its number: the micro-batch that the model was given last.
    given: Option<(u64, usize)>,
}

impl<'a, D: Device> BatchLoader<'a, D> {
    pub(super) fn new(rank: &'a Rank<D>, workload: &'a dyn Workload<D>, options: &'a RunOptions) -> Self {
        let tokens = options.micro_batch * options.seq_len;
        Self { rank, workload, options, inputs: vec![0; tokens], targets: vec![0; tokens], given: None }
    }

    /// Gives `model` the `micro`-th micro-batch of the step that `done` steps are done before, unless it has it.
    ///
    /// # Errors
    /// The data cannot be read, or the stream refused.
    pub(super) fn give(&mut self, model: &mut dyn Model<D>, done: u64, micro: usize) -> Result<(), TrainError> {
        if self.given == Some((done, micro)) {
            return Ok(());
        }
        let Self { rank, workload, options, inputs, targets, .. } = self;
        let at = BatchAt {
            step: done,
            micro_batch_index: micro as u64,
            grad_accum: rank.settings.grad_accum_steps as u64,
            rank: rank.comm.rank() as u64,
            world_size: rank.comm.world_size() as u64,
            micro_batch: options.micro_batch,
            seq_len: options.seq_len,
            seed: options.seed,
        };
        workload.batch(at, inputs, targets)?;
        model.set_batch(&rank.compute, inputs, targets)?;
        self.given = Some((done, micro));
        Ok(())
    }
}
