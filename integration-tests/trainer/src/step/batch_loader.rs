//! Loading micro-batches from the data into the model.

use zero_alloc::device::Device;

use crate::batch::Batch;
use crate::error::TrainError;
use crate::model::Model;
use crate::options::RunOptions;
use crate::rank::Rank;
use crate::workload::BatchAt;
use crate::workload::Workload;

/// Loads micro-batches into a model. The first one of a step is loaded while the device still works
/// on the previous step, so that the device never waits for it.
pub(crate) struct BatchLoader<'a, D: Device> {
    rank: &'a Rank<D>,
    workload: &'a dyn Workload<D>,
    options: &'a RunOptions,
    batch: Batch,
    /// The loaded micro-batch: the number of completed steps, and its index in its step.
    loaded: Option<(u64, usize)>,
}

impl<'a, D: Device> BatchLoader<'a, D> {
    pub(crate) fn new(
        rank: &'a Rank<D>,
        workload: &'a dyn Workload<D>,
        options: &'a RunOptions,
    ) -> Self {
        let tokens = options.micro_batch * options.seq_len;
        Self {
            rank,
            workload,
            options,
            batch: Batch::zeros(tokens),
            loaded: None,
        }
    }

    /// Makes the next [`Self::load`] load, because the model has another batch.
    pub(crate) fn forget(&mut self) {
        self.loaded = None;
    }

    /// Loads the `micro`-th micro-batch of the step after `done` steps into `model`, unless it is
    /// loaded already.
    pub(crate) fn load(
        &mut self,
        model: &mut dyn Model<D>,
        done: u64,
        micro: usize,
    ) -> Result<(), TrainError> {
        if self.loaded == Some((done, micro)) {
            return Ok(());
        }
        let Self {
            rank,
            workload,
            options,
            batch,
            ..
        } = self;

        let [batches, index] = rank.batches();
        let at = BatchAt {
            step: done,
            micro_batch_index: micro as u64,
            grad_accum: rank.settings.grad_accum_steps as u64,
            rank: index as u64,
            world_size: batches as u64,
            micro_batch: options.micro_batch,
            seq_len: options.seq_len,
            seed: options.seed,
        };

        workload.batch(at, batch)?;
        batch.rows = Some(at.rows());
        // The trainer takes the mean over ranks, of which these share a batch.
        let divisor = batch.divisor;
        batch.divisor = divisor / rank.settings.mesh.ranks_of_batch() as f64;
        model.set_batch(&rank.compute, batch)?;
        batch.divisor = divisor;
        self.loaded = Some((done, micro));
        Ok(())
    }
}
