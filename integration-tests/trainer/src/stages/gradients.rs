//! The reduction of gradients from backward into their storage.
//!
//! | buffer | elements | lifetime |
//! |---|---|---|
//! | scratch slot | a unit's flat gradient in fp32 | from the first pass that adds to it until it is packed |
//! | bucket | constant, in the dtype of communication | from packing, or the pass that writes it, until its sum is stored |
//! | storage | all units whole, or this rank's shards | the whole run |
//!
//! A unit whose gradient is complete is reduced over ranks by [`Buckets`]: the first micro-batch of
//! a step overwrites the storage, later ones add in fp32. [`Place`] says where backward leaves the
//! gradient. If the host updates and the device is a GPU, the storage is in pinned memory; with
//! parameters on NVMe it is a scratch file. A reduced unit then leaves the device through one of
//! two transfer buffers, and the host adds.
//!
//! Why fp32 scratch: passes add to it, and the sum is rounded once, when it is cast into a bucket.
//! It is as large as the largest unit, with a tied embedding two units; the memory formula does not
//! have it, so it is counted as workspace. A gradient that one pass makes in the only micro-batch
//! needs neither zeroing nor scratch nor cast, so a model may write it to the bucket, rounded in
//! the same way: blocks of GPT-2 on CUDA do. The host computes in fp32 and adds in place.
//!
//! Frozen units are not reduced, and backward ends at the first unit that trains; a frozen unit
//! above it computes its gradient in scratch, too.

use std::ops::Range;

use zero_alloc::device::{AnySlice, DType, Device, Reduced, Stream};
use zero_alloc::host::{HostDevice, HostEvent, HostStream};
use zero_alloc::{Block, Purpose};
use zero_comm::{BucketOptions, Buckets, Filling, SumInto};
use zero_shard::Layout;

use crate::error::TrainError;
use crate::model::{Grad, Model, Pass};
use crate::offload::host_optimizer::{HostOptimizer, Optimizer};
use crate::offload::unit_file::UnitFile;
use crate::param_groups::ModelGroups;
use crate::rank::{Rank, Settings, first_trained};
use crate::stages::storage::Storage;

/// The gradients of one rank.
pub(crate) struct Gradients<D: Device> {
    slots: Vec<Block<D>>,
    places: Vec<Place>,
    /// The gradient that the last pass wrote, until it is reduced.
    written: Option<Written<D>>,
    buckets: Buckets<D>,
    kept: Kept<D>,
    compute: D::Stream,
}

/// The place of a unit's gradient in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// fp32 in this scratch slot: passes add to it, and the last one's sum is packed into buckets.
    Scratch(usize),
    /// fp32 in the storage, to which all passes of a step add: the sum is packed into buckets, or
    /// at one rank is the result.
    Storage,
    /// The dtype of communication, written by one pass: to the bucket that reduces it, at one rank
    /// to its sum.
    Written,
}

/// A gradient that a pass writes.
enum Written<D: Device> {
    /// To a bucket.
    Bucket(Filling<D>),
    /// To the place of the sum of this one rank.
    Sum(AnySlice),
}

