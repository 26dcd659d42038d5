//! The sharded mixed-precision AdamW of one rank.
//!
//! The buffers of its life, all from the pool:
//!
//! | buffer | elements | held for | when |
//! |---|---|---|---|
//! | first_moment, second_moment | state elements, fp32 | `Optimizer` | always |
//! | master | state elements, fp32 | `Optimizer` | bf16 and fp16 parameters; in fp32 the parameter is the master |
//! | stats | 16 bytes a unit | `Workspace` | always |
//! | stats_scratch | as the kernels say, for the largest unit | `Workspace` | on a GPU |
//! | scalars | 32 bytes | `Workspace` | always |
//!
//! The state elements are this rank's shard storage (stages 1 to 3) or the whole storage (stage 0), end to
//! end. The optimizer knows nothing of stages: it is given **segments**, one a unit, that tile its state,
//! and at each step one gradient slice and one parameter slice a segment, wherever these lie.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use zero_alloc::device::{AnySlice, DType, Device, DeviceError, DeviceKind, DeviceSlice};
use zero_alloc::{Block, Pool, Purpose};
use zero_kernels::{AdamArgs, AdamHyper, GradStats, Kernels, RankStats, StepScalars};

use crate::decide::{BackwardScale, OptimizerConfig, Progress, StepController, StepOutcome};
use crate::on_device::OnDevice;
use crate::segments::{Segment, SubGroup, UnitSlices, check_segments, sub_groups};
use crate::{OptimError, StateKind};

/// What all ranks gather before a step.
#[derive(Clone, Copy, Debug)]
pub struct GatheredStats<'a> {
    /// The votes of all ranks, in rank order.
    pub votes: &'a [RankStats],
    /// The loss scale that this step's backward used: [`ShardedAdamW::backward_scale`] before it.
    pub backward_scale: BackwardScale,
    /// Micro-batches that were summed.
    pub micro_batches: usize,
}

/// AdamW over this rank's part of the state. One host thread drives it, on one compute stream.
pub struct ShardedAdamW<D: Device> {
    pub(crate) device: D,
    pub(crate) kernels: Arc<dyn Kernels<D>>,
    pub(crate) decider: StepController,
    param_dtype: DType,
    segments: Vec<Segment>,
    pub(crate) names: Vec<String>,
    master: Option<Block<D>>,
    first_moment: Block<D>,
    second_moment: Block<D>,
    stats: Block<D>,
    stats_scratch: Block<D>,
    scalars: Block<D>,
    /// What steps need that are decided on the device.
    pub(crate) on_device: Option<OnDevice<D>>,
    /// The stream of the last launch, behind which the blocks are given back.
    pub(crate) stream: D::Stream,
}

impl<D: Device> fmt::Debug for ShardedAdamW<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedAdamW")
            .field("param_dtype", &self.param_dtype)
            .field("segments", &self.segments)
            .field("decider", &self.decider)
            .finish_non_exhaustive()
    }
}

impl<D: Device> ShardedAdamW<D> {
    /// Allocates the state for `segments` and enqueues setting the moments to zero on `stream`. Masters are
    /// undefined until [`Self::init_masters`].
    ///
    /// # Errors
    /// A setting is outside its range, the segments do not tile the state, or there is no memory.
    pub fn new(
        pool: &Pool<D>,
        kernels: Arc<dyn Kernels<D>>,
        stream: &D::Stream,
        rules: OptimizerConfig,
        param_dtype: DType,
        segments: Vec<Segment>,
    ) -> Result<Self, OptimError> {
        if !matches!(param_dtype, DType::F32 | DType::Bf16 | DType::F16) {
            return Err(OptimError::ParamDType { dtype: param_dtype });
        }
        let decider = StepController::new(rules)?;
        let elems = check_segments(&segments)?;
        let state = || pool.allocate(elems, DType::F32, Purpose::Optimizer, stream);
        let largest = segments.iter().map(|s| s.vote.len()).max().unwrap_or(0);
        let scratch_elems = kernels.stats_scratch_elems(largest);
        let optim = Self {
            device: pool.device().clone(),
            kernels,
            decider,
            param_dtype,
            master: if param_dtype == DType::F32 { None } else { Some(state()?) },
            first_moment: state()?,
            second_moment: state()?,
            // Two eight-byte words a unit, as `GradStats`; eight four-byte words, as `StepScalars`.
            stats: pool.allocate(2 * segments.len(), DType::F64, Purpose::Workspace, stream)?,
            stats_scratch: pool.allocate(scratch_elems, DType::F64, Purpose::Workspace, stream)?,
            scalars: pool.allocate(8, DType::F32, Purpose::Workspace, stream)?,
            on_device: None,
            names: segments.iter().map(|s| s.name.clone()).collect(),
            segments,
            stream: stream.clone(),
        };
        for block in [&optim.first_moment, &optim.second_moment] {
            optim.device.fill_zero(stream, view(block))?;
        }
        Ok(optim)
    }

