//! The sharded mixed-precision optimizer of one rank.
//!
//! Buffers, allocated from the pool for the optimizer's lifetime:
//!
//! | buffer | elements | purpose | when |
//! |---|---|---|---|
//! | slots of the update rules, such as first_moment | state elements, in their format | `Optimizer` | always |
//! | master | state elements, fp32 | `Optimizer` | bf16 and fp16 parameters; in fp32 the parameter is the master |
//! | remainders | state elements, 16 bits | `Optimizer` | in place of `master` with [`Masters::Remainder`](crate::Masters::Remainder) |
//! | stats | 16 bytes per unit | `Workspace` | always |
//! | stats_scratch | [`Kernels::stats_scratch_elems`] of all units | `Workspace` | on a GPU |
//! | scalars | 32 bytes for each set of learning rate and betas | `Workspace` | always |
//!
//! The state elements are those of this rank's shards (stages 1 to 3) or of all units (stage 0),
//! without frozen ones. The optimizer does not depend on the stage: the caller passes **segments**,
//! one per unit, and at each step one gradient and the slices of one parameter per segment,
//! anywhere in device memory.
//!
//! Why fp32 training has no separate masters: the parameter, or its shard, is the master. The
//! optimizer then keeps 8 bytes a parameter of Adam in place of 12, and parameters, gradients and state are
//! 16 bytes a parameter in either case.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use zero_alloc::Block;
use zero_alloc::device::{
    AnySlice, DType, Device, DeviceError, DeviceSlice, Event, Reduced, Stream,
};
use zero_kernels::{GradStats, Kernels, RankStats, StepScalars};

use crate::controller::{Divisor, OptimizerConfig, Progress, StepController, StepOutcome};
use crate::device_steps::DeviceSteps;
use crate::format::StateArrays;
use crate::groups::{GroupRules, Piece, Resolved};
use crate::matrix_update::MatrixExchange;
use crate::pieces::{Access, Array, MasterSlice, Pieces, remainder_bytes, view};
use crate::segments::{Segment, UnitSlices};
use crate::{OptimError, StateFormat, StateKind};

/// The gathered statistics of a step.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct GatheredStats<'a> {
    /// The statistics of all ranks, in rank order.
    pub ranks: &'a [RankStats],
    /// The divisor of the gradients, which are sums over ranks.
    pub divisor: Divisor,
}

impl<'a> GatheredStats<'a> {
    /// The statistics of all ranks, in rank order, and the divisor of the gradients.
    pub const fn new(ranks: &'a [RankStats], divisor: Divisor) -> Self {
        Self { ranks, divisor }
    }
}

/// This rank's inputs of [`ShardedOptimizer::step_with`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct StepInputs {
    /// Its part of the loss; parts are summed over ranks.
    pub loss: f64,
    /// 64 bits; the outcome has their OR and their AND over ranks.
    pub flags: u64,
    /// The divisor of the gradients, which are sums over ranks; the same on all ranks.
    pub divisor: Divisor,
}

impl StepInputs {
    /// This rank's part of the loss, the divisor of the gradients, and no flags.
    pub const fn new(loss: f64, divisor: Divisor) -> Self {
        Self {
            loss,
            flags: 0,
            divisor,
        }
    }
}
zero_alloc::setters!(StepInputs { flags: u64 });

/// An update rule over this rank's part of the state. A call on another stream than the last call's makes
/// that stream wait for the optimizer's earlier work.
pub struct ShardedOptimizer<D: Device> {
    pub(crate) device: D,
    pub(crate) kernels: Arc<dyn Kernels<D>>,
    pub(crate) controller: StepController,
    pub(crate) param_dtype: DType,
    pub(crate) format: StateFormat,
    pub(crate) segments: Vec<Segment>,
    pub(crate) groups: Resolved,
    pub(crate) names: Vec<String>,
    pub(crate) state: Pieces<D>,
    /// Whether launches of an update are being enqueued; it stays so after a panic.
    pub(crate) is_updating: bool,
    /// For update rules that see matrices.
    pub(crate) exchange: Option<MatrixExchange<D>>,
    pub(crate) stats: Block<D>,
    pub(crate) stats_scratch: Block<D>,
    pub(crate) scalars: Block<D>,
    /// The buffers of device steps, once prepared.
    pub(crate) device_steps: Option<DeviceSteps<D>>,
    /// The stream of the last launch, behind all earlier ones; the blocks are freed after its work.
    pub(crate) stream: D::Stream,
}

