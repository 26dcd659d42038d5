//! The memory of error feedback: the errors of this rank's quantised reductions of gradients.
//!
//! One allocation has, for each trained unit and each hop, an error in fp32 for every element that
//! this rank encodes. Only the communication stream uses it. A skipped step, and a change of the
//! loss scale, set it to zero: its errors are of gradients that were not applied, or in another
//! unit. So does every `reset_every`-th step.
//!
//! **In a checkpoint** the errors of a hop are as many states as the hop has ranks,
//! `grad_error_h_q` of rank q, of which each rank saves its shard: an all-to-all brings it the
//! shards of the others. A resume with the same hops restores them to the bit. With others, what
//! matters is the sum over ranks and hops: each rank starts with that of the shard it saves, in the
//! unit of the new number of micro-batches, over which gradients are summed.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice};
use zero_alloc::{Block, Purpose};
use zero_ckpt::Reader;
use zero_comm::{Communicator, UnitFeedback};
use zero_optim::StepOutcome;

use crate::error::TrainError;
use crate::quantised::ErrorFeedback;
use crate::rank::Rank;

/// The errors of one rank.
pub(crate) struct GradErrors<D: Device> {
    block: Block<D>,
    /// By unit, the errors of each hop; frozen units have none.
    units: Vec<Vec<DeviceSlice<f32>>>,
    /// Each rank of a hop saves a shard of the errors of all of them.
    hops: Vec<Arc<dyn Communicator<D>>>,
    feedback: ErrorFeedback,
    stream: D::Stream,
}

/// The shape of the errors in a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SavedErrors {
    /// The states of each hop.
    pub hops: Vec<usize>,
    /// Micro-batches of all ranks in a step, whose gradients are summed.
    pub micro_batches: usize,
}

impl SavedErrors {
    /// The shape of a rank's errors, if its reductions have feedback.
    pub(crate) fn of<D: Device>(rank: &Rank<D>) -> Option<Self> {
        rank.settings.quantised_grads?.feedback?;
        let hops: Vec<_> = hops(rank).map(|comm| comm.world_size()).collect();
        (!hops.is_empty()).then(|| Self {
            hops,
            micro_batches: rank.batches()[0] * rank.settings.grad_accum_steps,
        })
    }

    /// The name of the state of rank `rank` of a hop.
    pub(crate) fn name(hop: usize, rank: usize) -> String {
        format!("grad_error_{hop}_{rank}")
    }

    /// The names of all states.
    pub(crate) fn names(&self) -> impl Iterator<Item = String> + '_ {
        let of_hop = |(hop, ranks): (usize, &usize)| {
            let ranks = 0..*ranks;
            ranks.map(move |rank| Self::name(hop, rank))
        };
        self.hops.iter().enumerate().flat_map(of_hop)
    }
}

/// The ranks of each hop of `rank`: it encodes a shard for each of them, and in a hop for those of
/// the later ones.
fn hops<D: Device>(rank: &Rank<D>) -> impl Iterator<Item = &Arc<dyn Communicator<D>>> {
    let comms = [Some(rank.mesh.reduce.comm()), rank.mesh.between()];
    let count = rank.mesh.reduce.hop_shards().len();
    comms.into_iter().flatten().take(count)
}

impl<D: Device> GradErrors<D> {
    /// The errors of `rank`, if its reductions have feedback.
    pub(crate) fn new(rank: &Rank<D>) -> Result<Option<Self>, TrainError> {
        let quantised = rank.settings.quantised_grads;
        let shards = rank.mesh.reduce.hop_shards();
        let Some(feedback) = quantised.and_then(|of| of.feedback) else {
            return Ok(None);
        };
        if shards.is_empty() {
            return Ok(None);
        }

        let trained = |unit: usize| match rank.trains(unit) {
            true => rank.reduced(unit).count(),
            false => 0,
        };
        let elems = |unit: usize| trained(unit) * shards.iter().sum::<usize>();
        let all = (0..rank.units()).map(elems).sum();
        let stream = rank.comm_stream.clone();
        let block = rank
            .pool
            .allocate(all, DType::F32, Purpose::Grads, &stream)?;
        // SAFETY: only the communication stream uses it; the drop records it.
        let slice = unsafe { block.slice() };
        rank.pool.device().fill_zero(&stream, slice)?;

        let slice = slice.typed::<f32>()?;
        let mut end = 0;
        let units = (0..rank.units()).map(|unit| {
            let of_hop = |shards: &usize| {
                let start = end;
                end += shards * trained(unit);
                slice.slice(start..end)
            };
            shards.iter().map(of_hop).collect()
        });
        let units = units.collect();
        Ok(Some(Self {
            block,
            units,
            hops: hops(rank).map(Arc::clone).collect(),
            feedback,
            stream,
        }))
    }

