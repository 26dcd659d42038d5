//! The interface of a ZeRO stage, and the parts of a step that all stages share.
//!
//! Why the stages run the micro-batches: at stage 3 one step of the prefetcher covers all of them,
//! so that units that are kept within a step are gathered once. In a recorded step the `Reduced`
//! values are those of the recording: an event of a finished recording orders nothing, and the
//! recorder orders the parts.

use zero_alloc::device::{AnySlice, Device};

use crate::error::TrainError;
use crate::model::Model;
use crate::rank::Rank;
use crate::stages::grad_errors::GradErrors;
use crate::stages::optimizer::Optimizer;
use crate::step::recorder::{GraphPart, Recorder};

/// Loads a micro-batch, by its number, into the model.
type Load<'a, D> = dyn FnMut(&mut dyn Model<D>, usize) -> Result<(), TrainError> + 'a;

/// Enqueues what reads the result of a forward, with the parameters of the last pass.
pub(crate) type Read<'a, D> =
    dyn FnMut(&mut dyn Model<D>, &[AnySlice]) -> Result<(), TrainError> + 'a;

/// The micro-batches of a step.
pub(crate) struct MicroBatches<'a, 'r, D: Device> {
    pub(crate) recorder: &'a mut Recorder<'r, D>,
    pub(crate) load: &'a mut Load<'a, D>,
}

impl<D: Device> MicroBatches<'_, '_, D> {
    /// Loads each micro-batch and calls `enqueue` with its number, or replays what an earlier call
    /// enqueued.
    pub(crate) fn run(
        &mut self,
        rank: &Rank<D>,
        model: &mut dyn Model<D>,
        mut enqueue: impl FnMut(&mut dyn Model<D>, usize) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        for micro in 0..rank.settings.grad_accum_steps {
            (self.load)(model, micro)?;
            let part = match micro {
                0 => GraphPart::First,
                _ if micro + 1 == rank.settings.grad_accum_steps => GraphPart::Last,
                _ => GraphPart::Later,
            };
            self.recorder.run(part, || enqueue(model, micro))?;
        }
        Ok(())
    }
}

/// One rank of a ZeRO stage. The operations that a call or a micro-batch enqueues at stages 0 to 2
/// may be recorded and replayed in later steps instead.
pub(crate) trait Stage<D: Device>: Send {
    /// Enqueues forward and backward of the micro-batches of a step, and the reduction of their
    /// gradients.
    fn gradients(
        &mut self,
        rank: &Rank<D>,
        model: &mut dyn Model<D>,
        micro_batches: &mut MicroBatches<'_, '_, D>,
    ) -> Result<(), TrainError>;

    /// Enqueues the forward of the loaded micro-batch, and calls `read` with the parameters of the
    /// last pass. Called between steps and never recorded; changes no state of the stage.
    fn evaluate(
        &mut self,
        rank: &Rank<D>,
        model: &mut dyn Model<D>,
        read: &mut Read<'_, D>,
    ) -> Result<(), TrainError>;

    /// Enqueues the decided update, a no-op in a skipped step; afterwards the parameters are ready
    /// for the next forward.
    fn update(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        self.optimizer().update(rank)
    }

    /// The parameters of each unit that other ranks hold, too: whole ones without padding, or at
    /// stage 3 the shards of replicas, if they are on the device. The compute stream waits for
    /// them. Called between steps and never recorded.
    fn replicated(&mut self, rank: &Rank<D>) -> Result<Vec<AnySlice>, TrainError>;

    /// The optimizer, with the state of this rank's shards, or of all parameters at stage 0.
    fn optimizer(&mut self) -> &mut dyn Optimizer<D>;

    /// The errors of quantised reductions of gradients, with error feedback.
    fn grad_errors(&self) -> Option<&GradErrors<D>>;

    /// Blocks the host until the streams of the rank are idle.
    fn synchronize(&mut self, rank: &Rank<D>) -> Result<(), TrainError> {
        rank.synchronize()?;
        self.optimizer()
            .on_host()
            .map_or(Ok(()), |host| host.synchronize(rank))
    }

    /// Prepares parameters that were set outside of a step for the next forward.
    fn publish(&mut self, rank: &Rank<D>) -> Result<(), TrainError>;
}