impl<D: Device> fmt::Debug for ShardedOptimizer<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedOptimizer")
            .field("param_dtype", &self.param_dtype)
            .field("segments", &self.segments)
            .field("controller", &self.controller)
            .finish_non_exhaustive()
    }
}

impl<D: Device> ShardedOptimizer<D> {
    /// Orders `stream` behind the optimizer's work on other streams, and makes it the stream of the
    /// last launch.
    pub(crate) fn enter(&mut self, stream: &D::Stream) -> Result<(), DeviceError> {
        self.device.check_stream("optimizer", stream)?;
        if stream.id() != self.stream.id() {
            let before = self.stream.record()?;
            // A failed stream runs nothing more.
            if let Ok(false) = before.is_done() {
                stream.wait(&before)?;
            }
            self.stream = stream.clone();
        }
        Ok(())
    }

    /// The pieces of unit `unit`, in order: ranges with equal rules, and their places in the state
    /// storage.
    ///
    /// # Panics
    /// There is no such unit.
    pub fn pieces(&self, unit: usize) -> &[Piece] {
        &self.groups.pieces[unit]
    }

    /// Whether the unit has elements, and all are frozen.
    pub(crate) fn is_frozen(&self, unit: usize) -> bool {
        let pieces = self.pieces(unit);
        !pieces.is_empty() && pieces.iter().all(|piece| piece.state.is_none())
    }

    /// Elements of the state storage: those that are not frozen.
    pub fn state_elems(&self) -> usize {
        self.groups.state_elems
    }

    /// The units' segments.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Enqueues copying each unit's weights (fp32 initial weights, or the parameters) to the master
    /// weights. The slices of a unit are as in [`UnitSlices::param`]. A no-op in fp32 training,
    /// where the parameter is the master.
    ///
    /// # Errors
    /// The slices do not match the segments, or the stream failed.
    pub fn init_masters(
        &mut self,
        stream: &D::Stream,
        weights: &[impl AsRef<[(AnySlice, usize)]>],
    ) -> Result<(), OptimError> {
        self.check_pieces("weights", weights)?;
        self.enter(stream)?;
        for (unit, weights) in weights.iter().enumerate() {
            self.copy_weights(stream, unit, weights.as_ref(), true)?;
        }
        Ok(())
    }

    /// Enqueues writing the parameters from the masters, rounded to their dtype. The slices of a
    /// unit are as in [`UnitSlices::param`]. Call it after loading a checkpoint. A no-op in fp32
    /// training.
    ///
    /// # Errors
    /// The slices do not match the segments, or the stream failed.
    pub fn write_params(
        &mut self,
        stream: &D::Stream,
        params: &[impl AsRef<[(AnySlice, usize)]>],
    ) -> Result<(), OptimError> {
        self.check_pieces("params", params)?;
        self.enter(stream)?;
        for (unit, params) in params.iter().enumerate() {
            self.copy_weights(stream, unit, params.as_ref(), false)?;
        }
        Ok(())
    }

    /// As [`Self::write_params`], for one unit.
    ///
    /// # Errors
    /// As [`Self::write_params`], or there is no such unit.
    pub fn write_unit_params(
        &mut self,
        stream: &D::Stream,
        unit: usize,
        param: &[(AnySlice, usize)],
    ) -> Result<(), OptimError> {
        self.segment(unit)?.check_slices("params", param)?;
        self.enter(stream)?;
        self.copy_weights(stream, unit, param, false)
    }

    /// Enqueues copies between a unit's slices and its masters.
    fn copy_weights(
        &mut self,
        stream: &D::Stream,
        unit: usize,
        slices: &[(AnySlice, usize)],
        to_masters: bool,
    ) -> Result<(), OptimError> {
        // Parameters with remainders are masters already.
        if self.param_dtype == DType::F32 || !to_masters && self.state.has_remainders() {
            return Ok(());
        }
        self.check_state()?;
        let access = match to_masters {
            true => Access::Update,
            false => Access::Read(Array::Masters),
        };

        for &(slice, at) in slices {
            for (elems, range, _) in self.groups.trained(unit, at..at + slice.len()) {
                let slice = slice.slice(elems.start - at..elems.end - at);
                for overlap in self.state.within(&range) {
                    let held = self.state.acquire(stream, &overlap, access)?;
                    let (of_range, of_piece) = held.piece.overlap(&range);
                    let weights = slice.slice(of_range);
                    match held.piece.masters {
                        MasterSlice::Params => {}
                        MasterSlice::Fp32(masters) => {
                            let masters = masters.slice(of_piece).erase();
                            let (from, to) = match to_masters {
                                true => (weights, masters),
                                false => (masters, weights),
                            };
                            self.kernels.cast(stream, from, to, 1.0)?;
                        }
                        MasterSlice::Remainders(_) if weights.dtype() != DType::Bf16 => {
                            let dtype = weights.dtype();
                            return Err(OptimError::Remainders { dtype });
                        }
                        MasterSlice::Remainders(remainders) => {
                            let bytes = remainder_bytes(remainders.slice(of_piece));
                            self.device.fill_zero(stream, bytes)?;
                        }
                    }
                    held.release()?;
                }
            }
        }

        Ok(())
    }

