//! Stage 0: plain data parallelism, the baseline and the oracle of the other stages.
//!
//! Every rank holds the whole model state: 16 bytes a parameter. A unit's gradients are all-reduced as soon as its
//! backward is done; then every rank updates all parameters in the same way.

use zero_alloc::Purpose;
use zero_alloc::device::{AnySlice, Device};
use zero_optim::{Segment, ShardedAdamW};

use super::gradients::Gradients;
use super::rank::Rank;
use super::stage::{Stage, StepInputs, decide, evaluate_whole, optimizer, update};
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
        let grads = Storage::whole(rank, rank.settings.grad_dtype(), Purpose::Grads)?;
        let own = rank.comm.rank() as u64;
        let segments = rank.layout.units().iter().map(|u| {
            let (whole, shard) = (u.whole_range(), u.shard(own));
            let index = |r: std::ops::Range<u64>| r.start as usize..r.end as usize;
            Segment::whole(&u.name, index(whole), index(shard))
        });
        let optimizer = optimizer(rank, segments.collect())?;
        Ok(Self { params, grads: Gradients::new(rank, grads)?, optimizer })
    }

    fn params(&self, rank: &Rank<D>, units: &[usize]) -> Vec<AnySlice> {
        units.iter().map(|&u| self.params.unit(u).slice(0..rank.numel(u))).collect()
    }
}

impl<D: Device> Stage<D> for Dense<D> {
    fn micro_batch(&mut self, rank: &Rank<D>, model: &mut dyn Model<D>, micro: usize) -> Result<(), TrainError> {
        for (i, pass) in rank.passes.iter().enumerate() {
            model.forward(&rank.compute, i, &self.params(rank, &pass.forward_reads))?;
        }
        for (i, pass) in rank.passes.iter().enumerate().rev() {
            let params = self.params(rank, &pass.backward_reads);
            let grads = self.grads.of_pass(rank, i)?;
            model.backward(&rank.compute, i, &params, &grads, super::stage::loss_scale(&self.optimizer)?)?;
            for unit in rank.complete_after(i) {
                self.grads.all_reduce(rank, unit, micro)?;
            }
        }
        Ok(())
    }

    fn evaluate(&mut self, rank: &Rank<D>, model: &mut dyn Model<D>, tokens: usize) -> Result<(), TrainError> {
        evaluate_whole(rank, model, tokens, |units| self.params(rank, units))
    }

    fn decide(&mut self, rank: &Rank<D>, inputs: StepInputs) -> Result<(), TrainError> {
        self.grads.wait(rank)?;
        decide(rank, &mut self.optimizer, &self.grads.storage().all_units(), inputs)
    }

    fn update(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        let (params, grads) = (self.params.all_units(), self.grads.storage().all_units());
        update(rank, &mut self.optimizer, &params, &grads)
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
