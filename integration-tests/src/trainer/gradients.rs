//! The reduction of gradients from backward into their storage.
//!
//! | buffer | elements | lifetime |
//! |---|---|---|
//! | scratch slot | a unit's flat gradient in fp32 | from the first pass that adds to it until it is packed |
//! | bucket | constant, in the dtype of communication | from packing until the reduced piece is stored |
//! | storage | all units whole, or this rank's shards | the whole run |
//!
//! A unit whose gradient is complete is reduced over ranks by [`Buckets`]: the first micro-batch of a step overwrites the
//! storage, later ones add in fp32. If the host updates and the device is a GPU, the storage is in pinned memory; with
//! parameters on NVMe it is a scratch file. A reduced unit then leaves the device through one of two transfer buffers, and the
//! host adds.

use std::ops::Range;

use zero_alloc::device::{AnySlice, DType, Device, Reduced, Stream};
use zero_alloc::host::{HostDevice, HostEvent, HostStream};
use zero_alloc::{Block, Purpose};
use zero_comm::{BucketOptions, Buckets, SumInto};
use zero_shard::Layout;

use super::host_optimizer::{HostOptimizer, Optimizer};
use super::rank::{Rank, complete_after, first_trained};
use super::storage::Storage;
use super::unit_file::UnitFile;
use crate::error::TrainError;
use crate::model::param_groups::ModelGroups;
use crate::model::{Grad, Pass};

/// The gradients of one rank.
pub(super) struct Gradients<D: Device> {
    slots: Vec<Block<D>>,
    /// The scratch slot of each unit.
    slot_of: Vec<usize>,
    buckets: Buckets<D>,
    kept: Kept<D>,
    compute: D::Stream,
}

/// The place of the sums over ranks.
enum Kept<D: Device> {
    /// On the device.
    Device {
        storage: Storage<D>,
        /// The sum of each unit, without elements if the unit is frozen. A recorded step has those of its recording.
        reduced: Vec<Option<Reduced<D>>>,
    },
    /// In host memory.
    Host(Box<HostSums<D>>),
}

/// Sums over ranks in host memory.
struct HostSums<D: Device> {
    /// Reduced units on the device.
    leaving: [Leaving<D>; 2],
    next: usize,
    sums: Sums,
    /// Copies in host memory that the host adds, unless a copy is the sum. If the device is the host, it adds what leaves.
    arrived: Option<[(Block<HostDevice>, Option<HostEvent>); 2]>,
    streams: (D::Stream, HostStream),
}

enum Sums {
    /// In pinned memory: the range of each unit.
    Memory { block: Block<HostDevice>, units: Vec<Range<usize>> },
    /// In a scratch file: the elements of each unit.
    File { file: Box<UnitFile>, lens: Vec<usize> },
}

impl Sums {
    fn len(&self, unit: usize) -> usize {
        match self {
            Self::Memory { units, .. } => units[unit].len(),
            Self::File { lens, .. } => lens[unit],
        }
    }

    /// A unit in pinned memory.
    fn in_memory(&self, unit: usize) -> Option<AnySlice> {
        match self {
            // SAFETY: copies of the device and operations of the host use it, ordered by events; the optimizer, which is
            // dropped first, waits for both.
            Self::Memory { block, units } => Some(unsafe { block.slice() }.slice(units[unit].clone())),
            Self::File { .. } => None,
        }
    }
}

/// A transfer buffer, and the events after which it may be overwritten.
struct Leaving<D: Device> {
    block: Block<D>,
    copied: Option<D::Event>,
    added: Option<HostEvent>,
}

impl<D: Device> Gradients<D> {
    /// Allocates scratch and buckets for gradients kept in `storage`.
    pub(super) fn new(
        rank: &Rank<D>,
        storage: impl FnOnce() -> Result<Storage<D>, TrainError>,
        optimizer: &mut Optimizer<D>,
    ) -> Result<Self, TrainError> {
        let (slot_of, sizes) = scratch_slots(&rank.layout, &rank.passes, &rank.groups);
        let slot = |&elems: &usize| rank.pool.allocate(elems, DType::F32, Purpose::Workspace, &rank.compute);
        let slots = sizes.iter().map(slot).collect::<Result<_, _>>()?;
        let capacity = rank.settings.bucket_capacity_elems.max(rank.comm.world_size());
        let count = rank.settings.buckets(rank.comm.world_size(), rank.is_host());
        let options = BucketOptions::new(capacity, rank.settings.dtype).count(count).overlap(rank.settings.overlap);
        let (compute, comm_stream) = (rank.compute.clone(), rank.comm_stream.clone());
        let buckets = Buckets::new(&rank.pool, rank.comm.clone(), compute.clone(), comm_stream, options)?;
        let kept = match optimizer.on_host() {
            Some(optimizer) if !rank.is_host() || rank.settings.offload.grads_on_file().is_some() => {
                Kept::Host(Box::new(HostSums::new(rank, optimizer)?))
            }
            _ => {
                let storage = storage()?;
                let reduced = (0..rank.units()).map(|unit| {
                    let frozen = (!rank.trains(unit)).then(|| compute.record()).transpose()?;
                    // SAFETY: the slice has no elements.
                    Ok(frozen.map(|done| unsafe { Reduced::new(storage.unit(unit), done) }))
                });
                Kept::Device { reduced: reduced.collect::<Result<_, TrainError>>()?, storage }
            }
        };
        Ok(Self { slots, slot_of, buckets, kept, compute })
    }