    /// Refuses state of which an unknown part was updated.
    pub(crate) fn check_state(&self) -> Result<(), OptimError> {
        if self.is_updating {
            return Err(OptimError::StateLost);
        }
        Ok(())
    }

    /// The segment of unit `unit`.
    pub(crate) fn segment(&self, unit: usize) -> Result<&Segment, OptimError> {
        self.segments.get(unit).ok_or(OptimError::NoUnit {
            unit,
            units: self.segments.len(),
        })
    }

    /// Sets the base learning rate of the next steps; schedules with absolute rates keep those. Not
    /// part of the progress in a checkpoint. Before further device steps call
    /// [`Self::prepare_device_steps`] again.
    ///
    /// # Errors
    /// The rate is negative or not finite, or device steps have unread outcomes.
    pub fn set_lr(&mut self, lr: f64) -> Result<(), OptimError> {
        self.outdate_device_steps()?;
        self.controller.set_lr(lr)
    }

    /// Sets the factor of the learning rate and the weight decay of a group for the next steps, the
    /// same on all ranks. Not part of the progress in a checkpoint. The groups are
    /// [settable](crate::ParamGroups::settable). Before further device steps call
    /// [`Self::prepare_device_steps`] again.
    ///
    /// # Errors
    /// There is no such group, it is frozen, a value is negative or not finite, or device steps have
    /// unread outcomes.
    pub fn set_group(
        &mut self,
        group: usize,
        lr_scale: f64,
        weight_decay: Option<f64>,
    ) -> Result<(), OptimError> {
        self.outdate_device_steps()?;
        self.groups.set(group, lr_scale, weight_decay)?;
        self.controller.set_rates(self.groups.rates.clone());
        Ok(())
    }

    /// The rules of the groups.
    pub fn group_rules(&self) -> &[GroupRules] {
        &self.groups.rules
    }

    /// The loss scale for all micro-batches of the next step. Only a step or a restore changes it.
    pub fn loss_scale(&self) -> f64 {
        self.controller.loss_scale()
    }

    /// Enqueues computing the statistics of this rank's shards of the gradients, one per unit;
    /// `stream` waits for them. Gradients of frozen elements are set to zero first, so that they do
    /// not count. Gradients that may still be in flight do not compile:
    ///
    /// ```compile_fail,E0277
    /// # use zero_alloc::{device::{AnySlice, Device}, host::HostDevice};
    /// # use zero_optim::{OptimError, ShardedOptimizer};
    /// # type Stream = <HostDevice as Device>::Stream;
    /// fn stats(optim: &mut ShardedOptimizer<HostDevice>, compute: &Stream, grad: AnySlice) -> Result<(), OptimError> {
    ///     optim.enqueue_stats(compute, &[grad])
    /// }
    /// ```
    ///
    /// With the result of the reduction they do:
    ///
    /// ```
    /// # use zero_alloc::{device::{Device, Reduced}, host::HostDevice};
    /// # use zero_optim::{OptimError, ShardedOptimizer};
    /// # type Stream = <HostDevice as Device>::Stream;
    /// # type Grad = Reduced<HostDevice>;
    /// fn stats(optim: &mut ShardedOptimizer<HostDevice>, compute: &Stream, grad: &Grad) -> Result<(), OptimError> {
    ///     optim.enqueue_stats(compute, &[grad])
    /// }
    /// ```
    ///
    /// # Errors
    /// The gradients do not match the segments, or the stream failed.
    pub fn enqueue_stats(
        &mut self,
        stream: &D::Stream,
        grads: &[impl Borrow<Reduced<D>>],
    ) -> Result<(), OptimError> {
        self.check_grads(grads.iter().map(Borrow::borrow))?;
        self.enter(stream)?;
        let shards: Vec<AnySlice> = (0..)
            .zip(grads)
            .map(|(unit, grad)| self.trained_shard(stream, unit, grad.borrow()))
            .collect::<Result<_, _>>()?;
        let stats = self.stats_slice();
        let scratch = view(&self.stats_scratch).typed()?;
        Ok(self.kernels.grad_stats(stream, &shards, scratch, stats)?)
    }