/// The place of the sums over ranks.
enum Kept<D: Device> {
    /// On the device.
    Device {
        storage: Storage<D>,
        /// The sum of each unit, without elements if the unit is frozen. A recorded step has those
        /// of its recording.
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
    /// Copies in host memory that the host adds, unless a copy is the sum. If the device is the
    /// host, it adds what leaves.
    arrived: Option<[(Block<HostDevice>, Option<HostEvent>); 2]>,
    streams: (D::Stream, HostStream),
}

enum Sums {
    /// In pinned memory: the range of each unit.
    Memory {
        block: Block<HostDevice>,
        units: Vec<Range<usize>>,
    },
    /// In a scratch file: the elements of each unit.
    File {
        file: Box<UnitFile>,
        lens: Vec<usize>,
    },
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
            Self::Memory { block, units } => {
                // SAFETY: copies of the device and operations of the host use it, ordered by
                // events; the optimizer, which is dropped first, waits for both.
                let all = unsafe { block.slice() };
                Some(all.slice(units[unit].clone()))
            }
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
    /// Allocates scratch and buckets for gradients of `model`, kept in `storage`.
    pub(crate) fn new(
        rank: &Rank<D>,
        model: &dyn Model<D>,
        storage: impl FnOnce() -> Result<Storage<D>, TrainError>,
        optimizer: &mut Optimizer<D>,
    ) -> Result<Self, TrainError> {
        let writes = |pass, unit| model.writes_grad(pass, unit);
        let (places, sizes) = places(
            &rank.settings,
            &rank.layout,
            &rank.passes,
            &rank.groups,
            &writes,
        );
        let slot = |&elems: &usize| {
            rank.pool
                .allocate(elems, DType::F32, Purpose::Workspace, &rank.compute)
        };
        let slots = sizes.iter().map(slot).collect::<Result<_, _>>()?;
        let capacity = rank
            .settings
            .bucket_capacity_elems
            .max(rank.comm.world_size());
        let count = rank
            .settings
            .buckets(rank.comm.world_size(), rank.is_host());
        let options = BucketOptions::new(capacity, rank.settings.dtype)
            .count(count)
            .overlap(rank.settings.overlap);
        let compute = rank.compute.clone();
        let comm_stream = rank.comm_stream.clone();
        let buckets = Buckets::new(
            &rank.pool,
            rank.comm.clone(),
            compute.clone(),
            comm_stream,
            options,
        )?;
        let kept = match optimizer.on_host() {
            Some(optimizer)
                if !rank.is_host() || rank.settings.offload.grads_on_file().is_some() =>
            {
                Kept::Host(Box::new(HostSums::new(rank, optimizer)?))
            }
            _ => {
                let storage = storage()?;
                let reduced = (0..rank.units()).map(|unit| {
                    let frozen = (!rank.trains(unit)).then(|| compute.record()).transpose()?;
                    // SAFETY: the slice has no elements.
                    Ok(frozen.map(|done| unsafe { Reduced::new(storage.unit(unit), done) }))
                });
                Kept::Device {
                    reduced: reduced.collect::<Result<_, TrainError>>()?,
                    storage,
                }
            }
        };
        Ok(Self {
            slots,
            places,
            written: None,
            buckets,
            kept,
            compute,
        })
    }

    /// The flat gradients that the backward of `pass` of a micro-batch writes, or to which it adds,
    /// set to zero if it is the first to add. `micro` counts micro-batches from 0.
    pub(crate) fn of_pass(
        &mut self,
        rank: &Rank<D>,
        pass: usize,
        micro: usize,
        optimizer: &mut Optimizer<D>,
    ) -> Result<Vec<Grad>, TrainError> {
        let mut grads = Vec::new();
        for &unit in &rank.passes[pass].grads {
            let numel = rank.numel(unit);
            let Some(sums) = self.sums(rank, unit) else {
                let whole = self.begin_write(rank, unit, optimizer)?;
                if numel < whole.len() {
                    rank.pool
                        .device()
                        .fill_zero(&rank.compute, whole.slice(numel..whole.len()))?;
                }
                grads.push(Grad::Write(whole.slice(0..numel)));
                continue;
            };
            let adds_first = !rank.passes[pass + 1..]
                .iter()
                .any(|later| later.grads.contains(&unit));
            if adds_first && (micro == 0 || self.places[unit] != Place::Storage) {
                rank.pool.device().fill_zero(&rank.compute, sums)?;
            }
            grads.push(Grad::Add(sums.typed::<f32>()?.slice(0..numel)));
        }
        Ok(grads)
    }

    /// The place to which the compute stream writes the padded gradient of `unit`.
    fn begin_write(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        optimizer: &mut Optimizer<D>,
    ) -> Result<AnySlice, TrainError> {
        if rank.comm.world_size() > 1 {
            let filling = self
                .buckets
                .begin(rank.layout.units()[unit].padded_elems as usize)?;
            // SAFETY: the pass uses it on the compute stream, before `reduce` launches it.
            let slice = unsafe { filling.slice() };
            self.written = Some(Written::Bucket(filling));
            return Ok(slice);
        }
        let slice = match &mut self.kept {
            Kept::Device { storage, .. } => {
                if let Some(optimizer) = optimizer.on_host() {
                    optimizer.wait_for_release(rank, &rank.compute, unit)?;
                }
                storage.own(unit)
            }
            Kept::Host(sums) => sums.next_buffer(rank, unit, &rank.compute)?,
        };
        self.written = Some(Written::Sum(slice));
        Ok(slice)
    }