    /// Elements of the state storage.
    pub fn state_elems(&self) -> usize {
        self.first_moment.len()
    }

    /// The units' segments.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Enqueues filling the master weights from one slice a unit: fp32 where the initial weights are, or
    /// the parameters. In fp32 training it does nothing: the parameter is the master.
    ///
    /// # Errors
    /// The slices do not fit the segments, or the stream refused.
    pub fn init_masters(&mut self, stream: &D::Stream, weights: &[AnySlice]) -> Result<(), OptimError> {
        self.check_slices("weights", weights.len(), weights.iter().copied())?;
        self.stream = stream.clone();
        let Some(master) = &self.master else { return Ok(()) };
        for (segment, &weights) in self.segments.iter().zip(weights) {
            let dst = view(master).slice(segment.state.clone());
            self.kernels.cast(stream, weights, dst, 1.0)?;
        }
        Ok(())
    }

    /// Enqueues writing the parameters from the masters, rounded to their dtype: after a checkpoint was
    /// loaded. In fp32 training it does nothing.
    ///
    /// # Errors
    /// The slices do not fit the segments, or the stream refused.
    pub fn write_params(&mut self, stream: &D::Stream, params: &[AnySlice]) -> Result<(), OptimError> {
        self.check_slices("params", params.len(), params.iter().copied())?;
        self.stream = stream.clone();
        let Some(master) = &self.master else { return Ok(()) };
        for (segment, &param) in self.segments.iter().zip(params) {
            let src = view(master).slice(segment.state.clone());
            self.kernels.cast(stream, src, param, 1.0)?;
        }
        Ok(())
    }

    /// The loss scale for all micro-batches of the next step. Take it once, before the first.
    pub fn backward_scale(&self) -> BackwardScale {
        self.decider.backward_scale()
    }

    /// Enqueues the statistics of the gradients that this rank votes for, one slice a unit.
    ///
    /// # Errors
    /// The slices do not fit the segments, or the stream refused.
    pub fn enqueue_stats(&mut self, stream: &D::Stream, grads: &[AnySlice]) -> Result<(), OptimError> {
        self.check_slices("grads", grads.len(), grads.iter().copied())?;
        self.stream = stream.clone();
        let (stats, scratch) = (self.stats_slice(), view(&self.stats_scratch).typed()?);
        for (i, (segment, grad)) in self.segments.iter().zip(grads).enumerate() {
            self.kernels.grad_stats(stream, grad.slice(segment.vote.clone()), scratch, stats.slice(i..i + 1))?;
        }
        Ok(())
    }

    /// Waits for the statistics, at most `limit`, and makes this rank's vote. `loss` is carried along.
    ///
    /// # Errors
    /// An operation on the stream failed, or the limit passed.
    pub fn vote(&self, stream: &D::Stream, loss: f64, limit: Duration) -> Result<RankStats, OptimError> {
        let mut stats = vec![GradStats::default(); self.segments.len()];
        self.device.download(stream, view(&self.stats), bytemuck::cast_slice_mut(&mut stats), limit)?;
        Ok(RankStats::new(&stats, loss))
    }

    /// Decides the step from all ranks' votes and enqueues it: parameters and state are updated when the
    /// stream gets there, or nothing is enqueued where the step is skipped.
    ///
    /// # Errors
    /// The slices do not fit the segments, the loss scale is at its minimum, or the scalars did not reach the device
    /// within `limit`: nothing has changed, and the step may be tried again. Where the stream refused a launch, some
    /// units may have been updated.
    pub fn step(
        &mut self,
        stream: &D::Stream,
        units: &[UnitSlices],
        ballot: GatheredStats<'_>,
        limit: Duration,
    ) -> Result<StepOutcome, OptimError> {
        self.check_units(units)?;
        self.stream = stream.clone();
        let GatheredStats { votes, backward_scale, micro_batches } = ballot;
        let mut decider = self.decider.clone();
        let decision = decider.decide(votes, backward_scale, micro_batches, &self.names)?;
        if !decision.outcome.is_skipped() {
            let scalars = view(&self.scalars);
            self.device.upload(stream, bytemuck::bytes_of(&decision.scalars), scalars, limit)?;
            self.enqueue_adam(stream, units, decision.hyper)?;
        }
        self.decider = decider;
        Ok(decision.outcome)
    }

    /// Enqueues the update, with the scalars that lie in device memory when the stream gets there.
    pub(crate) fn enqueue_adam(
        &self,
        stream: &D::Stream,
        units: &[UnitSlices],
        hyper: AdamHyper,
    ) -> Result<(), OptimError> {
        let first_moment = view(&self.first_moment).typed::<f32>()?;
        let second_moment = view(&self.second_moment).typed::<f32>()?;
        let master = self.master.as_ref().map(|m| view(m).typed::<f32>()).transpose()?;
        let join = self.device.kind() == DeviceKind::Cuda;
        for SubGroup { state, slices } in sub_groups(&self.segments, units, join) {
            let (master, param_out) = match master {
                Some(master) => (master.slice(state.clone()), Some(slices.param)),
                None => (slices.param.typed::<f32>()?, None),
            };
            let args = AdamArgs {
                master,
                first_moment: first_moment.slice(state.clone()),
                second_moment: second_moment.slice(state),
                grad: slices.grad,
                param_out,
                scalars: self.scalars_slice(),
                hyper,
            };
            self.kernels.adam(stream, args)?;
        }
        Ok(())
    }

