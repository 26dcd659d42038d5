//! The sharded mixed-precision AdamW of one rank.
//!
//! The buffers of its life, all from the pool:
//!
//! | buffer | elements | held for | when |
//! |---|---|---|---|
//! | first_moment, second_moment | state elements, fp32 | `Optimizer` | always |
//! | master | state elements, fp32 | `Optimizer` | bf16 and fp16 parameters; in fp32 the parameter is the master |
//! | stats | 16 bytes a unit | `Workspace` | always |
//! | scalars | 20 bytes | `Workspace` | always |
//!
//! The state elements are this rank's shard storage (stages 1 to 3) or the whole storage (stage 0), end to
//! end. The optimizer knows nothing of stages: it is given **segments**, one a unit, that tile its state,
//! and at each step one gradient slice and one parameter slice a segment, wherever these lie.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use zero_alloc::device::{AnySlice, DType, Device, DeviceError, DeviceSlice};
use zero_alloc::{Block, Pool, Purpose};
use zero_kernels::{AdamArgs, GradStats, Kernels, StepScalars, Vote};

use crate::decide::{BackwardScale, Decider, Decision, Progress, StepOutcome, StepRules};
use crate::{OptimError, StateKind};

/// One unit's place in the state, and what of it this rank votes for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The unit's name, for reports.
    pub name: String,
    /// Its elements of the state storage.
    pub state: Range<usize>,
    /// The elements, counted from the segment's start, whose gradients this rank votes for: its own shard.
    pub vote: Range<usize>,
}

impl Segment {
    /// A segment that holds this rank's shard, and votes for all of it: stages 1 to 3.
    pub fn shard(name: impl Into<String>, state: Range<usize>) -> Self {
        let vote = 0..state.end.saturating_sub(state.start);
        Self { name: name.into(), state, vote }
    }

    /// A segment that holds a whole unit, and votes for this rank's shard of it: stage 0. So the votes, and
    /// the norm, have the same bits as at the other stages.
    pub fn whole(name: impl Into<String>, state: Range<usize>, own_shard: Range<usize>) -> Self {
        Self { name: name.into(), state, vote: own_shard }
    }

    fn len(&self) -> usize {
        self.state.end - self.state.start
    }
}

/// The slices of one unit in a step.
#[derive(Clone, Copy, Debug)]
pub struct UnitSlices {
    /// The gradient, reduced over ranks: fp32, bf16 or fp16, as many elements as the segment.
    pub grad: AnySlice,
    /// The parameter in its own dtype, as many elements. It is written.
    pub param: AnySlice,
}

/// What all ranks gather before a step.
#[derive(Clone, Copy, Debug)]
pub struct Ballot<'a> {
    /// The votes of all ranks, in rank order.
    pub votes: &'a [Vote],
    /// The loss scale that this step's backward used: [`ShardedAdamW::backward_scale`] before it.
    pub backward_scale: BackwardScale,
    /// Micro-batches that were summed.
    pub micro_batches: usize,
}

