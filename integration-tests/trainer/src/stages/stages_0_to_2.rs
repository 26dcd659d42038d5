//! Stages 0 to 2: every rank holds all parameters.
//!
//! | stage | sharded | a rank holds in mixed precision | gradients of a unit, as soon as its backward is done |
//! |---|---|---|---|
//! | 0 | nothing: the baseline, and the oracle of the other stages | 16 Ψ bytes | all-reduced |
//! | 1 | the optimizer state (P_os of the paper) | 4 Ψ + 12 Ψ/N | reduce-scattered |
//! | 2 | and the gradients (P_os+g) | 2 Ψ + 14 Ψ/N | reduce-scattered |
//!
//! At stages 1 and 2 each rank then updates its shard from the sums over ranks, and the new
//! parameters are all-gathered: 2 Ψ elements a step in all, as many as stage 0 sends. With several
//! micro-batches, stages 0 and 1 by default sum them in their storage of whole gradients and reduce
//! the last sum; stage 2 reduces each.

use zero_alloc::device::{AnySlice, Device};

use crate::error::TrainError;
use crate::model::Model;
use crate::rank::Rank;
use crate::stages::grad_errors::GradErrors;
use crate::stages::gradients::Gradients;
use crate::stages::optimizer::Optimizer;
use crate::stages::optimizer_choice;
use crate::stages::stage::{MicroBatches, Read, Stage};
use crate::stages::whole_params::WholeParams;

/// One rank of stage 0, 1 or 2.
pub(crate) struct Stages0To2<D: Device> {
    /// The optimizer state of what this rank updates. Declared first: its drop waits for the host's
    /// work on the others.
    optimizer: Box<dyn Optimizer<D>>,
    params: WholeParams<D>,
    /// The gradients: whole at stages 0 and 1, this rank's shard at stage 2.
    grads: Gradients<D>,
}

impl<D: Device> Stages0To2<D> {
    /// Makes the compute stream wait for all parameters.
    fn wait_for_all(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        let all: Vec<usize> = (0..rank.units()).collect();
        self.params.gather_updated(rank, &all)?;
        self.params.hold_compute(rank)
    }

    /// Enqueues forward and backward of a micro-batch, and the reduction of its gradients.
    fn micro_batch(
        &mut self,
        rank: &Rank<D>,
        model: &mut dyn Model<D>,
        micro: usize,
    ) -> Result<(), TrainError> {
        for (i, pass) in rank.passes.iter().enumerate() {
            let params = self.params.wait_for(rank, &pass.forward_reads)?;
            model.forward(&rank.compute, i, &params)?;
        }

        let grads = &mut self.grads;
        let mut grads = grads.of_micro_batch(rank, micro, &mut *self.optimizer);
        for (i, pass) in rank.backward_passes() {
            let params = self.params.wait_for(rank, &pass.backward_reads)?;
            let of_pass = grads.of_pass(i)?;
            model.backward(&rank.compute, i, &params, &of_pass, grads.loss_scale()?)?;
            grads.reduce_complete(i)?;
        }
        Ok(())
    }
}

impl<D: Device> Stage<D> for Stages0To2<D> {
    fn gradients(
        &mut self,
        rank: &Rank<D>,
        model: &mut dyn Model<D>,
        micro_batches: &mut MicroBatches<'_, '_, D>,
    ) -> Result<(), TrainError> {
        micro_batches.run(rank, model, |model, micro| {
            self.micro_batch(rank, model, micro)
        })
    }

    fn update(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        self.params.wait_for_gathers(rank)?;
        self.optimizer.update(rank)?;
        match self.optimizer.on_host() {
            // The next forward gathers each unit when it needs it.
            Some(_) => self.params.hold_gathers(rank),
            None => self.params.all_gather(rank, |unit| rank.trains(unit)),
        }
    }

    fn publish(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        self.params.all_gather(rank, |_| true)
    }

    fn evaluate(
        &mut self,
        rank: &Rank<D>,
        model: &mut dyn Model<D>,
        read: &mut Read<'_, D>,
    ) -> Result<(), TrainError> {
        self.wait_for_all(rank)?;
        for (i, pass) in rank.passes.iter().enumerate() {
            let params = self.params.gathered(rank, &pass.forward_reads)?;
            model.forward(&rank.compute, i, &params)?;
            if i + 1 == rank.passes.len() {
                read(model, &params)?;
            }
        }
        Ok(())
    }

    fn replicated(&mut self, rank: &Rank<D>) -> Result<Vec<AnySlice>, TrainError> {
        self.wait_for_all(rank)?;
        Ok(self.params.stored(rank))
    }

    fn optimizer(&mut self) -> &mut dyn Optimizer<D> {
        &mut *self.optimizer
    }

    fn grad_errors(&self) -> Option<&GradErrors<D>> {
        self.grads.errors.as_ref()
    }
}

impl<D: Device> Stages0To2<D> {
    pub(crate) fn new(rank: &Rank<D>, model: &dyn Model<D>) -> Result<Self, TrainError> {
        let mut params = WholeParams::new(rank)?;
        let optimizer = optimizer_choice::build(rank, Some(params.updated()))?;
        params.set_updates(optimizer.host_params());
        let grads = Gradients::new(rank, model, &*optimizer)?;
        Ok(Self {
            optimizer,
            params,
            grads,
        })
    }
}