    /// Sums `unit`, whose backward of a micro-batch is complete, over all ranks; each rank keeps
    /// its shard of the sum, at stage 0 all of it. `micro` counts micro-batches from 0; if they are
    /// summed in the storage, only the last reduces. An optimizer on the host takes the sum of the
    /// last.
    pub(crate) fn reduce(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        micro: usize,
        optimizer: &mut Optimizer<D>,
    ) -> Result<(), TrainError> {
        let last = micro + 1 == rank.settings.grad_accum_steps;
        let in_storage = self.places[unit] == Place::Storage;
        if in_storage && !last {
            return Ok(());
        }
        let alone = in_storage && rank.comm.world_size() == 1;
        let written = if alone {
            self.sums(rank, unit).map(Written::Sum)
        } else {
            self.written.take()
        };
        let kernels = &*rank.kernels;
        let parts = self.sums(rank, unit).map(|sums| (sums, 0));
        let sharded = rank.settings.stage.shards_optimizer();
        let buckets = &self.buckets;
        if let Some(Written::Sum(sum)) = written {
            // SAFETY: passes wrote it on the compute stream, which writes it again after its
            // readers: the optimizer's work on that stream, or on the host, for whose end
            // `begin_write` waits.
            let sum = unsafe { Reduced::new(sum, rank.compute.record()?) };
            return match (&mut self.kept, optimizer.on_host()) {
                (Kept::Device { reduced, .. }, optimizer) => {
                    let sum = reduced[unit].insert(sum);
                    optimizer.map_or(Ok(()), |optimizer| optimizer.take_sum(rank, unit, sum))
                }
                (Kept::Host(sums), Some(optimizer)) => {
                    sums.take(rank, unit, micro, &sum, optimizer)
                }
                (Kept::Host(_), None) => Ok(()),
            };
        }
        let sum = |into| match (written, sharded) {
            (Some(Written::Bucket(bucket)), true) => bucket.reduce_unit(kernels, into),
            (Some(Written::Bucket(bucket)), false) => bucket.all_reduce_unit(kernels, into),
            (_, true) => buckets.reduce_unit(kernels, parts.as_slice(), into),
            (_, false) => buckets.all_reduce_unit(kernels, parts.as_slice(), into),
        };
        match (&mut self.kept, optimizer.on_host()) {
            (Kept::Device { storage, reduced }, mut optimizer) => {
                let into = match reduced[unit].take() {
                    Some(earlier) if micro > 0 && !in_storage => SumInto::Add(earlier),
                    _ => {
                        if let Some(optimizer) = &mut optimizer {
                            optimizer.wait_for_release(rank, &rank.comm_stream, unit)?;
                        }
                        SumInto::Write(if sharded {
                            storage.own(unit)
                        } else {
                            storage.unit(unit)
                        })
                    }
                };
                let reduced = reduced[unit].insert(sum(into)?);
                match optimizer {
                    Some(optimizer) if last => optimizer.take_sum(rank, unit, reduced),
                    _ => Ok(()),
                }
            }
            (Kept::Host(sums), Some(optimizer)) => {
                let slice = sums.next_buffer(rank, unit, &rank.comm_stream)?;
                let reduced = sum(SumInto::Write(slice))?;
                sums.take(rank, unit, micro, &reduced, optimizer)
            }
            (Kept::Host(_), None) => Ok(()),
        }
    }

    /// The sums of all units in a scratch file, if they are in one.
    pub(crate) fn on_file(&mut self) -> Option<&mut UnitFile> {
        match &mut self.kept {
            Kept::Host(sums) => match &mut sums.sums {
                Sums::File { file, .. } => Some(file),
                Sums::Memory { .. } => None,
            },
            Kept::Device { .. } => None,
        }
    }

