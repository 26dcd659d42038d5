//! The reduction of gradients from backward into their storage.
//!
//! | buffer | elements | lifetime |
//! |---|---|---|
//! | scratch slot | a unit's flat gradient in fp32 | from the first pass that adds to it until it is packed |
//! | bucket | constant, in the dtype of communication | from packing until the reduced piece is stored |
//! | storage | all units whole, or this rank's shards | the whole run |
//!
//! A unit whose gradient is complete is reduced over ranks by [`Buckets`]: the first micro-batch of a step overwrites the
//! storage, later ones add in fp32.

use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice, Reduced, Stream};
use zero_alloc::{Block, Purpose};
use zero_comm::{BucketOptions, Buckets, SumInto};
use zero_shard::Layout;

use super::rank::{Rank, complete_after, first_trained};
use super::storage::Storage;
use crate::error::TrainError;
use crate::model::Pass;
use crate::model::param_groups::ModelGroups;

/// The gradients of one rank.
pub(super) struct Gradients<D: Device> {
    slots: Vec<Block<D>>,
    /// The scratch slot of each unit.
    slot_of: Vec<usize>,
    buckets: Buckets<D>,
    storage: Storage<D>,
    /// The sum of each unit over ranks, without elements if the unit is frozen. A recorded step has those of its recording.
    reduced: Vec<Option<Reduced<D>>>,
    compute: D::Stream,
}

impl<D: Device> Gradients<D> {
    /// Allocates scratch and buckets for gradients kept in `storage`.
    pub(super) fn new(rank: &Rank<D>, storage: Storage<D>) -> Result<Self, TrainError> {
        let (slot_of, sizes) = scratch_slots(&rank.layout, &rank.passes, &rank.groups);
        let slot = |&elems: &usize| rank.pool.allocate(elems, DType::F32, Purpose::Workspace, &rank.compute);
        let slots = sizes.iter().map(slot).collect::<Result<_, _>>()?;
        let capacity = rank.settings.bucket_capacity_elems.max(rank.comm.world_size());
        let options = BucketOptions::new(capacity, rank.settings.dtype).overlap(rank.settings.overlap);
        let (compute, comm_stream) = (rank.compute.clone(), rank.comm_stream.clone());
        let buckets = Buckets::new(&rank.pool, rank.comm.clone(), compute.clone(), comm_stream, options)?;
        let reduced = (0..rank.units()).map(|unit| {
            let frozen = (!rank.trains(unit)).then(|| compute.record()).transpose()?;
            // SAFETY: the slice has no elements.
            Ok(frozen.map(|done| unsafe { Reduced::new(storage.unit(unit), done) }))
        });
        let reduced = reduced.collect::<Result<_, TrainError>>()?;
        Ok(Self { slots, slot_of, buckets, storage, reduced, compute })
    }

    /// The flat gradients to which the backward of `pass` adds, set to zero if it is the first to add.
    pub(super) fn of_pass(&self, rank: &Rank<D>, pass: usize) -> Result<Vec<DeviceSlice<f32>>, TrainError> {
        let mut grads = Vec::new();
        for &unit in &rank.passes[pass].grads {
            let scratch = self.scratch(rank, unit);
            if !rank.passes[pass + 1..].iter().any(|later| later.grads.contains(&unit)) {
                rank.pool.device().fill_zero(&rank.compute, scratch)?;
            }
            grads.push(scratch.typed::<f32>()?.slice(0..rank.numel(unit)));
        }
        Ok(grads)
    }

    /// Sums `unit` over all ranks; each rank keeps its shard of the sum, at stage 0 all of it. `micro` counts micro-batches
    /// from 0.
    pub(super) fn reduce(&mut self, rank: &Rank<D>, unit: usize, micro: usize) -> Result<(), TrainError> {
        let (kernels, parts) = (&*rank.kernels, [(self.scratch(rank, unit), 0)]);
        let sharded = rank.settings.stage.shards_optimizer();
        let into = match self.reduced[unit].take() {
            Some(earlier) if micro > 0 => SumInto::Add(earlier),
            _ => SumInto::Write(if sharded { self.storage.own(unit) } else { self.storage.unit(unit) }),
        };
        self.reduced[unit] = Some(match sharded {
            true => self.buckets.reduce_unit(kernels, &parts, into)?,
            false => self.buckets.all_reduce_unit(kernels, &parts, into)?,
        });
        Ok(())
    }

    /// The sums of all units.
    pub(super) fn reduced(&self) -> Vec<&Reduced<D>> {
        self.reduced.iter().flatten().collect()
    }

    fn scratch(&self, rank: &Rank<D>, unit: usize) -> AnySlice {
        // SAFETY: only the compute stream uses the scratch, and the drop records that stream.
        let slot = unsafe { self.slots[self.slot_of[unit]].slice() };
        slot.slice(0..rank.layout.units()[unit].padded_elems as usize)
    }
}

impl<D: Device> Drop for Gradients<D> {
    fn drop(&mut self) {
        for slot in &mut self.slots {
            // Recording fails only on a closed stream, which no longer uses the block.
            let _closed = slot.record_use(&self.compute);
        }
    }
}

/// Assigns a slot to each unit to which the passes of a backward add; no other unit uses it between the unit's first and
/// last pass. Returns the slot of each unit and the sizes of the slots.
pub(super) fn scratch_slots(layout: &Layout, passes: &[Pass], groups: &ModelGroups) -> (Vec<usize>, Vec<usize>) {
    let (mut slot_of, mut sizes, mut free) = (vec![0; layout.units().len()], Vec::<usize>::new(), Vec::new());
    let mut placed = vec![false; layout.units().len()];
    for pass in (first_trained(passes, groups)..passes.len()).rev() {
        for &unit in &passes[pass].grads {
            if !std::mem::replace(&mut placed[unit], true) {
                slot_of[unit] = free.pop().unwrap_or_else(|| {
                    sizes.push(0);
                    sizes.len() - 1
                });
                let size = &mut sizes[slot_of[unit]];
                *size = (*size).max(layout.units()[unit].padded_elems as usize);
            }
        }
        free.extend(complete_after(passes, pass).map(|unit| slot_of[unit]));
    }
    (slot_of, sizes)
}
