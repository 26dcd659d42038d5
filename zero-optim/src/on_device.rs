//! Steps that are decided on the device: the host enqueues them and waits for nothing.
//!
//! Votes are gathered in device memory, a kernel decides ([`zero_kernels::step`]), Adam's launches read what it
//! decided, and a report of each step lies in a ring until the host reads it. So a step can be recorded into a graph
//! and replayed.
//!
//! | buffer | bytes | held for |
//! |---|---|---|
//! | control: settings, state, all ranks' votes, a ring of 64 reports | 112 + 40 a rank + 6656 | `Workspace` |
//! | rates of the coming steps | 24 a step | `Workspace` |

use std::collections::VecDeque;
use std::time::Duration;

use bytemuck::{Pod, Zeroable};
use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice, Event, Stream};
use zero_alloc::{Block, Pool, Purpose};
use zero_kernels::step::{StepRates, StepReport, StepSettings, StepState};
use zero_kernels::{DecideArgs, RankStats};

use crate::adamw::view;
use crate::{LossScaling, OptimError, ShardedAdamW, StepOutcome, UnitSlices};

/// Reports that are kept until they are read.
const REPORTS: usize = 64;

/// What steps that are decided on the device have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSteps {
    /// This rank.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
    /// Micro-batches summed in a step.
    pub micro_batches: usize,
    /// For how many steps learning rates and betas are put on the device. Behind them the run is halted until
    /// [`ShardedAdamW::decide_on_device`] is called again.
    pub steps: usize,
}

impl DeviceSteps {
    /// Bytes that the decisions take on the device: 24 a step, 40 a rank, and the settings, the state and the reports.
    pub const fn bytes(&self) -> usize {
        (self.control_words() + self.steps * RATES_WORDS) * WORD_BYTES
    }

    const fn control_words(&self) -> usize {
        CONTROL_WORDS + self.ranks * VOTE_WORDS + REPORTS * REPORT_WORDS
    }
}

/// The votes in device memory, as bytes, to be gathered before a step.
#[derive(Clone, Copy, Debug)]
pub struct RankStatsSlices {
    /// This rank's: within `all`, at its own place.
    pub own: AnySlice,
    /// All ranks', in rank order.
    pub all: AnySlice,
}

pub(crate) struct OnDevice<D: Device> {
    plan: DeviceSteps,
    control: Block<D>,
    rates: Block<D>,
    /// Reports are read here, beside what runs.
    reading: D::Stream,
    /// Steps whose reports are not read yet, and the points at which these are there.
    expected: VecDeque<(u64, D::Event)>,
    /// The iteration of the next step.
    next: u64,
    /// Why no step goes on.
    halted: Option<OptimError>,
}

/// How the control block begins.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Control {
    settings: StepSettings,
    state: StepState,
}

const WORD_BYTES: usize = size_of::<f64>();
const CONTROL_WORDS: usize = size_of::<Control>() / WORD_BYTES;
const VOTE_WORDS: usize = size_of::<RankStats>() / WORD_BYTES;
const REPORT_WORDS: usize = size_of::<StepReport>() / WORD_BYTES;
const RATES_WORDS: usize = size_of::<StepRates>() / WORD_BYTES;

/// `len` values of `T` at word `word` of a block.
fn place<D: Device, T>(block: &Block<D>, word: usize, len: usize) -> DeviceSlice<T> {
    const { assert!(size_of::<T>().is_multiple_of(WORD_BYTES) && align_of::<T>() <= WORD_BYTES) };
    let words = view(block).slice(word..word + len * size_of::<T>() / WORD_BYTES);
    // SAFETY: as many words as the values have, aligned as words; the block lives as long as the optimizer, whose
    // drop notes the streams.
    unsafe { DeviceSlice::from_raw_parts(words.as_ptr().cast(), len) }
}

