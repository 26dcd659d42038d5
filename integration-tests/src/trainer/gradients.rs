//! The reduction of gradients from backward into their storage.
//!
//! | buffer | elements | lifetime |
//! |---|---|---|
//! | scratch slot | a unit's flat gradient in fp32 | from the first pass that adds to it until it is packed |
//! | bucket | constant, in the dtype of communication | from packing until the reduced piece is stored |
//! | storage | all units whole, or this rank's shards | the whole run |
//!
//! A unit whose gradient is complete is cut into pieces. Each piece is packed into a bucket (cast on the compute
//! stream), reduced over ranks on the communication stream, and stored: the first micro-batch of a step overwrites
//! the storage, later ones add in fp32.

use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice};
use zero_alloc::{Block, Purpose};
use zero_comm::{BucketOptions, Buckets, Filling, ReduceOp};
use zero_shard::{BucketPiece, Layout, bucket_pieces};

use super::rank::{Rank, complete_after};
use super::storage::Storage;
use crate::error::TrainError;
use crate::model::Pass;

/// The gradients of one rank.
pub(super) struct Gradients<D: Device> {
    slots: Vec<Block<D>>,
    /// The scratch slot of each unit.
    slot_of: Vec<usize>,
    buckets: Buckets<D>,
    storage: Storage<D>,
    compute: D::Stream,
}

impl<D: Device> Gradients<D> {
    /// Allocates scratch and buckets for gradients kept in `storage`.
    pub(super) fn new(rank: &Rank<D>, storage: Storage<D>) -> Result<Self, TrainError> {
        let (slot_of, sizes) = scratch_slots(&rank.layout, &rank.passes);
        let slot = |&elems: &usize| rank.pool.allocate(elems, DType::F32, Purpose::Workspace, &rank.compute);
        let slots = sizes.iter().map(slot).collect::<Result<_, _>>()?;
        let capacity = rank.settings.bucket_capacity_elems.max(rank.comm.world_size());
        let options =
            BucketOptions { overlap: rank.settings.overlap, ..BucketOptions::new(capacity, rank.settings.dtype) };
        let (compute, comm_stream) = (rank.compute.clone(), rank.comm_stream.clone());
        let buckets = Buckets::new(&rank.pool, rank.comm.clone(), compute.clone(), comm_stream, options)?;
        Ok(Self { slots, slot_of, buckets, storage, compute })
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

    /// Sums `unit` over all ranks; every rank keeps the whole sum. `micro` counts micro-batches from 0.
    pub(super) fn all_reduce(&self, rank: &Rank<D>, unit: usize, micro: usize) -> Result<(), TrainError> {
        for piece in self.pieces(rank, unit) {
            let in_flight = self.pack(rank, unit, &piece)?.all_reduce(ReduceOp::Sum)?;
            // SAFETY: used on the communication stream alone, before `finish`.
            let sum = unsafe { in_flight.slice() };
            for (part, place) in parts(&piece, sum) {
                self.store(rank, part, self.storage.unit(unit).slice(place), micro)?;
            }
            let _done = in_flight.finish()?;
        }
        Ok(())
    }

    /// Sums `unit` over all ranks; each rank keeps its shard of the sum. `micro` counts micro-batches from 0.
    pub(super) fn reduce_scatter(&self, rank: &Rank<D>, unit: usize, micro: usize) -> Result<(), TrainError> {
        for piece in self.pieces(rank, unit) {
            let shard = self.storage.own(unit).slice(piece.in_shard.start as usize..piece.in_shard.end as usize);
            let bucket = self.pack(rank, unit, &piece)?;
            let in_flight = if micro == 0 && shard.dtype() == rank.settings.dtype {
                bucket.reduce_scatter_into(shard, ReduceOp::Sum)?
            } else {
                let in_flight = bucket.reduce_scatter(ReduceOp::Sum)?;
                // SAFETY: used on the communication stream alone, before `finish`.
                let sum = unsafe { in_flight.segment() };
                self.store(rank, sum, shard, micro)?;
                in_flight
            };
            let _done = in_flight.finish()?;
        }
        Ok(())
    }

    /// Makes the compute stream wait until all gradients are stored.
    pub(super) fn wait(&self, rank: &Rank<D>) -> Result<(), TrainError> {
        Ok(self.buckets.wait_all_on(&rank.compute)?)
    }

    /// The stored gradients.
    pub(super) fn storage(&self) -> &Storage<D> {
        &self.storage
    }

    fn scratch(&self, rank: &Rank<D>, unit: usize) -> AnySlice {
        // SAFETY: only the compute stream uses the scratch, and the drop records that stream.
        let slot = unsafe { self.slots[self.slot_of[unit]].slice() };
        slot.slice(0..rank.layout.units()[unit].padded_elems as usize)
    }

    fn pieces(&self, rank: &Rank<D>, unit: usize) -> impl Iterator<Item = BucketPiece> + use<D> {
        let capacity = self.buckets.options().capacity_elems as u64;
        bucket_pieces(&rank.layout.units()[unit], rank.layout.world_size(), capacity)
    }

    /// Casts a piece of the scratch into the next bucket, on the compute stream.
    fn pack(&self, rank: &Rank<D>, unit: usize, piece: &BucketPiece) -> Result<Filling<D>, TrainError> {
        let bucket = self.buckets.begin(piece.elems() as usize)?;
        // SAFETY: written on the compute stream alone, before the launch.
        let packed = unsafe { bucket.slice() };
        let scratch = self.scratch(rank, unit);
        for (part, place) in parts(piece, packed) {
            rank.kernels.cast(&rank.compute, scratch.slice(place), part, 1.0)?;
        }
        Ok(bucket)
    }

    /// Writes a reduced piece, or adds it after the first micro-batch, on the communication stream.
    fn store(&self, rank: &Rank<D>, sum: AnySlice, place: AnySlice, micro: usize) -> Result<(), TrainError> {
        if micro == 0 {
            rank.kernels.cast(&rank.comm_stream, sum, place, 1.0)?;
        } else {
            rank.kernels.accumulate(&rank.comm_stream, sum, place.typed()?)?;
        }
        Ok(())
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

/// The segments of a bucket with their ranges in the unit. A piece that is the whole unit has one segment.
fn parts(piece: &BucketPiece, bucket: AnySlice) -> Vec<(AnySlice, std::ops::Range<usize>)> {
    if piece.elems() == piece.shard_elems * piece.world_size {
        return vec![(bucket, 0..bucket.len())];
    }
    let n = piece.segment_elems() as usize;
    let segments = piece.segments().enumerate();
    segments.map(|(i, at)| (bucket.slice(i * n..(i + 1) * n), at.start as usize..at.end as usize)).collect()
}

/// Assigns each unit a slot that no other unit uses between its first and last pass. Returns the slot of each unit
/// and the sizes of the slots.
pub(super) fn scratch_slots(layout: &Layout, passes: &[Pass]) -> (Vec<usize>, Vec<usize>) {
    let (mut slot_of, mut sizes, mut free) = (vec![0; layout.units().len()], Vec::<usize>::new(), Vec::new());
    let mut placed = vec![false; layout.units().len()];
    for pass in (0..passes.len()).rev() {
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