    /// The sums of all units, if they are on the device.
    pub(crate) fn reduced(&self) -> Vec<&Reduced<D>> {
        match &self.kept {
            Kept::Device { reduced, .. } => reduced.iter().flatten().collect(),
            Kept::Host(_) => Vec::new(),
        }
    }

    /// The padded fp32 gradient to which passes add; `None` if a pass writes it instead.
    fn sums(&self, rank: &Rank<D>, unit: usize) -> Option<AnySlice> {
        match (self.places[unit], &self.kept) {
            (Place::Scratch(slot), _) => {
                // SAFETY: only the compute stream uses the scratch, and the drop records that
                // stream.
                let slot = unsafe { self.slots[slot].slice() };
                Some(slot.slice(0..rank.layout.units()[unit].padded_elems as usize))
            }
            (Place::Storage, Kept::Device { storage, .. }) => Some(storage.unit(unit)),
            (Place::Storage | Place::Written, _) => None,
        }
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
            if rank.trains(unit) {
                (held.end - held.start) as usize
            } else {
                0
            }
        };
        let lens: Vec<usize> = (0..rank.units()).map(len).collect();
        let largest = lens.iter().copied().max().unwrap_or(0);
        let leaving = || {
            let block =
                rank.pool
                    .allocate(largest, settings.dtype, Purpose::Buckets, &rank.compute)?;
            rank.comm_stream.wait(&rank.compute.record()?)?;
            Ok::<_, TrainError>(Leaving {
                block,
                copied: None,
                added: None,
            })
        };
        let update = &optimizer.stream().clone();
        let pinned = |elems, dtype| host.pinned.allocate(elems, dtype, Purpose::Grads, update);
        let adds = settings.grad_accum_steps > 1 || settings.offload.grads_on_file().is_some();
        let arrived = match adds && !rank.is_host() {
            false => None,
            true => Some([
                (pinned(largest, settings.dtype)?, None),
                (pinned(largest, settings.dtype)?, None),
            ]),
        };
        let sums = match settings.offload.grads_on_file() {
            Some(dir) => {
                let file = UnitFile::new(
                    rank,
                    update,
                    dir,
                    ("gradients", settings.grad_dtype()),
                    &lens,
                )?;
                optimizer.count(file.file.clone());
                Sums::File {
                    file: Box::new(file),
                    lens,
                }
            }
            None => {
                let block = pinned(lens.iter().sum(), settings.grad_dtype())?;
                let mut end = 0;
                let range = |len: usize| {
                    end += len;
                    end - len..end
                };
                Sums::Memory {
                    block,
                    units: lens.into_iter().map(range).collect(),
                }
            }
        };
        let streams = (optimizer.copies().clone(), update.clone());
        Ok(Self {
            leaving: [leaving()?, leaving()?],
            next: 0,
            sums,
            arrived,
            streams,
        })
    }

    /// The next transfer buffer. `stream`, which writes it, waits until its last unit has left.
    fn next_buffer(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        stream: &D::Stream,
    ) -> Result<AnySlice, TrainError> {
        self.next = (self.next + 1) % self.leaving.len();
        let Leaving {
            block,
            copied,
            added,
        } = &mut self.leaving[self.next];
        if let Some(copied) = copied.take() {
            stream.wait(&copied)?;
        }
        if let Some(added) = added.take() {
            rank.pool
                .device()
                .wait_for_host(stream, &added, rank.settings.host_limit())?;
        }
        // SAFETY: the compute stream or the communication stream, the copies' and, if the device is
        // the host, the update's use it, ordered by events; the optimizer, which is dropped first,
        // waits for them.
        Ok(unsafe { block.slice() }.slice(0..self.sums.len(unit)))
    }