impl<D: Device> OnDevice<D> {
    fn new(pool: &Pool<D>, stream: &D::Stream, plan: DeviceSteps) -> Result<Self, OptimError> {
        Ok(Self {
            plan,
            control: pool.allocate(plan.control_words(), DType::F64, Purpose::Workspace, stream)?,
            rates: pool.allocate(plan.steps * RATES_WORDS, DType::F64, Purpose::Workspace, stream)?,
            reading: pool.device().create_stream("reports")?,
            expected: VecDeque::new(),
            next: 0,
            halted: None,
        })
    }

    fn settings(&self) -> DeviceSlice<StepSettings> {
        place(&self.control, 0, 1)
    }

    fn state(&self) -> DeviceSlice<StepState> {
        place(&self.control, size_of::<StepSettings>() / WORD_BYTES, 1)
    }

    fn votes(&self) -> DeviceSlice<RankStats> {
        place(&self.control, CONTROL_WORDS, self.plan.ranks)
    }

    fn reports(&self) -> DeviceSlice<StepReport> {
        place(&self.control, CONTROL_WORDS + self.plan.ranks * VOTE_WORDS, REPORTS)
    }

    /// Notes that what is enqueued on `stream`, and the reading of reports, may use the blocks.
    pub(crate) fn record_use(&mut self, stream: &D::Stream) {
        for block in [&mut self.control, &mut self.rates] {
            for stream in [stream, &self.reading] {
                // A stream that refuses is closed, and uses the block no more.
                let _closed = block.record_use(stream);
            }
        }
    }
}

fn bytes<T>(slice: DeviceSlice<T>) -> AnySlice {
    // SAFETY: the same memory, for as long.
    unsafe { AnySlice::from_raw_parts(slice.as_ptr().cast(), slice.len() * size_of::<T>(), DType::U8) }
}

impl<D: Device> ShardedAdamW<D> {
    /// Puts everything that decisions need on the device; the next steps are taken by [`Self::enqueue_vote`] and
    /// [`Self::enqueue_step`]. Call it again for the steps behind `plan.steps`, with all reports read: with the same
    /// plan it takes no memory then, and all slices stay where they are. Blocks the host.
    ///
    /// # Errors
    /// A report is not read yet, or there is no memory.
    pub fn decide_on_device(
        &mut self,
        pool: &Pool<D>,
        stream: &D::Stream,
        plan: DeviceSteps,
        limit: Duration,
    ) -> Result<(), OptimError> {
        let rules = self.decider.rules();
        let at = self.decider.progress();
        if self.on_device.as_ref().is_some_and(|d| !d.expected.is_empty()) {
            return Err(OptimError::ReportsLeft);
        }
        OptimError::check(plan.micro_batches > 0, "micro_batches", 0.0, "at least 1")?;
        OptimError::check(plan.rank < plan.ranks, "rank", plan.rank as f64, "less than the number of ranks")?;
        let rates: Vec<StepRates> = (0..plan.steps as u64).map(|s| rules.rates(at.schedule_position + s)).collect();
        let control = Control { settings: settings(rules, &plan, at.schedule_position), state: state(&at) };
        if self.on_device.as_ref().is_none_or(|d| d.plan != plan) {
            let on_device = OnDevice::new(pool, stream, plan)?;
            self.forget_device();
            self.on_device = Some(on_device);
        }
        self.stream = stream.clone();
        let Some(on_device) = &mut self.on_device else { return Err(OptimError::NotOnDevice) };
        (on_device.next, on_device.halted) = (at.loss_scaler.iteration, None);
        let device = &self.device;
        device.fill_zero(stream, view(&on_device.control))?;
        device.upload(
            stream,
            bytemuck::bytes_of(&control),
            bytes(place::<_, Control>(&on_device.control, 0, 1)),
            limit,
        )?;
        device.upload(stream, bytemuck::cast_slice(&rates), view(&on_device.rates), limit)?;
        Ok(())
    }

    fn on_device(&self) -> Result<&OnDevice<D>, OptimError> {
        self.on_device.as_ref().ok_or(OptimError::NotOnDevice)
    }

