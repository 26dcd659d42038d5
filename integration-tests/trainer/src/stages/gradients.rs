//! The gradients of a micro-batch, from backward to their sums over ranks.
//!
//! | buffer | elements | lifetime |
//! |---|---|---|
//! | scratch slot | a unit's flat gradient in fp32 | from the first pass that adds to it until it is packed |
//! | bucket | constant, in the dtype of communication | from packing, or the pass that writes it, until its sum is stored |
//! | sum | all units whole, or this rank's shards | the whole run; the [`Optimizer`] has it |
//!
//! A unit whose gradient is complete is reduced over ranks by [`Buckets`]: the first micro-batch of
//! a step replaces the sum, later ones add in fp32. [`GradDestination`] says where backward leaves the
//! gradient.

use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice, Reduced, Stream};
use zero_alloc::{Block, Purpose};
use zero_comm::{BucketOptions, Buckets, Filling};

use crate::error::TrainError;
use crate::model::{Grad, Model};
use crate::rank::Rank;
use crate::stages::grad_errors::GradErrors;
use crate::stages::optimizer::Optimizer;
use crate::stages::places::{GradDestination, places};

/// The gradients of one rank.
pub(crate) struct Gradients<D: Device> {
    /// By unit; `None` if no pass has its gradient.
    places: Vec<Option<InBackward>>,
    /// The gradient that the last pass wrote, until it is reduced.
    written: Option<Written<D>>,
    buckets: Buckets<D>,
    /// The errors of quantised reductions, with error feedback.
    pub(crate) errors: Option<GradErrors<D>>,
    /// Scratch, which only the compute stream uses.
    slots: Vec<Block<D>>,
    compute: D::Stream,
}

/// A [`GradDestination`] with its memory.
#[derive(Clone, Copy)]
enum InBackward {
    /// The padded fp32 gradient, to which passes of one micro-batch add.
    Scratch(AnySlice),
    /// The same of all micro-batches, where the sum will be.
    Sum(AnySlice),
    Written,
}

/// A gradient that a pass writes.
enum Written<D: Device> {
    Bucket(Filling<D>),
    /// To the place of the sum of this one rank.
    Sum(AnySlice),
}

impl<D: Device> Gradients<D> {
    /// Allocates scratch and buckets for gradients of `model`, whose sums `optimizer` takes.
    pub(crate) fn new(
        rank: &Rank<D>,
        model: &dyn Model<D>,
        optimizer: &dyn Optimizer<D>,
    ) -> Result<Self, TrainError> {
        let Rank {
            settings,
            pool,
            compute,
            mesh,
            ..
        } = rank;

        let writes = |pass, unit| model.writes_grad(pass, unit);
        let (reduced, _) = rank.layouts.grads(rank.index());
        let (places, sizes) = places(settings, reduced, &rank.passes, &rank.groups, &writes);
        let mut slots = Vec::with_capacity(sizes.len());
        for elems in sizes {
            slots.push(pool.allocate(elems, DType::F32, Purpose::Workspace, compute)?);
        }

        let with_memory = |(unit, place): (usize, Option<GradDestination>)| match place {
            Some(GradDestination::Scratch(slot)) => {
                // SAFETY: only the compute stream uses the scratch, and the drop records it.
                let slot = unsafe { slots[slot].slice() };
                let padded = rank.layout.units()[unit].padded_elems as usize;
                Some(InBackward::Scratch(slot.slice(0..padded)))
            }
            // The sum of one rank, or of local micro-batches, never leaves the device.
            Some(GradDestination::Storage) => optimizer.local_sum(unit).map(InBackward::Sum),
            Some(GradDestination::Written) => Some(InBackward::Written),
            None => None,
        };

        let places = places.into_iter().enumerate().map(with_memory).collect();

        let ranks = mesh.reduce.comm().world_size();
        let least = ranks * mesh.reduce.align_elems();
        let capacity = settings.bucket_capacity_elems.max(least);
        let options = BucketOptions::new(capacity, settings.dtype)
            .count(settings.buckets(ranks, rank.is_host()));

        let buckets = Buckets::new(
            pool,
            mesh.reduce.clone(),
            compute.clone(),
            rank.comm_stream.clone(),
            options,
        )?;

        Ok(Self {
            places,
            written: None,
            buckets,
            errors: GradErrors::new(rank)?,
            slots,
            compute: compute.clone(),
        })
    }

    /// The gradients of micro-batch `micro`, counted from 0, whose sums `optimizer` takes.
    pub(crate) fn of_micro_batch<'a>(
        &'a mut self,
        rank: &'a Rank<D>,
        micro: usize,
        optimizer: &'a mut dyn Optimizer<D>,
    ) -> MicroBatchGradients<'a, D> {
        MicroBatchGradients {
            all: self,
            rank,
            micro,
            optimizer,
        }
    }

    fn place(&self, unit: usize) -> Result<InBackward, TrainError> {
        self.places[unit].ok_or_else(|| internal("a unit's gradient has no place"))
    }
}

/// The gradients of a micro-batch. Its methods are in the order of time.
pub(crate) struct MicroBatchGradients<'a, D: Device> {
    all: &'a mut Gradients<D>,
    rank: &'a Rank<D>,
    micro: usize,
    optimizer: &'a mut dyn Optimizer<D>,
}

