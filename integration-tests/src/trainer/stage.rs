//! What the trainer asks of a stage, and what the stages share of a step.

use zero_alloc::Purpose;
use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice, Stream};
use zero_optim::{DeviceStepConfig, Segment, ShardedAdamW, StepOutcome, UnitSlices};
use zero_shard::ZeroStage;

use super::rank::Rank;
use super::stages_1_and_2::Stages1And2;
use super::{dense, stage3};
use crate::error::TrainError;
use crate::model::Model;

/// For so many steps learning rates are put on the device at once.
pub(super) const STEPS_AHEAD: u64 = 1024;

/// One rank's side of a ZeRO stage. What a call enqueues at stages 0 to 2 may be recorded, and replayed in later
/// steps in place of the call.
pub trait Stage<D: Device>: Send {
    /// Forward and backward of the model's current micro-batch, the `micro`-th of the step; its gradients
    /// are on their way to where they are kept.
    ///
    /// # Errors
    /// A stream or a collective refused.
    fn micro_batch(&mut self, rank: &Rank<D>, model: &mut dyn Model<D>, micro: usize) -> Result<(), TrainError>;

    /// Enqueues the decision of the step, which all ranks take alike. The host waits for nothing.
    ///
    /// # Errors
    /// A stream or a collective refused.
    fn decide(&mut self, rank: &Rank<D>, say: StepInputs) -> Result<(), TrainError>;

    /// Enqueues the update that was decided, which does nothing in a step that is skipped; afterwards the parameters
    /// are ready for the next forward.
    ///
    /// # Errors
    /// A stream or a collective refused.
    fn update(&mut self, rank: &Rank<D>) -> Result<(), TrainError>;

    /// The optimizer, whose state is this rank's shards, or everything at stage 0.
    fn optimizer(&mut self) -> &mut ShardedAdamW<D>;

    /// For each unit, the parameters that the optimizer updates: the shard, or everything at stage 0.
    fn updated(&self) -> Vec<AnySlice>;

    /// Makes parameters that were set from outside ready for the next forward.
    ///
    /// # Errors
    /// A stream or a collective refused.
    fn publish(&mut self, rank: &Rank<D>) -> Result<(), TrainError>;
}

/// The stage of the settings.
///
/// # Errors
/// There is no memory for it.
pub(super) fn create<D: Device>(rank: &Rank<D>) -> Result<Box<dyn Stage<D>>, TrainError> {
    Ok(match rank.settings.stage {
        ZeroStage::Zero => Box::new(dense::Dense::new(rank)?),
        ZeroStage::One => Box::new(Stages1And2::stage_1(rank)?),
        ZeroStage::Two => Box::new(Stages1And2::stage_2(rank)?),
        ZeroStage::Three => Box::new(stage3::Stage3::new(rank)?),
    })
}

/// What a rank tells all others at the end of a step beside its gradients' statistics, in device memory when the
/// compute stream gets there.
#[derive(Clone, Copy, Debug)]
pub struct StepInputs {
    /// Sum of its micro-batches' losses.
    pub loss: DeviceSlice<f64>,
    /// 64 bits, of which all learn whether any and whether all ranks have set them.
    pub flags: DeviceSlice<u64>,
}

/// Statistics of the gradients that this rank votes for, the votes of all ranks, and one decision, the same everywhere.
pub(super) fn decide<D: Device>(
    rank: &Rank<D>,
    optimizer: &mut ShardedAdamW<D>,
    grads: &[AnySlice],
    say: StepInputs,
) -> Result<(), TrainError> {
    let Rank { compute, comm_stream, .. } = rank;
    optimizer.enqueue_stats(compute, grads)?;
    let stats = optimizer.enqueue_rank_stats(compute, say.loss, say.flags)?;
    comm_stream.wait(&compute.record()?)?;
    rank.comm.control_all_gather(comm_stream, stats.own, stats.all)?;
    compute.wait(&comm_stream.record()?)?;
    Ok(optimizer.enqueue_advance(compute)?)
}

