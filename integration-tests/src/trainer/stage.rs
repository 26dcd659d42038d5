//! What the trainer asks of a stage, and what the stages share of a step.

use bytemuck::{Pod, Zeroable};
use zero_alloc::Purpose;
use zero_alloc::device::{AnySlice, DType, Device};
use zero_optim::{BackwardScale, Ballot, Segment, ShardedAdamW, StepOutcome, UnitSlices, Vote};
use zero_shard::ZeroStage;

use super::rank::Rank;
use super::{dense, stage1, stage2, stage3};
use crate::error::TrainError;
use crate::model::Model;

/// One rank's side of a ZeRO stage.
pub trait Stage<D: Device>: Send {
    /// Forward and backward of the model's current micro-batch, the `micro`-th of the step; its gradients
    /// are on their way to where they are kept.
    ///
    /// # Errors
    /// A stream or a collective refused.
    fn micro_batch(
        &mut self,
        rank: &Rank<D>,
        model: &mut dyn Model<D>,
        micro: usize,
        scale: BackwardScale,
    ) -> Result<(), TrainError>;

    /// The optimizer step, agreed on by all ranks; afterwards the parameters are ready for the next forward.
    ///
    /// # Errors
    /// A stream or a collective failed, on any rank.
    fn step(&mut self, rank: &Rank<D>, say: Say, scale: BackwardScale) -> Result<Agreed, TrainError>;

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
        ZeroStage::One => Box::new(stage1::Stage1::new(rank)?),
        ZeroStage::Two => Box::new(stage2::Stage2::new(rank)?),
        ZeroStage::Three => Box::new(stage3::Stage3::new(rank)?),
    })
}

/// What a rank tells all others at the end of a step.
#[derive(Clone, Copy, Debug)]
pub struct Say {
    /// Sum of its micro-batches' losses.
    pub loss: f64,
    /// It was asked to stop after this step.
    pub stop: bool,
    /// It is ready to take the save under way a step further.
    pub saved: bool,
}

/// What all ranks know at the end of a step.
#[derive(Clone, Debug)]
pub struct Agreed {
    /// What became of the step; its loss is the sum over ranks and micro-batches.
    pub outcome: StepOutcome,
    /// A rank was asked to stop.
    pub stop: bool,
    /// All ranks are ready to take the save under way a step further.
    pub saved: bool,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Message {
    vote: Vote,
    stop: u64,
    saved: u64,
}

/// The end of a step on every rank: statistics of the gradients that this rank votes for, an exchange of
/// votes, and one decision, the same everywhere, which the optimizer enqueues.
pub(super) fn agree_and_update<D: Device>(
    rank: &Rank<D>,
    optimizer: &mut ShardedAdamW<D>,
    params: &[AnySlice],
    grads: &[AnySlice],
    say: Say,
    scale: BackwardScale,
) -> Result<Agreed, TrainError> {
    let limit = rank.settings.host_limit();
    optimizer.enqueue_stats(&rank.compute, grads)?;
    let vote = optimizer.vote(&rank.compute, say.loss, limit)?;
    let message = Message { vote, stop: u64::from(say.stop), saved: u64::from(say.saved) };
    let messages = exchange(rank, message)?;
    let votes: Vec<Vote> = messages.iter().map(|m| m.vote).collect();
    let ballot = Ballot { votes: &votes, backward_scale: scale, micro_batches: rank.settings.grad_accum_steps };
    let units: Vec<_> = params.iter().zip(grads).map(|(&param, &grad)| UnitSlices { grad, param }).collect();
    let outcome = optimizer.step(&rank.compute, &units, ballot, limit)?;
    let (stop, saved) = (messages.iter().any(|m| m.stop != 0), messages.iter().all(|m| m.saved != 0));
    Ok(Agreed { outcome, stop, saved })
}

/// Every rank's `message`, in rank order.
fn exchange<D: Device>(rank: &Rank<D>, message: Message) -> Result<Vec<Message>, TrainError> {
    let bytes = exchange_bytes(rank, bytemuck::bytes_of(&message))?;
    Ok(bytes.chunks_exact(size_of::<Message>()).map(bytemuck::pod_read_unaligned).collect())
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