/// AdamW over this rank's part of the state. One host thread drives it, on one compute stream.
pub struct ShardedAdamW<D: Device> {
    device: D,
    kernels: Arc<dyn Kernels<D>>,
    decider: Decider,
    param_dtype: DType,
    segments: Vec<Segment>,
    names: Vec<String>,
    master: Option<Block<D>>,
    first_moment: Block<D>,
    second_moment: Block<D>,
    stats: Block<D>,
    scalars: Block<D>,
    /// The stream of the last launch, behind which the blocks are given back.
    stream: D::Stream,
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
        rules: StepRules,
        param_dtype: DType,
        segments: Vec<Segment>,
    ) -> Result<Self, OptimError> {
        if !matches!(param_dtype, DType::F32 | DType::Bf16 | DType::F16) {
            return Err(OptimError::ParamDType { dtype: param_dtype });
        }
        let decider = Decider::new(rules)?;
        let elems = check_segments(&segments)?;
        let state = || pool.allocate(elems, DType::F32, Purpose::Optimizer, stream);
        let optim = Self {
            device: pool.device().clone(),
            kernels,
            decider,
            param_dtype,
            master: if param_dtype == DType::F32 { None } else { Some(state()?) },
            first_moment: state()?,
            second_moment: state()?,
            // Two eight-byte words a unit, as `GradStats`; five four-byte words, as `StepScalars`.
            stats: pool.allocate(2 * segments.len(), DType::F64, Purpose::Workspace, stream)?,
            scalars: pool.allocate(5, DType::F32, Purpose::Workspace, stream)?,
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
        let stats = self.stats_slice();
        for (i, (segment, grad)) in self.segments.iter().zip(grads).enumerate() {
            self.kernels.grad_stats(stream, grad.slice(segment.vote.clone()), stats.slice(i..i + 1))?;
        }
        Ok(())
    }

    /// Waits for the statistics, at most `limit`, and makes this rank's vote. `loss` is carried along.
    ///
    /// # Errors
    /// An operation on the stream failed, or the limit passed.
    pub fn vote(&self, stream: &D::Stream, loss: f64, limit: Duration) -> Result<Vote, OptimError> {
        let mut stats = vec![GradStats::default(); self.segments.len()];
        self.device.download(stream, view(&self.stats), bytemuck::cast_slice_mut(&mut stats), limit)?;
        Ok(Vote::new(&stats, loss))
    }

    /// Decides the step from all ranks' votes and enqueues it: parameters and state are updated when the
    /// stream gets there, or nothing is enqueued where the step is skipped.
    ///
    /// # Errors
    /// The slices do not fit the segments (nothing has changed), the loss scale is at its minimum, or the
    /// stream refused.
    pub fn step(
        &mut self,
        stream: &D::Stream,
        units: &[UnitSlices],
        ballot: Ballot<'_>,
        limit: Duration,
    ) -> Result<StepOutcome, OptimError> {
        self.check_slices("grads", units.len(), units.iter().map(|u| u.grad))?;
        self.check_slices("params", units.len(), units.iter().map(|u| u.param))?;
        for (segment, unit) in self.segments.iter().zip(units) {
            if unit.param.dtype() != self.param_dtype {
                let (expected, got) = (self.param_dtype, unit.param.dtype());
                return Err(OptimError::SliceDType { unit: segment.name.clone(), what: "params", expected, got });
            }
        }
        self.stream = stream.clone();
        let Ballot { votes, backward_scale, micro_batches } = ballot;
        let decision = self.decider.decide(votes, backward_scale, micro_batches, &self.names)?;
        if !decision.outcome.is_skipped() {
            self.enqueue_update(stream, units, &decision, limit)?;
        }
        Ok(decision.outcome)
    }

    fn enqueue_update(
        &self,
        stream: &D::Stream,
        units: &[UnitSlices],
        decision: &Decision,
        limit: Duration,
    ) -> Result<(), OptimError> {
        let scalars = view(&self.scalars);
        self.device.upload(stream, bytemuck::bytes_of(&decision.scalars), scalars, limit)?;
        // SAFETY: the block holds five four-byte words, as `StepScalars` does, and is aligned for them; it
        // lives as long as `self`, whose drop notes the stream.
        let scalars = unsafe { DeviceSlice::from_raw_parts(scalars.as_ptr().cast::<StepScalars>(), 1) };
        let first_moment = view(&self.first_moment).typed::<f32>()?;
        let second_moment = view(&self.second_moment).typed::<f32>()?;
        let master = self.master.as_ref().map(|m| view(m).typed::<f32>()).transpose()?;
        for (segment, unit) in self.segments.iter().zip(units) {
            if segment.state.is_empty() {
                continue;
            }
            let (master, param_out) = match master {
                Some(master) => (master.slice(segment.state.clone()), Some(unit.param)),
                None => (unit.param.typed::<f32>()?, None),
            };
            let args = AdamArgs {
                master,
                first_moment: first_moment.slice(segment.state.clone()),
                second_moment: second_moment.slice(segment.state.clone()),
                grad: unit.grad,
                param_out,
                scalars,
                hyper: decision.hyper,
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
    pub fn rules(&self) -> &StepRules {
        self.decider.rules()
    }

    /// The scalars that a checkpoint keeps.
    pub fn progress(&self) -> Progress {
        self.decider.progress()
    }

    /// Takes up the scalars of a checkpoint. The state itself is written through [`Self::state`].
    ///
    /// # Errors
    /// They do not fit the settings.
    pub fn restore(&mut self, progress: &Progress) -> Result<(), OptimError> {
        self.decider.restore(progress)
    }

    fn stats_slice(&self) -> DeviceSlice<GradStats> {
        // SAFETY: the block holds two eight-byte words a unit, as `GradStats` does, and is aligned for them;
        // it lives as long as `self`, whose drop notes the stream.
        unsafe { DeviceSlice::from_raw_parts(view(&self.stats).as_ptr().cast(), self.segments.len()) }
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
        let blocks = [&mut self.first_moment, &mut self.second_moment, &mut self.stats, &mut self.scalars];
        for block in self.master.iter_mut().chain(blocks) {
            // A stream that is gone runs nothing any more.
            let _ = block.record_use(&self.stream);
        }
    }
}

/// The block as a slice, for launches of its owner.
fn view<D: Device>(block: &Block<D>) -> AnySlice {
    // SAFETY: the optimizer owns the block; all its launches are on streams that its drop or `record_use`
    // notes, and one host thread enqueues them in order.
    unsafe { block.slice() }
}

/// Elements of the state, if the segments tile it and vote within themselves.
fn check_segments(segments: &[Segment]) -> Result<usize, OptimError> {
    let mut end = 0;
    for s in segments {
        if s.state.start != end || s.state.end < s.state.start {
            return Err(OptimError::Segments { unit: s.name.clone(), expected: end, got: s.state.start });
        }
        if s.vote.start > s.vote.end || s.vote.end > s.len() {
            let (start, end) = (s.vote.start, s.vote.end);
            return Err(OptimError::VoteRange { unit: s.name.clone(), start, end, len: s.len() });
        }
        end = s.state.end;
    }
    Ok(end)
}