    /// [`Self::enqueue_stats`] of one unit: for an optimizer that works while backward does. Each
    /// unit's are enqueued once a step, in any order.
    ///
    /// # Errors
    /// There is no such unit, the gradient does not match its segment, or the stream failed.
    pub fn enqueue_unit_stats(
        &mut self,
        stream: &D::Stream,
        unit: usize,
        grad: &Reduced<D>,
    ) -> Result<(), OptimError> {
        self.check_grad(unit, grad)?;
        self.enter(stream)?;
        let shard = self.trained_shard(stream, unit, grad)?;
        let stats = self.stats_slice();
        let scratch = view(&self.stats_scratch).typed()?;
        Ok(self
            .kernels
            .grad_stats(stream, &[shard], scratch, stats.slice(unit..unit + 1))?)
    }

    /// Makes `stream` wait for the gradient of a unit and set its frozen elements to zero. Returns
    /// what this rank counts of it, without elements if the unit is frozen.
    fn trained_shard(
        &self,
        stream: &D::Stream,
        unit: usize,
        grad: &Reduced<D>,
    ) -> Result<AnySlice, OptimError> {
        // SAFETY: read by operations that this call and its callers enqueue on `stream`; frozen
        // elements are written behind the readers, before the write is recorded.
        let slice = unsafe { grad.slice_on(stream) }?;
        if self.is_frozen(unit) {
            return Ok(slice.slice(0..0));
        }
        let frozen: Vec<_> = self
            .pieces(unit)
            .iter()
            .filter(|piece| piece.state.is_none())
            .collect();
        if !frozen.is_empty() {
            grad.wait_for_readers(stream)?;
            for piece in frozen {
                self.device
                    .fill_zero(stream, slice.slice(piece.elems.clone()))?;
            }
            grad.record_write(stream)?;
        }
        Ok(slice.slice(self.segment(unit)?.counted.clone()))
    }

    /// Waits at most `limit` for the statistics and combines them with this rank's `loss`.
    ///
    /// # Errors
    /// An operation on the stream failed, or the limit passed.
    pub fn rank_stats(
        &mut self,
        stream: &D::Stream,
        loss: f64,
        limit: Duration,
    ) -> Result<RankStats, OptimError> {
        self.enter(stream)?;
        let mut stats = vec![GradStats::default(); self.segments.len()];
        self.device.download(
            stream,
            view(&self.stats),
            bytemuck::cast_slice_mut(&mut stats),
            limit,
        )?;
        Ok(RankStats::new(&stats, loss))
    }

