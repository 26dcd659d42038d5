//! The interface of a ZeRO stage, and the parts of a step that all stages share.
//!
//! Why the stages run the micro-batches: at stage 3 one step of the prefetcher covers all of them,
//! so that units that are kept within a step are gathered once. In a recorded step the `Reduced`
//! values are those of the recording: an event of a finished recording orders nothing, and the
//! recorder orders the parts.

use zero_alloc::device::{AnySlice, Device, DeviceSlice, Stream};
use zero_optim::{DeviceStepConfig, Divisor, Segment, ShardedAdamW, StepOutcome, UnitSlices};

use crate::error::TrainError;
use crate::model::Model;
use crate::offload::host_optimizer::Optimizer;
use crate::rank::Rank;
use crate::stages::gradients::Gradients;
use crate::step::recorder::{Part, Recorder};

/// Steps whose learning rates are uploaded at once.
pub(crate) const STEPS_AHEAD: u64 = 1024;

/// Loads a micro-batch, by its number, into the model.
type Load<'a, D> = dyn FnMut(&mut dyn Model<D>, usize) -> Result<(), TrainError> + 'a;

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
                0 => Part::First,
                _ if micro + 1 == rank.settings.grad_accum_steps => Part::Last,
                _ => Part::Later,
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

    /// Enqueues the forward of the loaded micro-batch and adds the losses of its first `tokens`
    /// tokens to the model's loss. Called between steps and never recorded; changes no state of the
    /// stage.
    fn evaluate(
        &mut self,
        rank: &Rank<D>,
        model: &mut dyn Model<D>,
        tokens: usize,
    ) -> Result<(), TrainError>;

    /// The parameters of each unit, without padding, that every rank holds whole: none at stage 3.
    /// The compute stream waits for them. Called between steps and never recorded.
    fn whole_params(&mut self, _rank: &Rank<D>) -> Result<Vec<AnySlice>, TrainError> {
        Ok(Vec::new())
    }

    /// Enqueues the decision of the step (skip or update, clipping), the same on all ranks. The
    /// host does not wait.
    fn decide(&mut self, rank: &Rank<D>, inputs: StepInputs) -> Result<(), TrainError>;

    /// Enqueues the decided update, a no-op in a skipped step; afterwards the parameters are ready
    /// for the next forward.
    fn update(&mut self, rank: &Rank<D>) -> Result<(), TrainError>;

    /// The optimizer, with the state of this rank's shards, or of all parameters at stage 0.
    fn optimizer(&mut self) -> &mut Optimizer<D>;

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

/// This rank's loss and flags for the all-gather at the end of a step, in device memory, read in
/// compute-stream order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepInputs {
    /// Sum of the losses of its micro-batches.
    pub(crate) loss: DeviceSlice<f64>,
    /// 64 bits; every rank receives their OR and their AND over all ranks.
    pub(crate) flags: DeviceSlice<u64>,
}

/// Enqueues forward and backward of a micro-batch with parameters that are whole on every rank, and
/// the reduction of its gradients: `params` returns the parameters of some units.
pub(crate) fn micro_batch_whole<D: Device>(
    rank: &Rank<D>,
    model: &mut dyn Model<D>,
    micro: usize,
    grads: &mut Gradients<D>,
    optimizer: &mut Optimizer<D>,
    mut params: impl FnMut(&[usize]) -> Result<Vec<AnySlice>, TrainError>,
) -> Result<(), TrainError> {
    for (i, pass) in rank.passes.iter().enumerate() {
        model.forward(&rank.compute, i, &params(&pass.forward_reads)?)?;
    }
    for (i, pass) in rank.backward_passes() {
        let params = params(&pass.backward_reads)?;
        let of_pass = grads.of_pass(rank, i, micro, optimizer)?;
        model.backward(&rank.compute, i, &params, &of_pass, optimizer.loss_scale()?)?;
        rank.complete_after(i)
            .try_for_each(|unit| grads.reduce(rank, unit, micro, optimizer))?;
    }
    Ok(())
}

/// Enqueues an evaluation with parameters that are whole on every rank: `params` returns those of
/// some units.
pub(crate) fn evaluate_whole<D: Device>(
    rank: &Rank<D>,
    model: &mut dyn Model<D>,
    tokens: usize,
    params: impl Fn(&[usize]) -> Vec<AnySlice>,
) -> Result<(), TrainError> {
    for (i, pass) in rank.passes.iter().enumerate() {
        model.forward(&rank.compute, i, &params(&pass.forward_reads))?;
    }
    if let Some(last) = rank.passes.last() {
        model.add_losses(&rank.compute, &params(&last.forward_reads), tokens)?;
    }
    Ok(())
}

