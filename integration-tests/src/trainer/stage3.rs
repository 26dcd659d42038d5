//! Stage 3: optimizer state, gradients and parameters are sharded (P_os+g+p of the paper).
//!
//! Every rank holds 1/N of the model state: 16 Ψ/N bytes. A unit is gathered just before a pass reads it and freed
//! just after, in forward and again in backward; meanwhile the communication stream gathers the next unit. The last
//! pass (the head), whose backward directly follows its forward, keeps its units between the two. Gradients are
//! reduced as in stage 2, and nothing is gathered after the step. At most 3 Ψ elements are sent: two all-gathers and
//! one reduce-scatter.

use zero_alloc::Purpose;
use zero_alloc::device::{AnySlice, Device};
use zero_comm::{OrderCheck, Prefetcher, Unsharded};
use zero_optim::ShardedAdamW;

use super::gradients::Gradients;
use super::rank::Rank;
use super::stage::{Stage, StepInputs, decide, sharded_optimizer, update};
use super::storage::Storage;
use crate::error::TrainError;
use crate::model::Model;

/// One rank of stage 3.
pub(super) struct Stage3<D: Device> {
    /// Gathers units ahead of their use. Declared first, so that it is dropped before the shards that it reads.
    prefetcher: Prefetcher<D>,
    /// Gathers units for an evaluation, whose order of units differs from a step's. Between its calls it holds nothing.
    forward_only: Prefetcher<D>,
    /// This rank's shard of the parameters.
    params: Storage<D>,
    /// This rank's shard of the gradients, summed over ranks.
    grads: Gradients<D>,
    /// The optimizer state of this rank's shard.
    optimizer: ShardedAdamW<D>,
}

impl<D: Device> Stage3<D> {
    pub(super) fn new(rank: &Rank<D>) -> Result<Self, TrainError> {
        let params = Storage::shards(rank, rank.settings.dtype, Purpose::Params)?;
        let grads = Storage::shards(rank, rank.settings.grad_dtype(), Purpose::Grads)?;
        let prefetcher = |order| {
            let (comm, compute, comm_stream) = (rank.comm.clone(), rank.compute.clone(), rank.comm_stream.clone());
            let (shards, options) = (params.all_own(), rank.settings.prefetch);
            let mut prefetcher = Prefetcher::new(rank.pool.clone(), comm, compute, comm_stream, shards, options);
            prefetcher.expect_order(order).map(|()| prefetcher)
        };
        let (forward_only, prefetcher) = (prefetcher(forward_uses(rank).collect())?, prefetcher(uses(rank))?);
        let optimizer = sharded_optimizer(rank)?;
        Ok(Self { prefetcher, forward_only, params, grads: Gradients::new(rank, grads)?, optimizer })
    }
}

fn unshard<D: Device>(from: &mut Prefetcher<D>, units: &[usize]) -> Result<Vec<Unsharded<D>>, TrainError> {
    units.iter().map(|&unit| Ok(from.unshard(unit)?)).collect()
}

fn reshard<D: Device>(from: &mut Prefetcher<D>, units: Vec<Unsharded<D>>) {
    units.into_iter().for_each(|unit| from.reshard(unit));
}

/// The units in the order in which a forward unshards them.
fn forward_uses<D: Device>(rank: &Rank<D>) -> impl Iterator<Item = usize> {
    rank.passes.iter().flat_map(|p| &p.forward_reads).copied()
}

/// The units in the order in which a step unshards them.
fn uses<D: Device>(rank: &Rank<D>) -> Vec<usize> {
    let backward = rank.passes.iter().rev().skip(1).flat_map(|p| &p.backward_reads);
    let micro_batch: Vec<usize> = forward_uses(rank).chain(backward.copied()).collect();
    micro_batch.repeat(rank.settings.grad_accum_steps)
}

/// The gathered flat parameters, without their padding.
fn params<D: Device>(rank: &Rank<D>, units: &[usize], gathered: &[Unsharded<D>]) -> Vec<AnySlice> {
    // SAFETY: passes read them on the compute stream, which waited for them, before they are resharded.
    units.iter().zip(gathered).map(|(&u, g)| unsafe { g.slice() }.slice(0..rank.numel(u))).collect()
}

impl<D: Device> Stage<D> for Stage3<D> {
    fn micro_batch(&mut self, rank: &Rank<D>, model: &mut dyn Model<D>, micro: usize) -> Result<(), TrainError> {
        if micro == 0 {
            self.prefetcher.begin_step()?;
        }
        let last = rank.passes.len() - 1;
        let mut turning = Vec::new();
        for (i, pass) in rank.passes.iter().enumerate() {
            let units = unshard(&mut self.prefetcher, &pass.forward_reads)?;
            model.forward(&rank.compute, i, &params(rank, &pass.forward_reads, &units))?;
            if i == last {
                turning = units;
            } else {
                reshard(&mut self.prefetcher, units);
            }
        }
        for (i, pass) in rank.passes.iter().enumerate().rev() {
            let units = match i == last {
                true => std::mem::take(&mut turning),
                false => unshard(&mut self.prefetcher, &pass.backward_reads)?,
            };
            let grads = self.grads.of_pass(rank, i)?;
            let params = params(rank, &pass.backward_reads, &units);
            model.backward(&rank.compute, i, &params, &grads, super::stage::loss_scale(&self.optimizer)?)?;
            reshard(&mut self.prefetcher, units);
            for unit in rank.complete_after(i) {
                self.grads.reduce_scatter(rank, unit, micro)?;
            }
        }
        Ok(())
    }

    fn evaluate(&mut self, rank: &Rank<D>, model: &mut dyn Model<D>, tokens: usize) -> Result<(), TrainError> {
        self.forward_only.begin_step()?;
        for (i, pass) in rank.passes.iter().enumerate() {
            let units = unshard(&mut self.forward_only, &pass.forward_reads)?;
            let params = params(rank, &pass.forward_reads, &units);
            model.forward(&rank.compute, i, &params)?;
            if i + 1 == rank.passes.len() {
                model.add_losses(&rank.compute, &params, tokens)?;
            }
            reshard(&mut self.forward_only, units);
        }
        self.forward_only.end_step();
        Ok(())
    }

    fn decide(&mut self, rank: &Rank<D>, inputs: StepInputs) -> Result<(), TrainError> {
        if let OrderCheck::Changed { position, expected, got } = self.prefetcher.end_step().order {
            tracing::warn!(
                position,
                ?expected,
                ?got,
                "the order of units changed during the step; units after this position were gathered on demand"
            );
        }
        self.grads.wait(rank)?;
        decide(rank, &mut self.optimizer, &self.grads.storage().all_own(), inputs)
    }

    fn update(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        let (params, grads) = (self.params.all_own(), self.grads.storage().all_own());
        update(rank, &mut self.optimizer, &params, &grads)
    }

    fn optimizer(&mut self) -> &mut ShardedAdamW<D> {
        &mut self.optimizer
    }

    fn updated(&self) -> Vec<AnySlice> {
        self.params.all_own()
    }

    fn publish(&mut self, _rank: &Rank<D>) -> Result<(), TrainError> {
        Ok(())
    }
}