impl<D: Device> MicroBatchGradients<'_, D> {
    /// The loss scale of backward.
    pub(crate) fn loss_scale(&self) -> Result<DeviceSlice<f64>, TrainError> {
        self.optimizer.loss_scale()
    }

    /// The flat gradients that the backward of `pass` writes, or to which it adds, set to zero if it
    /// is the first to add.
    pub(crate) fn of_pass(&mut self, pass: usize) -> Result<Vec<Grad>, TrainError> {
        let rank = self.rank;
        let mut grads = Vec::new();
        for &unit in &rank.passes[pass].grads {
            let used = rank.used_elems(unit);
            let (sum, is_new) = match self.all.place(unit)? {
                InBackward::Scratch(sum) => (sum, true),
                InBackward::Sum(sum) => (sum, self.micro == 0),
                InBackward::Written => {
                    let whole = self.begin_write(unit)?;
                    grads.push(Grad::Write(whole.slice(0..used)));
                    continue;
                }
            };
            let later = &rank.passes[pass + 1..];
            let adds_first = !later.iter().any(|pass| pass.grads.contains(&unit));
            if adds_first && is_new {
                rank.pool.device().fill_zero(&rank.compute, sum)?;
            }
            grads.push(Grad::Add(sum.typed::<f32>()?.slice(0..used)));
        }
        Ok(grads)
    }

    /// The memory to which the compute stream writes the gradient of `unit`. Its padding is zero.
    fn begin_write(&mut self, unit: usize) -> Result<AnySlice, TrainError> {
        let rank = self.rank;
        let (whole, written) = if rank.mesh.reduce.comm().world_size() > 1 {
            let padded = rank.layout.units()[unit].padded_elems as usize;
            let filling = self.all.buckets.begin(padded)?;
            // SAFETY: the pass uses it on the compute stream, before `reduce` launches it.
            (unsafe { filling.slice() }, Written::Bucket(filling))
        } else {
            let sum = self.optimizer.begin_sum(rank, unit)?;
            (sum, Written::Sum(sum))
        };
        self.all.written = Some(written);

        for padding in rank.layout.units()[unit].padding() {
            let padding = whole.slice(padding.start as usize..padding.end as usize);
            rank.pool.device().fill_zero(&rank.compute, padding)?;
        }
        Ok(whole)
    }

    /// Reduces the units whose gradient is complete after the backward of `pass`.
    pub(crate) fn reduce_complete(&mut self, pass: usize) -> Result<(), TrainError> {
        let mut units = self.rank.complete_after(pass);
        units.try_for_each(|unit| self.reduce(unit))
    }

    /// Sums `unit` over all ranks, and passes the sum to the optimizer; each rank keeps its shard
    /// of the sum, at stage 0 all of it. If micro-batches are summed in place, only the last
    /// reduces. Replicas sum once a step, unless sums leave the device after each micro-batch.
    fn reduce(&mut self, unit: usize) -> Result<(), TrainError> {
        let rank = self.rank;
        let last = self.micro + 1 == rank.settings.grad_accum_steps;
        let alone = rank.mesh.reduce.comm().world_size() == 1;
        let sum = match self.all.place(unit)? {
            InBackward::Sum(_) if !last => return Ok(()),
            InBackward::Sum(sum) if alone => complete(rank, sum)?,
            InBackward::Sum(local) => self.pack(unit, local, false)?,
            InBackward::Scratch(sum) => self.pack(unit, sum, self.micro > 0)?,
            InBackward::Written => match self.all.written.take() {
                Some(Written::Bucket(bucket)) => {
                    let into = self.optimizer.sum_into(rank, unit, self.micro > 0)?;
                    let errors = self.all.errors.as_ref();
                    let feedback = errors.map(|errors| errors.of_unit(unit));
                    bucket.reduce_unit_with(&*rank.kernels, into, feedback)?
                }
                Some(Written::Sum(sum)) => complete(rank, sum)?,
                None => return Err(internal("reduced a gradient that no pass wrote")),
            },
        };

        let sum = match rank.mesh.with_own_sums() {
            Some(replicas) if last || self.optimizer.sums_leave() => replicas.sum(&sum)?,
            _ => sum,
        };
        self.optimizer.take_sum(rank, unit, self.micro, sum)
    }

    /// Packs the gradient `local` into buckets and reduces it over ranks.
    fn pack(&mut self, unit: usize, local: AnySlice, adds: bool) -> Result<Reduced<D>, TrainError> {
        let rank = self.rank;
        let into = self.optimizer.sum_into(rank, unit, adds)?;
        let buckets = &self.all.buckets;
        let errors = self.all.errors.as_ref();
        let feedback = errors.map(|errors| errors.of_unit(unit));
        Ok(buckets.reduce_unit_with(&*rank.kernels, &[(local, 0)], into, feedback)?)
    }
}

/// The sum of one rank, which passes have written.
fn complete<D: Device>(rank: &Rank<D>, sum: AnySlice) -> Result<Reduced<D>, TrainError> {
    // SAFETY: passes wrote it on the compute stream, which writes it again after its readers: the
    // optimizer's work on that stream, or on the host, for whose end `begin_sum` waits.
    Ok(unsafe { Reduced::new(sum, rank.compute.record()?) })
}

fn internal(what: &str) -> TrainError {
    TrainError::State(format!("internal error: {what}"))
}

impl<D: Device> Drop for Gradients<D> {
    fn drop(&mut self) {
        for slot in &mut self.slots {
            // Recording fails only on a closed stream, which no longer uses the block.
            let _closed = slot.record_use(&self.compute);
        }
    }
}
