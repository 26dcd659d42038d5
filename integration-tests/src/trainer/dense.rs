//! Stage 0: plain data parallelism, the baseline and the oracle of the other stages.
//!
//! Every rank holds the whole model state: 16 bytes a parameter. A unit's gradients are all-reduced as soon as its
//! backward is done; then every rank updates all parameters in the same way.

use zero_alloc::Purpose;
use zero_alloc::device::{AnySlice, Device};
use zero_optim::{Segment, ShardedAdamW};

use super::gradients::Gradients;
use super::rank::Rank;
use super::stage::{MicroBatches, Stage, StepInputs, decide, evaluate_whole, micro_batch_whole, optimizer, update};
use super::storage::Storage;
use crate::error::TrainError;
use crate::model::Model;

/// One rank of stage 0.
pub(super) struct Dense<D: Device> {
    /// All parameters.
    params: Storage<D>,
    /// All gradients, summed over ranks.
    grads: Gradients<D>,
    /// The optimizer state of all parameters.
    optimizer: ShardedAdamW<D>,
}

impl<D: Device> Dense<D> {
    pub(super) fn new(rank: &Rank<D>) -> Result<Self, TrainError> {
        let params = Storage::whole(rank, rank.settings.dtype, Purpose::Params)?;
        let grads = Storage::gradients(rank, true)?;
        let own = rank.comm.rank() as u64;
        let segments = rank.layout.units().iter().map(|u| {
            let (whole, shard) = (u.whole_range(), u.shard(own));
            let index = |r: std::ops::Range<u64>| r.start as usize..r.end as usize;
            Segment::whole(&u.name, index(whole), index(shard))
        });
        let optimizer = optimizer(rank, segments.collect())?;
        Ok(Self { params, grads: Gradients::new(rank, grads)?, optimizer })
    }
}

impl<D: Device> Stage<D> for Dense<D> {
    fn gradients(
        &mut self,
        rank: &Rank<D>,
        model: &mut dyn Model<D>,
        micro_batches: &mut MicroBatches<'_, '_, D>,
    ) -> Result<(), TrainError> {
        let Self { params, grads, optimizer } = self;
        micro_batches.run(rank, model, |model, micro| {
            micro_batch_whole(rank, model, micro, grads, optimizer, |units| Ok(params.of(rank, units)))
        })
    }

    fn evaluate(&mut self, rank: &Rank<D>, model: &mut dyn Model<D>, tokens: usize) -> Result<(), TrainError> {
        evaluate_whole(rank, model, tokens, |units| self.params.of(rank, units))
    }

    fn decide(&mut self, rank: &Rank<D>, inputs: StepInputs) -> Result<(), TrainError> {
        decide(rank, &mut self.optimizer, &self.grads, inputs)
    }

    fn update(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        update(rank, &mut self.optimizer, &self.params.all_units(), &self.grads)
    }

    fn optimizer(&mut self) -> &mut ShardedAdamW<D> {
        &mut self.optimizer
    }

    fn updated(&self) -> Vec<AnySlice> {
        self.params.all_units()
    }

    fn publish(&mut self, _rank: &Rank<D>) -> Result<(), TrainError> {
        Ok(())
    }
}
