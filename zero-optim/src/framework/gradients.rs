//! Gradients, from the framework to the sums over ranks.
//!
//! The gradients of a unit are parts, each in another allocation. The last of them starts the
//! reduction: the compute stream packs the parts into buckets, and an event behind the packing
//! tells when their owners may be dropped.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};

use zero_alloc::Purpose;
use zero_alloc::device::{AnySlice, DType, Device, DeviceId, DeviceSlice, Element, Event};
use zero_alloc::device::{DeviceKind, Reduced, Stream};
use zero_comm::{Buckets, CallerMemory, SumInto};
use zero_kernels::Segments;
use zero_shard::{Layout, UnitLayout, ZeroStage};

use crate::RankSettings;

use super::FrameworkError;
use super::rank::Rank;
use super::rank_calls::{Use, Uses};
use super::values::{Memory, find, range_of, some};

/// Memory of a gradient.
type Owner = Box<dyn Any + Send>;

/// The gradients of one unit in a micro-batch. Its first pass, a gradient of each parameter, is summed
/// when it is complete; second gradients at the end of the micro-batch, in the order of units, so
/// that all ranks sum in one order.
struct UnitGrads {
    /// Whether each parameter takes part in the training, and whether its gradient has arrived.
    trained: Vec<bool>,
    arrived: Vec<bool>,
    parts: Vec<(AnySlice, usize)>,
    owners: Vec<Owner>,
    /// Second gradients, with their parameters.
    second: Vec<(usize, AnySlice, Owner)>,
    /// Something is summed in this step.
    is_begun: bool,
    /// The sum is over ranks, too.
    is_reduced: bool,
    /// The elements of the sum: the whole unit at stages 0 and 1, else this rank's shard.
    sum_elems: usize,
    /// The memory of the sum, from the first gradient of a step to its update.
    sum: Option<(AnySlice, Owner)>,
}

impl UnitGrads {
    fn is_complete(&self) -> bool {
        let mut params = self.trained.iter().zip(&self.arrived);
        params.all(|(trained, arrived)| !trained || *arrived)
    }
}

/// How gradients are summed.
#[derive(Clone, Copy)]
pub(super) struct SumOptions {
    pub(super) stage: ZeroStage,
    pub(super) micro_batches: usize,
    /// Whether a second gradient in a micro-batch adds to the first.
    pub(super) adds: bool,
    /// The units whose gradients may wait to be packed while the next ones are computed.
    pub(super) waiting_units: usize,
}

/// The gradients of all units.
pub(super) struct Gradients<D: Device> {
    options: SumOptions,
    /// The micro-batch of the step, from 0.
    micro: usize,
    units: Vec<UnitGrads>,
    sums: Vec<Option<Reduced<D>>>,
    buckets: Buckets<D>,
    failure: Option<String>,
    uses: Uses,
    /// Of the caller, for sums.
    memory: Option<Box<dyn CallerMemory>>,
    /// Owners of packed gradients, and of the sums of an update, until the event.
    packed: VecDeque<(D::Event, Vec<Owner>)>,
    /// Owners of gradients whose sum failed, until the streams have ended.
    unpacked: Vec<Owner>,
}

impl<D: Device> Gradients<D> {
    /// The gradients of `layout`, whose sums are in `memory` or in blocks of the pool. `trained` says
    /// which parameters take part in the training.
    pub(super) fn new(
        layout: &Layout,
        options: SumOptions,
        buckets: Buckets<D>,
        memory: Option<Box<dyn CallerMemory>>,
        trained: impl Fn(usize, usize) -> bool,
    ) -> Self {
        let unit = |(index, unit): (usize, &UnitLayout)| {
            let trained: Vec<bool> = (0..unit.params.len())
                .map(|param| trained(index, param))
                .collect();
            let elems = match options.stage.shards_grads() {
                true => unit.shard_elems,
                false => unit.padded_elems,
            };
            UnitGrads {
                arrived: vec![false; trained.len()],
                trained,
                parts: Vec::new(),
                owners: Vec::new(),
                second: Vec::new(),
                is_begun: false,
                is_reduced: false,
                sum_elems: elems as usize,
                sum: None,
            }
        };
        let units: Vec<UnitGrads> = layout.units().iter().enumerate().map(unit).collect();

        Self {
            options,
            micro: 0,
            sums: units.iter().map(|_| None).collect(),
            units,
            buckets,
            failure: None,
            uses: Uses::default(),
            memory,
            packed: VecDeque::new(),
            unpacked: Vec::new(),
        }
    }