    /// Copies a reduced unit to the host, which adds it to those of earlier micro-batches. The
    /// optimizer takes the last sum.
    fn take(
        &mut self,
        rank: &Rank<D>,
        unit: usize,
        micro: usize,
        reduced: &Reduced<D>,
        optimizer: &mut HostOptimizer<D>,
    ) -> Result<(), TrainError> {
        let device = rank.pool.device();
        let kernels = &rank.host.kernels;
        let limit = rank.settings.host_limit();
        let (copies, update) = &self.streams;
        let next = self.next;
        let last = micro + 1 == rank.settings.grad_accum_steps;
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
                    if last {
                        optimizer.enqueue_stats(unit, sum)
                    } else {
                        Ok(())
                    }
                })?;
            }
        }
        let added = update.record()?;
        match (&mut self.arrived, copy) {
            (Some(arrived), _) => arrived[next].1 = Some(added),
            (None, None) => self.leaving[next].added = Some(added),
            // The copy is the sum: the host reads nothing on the device.
            (None, Some(_)) => {}
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

/// The place of each unit's gradient in backward, and the sizes of the scratch slots; no other unit
/// uses a slot between the unit's first and last pass. `writes(pass, unit)`:
/// [`Model::writes_grad`].
pub(crate) fn places(
    settings: &Settings,
    layout: &Layout,
    passes: &[Pass],
    groups: &ModelGroups,
    writes: &dyn Fn(usize, usize) -> bool,
) -> (Vec<Place>, Vec<usize>) {
    let units = layout.units();
    let capacity_elems = settings.bucket_capacity_elems as u64;
    let fits = |unit: usize| layout.world_size() == 1 || units[unit].padded_elems <= capacity_elems;
    // At one rank an fp32 sum is the result.
    let is_result = layout.world_size() == 1
        && (settings.dtype, settings.grad_accum_steps) == (DType::F32, 1)
        && !settings.offload.updates_on_host();
    let adding = adding_passes(passes, units.len());
    // One bucket at a time is written.
    let is_written = |pass: usize, unit: usize| {
        let alone = adding[unit].count == 1 && passes[pass].grads == [unit];
        alone && settings.grad_accum_steps == 1 && fits(unit) && writes(pass, unit)
    };
    let (mut places, mut sizes, mut free) =
        (vec![None; units.len()], Vec::<usize>::new(), Vec::new());
    for pass in (first_trained(passes, groups)..passes.len()).rev() {
        for &unit in &passes[pass].grads {
            if places[unit].is_some() {
                continue;
            }
            places[unit] = Some(match groups.is_frozen(unit) {
                false if settings.sums_locally() => Place::Storage,
                false if is_written(pass, unit) => Place::Written,
                false if is_result => Place::Storage,
                // The gradient of a frozen unit is computed, too, but has no storage.
                _ => {
                    let slot = free.pop().unwrap_or_else(|| {
                        sizes.push(0);
                        sizes.len() - 1
                    });
                    sizes[slot] = sizes[slot].max(units[unit].padded_elems as usize);
                    Place::Scratch(slot)
                }
            });
        }
        let complete = passes[pass]
            .grads
            .iter()
            .filter(|unit| adding[**unit].first == pass);
        free.extend(complete.filter_map(|&unit| match places[unit] {
            Some(Place::Scratch(slot)) => Some(slot),
            _ => None,
        }));
    }
    // Units without a pass have no gradient.
    (
        places
            .into_iter()
            .map(|place| place.unwrap_or(Place::Storage))
            .collect(),
        sizes,
    )
}

/// The passes that add to the gradient of a unit.
#[derive(Clone, Copy, Debug, Default)]
struct AddingPasses {
    /// The first one, after whose backward the gradient is complete.
    first: usize,
    count: usize,
}

/// The passes that add to the gradient of each of `units` units.
///
/// Why in one go: a search of all passes for each unit takes minutes in a plan of ten thousand
/// layers.
fn adding_passes(passes: &[Pass], units: usize) -> Vec<AddingPasses> {
    let mut adding = vec![AddingPasses::default(); units];
    for (at, pass) in passes.iter().enumerate().rev() {
        for (i, &unit) in pass.grads.iter().enumerate() {
            if !pass.grads[..i].contains(&unit) {
                adding[unit].first = at;
                adding[unit].count += 1;
            }
        }
    }
    adding
}