    /// The state of one kind over the whole state storage; `None` for the masters of fp32 training.
    ///
    /// # Safety
    /// Accesses are ordered against the optimizer's own by the stream it is driven on or by events, and end
    /// before the optimizer is dropped or are noted by [`Self::record_use`].
    pub unsafe fn state(&self, kind: StateKind) -> Option<DeviceSlice<f32>> {
        let block = match kind {
            StateKind::Master => self.master.as_ref()?,
            StateKind::FirstMoment => &self.first_moment,
            StateKind::SecondMoment => &self.second_moment,
        };
        view(block).typed().ok()
    }

    /// Notes that everything enqueued on `stream` so far may use the state.
    ///
    /// # Errors
    /// The stream is gone.
    pub fn record_use(&mut self, stream: &D::Stream) -> Result<(), DeviceError> {
        for block in self.master.iter_mut().chain([&mut self.first_moment, &mut self.second_moment]) {
            block.record_use(stream)?;
        }
        Ok(())
    }

    /// The settings.
    pub fn rules(&self) -> &OptimizerConfig {
        self.decider.rules()
    }

    /// The scalars that a checkpoint keeps.
    pub fn progress(&self) -> Progress {
        self.decider.progress()
    }

    /// Takes up the scalars of a checkpoint. The state itself is written through [`Self::state`]. Steps are decided
    /// on the device again only after another [`Self::decide_on_device`].
    ///
    /// # Errors
    /// They do not fit the settings.
    pub fn restore(&mut self, progress: &Progress) -> Result<(), OptimError> {
        self.forget_device();
        self.decider.restore(progress)
    }

    /// Gives the blocks of decisions on the device back, behind the last launch.
    pub(crate) fn forget_device(&mut self) {
        if let Some(mut on_device) = self.on_device.take() {
            on_device.record_use(&self.stream);
        }
    }

    pub(crate) fn scalars_slice(&self) -> DeviceSlice<StepScalars> {
        // SAFETY: the block holds eight four-byte words, as `StepScalars` does, and is aligned for them; it
        // lives as long as `self`, whose drop notes the stream.
        unsafe { DeviceSlice::from_raw_parts(view(&self.scalars).as_ptr().cast::<StepScalars>(), 1) }
    }

    pub(crate) fn stats_slice(&self) -> DeviceSlice<GradStats> {
        // SAFETY: the block holds two eight-byte words a unit, as `GradStats` does, and is aligned for them;
        // it lives as long as `self`, whose drop notes the stream.
        unsafe { DeviceSlice::from_raw_parts(view(&self.stats).as_ptr().cast(), self.segments.len()) }
    }

    pub(crate) fn check_units(&self, units: &[UnitSlices]) -> Result<(), OptimError> {
        self.check_slices("grads", units.len(), units.iter().map(|u| u.grad))?;
        self.check_slices("params", units.len(), units.iter().map(|u| u.param))?;
        for (segment, unit) in self.segments.iter().zip(units) {
            if unit.param.dtype() != self.param_dtype {
                let (expected, got) = (self.param_dtype, unit.param.dtype());
                return Err(OptimError::SliceDType { unit: segment.name.clone(), what: "params", expected, got });
            }
        }
        Ok(())
    }

    fn check_slices(
        &self,
        what: &'static str,
        got: usize,
        slices: impl Iterator<Item = AnySlice>,
    ) -> Result<(), OptimError> {
        let expected = self.segments.len();
        if got != expected {
            return Err(OptimError::SliceCount { what, expected, got });
        }
        for (segment, slice) in self.segments.iter().zip(slices) {
            if slice.len() != segment.len() {
                let (expected, got) = (segment.len(), slice.len());
                return Err(OptimError::SliceLen { unit: segment.name.clone(), what, expected, got });
            }
        }
        Ok(())
    }
}

impl<D: Device> Drop for ShardedAdamW<D> {
    fn drop(&mut self) {
        self.forget_device();
        let blocks = [
            &mut self.first_moment,
            &mut self.second_moment,
            &mut self.stats,
            &mut self.stats_scratch,
            &mut self.scalars,
        ];
        for block in self.master.iter_mut().chain(blocks) {
            // A stream that is gone runs nothing any more.
            let _ = block.record_use(&self.stream);
        }
    }
}

/// The block as a slice, for launches of its owner.
pub(crate) fn view<D: Device>(block: &Block<D>) -> AnySlice {
    // SAFETY: the optimizer owns the block; all its launches are on streams that its drop or `record_use`
    // notes, and one host thread enqueues them in order.
    unsafe { block.slice() }
}
