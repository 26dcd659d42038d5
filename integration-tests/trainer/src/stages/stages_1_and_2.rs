//! Stages 1 and 2: parameters are whole on every rank, the optimizer state is sharded (P_os of the
//! paper), and at stage 2 the gradients too (P_os+g).
//!
//! In mixed precision a rank holds 4 Ψ + 12 Ψ/N bytes at stage 1, 2 Ψ + 14 Ψ/N at stage 2. A unit's
//! gradient is reduce-scattered as soon as its backward is done. Each rank then updates its shard
//! from the sums over ranks, and the new parameters are all-gathered: 2 Ψ elements a step in all.
//! With several micro-batches, stage 1 sums them in its storage of whole gradients and reduces the
//! last sum; stage 2 reduces each.

use zero_alloc::device::{AnySlice, Device, Stream};

use crate::error::TrainError;
use crate::model::Model;
use crate::rank::Rank;
use crate::stages::gradients::Gradients;
use crate::stages::optimizer::{self, Optimizer};
use crate::stages::stage::{MicroBatches, Read, Stage, evaluate_whole, micro_batch_whole};
use crate::stages::whole_params::WholeParams;

/// One rank of stage 1 or 2.
pub(crate) struct Stages1And2<D: Device> {
    /// The optimizer state of this rank's shard. Declared first: its drop waits for the host's work
    /// on the others.
    optimizer: Box<dyn Optimizer<D>>,
    params: WholeParams<D>,
    /// The gradients: whole at stage 1, this rank's shard at stage 2. Only the shard has the sums
    /// over ranks.
    grads: Gradients<D>,
}

impl<D: Device> Stages1And2<D> {
    pub(crate) fn new(rank: &Rank<D>, model: &dyn Model<D>) -> Result<Self, TrainError> {
        let mut params = WholeParams::new(rank)?;
        let optimizer = optimizer::build(rank, Some(params.updated()))?;
        params.set_updates(optimizer.host_params());
        let grads = Gradients::new(rank, model, &*optimizer)?;
        Ok(Self {
            optimizer,
            params,
            grads,
        })
    }
}

impl<D: Device> Stage<D> for Stages1And2<D> {
    fn gradients(
        &mut self,
        rank: &Rank<D>,
        model: &mut dyn Model<D>,
        micro_batches: &mut MicroBatches<'_, '_, D>,
    ) -> Result<(), TrainError> {
        let Self {
            params,
            grads,
            optimizer,
        } = self;
        micro_batches.run(rank, model, |model, micro| {
            micro_batch_whole(rank, model, micro, grads, &mut **optimizer, |units| {
                params.of(rank, units)
            })
        })
    }

    fn evaluate(
        &mut self,
        rank: &Rank<D>,
        model: &mut dyn Model<D>,
        read: &mut Read<'_, D>,
    ) -> Result<(), TrainError> {
        self.whole_params(rank)?;
        evaluate_whole(rank, model, read, |units| self.params.gathered(rank, units))
    }

    fn whole_params(&mut self, rank: &Rank<D>) -> Result<Vec<AnySlice>, TrainError> {
        let all: Vec<usize> = (0..rank.units()).collect();
        self.params.gather_updated(rank, all.iter().copied())?;
        // Not the events of the gathers: the next step waits for those, and a recorded gather's
        // cannot be waited for.
        rank.compute.wait(&rank.comm_stream.record()?)?;
        Ok(self.params.gathered(rank, &all))
    }

    fn update(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        self.params.wait(rank)?;
        self.optimizer.update(rank)?;
        match self.optimizer.on_host() {
            // The next forward gathers each unit when it needs it.
            Some(_) => Ok(rank.comm_stream.wait(&rank.compute.record()?)?),
            None => self.params.all_gather(rank, |unit| rank.trains(unit)),
        }
    }

    fn optimizer(&mut self) -> &mut dyn Optimizer<D> {
        &mut *self.optimizer
    }

    fn publish(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        self.params.all_gather(rank, |_| true)
    }
}