/// Enqueues this rank's gradient statistics, their all-gather, and the decision, which is the same
/// on all ranks.
pub(crate) fn decide<D: Device>(
    rank: &Rank<D>,
    optimizer: &mut Optimizer<D>,
    grads: &Gradients<D>,
    inputs: StepInputs,
) -> Result<(), TrainError> {
    let Rank {
        compute,
        comm_stream,
        ..
    } = rank;
    let optimizer = match optimizer {
        Optimizer::Device { optimizer, .. } => optimizer,
        Optimizer::Host(host) => return host.decide(rank, inputs),
    };
    optimizer.enqueue_stats(compute, &grads.reduced())?;
    optimizer.enqueue_rank_stats(compute, inputs.loss, inputs.flags)?;
    // SAFETY: the gather is ordered after this and before the advance by the two events below.
    let stats = unsafe { optimizer.rank_stats_slices() }?;
    comm_stream.wait(&compute.record()?)?;
    rank.comm
        .control_all_gather(comm_stream, stats.own, stats.all)?;
    compute.wait(&comm_stream.record()?)?;
    Ok(optimizer.enqueue_advance(compute)?)
}

/// Enqueues the decided update by `grads`.
pub(crate) fn update<D: Device>(
    rank: &Rank<D>,
    optimizer: &mut Optimizer<D>,
    grads: &mut Gradients<D>,
) -> Result<(), TrainError> {
    let (optimizer, params) = match optimizer {
        Optimizer::Device { optimizer, params } => (optimizer, params),
        Optimizer::Host(host) => return host.update(rank, grads.on_file()),
    };
    let params: Vec<_> = params.iter().map(|&param| [(param, 0)]).collect();
    let units = grads
        .reduced()
        .into_iter()
        .zip(&params)
        .map(|(grad, param)| UnitSlices { grad, param });
    Ok(optimizer.enqueue_update(&rank.compute, &units.collect::<Vec<_>>())?)
}

/// The configuration of decisions on the device, for rank 0 of `ranks` ranks.
pub fn device_steps(ranks: usize) -> DeviceStepConfig {
    DeviceStepConfig::new(0, ranks, Divisor::MicroBatches(1), STEPS_AHEAD as usize)
}

/// Uploads the inputs of the next [`STEPS_AHEAD`] decisions. The outcomes of all earlier steps must
/// have been read.
pub(crate) fn decide_on_device<D: Device>(
    rank: &Rank<D>,
    stage: &mut dyn Stage<D>,
) -> Result<(), TrainError> {
    let Rank {
        comm,
        pool,
        compute,
        settings,
        ..
    } = rank;
    let optimizer = match stage.optimizer() {
        Optimizer::Device { optimizer, .. } => optimizer,
        Optimizer::Host(host) => return host.upload_loss_scale(rank),
    };
    let mut config = device_steps(comm.world_size());
    (config.rank, config.divisor) = (
        comm.rank(),
        Divisor::MicroBatches(settings.grad_accum_steps),
    );
    Ok(optimizer.prepare_device_steps(pool, compute, config, settings.host_limit())?)
}

/// Waits for the decision of the enqueued step and returns it.
pub(crate) fn outcome<D: Device>(
    rank: &Rank<D>,
    stage: &mut dyn Stage<D>,
) -> Result<StepOutcome, TrainError> {
    let outcome = match stage.optimizer() {
        Optimizer::Device { optimizer, .. } => {
            optimizer.all_outcomes(rank.settings.host_limit())?.pop()
        }
        Optimizer::Host(host) => host.outcome(),
    };
    outcome.ok_or_else(|| {
        TrainError::State("internal error: the device reported no step outcome".to_owned())
    })
}

/// The optimizer over this rank's shards: stages 1 to 3. `params` are those on the device, if it
/// has them.
pub(crate) fn sharded_optimizer<D: Device>(
    rank: &Rank<D>,
    params: Option<Vec<AnySlice>>,
) -> Result<Optimizer<D>, TrainError> {
    let units = rank.layout.units().iter();
    let segments = units.map(|u| {
        let range = u.shard_range();
        Segment::shard(&u.name, range.start as usize..range.end as usize)
    });
    Optimizer::new(rank, segments.collect(), params)
}

/// The optimizer on the device over `segments`.
pub(crate) fn optimizer_of<D: Device>(
    rank: &Rank<D>,
    segments: Vec<Segment>,
) -> Result<ShardedAdamW<D>, TrainError> {
    let Rank {
        pool,
        kernels,
        compute,
        settings,
        ..
    } = rank;
    let shards_of = settings
        .stage
        .shards_optimizer()
        .then_some(rank.comm.rank() as u64);
    let config = settings.optimizer.clone();
    let groups = rank.groups.of(&rank.layout, shards_of)?;
    let new = match settings.offload.format.remainder {
        true => ShardedAdamW::with_remainders,
        false => ShardedAdamW::with_groups,
    };
    Ok(new(
        pool,
        kernels.clone(),
        compute,
        config,
        settings.dtype,
        segments,
        &groups,
    )?)
}