    /// The feedback of a unit.
    pub(crate) fn of_unit(&self, unit: usize) -> UnitFeedback<'_> {
        UnitFeedback::new(&self.units[unit], self.feedback.keep)
    }

    fn all(&self) -> AnySlice {
        // SAFETY: as for `new`.
        unsafe { self.block.slice() }
    }

    /// Sets the errors to zero behind a step, completed step `step`, if they do not fit the next.
    pub(crate) fn end_step(
        &self,
        rank: &Rank<D>,
        step: u64,
        outcome: &StepOutcome,
        next_scale: f64,
    ) -> Result<(), TrainError> {
        let is_due = |every: u64| every > 0 && step.is_multiple_of(every);
        let resets = self.feedback.reset_every.is_some_and(is_due)
            || outcome.is_skipped()
            || outcome.loss_scale() != next_scale;
        if resets {
            rank.pool.device().fill_zero(&self.stream, self.all())?;
        }
        Ok(())
    }

    /// This rank's shard of the errors of all ranks, for a checkpoint. Collective.
    pub(crate) fn shards(&self, rank: &Rank<D>) -> Result<ErrorShards, TrainError> {
        let mut shards = ErrorShards::default();
        for errors in &self.units {
            let mut of_unit = Vec::new();
            for (hop, errors) in self.hops.iter().zip(errors) {
                let len = errors.len();
                let mut block =
                    rank.pool
                        .allocate(len, DType::F32, Purpose::Workspace, &self.stream)?;
                // SAFETY: used on the stream, which is recorded below.
                let received = unsafe { block.slice() };
                let sent = hop.all_to_all(&self.stream, errors.erase(), received);
                block.record_use(&self.stream)?;
                sent?;
                let mut values = vec![0f32; len];
                let bytes = bytemuck::cast_slice_mut(&mut values);
                let limit = rank.settings.host_limit();
                let device = rank.pool.device();
                device.download(&self.stream, received, bytes, limit)?;
                of_unit.push((hop.world_size(), values));
            }
            shards.units.push(of_unit);
        }
        Ok(shards)
    }

    /// Restores the errors of a checkpoint, which has `saved`; without errors they are zero.
    pub(crate) fn load(
        &self,
        rank: &Rank<D>,
        reader: &Reader,
        saved: Option<&SavedErrors>,
    ) -> Result<(), TrainError> {
        let (Some(saved), Some(now)) = (saved, SavedErrors::of(rank)) else {
            return Ok(());
        };
        let layout = rank.layouts.parts();
        let view = reader.view(layout).map_err(TrainError::from)?;
        for (unit, errors) in self.units.iter().enumerate() {
            let shard_elems = layout.units()[unit].shard_elems as usize;
            if !rank.trains(unit) {
                continue;
            }
            if now.hops == saved.hops {
                for (hop, errors) in errors.iter().enumerate() {
                    let name = SavedErrors::name(hop, self.hops[hop].rank());
                    let mut values = vec![0f32; errors.len()];
                    // In a later hop, the shards of this position.
                    let shards = values.len() / shard_elems;
                    let first = rank.part() as usize / shards * shards;
                    for (nth, shard) in values.chunks_exact_mut(shard_elems).enumerate() {
                        view.read_shard(&name, unit, (first + nth) as u64, shard)?;
                    }
                    self.upload(rank, *errors, &values)?;
                }
                continue;
            }

            let mut sum = vec![0f64; shard_elems];
            let mut values = vec![0f32; shard_elems];
            for name in saved.names() {
                view.read_shard(&name, unit, rank.part(), &mut values)?;
                sum.iter_mut()
                    .zip(&values)
                    .for_each(|(sum, value)| *sum += f64::from(*value));
            }
            let scale = now.micro_batches as f64 / saved.micro_batches.max(1) as f64;
            let values: Vec<f32> = sum.iter().map(|sum| (sum * scale) as f32).collect();
            if let Some(first) = errors.first() {
                let own = rank.part() as usize * shard_elems;
                self.upload(rank, first.slice(own..own + shard_elems), &values)?;
            }
        }
        Ok(())
    }

    fn upload(
        &self,
        rank: &Rank<D>,
        to: DeviceSlice<f32>,
        values: &[f32],
    ) -> Result<(), TrainError> {
        let limit = rank.settings.host_limit();
        let bytes = bytemuck::cast_slice(values);
        let device = rank.pool.device();
        Ok(device.upload(&self.stream, bytes, to.erase(), limit)?)
    }
}

impl<D: Device> Drop for GradErrors<D> {
    fn drop(&mut self) {
        // Recording fails only on a closed stream, which no longer uses the block.
        let _closed = self.block.record_use(&self.stream);
    }
}

/// A rank's shard of the errors of all ranks.
#[derive(Debug, Default)]
pub(crate) struct ErrorShards {
    /// By unit and hop: the ranks of the hop, and a shard of each.
    units: Vec<Vec<(usize, Vec<f32>)>>,
}

impl ErrorShards {
    /// Fills `out` with a range of this rank's shard in the state of this name: zeros if the unit
    /// is frozen. Returns `None` for another kind of state.
    pub(crate) fn fill(
        &self,
        name: &str,
        unit: usize,
        range: Range<usize>,
        out: &mut [u8],
    ) -> Option<()> {
        let (hop, rank) = name.strip_prefix("grad_error_")?.split_once('_')?;
        let hop: usize = hop.parse().ok()?;
        let rank: usize = rank.parse().ok()?;
        let (ranks, values) = self.units.get(unit)?.get(hop)?;
        if values.is_empty() {
            out.fill(0);
            return Some(());
        }
        let len = values.len() / ranks;
        let values = values.get(rank * len + range.start..rank * len + range.end)?;
        out.copy_from_slice(bytemuck::cast_slice(values));
        Some(())
    }
}
