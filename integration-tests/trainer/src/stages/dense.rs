//! Stage 0: plain data parallelism, the baseline and the oracle of the other stages.
//!
//! Every rank holds the whole model state: 16 bytes a parameter. A unit's gradients are all-reduced
//! as soon as its backward is done, by default in the last micro-batch only; then every rank
//! updates all parameters in the same way.

use zero_alloc::Purpose;
use zero_alloc::device::{AnySlice, Device};

use crate::error::TrainError;
use crate::model::Model;
use crate::offload::host_params::SharedParams;
use crate::rank::Rank;
use crate::stages::gradients::Gradients;
use crate::stages::optimizer::{self, Optimizer};
use crate::stages::stage::{MicroBatches, Read, Stage, evaluate_whole, micro_batch_whole};
use crate::stages::storage::Storage;

/// One rank of stage 0.
pub(crate) struct Dense<D: Device> {
    /// The optimizer state of all parameters. Declared first: its drop waits for the host's work on
    /// the others.
    optimizer: Box<dyn Optimizer<D>>,
    params: Storage<D>,
    /// All gradients, summed over ranks.
    grads: Gradients<D>,
}

impl<D: Device> Dense<D> {
    pub(crate) fn new(rank: &Rank<D>, model: &dyn Model<D>) -> Result<Self, TrainError> {
        let params = Storage::whole(rank, rank.settings.dtype, Purpose::Params)?;
        let optimizer = optimizer::build(rank, Some(params.all_units()))?;
        let grads = Gradients::new(rank, model, &*optimizer)?;
        Ok(Self {
            optimizer,
            params,
            grads,
        })
    }
}

/// Makes the compute stream wait for the host's updates of `units`.
fn deliver<D: Device>(
    rank: &Rank<D>,
    updates: Option<&SharedParams<D>>,
    units: &[usize],
) -> Result<(), TrainError> {
    let Some(updates) = updates else {
        return Ok(());
    };
    let mut updates = updates.lock();
    Ok(units
        .iter()
        .try_for_each(|&unit| updates.deliver(&rank.compute, unit).map(drop))?)
}

impl<D: Device> Stage<D> for Dense<D> {
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
            let updates = optimizer.host_params();
            micro_batch_whole(rank, model, micro, grads, &mut **optimizer, |units| {
                deliver(rank, updates.as_ref(), units)?;
                Ok(params.of(rank, units))
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
        evaluate_whole(rank, model, read, |units| self.params.of(rank, units))
    }

    fn whole_params(&mut self, rank: &Rank<D>) -> Result<Vec<AnySlice>, TrainError> {
        let all: Vec<usize> = (0..rank.units()).collect();
        deliver(rank, self.optimizer.host_params().as_ref(), &all)?;
        Ok(self.params.of(rank, &all))
    }

    fn optimizer(&mut self) -> &mut dyn Optimizer<D> {
        &mut *self.optimizer
    }

    fn publish(&mut self, _rank: &Rank<D>) -> Result<(), TrainError> {
        Ok(())
    }
}
