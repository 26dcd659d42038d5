//! Stage 3: optimizer state, gradients and parameters are sharded (P_os+g+p of the paper).
//!
//! Every rank holds 1/N of the model state: 16 Ψ/N bytes. A unit is gathered just before a pass
//! reads it and freed just after, in forward and again in backward; meanwhile the communication
//! stream gathers the next unit. The last pass (the head), whose backward directly follows its
//! forward, keeps its units between the two. Gradients are reduced as in stage 2, and nothing is
//! gathered after the step. At most 3 Ψ elements are sent: two all-gathers and one reduce-scatter.

use zero_alloc::device::{AnySlice, Device};
use zero_comm::{OrderCheck, PrefetchError, PrefetchStep, Prefetcher, Unsharded};

use crate::error::TrainError;
use crate::model::Model;
use crate::rank::{Rank, uses};
use crate::stages::grad_errors::GradErrors;
use crate::stages::gradients::{Gradients, MicroBatchGradients};
use crate::stages::optimizer::Optimizer;
use crate::stages::optimizer_choice;
use crate::stages::shards::SharedShards;
use crate::stages::stage::{MicroBatches, Read, Stage};

/// One rank of stage 3.
pub(crate) struct Stage3<D: Device> {
    /// Gathers units ahead of their use. Declared first, so that it is dropped before the shards
    /// that it reads.
    prefetcher: Prefetcher<D>,
    /// Gathers units for an evaluation, whose order of units differs from a step's. Between its
    /// calls it holds nothing.
    forward_only: Prefetcher<D>,
    /// The optimizer state of this rank's shard. Declared before what it updates: its drop waits
    /// for the host's work.
    optimizer: Box<dyn Optimizer<D>>,
    /// This rank's shard of the parameters.
    shards: SharedShards<D>,
    /// This rank's shard of the gradients, summed over ranks.
    grads: Gradients<D>,
}

/// Enqueues forward and backward of a micro-batch, and the reduction of its gradients.
fn micro_batch<D: Device>(
    rank: &Rank<D>,
    model: &mut dyn Model<D>,
    step: &mut PrefetchStep<'_, D>,
    mut grads: MicroBatchGradients<'_, D>,
) -> Result<(), TrainError> {
    let last = rank.passes.len() - 1;
    let mut turning = Vec::new();
    for (i, pass) in rank.passes.iter().enumerate() {
        let units = unshard(step, &pass.forward_reads)?;
        model.forward(&rank.compute, i, &params(rank, &pass.forward_reads, &units))?;
        if i == last {
            turning = units;
        } else {
            reshard(step, units);
        }
    }

    for (i, pass) in rank.backward_passes() {
        let units = match i == last {
            true => std::mem::take(&mut turning),
            false => unshard(step, &pass.backward_reads)?,
        };
        let params = params(rank, &pass.backward_reads, &units);
        let of_pass = grads.of_pass(i)?;
        model.backward(&rank.compute, i, &params, &of_pass, grads.loss_scale()?)?;
        reshard(step, units);
        grads.reduce_complete(i)?;
    }

    Ok(())
}

impl<D: Device> Stage<D> for Stage3<D> {
    fn gradients(
        &mut self,
        rank: &Rank<D>,
        model: &mut dyn Model<D>,
        micro_batches: &mut MicroBatches<'_, '_, D>,
    ) -> Result<(), TrainError> {
        let Self {
            prefetcher,
            grads,
            optimizer,
            ..
        } = self;

        let mut step = prefetcher.step()?;
        micro_batches.run(rank, model, |model, micro| {
            let grads = grads.of_micro_batch(rank, micro, &mut **optimizer);
            micro_batch(rank, model, &mut step, grads)
        })?;
        if let OrderCheck::Changed {
            position,
            expected,
            got,
        } = step.end().order
        {
            tracing::warn!(
                position,
                ?expected,
                ?got,
                "the order of units changed during the step; units after this position were gathered on demand"
            );
        }

        Ok(())
    }