    /// The flat gradients to which the backward of `pass` adds, set to zero if it is the first to add.
    pub(super) fn of_pass(&self, rank: &Rank<D>, pass: usize) -> Result<Vec<Grad>, TrainError> {
        let mut grads = Vec::new();
        for &unit in &rank.passes[pass].grads {
            let scratch = self.scratch(rank, unit);
            if !rank.passes[pass + 1..].iter().any(|later| later.grads.contains(&unit)) {
                rank.pool.device().fill_zero(&rank.compute, scratch)?;
            }
            grads.push(Grad::Add(scratch.typed::<f32>()?.slice(0..rank.numel(unit))));
        }
        Ok(grads)
    }

    /// Sums `unit` over all ranks; each rank keeps its shard of the sum, at stage 0 all of it. `micro` counts micro-batches
    /// from 0. An optimizer on the host takes the sum of the last.
    pub(super) fn reduce(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        micro: usize,
        optimizer: &mut Optimizer<D>,
    ) -> Result<(), TrainError> {
        let (kernels, parts) = (&*rank.kernels, [(self.scratch(rank, unit), 0)]);
        let (sharded, buckets) = (rank.settings.stage.shards_optimizer(), &self.buckets);
        let sum = |into| match sharded {
            true => buckets.reduce_unit(kernels, &parts, into),
            false => buckets.all_reduce_unit(kernels, &parts, into),
        };
        let last = micro + 1 == rank.settings.grad_accum_steps;
        match (&mut self.kept, optimizer.on_host()) {
            (Kept::Device { storage, reduced }, mut optimizer) => {
                let into = match reduced[unit].take() {
                    Some(earlier) if micro > 0 => SumInto::Add(earlier),
                    _ => {
                        if let Some(optimizer) = &mut optimizer {
                            optimizer.wait_for_release(rank, &rank.comm_stream, unit)?;
                        }
                        SumInto::Write(if sharded { storage.own(unit) } else { storage.unit(unit) })
                    }
                };
                let reduced = reduced[unit].insert(sum(into)?);
                match optimizer {
                    Some(optimizer) if last => optimizer.take_sum(rank, unit, reduced),
                    _ => Ok(()),
                }
            }
            (Kept::Host(sums), Some(optimizer)) => {
                let slice = sums.next_buffer(rank, unit)?;
                let reduced = sum(SumInto::Write(slice))?;
                sums.take(rank, unit, micro, &reduced, optimizer)
            }
            (Kept::Host(_), None) => Ok(()),
        }
    }

    /// The sums of all units in a scratch file, if they are in one.
    pub(super) fn on_file(&mut self) -> Option<&mut UnitFile> {
        match &mut self.kept {
            Kept::Host(sums) => match &mut sums.sums {
                Sums::File { file, .. } => Some(file),
                Sums::Memory { .. } => None,
            },
            Kept::Device { .. } => None,
        }
    }