    /// Sets the settings of the run, which the ranks compare by their fingerprint.
    pub(super) fn identify(&mut self, settings: &RankSettings) {
        self.uses = Uses::new(settings);
    }

    /// Takes the gradient of a parameter, of `slice`, which `owner` keeps.
    fn take(
        &mut self,
        rank: &Rank<D>,
        (index, unit): (usize, &UnitLayout),
        param: usize,
        slice: AnySlice,
        owner: Owner,
    ) -> Result<(), FrameworkError> {
        let placed = &unit.params[param];
        let grads = &mut self.units[index];
        let expected = placed.numel_elems as usize;
        if slice.len() != expected {
            return Err(FrameworkError::Length {
                name: placed.name.clone(),
                got: slice.len(),
                expected,
            });
        }
        if std::mem::replace(&mut grads.arrived[param], true) {
            if !self.options.adds {
                let name = placed.name.clone();
                return Err(FrameworkError::Twice { name });
            }
            if grads.trained[param] {
                grads.second.push((param, slice, owner));
            }
            return Ok(());
        }
        if grads.trained[param] {
            grads.parts.push((slice, range_of(unit, param).start));
            grads.owners.push(owner);
            self.sum_if_complete(rank, index, unit)?;
        }
        Ok(())
    }

    /// Declares that a parameter has no gradient in this micro-batch.
    fn leave_out(
        &mut self,
        rank: &Rank<D>,
        (index, unit): (usize, &UnitLayout),
        param: usize,
    ) -> Result<(), FrameworkError> {
        let grads = &mut self.units[index];
        let has_arrived = std::mem::replace(&mut grads.arrived[param], true);
        match grads.trained[param] && !has_arrived {
            true => self.sum_if_complete(rank, index, unit),
            false => Ok(()),
        }
    }

    fn sum_if_complete(
        &mut self,
        rank: &Rank<D>,
        index: usize,
        unit: &UnitLayout,
    ) -> Result<(), FrameworkError> {
        match self.units[index].is_complete() {
            true => self.sum_pass(rank, index, unit),
            false => Ok(()),
        }
    }

    /// Sums a pass of a unit. An error ends the run.
    fn sum_pass(
        &mut self,
        rank: &Rank<D>,
        index: usize,
        unit: &UnitLayout,
    ) -> Result<(), FrameworkError> {
        self.unit_is_complete(rank, index).map_err(|error| {
            let error = error.at(|| format!("reduction of {}", unit.name));
            self.failure = Some(error.to_string());
            rank.comm.abort(&error.to_string());
            error
        })
    }

    /// Enqueues the sum of a unit, and keeps the gradients until they are packed.
    fn unit_is_complete(&mut self, rank: &Rank<D>, index: usize) -> Result<(), FrameworkError> {
        let grads = &mut self.units[index];
        let mut parts = std::mem::take(&mut grads.parts);
        let owners = std::mem::take(&mut grads.owners);
        parts.sort_by_key(|(_, at)| *at);
        let is_first = !std::mem::replace(&mut grads.is_begun, true);
        let summed = self.sum(rank, index, &parts, is_first);
        match summed.and_then(|()| Ok(rank.compute.record()?)) {
            Ok(packed) => self.packed.push_back((packed, owners)),
            Err(error) => {
                // Some of the work may be enqueued.
                self.unpacked.extend(owners);
                return Err(error);
            }
        }
        while let Some((packed, _)) = self.packed.front()
            && self.packed.len() > self.options.waiting_units
        {
            packed.synchronize(rank.limit)?;
            self.packed.pop_front();
        }
        self.free()
    }

    /// Drops the owners of memory that the streams have used.
    pub(super) fn free(&mut self) -> Result<(), FrameworkError> {
        while let Some((packed, _)) = self.packed.front()
            && packed.is_done()?
        {
            self.packed.pop_front();
        }
        Ok(())
    }