    fn update(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        self.shards.wait_for_gathers(rank)?;
        self.optimizer.update(rank)?;
        self.shards.gather(rank, |unit| rank.trains(unit))
    }

    fn publish(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        self.shards.gather(rank, |_| true)
    }

    fn evaluate(
        &mut self,
        rank: &Rank<D>,
        model: &mut dyn Model<D>,
        read: &mut Read<'_, D>,
    ) -> Result<(), TrainError> {
        let mut step = self.forward_only.step()?;
        for (i, pass) in rank.passes.iter().enumerate() {
            let units = unshard(&mut step, &pass.forward_reads)?;
            let params = params(rank, &pass.forward_reads, &units);
            model.forward(&rank.compute, i, &params)?;
            if i + 1 == rank.passes.len() {
                read(model, &params)?;
            }
            reshard(&mut step, units);
        }
        Ok(())
    }

    fn replicated(&mut self, rank: &Rank<D>) -> Result<Vec<AnySlice>, TrainError> {
        self.shards.of_replicas(rank)
    }

    fn optimizer(&mut self) -> &mut dyn Optimizer<D> {
        &mut *self.optimizer
    }

    fn grad_errors(&self) -> Option<&GradErrors<D>> {
        self.grads.errors.as_ref()
    }
}

fn unshard<D: Device>(
    step: &mut PrefetchStep<'_, D>,
    units: &[usize],
) -> Result<Vec<Unsharded<D>>, PrefetchError> {
    units.iter().map(|&unit| step.unshard(unit)).collect()
}

fn reshard<D: Device>(step: &mut PrefetchStep<'_, D>, units: Vec<Unsharded<D>>) {
    units.into_iter().for_each(|unit| step.reshard(unit));
}

/// The units in the order in which a forward unshards them.
fn forward_uses<D: Device>(rank: &Rank<D>) -> impl Iterator<Item = usize> {
    rank.passes.iter().flat_map(|p| &p.forward_reads).copied()
}

/// The units in the order in which a step unshards them.
fn step_uses<D: Device>(rank: &Rank<D>) -> Vec<usize> {
    let micro_batch = uses(&rank.passes, &rank.groups).concat();
    micro_batch.repeat(rank.settings.grad_accum_steps)
}

/// The gathered flat parameters, without their padding.
fn params<D: Device>(rank: &Rank<D>, units: &[usize], gathered: &[Unsharded<D>]) -> Vec<AnySlice> {
    let slice = |(&unit, gathered): (&usize, &Unsharded<D>)| {
        // SAFETY: passes read it on the compute stream, which waited for it, before it is
        // resharded.
        unsafe { gathered.slice() }.slice(0..rank.used_elems(unit))
    };
    units.iter().zip(gathered).map(slice).collect()
}

impl<D: Device> Stage3<D> {
    pub(crate) fn new(rank: &Rank<D>, model: &dyn Model<D>) -> Result<Self, TrainError> {
        let shards = SharedShards::new(rank)?;
        let optimizer = optimizer_choice::build(rank, shards.updated())?;
        shards.set_updates(optimizer.host_params());
        let prefetcher = |order| {
            let mut prefetcher = Prefetcher::with_source(
                rank.pool.clone(),
                rank.mesh.gather.clone(),
                rank.compute.clone(),
                rank.comm_stream.clone(),
                shards.clone(),
                rank.settings.prefetch,
            );
            prefetcher.expect_order(order).map(|()| prefetcher)
        };

        let forward_only = prefetcher(forward_uses(rank).collect())?;
        let prefetcher = prefetcher(step_uses(rank))?;
        let grads = Gradients::new(rank, model, &*optimizer)?;
        Ok(Self {
            prefetcher,
            forward_only,
            optimizer,
            shards,
            grads,
        })
    }
}