    /// Computes the step from the statistics of all ranks and enqueues the update of parameters and
    /// state. A skipped step enqueues nothing.
    ///
    /// # Errors
    /// If the slices do not match the segments, gradients overflowed with the loss scale at its
    /// minimum, or the scalars did not reach the device within `limit`, nothing has changed, and
    /// the step may be retried. If the stream failed at a launch, some units may have been updated.
    pub fn step(
        &mut self,
        stream: &D::Stream,
        units: &[UnitSlices<'_, D>],
        gathered: GatheredStats<'_>,
        limit: Duration,
    ) -> Result<StepOutcome, OptimError> {
        self.check_units(units)?;
        let controller = self.controller.clone();
        let outcome = self.decide(stream, gathered, limit)?;
        if !outcome.is_skipped() {
            self.enqueue_updates(stream, units.iter().enumerate())
                .inspect_err(|_| self.controller = controller)?;
        }
        Ok(outcome)
    }

    /// The decision of [`Self::step`] alone: unless it is to skip, [`Self::enqueue_unit_update`] of
    /// every unit follows, in the order in which the next forward reads them, so that it can begin
    /// behind the first.
    ///
    /// # Errors
    /// As [`Self::step`]; then nothing has changed.
    pub fn decide(
        &mut self,
        stream: &D::Stream,
        gathered: GatheredStats<'_>,
        limit: Duration,
    ) -> Result<StepOutcome, OptimError> {
        self.enter(stream)?;
        let mut controller = self.controller.clone();
        let (scalars, outcome) =
            controller.advance(gathered.ranks, gathered.divisor, &self.names)?;
        if !outcome.is_skipped() {
            self.device.upload(
                stream,
                bytemuck::cast_slice(&scalars),
                view(&self.scalars),
                limit,
            )?;
        }
        self.controller = controller;
        Ok(outcome)
    }

    /// Enqueues the decided update of one unit, once a step.
    ///
    /// # Errors
    /// There is no such unit, the slices do not match its segment, or the stream failed.
    pub fn enqueue_unit_update(
        &mut self,
        stream: &D::Stream,
        unit: usize,
        slices: &UnitSlices<'_, D>,
    ) -> Result<(), OptimError> {
        self.check_grad(unit, slices.grad)?;
        self.check_params(self.segment(unit)?, slices.param)?;
        self.enter(stream)?;
        self.enqueue_updates(stream, [(unit, slices)].into_iter())
    }

    /// The four parts of a step in one call: statistics, exchange, decision and update. `exchange`
    /// sends a message to all ranks and returns the messages of all ranks, in rank order, such as
    /// `Communicator::exchange` of zero-comm. All ranks call it.
    ///
    /// # Errors
    /// Those of [`Self::enqueue_stats`], [`Self::rank_stats`], `exchange` and [`Self::step`]. If
    /// this rank fails before or in the exchange, the others wait for it: abort the communicator.
    pub fn step_with<E: From<OptimError>>(
        &mut self,
        stream: &D::Stream,
        units: &[UnitSlices<'_, D>],
        inputs: StepInputs,
        exchange: impl FnOnce(&[u8]) -> Result<Vec<Vec<u8>>, E>,
        limit: Duration,
    ) -> Result<StepOutcome, E> {
        self.check_units(units)?;
        let grads: Vec<&Reduced<D>> = units.iter().map(|unit| unit.grad).collect();
        self.enqueue_stats(stream, &grads)?;
        let own = RankStats {
            flags: inputs.flags,
            ..self.rank_stats(stream, inputs.loss, limit)?
        };

        let mut ranks = Vec::new();
        for (rank, message) in exchange(bytemuck::bytes_of(&own))?.iter().enumerate() {
            let stats = bytemuck::try_pod_read_unaligned(message);
            let expected = size_of::<RankStats>();
            let got = message.len();
            ranks.push(stats.map_err(|_| OptimError::StatsLen {
                rank,
                expected,
                got,
            })?);
        }

        Ok(self.step(
            stream,
            units,
            GatheredStats {
                ranks: &ranks,
                divisor: inputs.divisor,
            },
            limit,
        )?)
    }

    /// The state of one kind over the whole state storage, which [`Self::pieces`] maps to units;
    /// `None` for the masters of fp32 training, for remainders, and for state in another format or
    /// on NVMe.
    ///
    /// # Safety
    /// The optimizer's stream or events order accesses with those of the optimizer. They end before
    /// the optimizer is dropped, or [`Self::record_use`] records them.
    pub unsafe fn state(&self, kind: StateKind) -> Option<DeviceSlice<f32>> {
        let all = self.state.in_blocks(0..self.groups.state_elems)?;
        match (self.array(kind)?, all.masters) {
            (Array::Slot(name), _) => {
                let nth = self
                    .state
                    .arrays()
                    .iter()
                    .find_map(|arrays| arrays.slot(name))?;
                let slot = all.slots.get(nth)?;
                slot.memory.typed().ok()
            }
            (Array::Masters, MasterSlice::Fp32(masters)) => Some(masters),
            (Array::Masters, _) => None,
        }
    }

    /// The kinds of state, in the order in which checkpoints have them.
    pub fn kinds(&self) -> Vec<StateKind> {
        StateArrays::all_kinds(self.state.arrays())
    }

    /// The array of this kind; `None` if the rules have no such slot.
    pub(crate) fn array(&self, kind: StateKind) -> Option<Array> {
        match kind {
            StateKind::Master => Some(Array::Masters),
            StateKind::Slot(name) => {
                let mut all = self.state.arrays().iter();
                all.any(|arrays| arrays.slot(name).is_some())
                    .then_some(Array::Slot(name))
            }
        }
    }

    /// Records that work enqueued on `stream` so far may access the state, so that it is freed only
    /// after that work.
    ///
    /// # Errors
    /// The stream is closed.
    pub fn record_use(&mut self, stream: &D::Stream) -> Result<(), DeviceError> {
        self.state
            .blocks()
            .try_for_each(|block| block.record_use(stream))
    }

    /// The settings.
    pub fn config(&self) -> &OptimizerConfig {
        self.controller.config()
    }

    /// The step counts and the loss scaler's state, for a checkpoint.
    pub fn progress(&self) -> Progress {
        self.controller.progress()
    }

    /// Restores the progress of a checkpoint. [`Self::write_state`] writes masters and slots.
    /// Before further device steps call [`Self::prepare_device_steps`] again.
    ///
    /// # Errors
    /// The progress is invalid or contradicts the settings.
    pub fn restore(&mut self, progress: &Progress) -> Result<(), OptimError> {
        self.free_device_steps();
        self.controller.restore(progress)
    }

    /// Frees the buffers of device steps after the last launch.
    pub(crate) fn free_device_steps(&mut self) {
        if let Some(mut device_steps) = self.device_steps.take() {
            device_steps.record_use(&self.stream);
        }
    }

    pub(crate) fn scalars_slice(&self) -> DeviceSlice<StepScalars> {
        let at = view(&self.scalars).as_ptr().cast::<StepScalars>();
        let sets = self.groups.rates.len();
        // SAFETY: the block has the size and alignment of a `StepScalars` per set of rates; the
        // rest as for `view`.
        unsafe { DeviceSlice::from_raw_parts(at, sets, self.device.id()) }
    }

    pub(crate) fn stats_slice(&self) -> DeviceSlice<GradStats> {
        // SAFETY: the block has the size and alignment of a `GradStats` per unit; the rest as for
        // `view`.
        unsafe {
            DeviceSlice::from_raw_parts(
                view(&self.stats).as_ptr().cast(),
                self.segments.len(),
                self.device.id(),
            )
        }
    }

    pub(crate) fn check_units(&self, units: &[UnitSlices<'_, D>]) -> Result<(), OptimError> {
        self.check_grads(units.iter().map(|u| u.grad))?;
        self.check_count("params", units.len())?;
        self.segments
            .iter()
            .zip(units)
            .try_for_each(|(segment, unit)| self.check_params(segment, unit.param))
    }

    /// Checks the slices of a unit's parameter.
    pub(crate) fn check_params(
        &self,
        segment: &Segment,
        param: &[(AnySlice, usize)],
    ) -> Result<(), OptimError> {
        segment.check_slices("params", param)?;
        match param
            .iter()
            .map(|(slice, _)| slice.dtype())
            .find(|dtype| *dtype != self.param_dtype)
        {
            Some(got) => {
                let unit = segment.name.clone();
                let expected = self.param_dtype;
                Err(OptimError::SliceDType {
                    unit,
                    what: "params",
                    expected,
                    got,
                })
            }
            None => Ok(()),
        }
    }

    fn check_grads<'a>(
        &self,
        grads: impl ExactSizeIterator<Item = &'a Reduced<D>>,
    ) -> Result<(), OptimError> {
        self.check_count("grads", grads.len())?;
        (0..)
            .zip(grads)
            .try_for_each(|(unit, grad)| self.check_grad(unit, grad))
    }

    fn check_grad(&self, unit: usize, grad: &Reduced<D>) -> Result<(), OptimError> {
        let segment = self.segment(unit)?;
        if grad.len() == segment.len() || grad.is_empty() && self.is_frozen(unit) {
            return Ok(());
        }
        let expected = segment.len();
        let got = grad.len();
        Err(OptimError::SliceLen {
            unit: segment.name.clone(),
            what: "grads",
            expected,
            got,
        })
    }

    pub(crate) fn check_count(&self, what: &'static str, got: usize) -> Result<(), OptimError> {
        let expected = self.segments.len();
        if got == expected {
            Ok(())
        } else {
            Err(OptimError::SliceCount {
                what,
                expected,
                got,
            })
        }
    }

    fn check_pieces(
        &self,
        what: &'static str,
        units: &[impl AsRef<[(AnySlice, usize)]>],
    ) -> Result<(), OptimError> {
        self.check_count(what, units.len())?;
        self.segments
            .iter()
            .zip(units)
            .try_for_each(|(segment, unit)| segment.check_slices(what, unit.as_ref()))
    }
}

impl<D: Device> Drop for ShardedOptimizer<D> {
    fn drop(&mut self) {
        self.free_device_steps();
        for block in
            self.state
                .blocks()
                .chain([&mut self.stats, &mut self.stats_scratch, &mut self.scalars])
        {
            // A closed stream runs no more work.
            let _ = block.record_use(&self.stream);
        }
    }
}