    /// The place of a unit's sum.
    fn sum_of(&mut self, rank: &Rank<D>, index: usize) -> Result<AnySlice, FrameworkError> {
        let grads = &mut self.units[index];
        if let Some((sum, _)) = grads.sum {
            return Ok(sum);
        }
        let elems = grads.sum_elems;
        let (sum, owner): (_, Owner) = match &mut self.memory {
            Some(memory) => {
                let (sum, owner) = memory.allocate(index, elems, DType::F32)?;
                (sum, owner)
            }
            None => {
                let Rank { pool, compute, .. } = rank;
                let block = pool.allocate(elems, DType::F32, Purpose::Grads, compute)?;
                // SAFETY: the block is the owner, which is dropped behind an event after the last
                // use; the compute stream, which it was allocated for, is ahead of all uses.
                (unsafe { block.slice() }, Box::new(block))
            }
        };
        grads.sum = Some((sum, owner));
        Ok(sum)
    }

    /// Frees the sums behind the update that is enqueued.
    pub(super) fn end_update(&mut self, rank: &Rank<D>) -> Result<(), FrameworkError> {
        let compute = &rank.compute;
        for sum in self.sums.iter_mut().filter_map(Option::take) {
            sum.wait_for_readers(compute)?;
        }
        let owners = self.units.iter_mut().filter_map(|unit| unit.sum.take());
        let owners: Vec<Owner> = owners.map(|(_, owner)| owner).collect();
        self.packed.push_back((compute.record()?, owners));
        Ok(())
    }

    /// Enqueues the sum of a unit: over ranks, or over micro-batches until the last of them.
    fn sum(
        &mut self,
        rank: &Rank<D>,
        index: usize,
        parts: &[(AnySlice, usize)],
        is_first: bool,
    ) -> Result<(), FrameworkError> {
        let kernels = &*rank.kernels;
        let SumOptions {
            stage,
            micro_batches,
            ..
        } = self.options;
        let is_last = self.micro + 1 == micro_batches;
        let earlier = self.sums[index].take();
        let sum = self.sum_of(rank, index)?;
        let is_reduced = std::mem::replace(
            &mut self.units[index].is_reduced,
            stage.shards_grads() || is_last,
        );

        let packed = if is_reduced || stage.shards_grads() {
            let into = match earlier {
                Some(earlier) if !is_first => SumInto::Add(earlier),
                _ => SumInto::Write(sum),
            };
            self.buckets.reduce_unit(kernels, parts, into).map(Some)?
        } else if is_last && is_first {
            Some(self.reduce_whole(rank, parts, sum)?)
        } else {
            self.sum_on_rank(rank, sum, parts, is_first)?;
            match is_last {
                false => None,
                // The sum of one rank's micro-batches.
                true if rank.comm.world_size() == 1 => {
                    let done = rank.compute.record()?;
                    // SAFETY: only the compute stream writes the sum, before the event; its memory is
                    // freed behind its readers.
                    Some(unsafe { Reduced::new(sum, done) })
                }
                true => Some(self.reduce_whole(rank, &[(sum, 0)], sum)?),
            }
        };

        if let Some(reduced) = packed {
            self.sums[index] = Some(reduced);
            self.note(false, index);
        }
        Ok(())
    }

    /// Adds `parts` to this rank's sum over micro-batches, or begins it.
    fn sum_on_rank(
        &self,
        rank: &Rank<D>,
        sum: AnySlice,
        parts: &[(AnySlice, usize)],
        is_first: bool,
    ) -> Result<(), FrameworkError> {
        let Rank {
            kernels, compute, ..
        } = rank;
        if !is_first {
            for (part, at) in parts {
                let acc = sum.slice(*at..at + part.len()).typed()?;
                kernels.accumulate(compute, *part, acc)?;
            }
            return Ok(());
        }
        let whole = Segments {
            start: 0,
            len: sum.len(),
            stride: sum.len(),
            count: 1,
        };
        Ok(kernels.pack(compute, parts, whole, sum)?)
    }

    /// Enqueues the sum over ranks at stages 0 and 1.
    fn reduce_whole(
        &self,
        rank: &Rank<D>,
        parts: &[(AnySlice, usize)],
        sum: AnySlice,
    ) -> Result<Reduced<D>, FrameworkError> {
        let own = match self.options.stage {
            ZeroStage::Zero => 0..sum.len(),
            _ => {
                let shard = sum.len() / rank.comm.world_size();
                rank.comm.rank() * shard..(rank.comm.rank() + 1) * shard
            }
        };
        let into = SumInto::Write(sum.slice(own));
        Ok(self.buckets.reduce_unit(&*rank.kernels, parts, into)?)
    }