    /// The loss scale of the next backward, in device memory: right for what is enqueued behind the decision before it.
    ///
    /// # Errors
    /// Steps are not decided on the device.
    pub fn loss_scale(&self) -> Result<DeviceSlice<f64>, OptimError> {
        let state = self.on_device()?.state();
        const { assert!(std::mem::offset_of!(StepState, loss_scale) == 0) };
        // SAFETY: the first field of the state, which lies there as long as it.
        Ok(unsafe { DeviceSlice::from_raw_parts(state.as_ptr().cast(), 1) })
    }

    /// Enqueues this rank's vote, from statistics that [`Self::enqueue_stats`] has enqueued, and the loss and the flags
    /// that lie at `loss` and `flags` when the stream gets there. Gather `own` of all ranks into `all`, then call
    /// [`Self::enqueue_step`].
    ///
    /// # Errors
    /// Steps are not decided on the device, or the stream refused.
    pub fn enqueue_vote(
        &mut self,
        stream: &D::Stream,
        loss: DeviceSlice<f64>,
        flags: DeviceSlice<u64>,
    ) -> Result<RankStatsSlices, OptimError> {
        self.stream = stream.clone();
        let on_device = self.on_device()?;
        let (rank, votes) = (on_device.plan.rank, on_device.votes());
        let own = votes.slice(rank..rank + 1);
        self.kernels.make_vote(stream, self.stats_slice(), loss, flags, own)?;
        Ok(RankStatsSlices { own: bytes(own), all: bytes(votes) })
    }

    /// Enqueues the decision of the step and the update, which does nothing where the step is skipped. The stream is
    /// behind the gathering of the votes. The host waits for nothing and learns nothing: see [`Self::expect_report`].
    ///
    /// # Errors
    /// The slices do not fit the segments, steps are not decided on the device, or the stream refused.
    pub fn enqueue_step(&mut self, stream: &D::Stream, units: &[UnitSlices]) -> Result<(), OptimError> {
        self.check_units(units)?;
        self.enqueue_decision(stream)?;
        self.enqueue_update(stream, units)
    }

    /// The decision of [`Self::enqueue_step`] alone: what is reported is there behind it, beside the update.
    ///
    /// # Errors
    /// Steps are not decided on the device, or the stream refused.
    pub fn enqueue_decision(&mut self, stream: &D::Stream) -> Result<(), OptimError> {
        self.stream = stream.clone();
        let on_device = self.on_device()?;
        let args = DecideArgs {
            votes: on_device.votes(),
            settings: on_device.settings(),
            rates: place(&on_device.rates, 0, on_device.plan.steps),
            state: on_device.state(),
            scalars: self.scalars_slice(),
            reports: on_device.reports(),
        };
        Ok(self.kernels.decide_step(stream, args)?)
    }

    /// The update of [`Self::enqueue_step`] alone, behind [`Self::enqueue_decision`].
    ///
    /// # Errors
    /// The slices do not fit the segments, or the stream refused.
    pub fn enqueue_update(&mut self, stream: &D::Stream, units: &[UnitSlices]) -> Result<(), OptimError> {
        self.check_units(units)?;
        self.stream = stream.clone();
        let hyper = self.decider.rules().hyper;
        self.enqueue_adam(stream, units, hyper)
    }

    /// Notes that one decision was enqueued on `stream`, by a call or by a graph that holds one: its report is
    /// there when the stream gets here. The oldest are lost where 64 or more are not read.
    ///
    /// # Errors
    /// Steps are not decided on the device, or the stream is gone.
    pub fn expect_report(&mut self, stream: &D::Stream) -> Result<(), OptimError> {
        let point = stream.record()?;
        let on_device = self.on_device.as_mut().ok_or(OptimError::NotOnDevice)?;
        on_device.expected.push_back((on_device.next, point));
        on_device.next += 1;
        Ok(())
    }

    /// What became of steps that have been decided and were not reported yet, in order, without waiting for any
    /// other. The optimizer's [`progress`](Self::progress) and [`backward_scale`](Self::backward_scale) move with the
    /// reports.
    ///
    /// # Errors
    /// A step failed; or the run is halted, since gradients overflowed with the loss scale at its minimum or rates
    /// are used up.
    pub fn reports(&mut self, limit: Duration) -> Result<Vec<StepOutcome>, OptimError> {
        let Some(on_device) = &self.on_device else { return Ok(Vec::new()) };
        let mut count = 0;
        for (_, point) in &on_device.expected {
            if !point.is_done()? {
                break;
            }
            count += 1;
        }
        self.read_reports(count, limit)
    }