/// The update of `params` by `grads`, as decided.
pub(super) fn update<D: Device>(
    rank: &Rank<D>,
    optimizer: &mut ShardedAdamW<D>,
    params: &[AnySlice],
    grads: &[AnySlice],
) -> Result<(), TrainError> {
    let units: Vec<_> = params.iter().zip(grads).map(|(&param, &grad)| UnitSlices { grad, param }).collect();
    Ok(optimizer.enqueue_update(&rank.compute, &units)?)
}

/// Steps that are decided on the device, on rank 0 of `ranks`.
pub fn device_steps(ranks: usize) -> DeviceStepConfig {
    DeviceStepConfig { rank: 0, ranks, micro_batches: 1, steps: STEPS_AHEAD as usize }
}

/// Puts what the decisions of the next [`STEPS_AHEAD`] steps need on the device. The steps before are reported.
pub(super) fn decide_on_device<D: Device>(rank: &Rank<D>, stage: &mut dyn Stage<D>) -> Result<(), TrainError> {
    let Rank { comm, pool, compute, settings, .. } = rank;
    let config = DeviceStepConfig {
        rank: comm.rank(),
        micro_batches: settings.grad_accum_steps,
        ..device_steps(comm.world_size())
    };
    Ok(stage.optimizer().prepare_device_steps(pool, compute, config, settings.host_limit())?)
}

/// Waits until the step that was enqueued is decided, and gives what was decided.
pub(super) fn outcome<D: Device>(rank: &Rank<D>, stage: &mut dyn Stage<D>) -> Result<StepOutcome, TrainError> {
    let outcome = stage.optimizer().all_outcomes(rank.settings.host_limit())?.pop();
    outcome.ok_or_else(|| TrainError::State("the device has not reported the step".to_owned()))
}

/// Every rank's `bytes` end to end; all ranks send the same length. Control traffic.
///
/// # Errors
/// A stream or a rank failed.
pub(super) fn exchange_bytes<D: Device>(rank: &Rank<D>, bytes: &[u8]) -> Result<Vec<u8>, TrainError> {
    let (n, device, stream) = (rank.comm.world_size(), rank.pool.device(), &rank.comm_stream);
    let mut block = rank.pool.allocate(bytes.len() * n, DType::U8, Purpose::Workspace, stream)?;
    // SAFETY: used on the communication stream alone, which is noted before the block is dropped.
    let all = unsafe { block.slice() };
    let own = all.slice(rank.comm.rank() * bytes.len()..(rank.comm.rank() + 1) * bytes.len());
    let mut received = vec![0; all.len()];
    let exchanged = device
        .upload(stream, bytes, own, rank.settings.host_limit())
        .map_err(TrainError::from)
        .and_then(|()| Ok(rank.comm.control_all_gather(stream, own, all)?))
        .and_then(|()| Ok(device.download(stream, all, &mut received, rank.settings.host_limit())?));
    block.record_use(stream)?;
    exchanged.map(|()| received)
}

/// The optimizer over this rank's shards: stages 1 to 3.
pub(super) fn sharded_optimizer<D: Device>(rank: &Rank<D>) -> Result<ShardedAdamW<D>, TrainError> {
    let units = rank.layout.units().iter();
    let segments = units.map(|u| {
        let range = u.shard_range();
        Segment::shard(&u.name, range.start as usize..range.end as usize)
    });
    optimizer(rank, segments.collect())
}

/// The optimizer over `segments`.
pub(super) fn optimizer<D: Device>(rank: &Rank<D>, segments: Vec<Segment>) -> Result<ShardedAdamW<D>, TrainError> {
    let Rank { pool, kernels, compute, settings, .. } = rank;
    Ok(ShardedAdamW::new(pool, kernels.clone(), compute, settings.rules.clone(), settings.dtype, segments)?)
}