    /// Begins a step of a number of micro-batches.
    pub(super) fn begin(&mut self, micro_batches: usize) {
        self.options.micro_batches = micro_batches;
        self.micro = 0;
        self.uses.begin_step();
        for unit in &mut self.units {
            unit.is_begun = false;
            unit.is_reduced = false;
        }
        self.begin_micro_batch();
    }

    fn begin_micro_batch(&mut self) {
        for unit in &mut self.units {
            unit.arrived.fill(false);
        }
    }

    /// Notes a collective of a unit.
    pub(super) fn note(&mut self, is_gather: bool, unit: usize) {
        self.uses.push(Use { is_gather, unit });
    }

    /// The collectives of units so far.
    pub(super) fn uses(&self) -> &Uses {
        &self.uses
    }

    /// Ends a micro-batch that is not the last.
    pub(super) fn next_micro_batch(
        &mut self,
        rank: &Rank<D>,
        layout: &Layout,
    ) -> Result<(), FrameworkError> {
        self.check_complete(layout)?;
        if self.micro + 1 == self.options.micro_batches {
            return Err(FrameworkError::MicroBatches {
                got: self.micro + 2,
                expected: self.options.micro_batches,
            });
        }
        self.sum_second(rank, layout)?;
        self.micro += 1;
        self.begin_micro_batch();
        Ok(())
    }

    /// Sums second gradients: those of one parameter in one pass each.
    fn sum_second(&mut self, rank: &Rank<D>, layout: &Layout) -> Result<(), FrameworkError> {
        for (index, unit) in layout.units().iter().enumerate() {
            while !self.units[index].second.is_empty() {
                let grads = &mut self.units[index];
                let mut taken = vec![false; unit.params.len()];
                for (param, slice, owner) in std::mem::take(&mut grads.second) {
                    if std::mem::replace(&mut taken[param], true) {
                        grads.second.push((param, slice, owner));
                    } else {
                        grads.parts.push((slice, range_of(unit, param).start));
                        grads.owners.push(owner);
                    }
                }
                self.sum_pass(rank, index, unit)?;
            }
        }
        Ok(())
    }

    /// Whether no gradient of the step has arrived.
    pub(super) fn is_empty(&self) -> bool {
        self.micro == 0 && self.units.iter().all(|unit| !unit.arrived.contains(&true))
    }

    /// Checks that all gradients have arrived.
    fn check_complete(&self, layout: &Layout) -> Result<(), FrameworkError> {
        let units = layout.units().iter().zip(&self.units);
        let params = units.flat_map(|(unit, grads)| {
            let state = grads.trained.iter().zip(&grads.arrived);
            let names = unit.params.iter().map(|param| &*param.name);
            names.zip(state.map(|(trained, arrived)| *trained && !arrived))
        });
        let missing: Vec<&str> = params
            .clone()
            .filter_map(|(name, missing)| missing.then_some(name))
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        Err(FrameworkError::Missing {
            count: missing.len(),
            all: params.count(),
            names: some(missing.into_iter()),
        })
    }

    /// Ends the last micro-batch.
    pub(super) fn end_micro_batches(
        &mut self,
        rank: &Rank<D>,
        layout: &Layout,
    ) -> Result<(), FrameworkError> {
        self.check_complete(layout)?;
        if self.micro + 1 != self.options.micro_batches {
            return Err(FrameworkError::MicroBatches {
                got: self.micro + 1,
                expected: self.options.micro_batches,
            });
        }
        self.sum_second(rank, layout)
    }

    /// Gives frozen units, which have no gradients, an empty sum.
    pub(super) fn complete_sums(&mut self, rank: &Rank<D>) -> Result<(), FrameworkError> {
        let id = rank.pool.device().id();
        for sum in &mut self.sums {
            if sum.is_none() {
                let done = rank.compute.record()?;
                // SAFETY: no elements.
                let none = unsafe { AnySlice::from_raw_parts(null_mut(), 0, DType::F32, id) };
                // SAFETY: nothing is written to it.
                *sum = Some(unsafe { Reduced::new(none, done) });
            }
        }
        Ok(())
    }

    /// The sums over ranks of all units, once they are complete.
    pub(super) fn sums(&self) -> Vec<&Reduced<D>> {
        self.sums.iter().flatten().collect()
    }