    /// [`Self::reports`] of all steps that are expected, waiting for them, at most `limit`.
    ///
    /// # Errors
    /// As for [`Self::reports`], or the limit passed.
    pub fn all_reports(&mut self, limit: Duration) -> Result<Vec<StepOutcome>, OptimError> {
        let Some(on_device) = &self.on_device else { return Ok(Vec::new()) };
        if let Some((_, last)) = on_device.expected.back() {
            last.synchronize(limit)?;
        }
        let count = on_device.expected.len();
        self.read_reports(count, limit)
    }

    /// Reads the first `count` reports, which are there.
    fn read_reports(&mut self, count: usize, limit: Duration) -> Result<Vec<StepOutcome>, OptimError> {
        let on_device = self.on_device.as_mut().ok_or(OptimError::NotOnDevice)?;
        if let Some(error) = &on_device.halted {
            return Err(error.clone());
        }
        let Some((_, last)) = count.checked_sub(1).and_then(|last| on_device.expected.get(last)) else {
            return Ok(Vec::new());
        };
        on_device.reading.wait(last)?;
        // The ring wraps at most once. Only what is asked for is read: a step under way may be writing beside it.
        let first = on_device.expected.front().map_or(0, |(iteration, _)| *iteration);
        let lost = first + REPORTS as u64 <= on_device.next;
        let start = (first % REPORTS as u64) as usize;
        let readable = if lost { 0 } else { count };
        let mut read = vec![StepReport::default(); readable];
        let (head, tail) = read.split_at_mut(readable.min(REPORTS - start));
        for (place, reports) in [(start, head), (0, tail)] {
            if !reports.is_empty() {
                let from = bytes(on_device.reports().slice(place..place + reports.len()));
                self.device.download(&on_device.reading, from, bytemuck::cast_slice_mut(reports), limit)?;
            }
        }
        let mut outcomes = Vec::with_capacity(count);
        let mut read = read.iter();
        for (iteration, _) in on_device.expected.drain(..count) {
            let Some(report) = read.next().filter(|report| report.iteration == iteration) else {
                on_device.halted = Some(OptimError::ReportLost { iteration });
                break;
            };
            match self.decider.follow(report, &self.names) {
                Ok(outcome) => outcomes.push(outcome),
                Err(error) => {
                    on_device.halted = Some(error);
                    break;
                }
            }
        }
        match &on_device.halted {
            // What came before the failure is told first; the failure, at the next call.
            Some(error) if outcomes.is_empty() => Err(error.clone()),
            _ => Ok(outcomes),
        }
    }
}

fn settings(rules: &crate::OptimizerConfig, plan: &DeviceSteps, position: u64) -> StepSettings {
    let mut settings = StepSettings {
        max_grad_norm: rules.max_grad_norm,
        min_scale: 0.0,
        window: 1,
        micro_batches: plan.micro_batches as u64,
        first_position: position,
        dynamic: 0,
        hysteresis: 1,
        consecutive_hysteresis: 0,
        fail_at_min: 0,
    };
    if let LossScaling::Dynamic(d) = &rules.loss_scaling {
        settings.min_scale = d.min_scale;
        settings.window = d.window;
        settings.dynamic = 1;
        settings.hysteresis = d.hysteresis;
        settings.consecutive_hysteresis = d.consecutive_hysteresis.into();
        settings.fail_at_min = d.fail_at_min.into();
    }
    settings
}

fn state(progress: &crate::Progress) -> StepState {
    StepState {
        loss_scale: progress.loss_scaler.scale,
        iteration: progress.loss_scaler.iteration,
        since: progress.loss_scaler.since,
        adam_steps: progress.adam_steps,
        schedule_position: progress.schedule_position,
        skipped_steps: progress.skipped_steps,
        hysteresis_left: progress.loss_scaler.hysteresis_left,
        halted: StepState::RUNNING,
    }
}