    /// The sums of all units, if they are on the device.
    pub(super) fn reduced(&self) -> Vec<&Reduced<D>> {
        match &self.kept {
            Kept::Device { reduced, .. } => reduced.iter().flatten().collect(),
            Kept::Host(_) => Vec::new(),
        }
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

impl<D: Device> HostSums<D> {
    fn new(rank: &Rank<D>, optimizer: &mut HostOptimizer<D>) -> Result<Self, TrainError> {
        let Rank { settings, host, .. } = rank;
        let len = |unit: usize| {
            let held = rank.held(&rank.layout.units()[unit]);
            if rank.trains(unit) { (held.end - held.start) as usize } else { 0 }
        };
        let lens: Vec<usize> = (0..rank.units()).map(len).collect();
        let largest = lens.iter().copied().max().unwrap_or(0);
        let leaving = || {
            let block = rank.pool.allocate(largest, settings.dtype, Purpose::Buckets, &rank.comm_stream)?;
            Ok::<_, TrainError>(Leaving { block, copied: None, added: None })
        };
        let update = &optimizer.stream().clone();
        let pinned = |elems, dtype| host.pinned.allocate(elems, dtype, Purpose::Grads, update);
        let adds = settings.grad_accum_steps > 1 || settings.offload.grads_on_file().is_some();
        let arrived = match adds && !rank.is_host() {
            false => None,
            true => Some([(pinned(largest, settings.dtype)?, None), (pinned(largest, settings.dtype)?, None)]),
        };
        let sums = match settings.offload.grads_on_file() {
            Some(dir) => {
                let file = UnitFile::new(rank, update, dir, ("gradients", settings.grad_dtype()), &lens)?;
                optimizer.count(file.file.clone());
                Sums::File { file: Box::new(file), lens }
            }
            None => {
                let block = pinned(lens.iter().sum(), settings.grad_dtype())?;
                let mut end = 0;
                let range = |len: usize| {
                    end += len;
                    end - len..end
                };
                Sums::Memory { block, units: lens.into_iter().map(range).collect() }
            }
        };
        let streams = (optimizer.copies().clone(), update.clone());
        Ok(Self { leaving: [leaving()?, leaving()?], next: 0, sums, arrived, streams })
    }

    /// The next transfer buffer. The communication stream waits until its last unit has left.
    fn next_buffer(&mut self, rank: &Rank<D>, unit: usize) -> Result<AnySlice, TrainError> {
        self.next = (self.next + 1) % self.leaving.len();
        let Leaving { block, copied, added } = &mut self.leaving[self.next];
        if let Some(copied) = copied.take() {
            rank.comm_stream.wait(&copied)?;
        }
        if let Some(added) = added.take() {
            rank.pool.device().wait_for_host(&rank.comm_stream, &added, rank.settings.host_limit())?;
        }
        // SAFETY: the communication stream, the copies' and, if the device is the host, the update's use it, ordered by
        // events; the optimizer, which is dropped first, waits for them.
        Ok(unsafe { block.slice() }.slice(0..self.sums.len(unit)))
    }

    /// Copies a reduced unit to the host, which adds it to those of earlier micro-batches. The optimizer takes the last sum.
    fn take(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        micro: usize,
        reduced: &Reduced<D>,
        optimizer: &mut HostOptimizer<D>,
    ) -> Result<(), TrainError> {
        let (device, kernels, limit) = (rank.pool.device(), &rank.host.kernels, rank.settings.host_limit());
        let (copies, update) = &self.streams;
        let (next, last) = (self.next, micro + 1 == rank.settings.grad_accum_steps);
        let slice = reduced.wait_on(copies)?;
        // A copy that is the sum, one that the host adds, or none.
        let copy = match (&mut self.arrived, self.sums.in_memory(unit)) {
            (None, Some(sum)) => {
                optimizer.wait_for_release(rank, copies, unit)?;
                Some(sum)
            }
            (None, None) => None,
            (Some(arrived), _) => {
                let (block, added) = &mut arrived[next];
                if let Some(added) = added.take() {
                    device.wait_for_host(copies, &added, limit)?;
                }
                // SAFETY: as for the sums.
                Some(unsafe { block.slice() }.slice(0..slice.len()))
            }
        };
        if let Some(copy) = copy {
            device.copy(copies, slice, copy)?;
        }
        let copied = copies.record()?;
        device.host_waits(update, &copied, limit)?;
        self.leaving[next].copied = Some(copied);
        let from = copy.unwrap_or(slice);
        let add = |sum: AnySlice| match micro {
            0 => kernels.cast(update, from, sum, 1.0),
            _ => kernels.accumulate(update, from, sum.typed()?),
        };
        match &mut self.sums {
            Sums::Memory { block, units } => {
                // SAFETY: as in `Sums::in_memory`.
                let sum = unsafe { block.slice() }.slice(units[unit].clone());
                if self.arrived.is_some() {
                    add(sum)?;
                }
                if last {
                    optimizer.take_host_sum(unit, sum)?;
                }
            }
            Sums::File { file, .. } => {
                file.update(unit, micro == 0, |sum| {
                    add(sum)?;
                    if last { optimizer.enqueue_stats(unit, sum) } else { Ok(()) }
                })?;
            }
        }
        let added = update.record()?;
        match &mut self.arrived {
            Some(arrived) => arrived[next].1 = Some(added),
            None => self.leaving[next].added = Some(added),
        }
        Ok(())
    }
}

impl<D: Device> Drop for HostSums<D> {
    fn drop(&mut self) {
        // Recording fails only on a closed stream, which no longer uses the block.
        for leaving in &mut self.leaving {
            let _closed = leaving.block.record_use(&self.streams.0);
        }
        let arrived = self.arrived.iter_mut().flatten().map(|(block, _)| block);
        let sums = match &mut self.sums {
            Sums::Memory { block, .. } => Some(block),
            Sums::File { .. } => None,
        };
        for block in sums.into_iter().chain(arrived) {
            let _closed = block.record_use(&self.streams.1);
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