    /// Why a gradient that was taken was not summed.
    pub(super) fn failure(&self) -> Option<&String> {
        self.failure.as_ref()
    }
}

/// The sink of the gradients of a unit.
pub struct Grads<'a, D: Device> {
    pub(super) rank: &'a Rank<D>,
    pub(super) index: usize,
    pub(super) unit: &'a UnitLayout,
    pub(super) gradients: &'a mut Gradients<D>,
}

impl<D: Device> fmt::Debug for Grads<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let arrived = &self.gradients.units[self.index].arrived;
        write!(f, "Grads({}, arrived: {arrived:?})", self.unit.name)
    }
}

impl<D: Device> Grads<'_, D> {
    /// Takes the gradient of a parameter, by its name, with or without `UNIT.` before it: fp32,
    /// bf16 or fp16. On the host a `Vec` is not copied.
    ///
    /// # Errors
    /// The unit has no such parameter, it has a gradient already, or the length differs; then
    /// nothing has changed. Or a stream failed.
    pub fn set<T: Element>(
        &mut self,
        name: &str,
        values: impl Into<Vec<T>>,
    ) -> Result<(), FrameworkError> {
        let param = find(self.unit, name)?;
        let (slice, owner) = self.memory_of(values.into())?;
        self.take(param, slice, Box::new(owner))
    }

    /// Takes the gradients of all parameters of the unit, one after the other.
    ///
    /// # Errors
    /// As [`Self::set`].
    pub fn set_all<T: Element>(&mut self, values: impl Into<Vec<T>>) -> Result<(), FrameworkError> {
        let values = values.into();
        let expected = self.unit.numel_elems as usize;
        if values.len() != expected {
            return Err(FrameworkError::Length {
                name: self.unit.name.clone(),
                got: values.len(),
                expected,
            });
        }
        let (all, owner) = self.memory_of(values)?;
        let mut start = 0;
        for param in 0..self.unit.params.len() {
            let end = start + self.unit.params[param].numel_elems as usize;
            self.take(param, all.slice(start..end), Box::new(Arc::clone(&owner)))?;
            start = end;
        }
        Ok(())
    }

    /// The elements of `values` in memory of the device, and their owner.
    fn memory_of<T: Element>(&self, values: Vec<T>) -> Result<(AnySlice, Memory), FrameworkError> {
        let Rank { pool, compute, .. } = self.rank;
        if pool.device().kind() == DeviceKind::Host {
            let at = values.as_ptr().cast_mut();
            // SAFETY: the vector is the owner, which nobody changes; the slice is only read, before
            // the owner is dropped.
            let slice = unsafe { DeviceSlice::from_raw_parts(at, values.len(), DeviceId::HOST) };
            return Ok((slice.erase(), Arc::new(values)));
        }

        let block = pool.allocate(values.len(), T::DTYPE, Purpose::Workspace, compute)?;
        // SAFETY: the block is the owner, and is used on the compute stream only, which it was
        // allocated for.
        let slice = unsafe { block.slice() };
        let bytes = bytemuck::cast_slice(&values);
        pool.device()
            .upload(compute, bytes, slice, self.rank.limit)?;
        Ok((slice, Arc::new(Mutex::new(block))))
    }

    /// Takes the gradient of a parameter in memory of the framework, without a copy.
    ///
    /// # Safety
    /// Its writers have ended, or are on the compute stream. `slice` stays valid and unchanged
    /// until `owner` is dropped, which is after it is packed on the compute stream.
    ///
    /// # Errors
    /// As [`Self::set`].
    pub unsafe fn set_slice(
        &mut self,
        name: &str,
        slice: AnySlice,
        owner: impl Any + Send,
    ) -> Result<(), FrameworkError> {
        self.take(find(self.unit, name)?, slice, Box::new(owner))
    }

    fn take(&mut self, param: usize, slice: AnySlice, owner: Owner) -> Result<(), FrameworkError> {
        let unit = (self.index, self.unit);
        self.gradients.take(self.rank, unit, param, slice, owner)
    }

    pub(super) fn leave_out(&mut self, param: usize) -> Result<(), FrameworkError> {
        let unit = (self.index, self.unit);
        self.gradients.leave_out(self.rank, unit, param)
    }
}
