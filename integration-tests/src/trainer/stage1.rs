//! Stage 1: the optimizer state is sharded (P_os of the paper).
//!
//! Parameters and gradients are whole on every rank, optimizer state is 1/N: 4 Ψ + 12 Ψ/N bytes in mixed
//! precision. A unit's gradient is reduce-scattered as soon as its backward is done, so that each rank has the
//! sum over ranks for its own shard; it updates that shard, and the new parameters are all-gathered. Of the
//! whole gradient storage only the own shard is ever summed: stage 2 is the same without the rest of it.

use zero_alloc::Purpose;
use zero_alloc::device::{AnySlice, Device};
use zero_optim::ShardedAdamW;

use super::gradients::Gradients;
use super::rank::Rank;
use super::stage::{Say, Stage, decide, sharded_optimizer, update};
use super::storage::Storage;
use super::whole_params::WholeParams;
use crate::error::TrainError;
use crate::model::Model;

/// One rank of stage 1.
pub(super) struct Stage1<D: Device> {
    /// All parameters.
    params: WholeParams<D>,
    /// Storage for all gradients; summed over ranks in the own shard.
    grads: Gradients<D>,
    /// The state of the own shard.
    optimizer: ShardedAdamW<D>,
}

impl<D: Device> Stage1<D> {
    pub(super) fn new(rank: &Rank<D>) -> Result<Self, TrainError> {
        let grads = Storage::whole(rank, rank.settings.grad_dtype(), Purpose::Grads)?;
        let (params, optimizer) = (WholeParams::new(rank)?, sharded_optimizer(rank)?);
        Ok(Self { params, grads: Gradients::new(rank, grads)?, optimizer })
    }
}

impl<D: Device> Stage<D> for Stage1<D> {
    fn micro_batch(&mut self, rank: &Rank<D>, model: &mut dyn Model<D>, micro: usize) -> Result<(), TrainError> {
        for (i, pass) in rank.passes.iter().enumerate() {
            model.forward(&rank.compute, i, &self.params.of(rank, &pass.forward_reads)?)?;
        }
        for (i, pass) in rank.passes.iter().enumerate().rev() {
            let params = self.params.of(rank, &pass.backward_reads)?;
            let grads = self.grads.of_pass(rank, i)?;
            model.backward(&rank.compute, i, &params, &grads, self.optimizer.loss_scale()?)?;
            for unit in rank.complete_after(i) {
                self.grads.reduce_scatter(rank, unit, micro)?;
            }
        }
        Ok(())
    }

    fn decide(&mut self, rank: &Rank<D>, say: Say) -> Result<(), TrainError> {
        self.grads.wait(rank)?;
        decide(rank, &mut self.optimizer, &self.grads.storage().all_own(), say)
    }

    fn update(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        self.params.settle(rank)?;
        let (params, grads) = (self.params.own(), self.grads.storage().all_own());
        update(rank, &mut self.optimizer, &params, &grads)?;
        self.params.all_gather(rank)
    }

    fn optimizer(&mut self) -> &mut ShardedAdamW<D> {
        &mut self.optimizer
    }

    fn updated(&self) -> Vec<AnySlice> {
        self.params.own()
    }

    fn publish(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        self.params.all_gather(rank)
    }
}
