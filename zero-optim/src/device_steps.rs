//! Device steps: the host enqueues each step without waiting.
//!
//! Statistics are gathered in device memory, the kernel of [`zero_kernels::step`] computes the
//! step, updates read its scalars, and a ring buffer stores each step's record until the
//! host reads it. So a step can be recorded into a graph and replayed.
//!
//! | buffer | bytes | purpose |
//! |---|---|---|
//! | control: config, state, all ranks' statistics, a ring of 64 records | 120 + 40 per rank + 6656 | `Workspace` |
//! | rates of the next steps | 32 per step and set of learning rate and betas | `Workspace` |

use std::collections::VecDeque;
use std::time::Duration;

use bytemuck::{Pod, Zeroable};
use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice, Event, Stream};
use zero_alloc::{Block, Pool, Purpose};
use zero_kernels::step::{StepConfig, StepRates, StepRecord, StepState};
use zero_kernels::{AdvanceArgs, RankStats};

use crate::controller::Divisor;
use crate::pieces::view;
use crate::{OptimError, ShardedOptimizer, StepOutcome, UnitSlices};

/// The capacity of the ring of records.
const RECORDS: usize = 64;

/// Settings of device steps.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct DeviceStepConfig {
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub ranks: usize,
    /// The divisor of the gradients, which are sums over ranks, in all of these steps.
    pub divisor: Divisor,
    /// The number of steps whose learning rates and betas are uploaded. Steps beyond it are skipped
    /// until [`ShardedOptimizer::prepare_device_steps`] is called again.
    pub steps: usize,
}

impl DeviceStepConfig {
    /// Settings of rank `rank` of `ranks` for `steps` steps.
    pub const fn new(rank: usize, ranks: usize, divisor: Divisor, steps: usize) -> Self {
        Self {
            rank,
            ranks,
            divisor,
            steps,
        }
    }

    /// Device memory of the buffers: 32 bytes per step and set of rates
    /// ([`ParamGroups::rate_sets`](crate::ParamGroups::rate_sets); 1 without groups), 40 per rank,
    /// and the config, the state and the records.
    pub const fn bytes(&self, rate_sets: usize) -> usize {
        (self.control_words() + self.steps * rate_sets * RATES_WORDS) * WORD_BYTES
    }

    const fn control_words(&self) -> usize {
        CONTROL_WORDS + self.ranks * STATS_WORDS + RECORDS * RECORD_WORDS
    }
}

/// Rank statistics in device memory, as bytes, for the all-gather before a step.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RankStatsSlices {
    /// This rank's statistics: its element of `all`.
    pub own: AnySlice,
    /// The statistics of all ranks, in rank order.
    pub all: AnySlice,
}

/// The buffers of device steps, and the steps with unread outcomes.
pub(crate) struct DeviceSteps<D: Device> {
    config: DeviceStepConfig,
    control: Block<D>,
    rates: Block<D>,
    /// The stream that downloads records while later steps run.
    reading: D::Stream,
    /// Iterations with unread outcomes. After an entry's event its record is complete.
    expected: VecDeque<(u64, D::Event)>,
    /// The iteration of the next step that is registered.
    next: u64,
    /// The iteration of the next step that is enqueued; at least `next`.
    enqueued: u64,
    /// The error that halted the run.
    halted: Option<OptimError>,
    /// Whether a setting has changed since the rates were uploaded.
    outdated: bool,
}

/// The start of the control block.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Control {
    config: StepConfig,
    state: StepState,
}

const WORD_BYTES: usize = size_of::<f64>();
const CONTROL_WORDS: usize = size_of::<Control>() / WORD_BYTES;
const STATS_WORDS: usize = size_of::<RankStats>() / WORD_BYTES;
const RECORD_WORDS: usize = size_of::<StepRecord>() / WORD_BYTES;
const RATES_WORDS: usize = size_of::<StepRates>() / WORD_BYTES;

/// `len` values of `T` from 8-byte word `word` of a block.
fn values<D: Device, T>(block: &Block<D>, word: usize, len: usize) -> DeviceSlice<T> {
    const { assert!(size_of::<T>().is_multiple_of(WORD_BYTES) && align_of::<T>() <= WORD_BYTES) };
    let words = view(block).slice(word..word + len * size_of::<T>() / WORD_BYTES);
    // SAFETY: the words, within the block, have the size and alignment of the values; the rest as
    // for `view`.
    unsafe { DeviceSlice::from_raw_parts(words.as_ptr().cast(), len, words.device()) }
}

impl<D: Device> DeviceSteps<D> {
    fn new(
        pool: &Pool<D>,
        stream: &D::Stream,
        config: DeviceStepConfig,
        rate_sets: usize,
    ) -> Result<Self, OptimError> {
        Ok(Self {
            config,
            control: pool.allocate(
                config.control_words(),
                DType::F64,
                Purpose::Workspace,
                stream,
            )?,
            rates: pool.allocate(
                config.steps * rate_sets * RATES_WORDS,
                DType::F64,
                Purpose::Workspace,
                stream,
            )?,
            reading: pool.device().create_stream("step records")?,
            expected: VecDeque::new(),
            next: 0,
            enqueued: 0,
            halted: None,
            outdated: false,
        })
    }

    fn state(&self) -> DeviceSlice<StepState> {
        values(&self.control, size_of::<StepConfig>() / WORD_BYTES, 1)
    }

    fn ranks(&self) -> DeviceSlice<RankStats> {
        values(&self.control, CONTROL_WORDS, self.config.ranks)
    }

    fn records(&self) -> DeviceSlice<StepRecord> {
        values(
            &self.control,
            CONTROL_WORDS + self.config.ranks * STATS_WORDS,
            RECORDS,
        )
    }

    /// Records that work enqueued on `stream` and on the reading stream may access the blocks.
    pub(crate) fn record_use(&mut self, stream: &D::Stream) {
        for block in [&mut self.control, &mut self.rates] {
            for stream in [stream, &self.reading] {
                // A closed stream runs no more work.
                let _closed = block.record_use(stream);
            }
        }
    }
}

fn bytes<T>(slice: DeviceSlice<T>) -> AnySlice {
    // SAFETY: the same memory as bytes, for which the maker of `slice` made the same promises.
    unsafe {
        AnySlice::from_raw_parts(
            slice.as_ptr().cast(),
            slice.len() * size_of::<T>(),
            DType::U8,
            slice.device(),
        )
    }
}

impl<D: Device> ShardedOptimizer<D> {
    /// Uploads the settings, the state and the learning rates of the next `config.steps` steps,
    /// which [`Self::enqueue_rank_stats`], [`Self::enqueue_advance`] and [`Self::enqueue_update`] then
    /// enqueue. Call it again
    /// after those steps, when all outcomes have been read: with the same config it allocates
    /// nothing, and all slices keep their addresses. Blocks the host.
    ///
    /// # Errors
    /// An outcome is unread, a setting is outside its range, or an allocation failed.
    pub fn prepare_device_steps(
        &mut self,
        pool: &Pool<D>,
        stream: &D::Stream,
        config: DeviceStepConfig,
        limit: Duration,
    ) -> Result<(), OptimError> {
        if self
            .device_steps
            .as_ref()
            .is_some_and(|d| !d.expected.is_empty())
        {
            return Err(OptimError::UnreadOutcomes);
        }
        self.enter(stream)?;
        config.divisor.check()?;
        OptimError::check(
            config.rank < config.ranks,
            "rank",
            config.rank as f64,
            "less than the number of ranks",
        )?;
        let optim_config = self.controller.config();
        let state = *self.controller.state();
        let first = state.schedule_position;
        let rates: Vec<StepRates> = (0..config.steps as u64)
            .flat_map(|ahead| self.controller.rates(ahead))
            .collect();
        let control = Control {
            config: optim_config.step_config(config.divisor, first),
            state,
        };

        if self
            .device_steps
            .as_ref()
            .is_none_or(|d| d.config != config)
        {
            let rate_sets = self.controller.rate_sets();
            let device_steps = DeviceSteps::new(pool, stream, config, rate_sets)?;
            self.free_device_steps();
            self.device_steps = Some(device_steps);
        }
        let Some(steps) = &mut self.device_steps else {
            return Err(OptimError::NotPrepared);
        };
        (steps.next, steps.enqueued, steps.halted) = (state.iteration, state.iteration, None);
        steps.outdated = false;
        self.device.fill_zero(stream, view(&steps.control))?;
        let start = bytes(values::<_, Control>(&steps.control, 0, 1));
        self.device
            .upload(stream, bytemuck::bytes_of(&control), start, limit)?;
        self.device.upload(
            stream,
            bytemuck::cast_slice(&rates),
            view(&steps.rates),
            limit,
        )?;

        Ok(())
    }

    fn prepared(&self) -> Result<&DeviceSteps<D>, OptimError> {
        self.device_steps
            .as_ref()
            .filter(|steps| !steps.outdated)
            .ok_or(OptimError::NotPrepared)
    }

    /// Requires new rates before the next device step.
    pub(crate) fn outdate_device_steps(&mut self) -> Result<(), OptimError> {
        if let Some(steps) = &mut self.device_steps {
            if !steps.expected.is_empty() {
                return Err(OptimError::UnreadOutcomes);
            }
            steps.outdated = true;
        }
        Ok(())
    }

    /// The loss scale of the next backward, in device memory. Work enqueued after
    /// [`Self::enqueue_advance`] reads the new value.
    ///
    /// # Errors
    /// [`OptimError::NotPrepared`].
    ///
    /// # Safety
    /// As for [`Self::rank_stats_slices`]; the next [`Self::prepare_device_steps`] with another
    /// config frees it, too.
    pub unsafe fn device_loss_scale(&self) -> Result<DeviceSlice<f64>, OptimError> {
        let state = self.prepared()?.state();
        const { assert!(std::mem::offset_of!(StepState, loss_scale) == 0) };
        // SAFETY: the first field of the state; the rest is the caller's promise.
        Ok(unsafe { DeviceSlice::from_raw_parts(state.as_ptr().cast(), 1, state.device()) })
    }

    /// Enqueues combining the results of [`Self::enqueue_stats`] with `loss` and `flags`, which are
    /// read in stream order, to this rank's statistics. Gather [`Self::rank_stats_slices`], then
    /// call [`Self::enqueue_advance`] and [`Self::enqueue_update`].
    ///
    /// # Errors
    /// [`OptimError::NotPrepared`], or the stream failed.
    pub fn enqueue_rank_stats(
        &mut self,
        stream: &D::Stream,
        loss: DeviceSlice<f64>,
        flags: DeviceSlice<u64>,
    ) -> Result<(), OptimError> {
        self.enter(stream)?;
        let steps = self.prepared()?;
        let rank = steps.config.rank;
        let ranks = steps.ranks();
        let own = ranks.slice(rank..rank + 1);
        Ok(self
            .kernels
            .rank_stats(stream, self.stats_slice(), loss, flags, own)?)
    }

    /// The statistics in device memory: gather `own` of all ranks into `all`.
    ///
    /// # Errors
    /// [`OptimError::NotPrepared`].
    ///
    /// # Safety
    /// The slices are used between [`Self::enqueue_rank_stats`] and [`Self::enqueue_advance`],
    /// ordered by streams and events after the first and before the second; or otherwise ordered
    /// with the optimizer's launches, and before the drop of the optimizer on the stream of its
    /// last call.
    pub unsafe fn rank_stats_slices(&self) -> Result<RankStatsSlices, OptimError> {
        let steps = self.prepared()?;
        let rank = steps.config.rank;
        let ranks = steps.ranks();
        Ok(RankStatsSlices {
            own: bytes(ranks.slice(rank..rank + 1)),
            all: bytes(ranks),
        })
    }

    /// Enqueues the kernel that advances the state by one step and writes the step's scalars and
    /// record. `stream` must be ordered after the all-gather. The host does not wait;
    /// [`Self::expect_outcome`] registers the step's outcome.
    ///
    /// # Errors
    /// [`OptimError::NotPrepared`], or the stream failed.
    pub fn enqueue_advance(&mut self, stream: &D::Stream) -> Result<(), OptimError> {
        self.enter(stream)?;
        let steps = self.prepared()?;
        let args = AdvanceArgs {
            ranks: steps.ranks(),
            config: values(&steps.control, 0, 1),
            rates: values(
                &steps.rates,
                0,
                steps.config.steps * self.scalars_slice().len(),
            ),
            state: steps.state(),
            scalars: self.scalars_slice(),
            records: steps.records(),
        };
        self.kernels.advance_step(stream, args)?;
        if let Some(steps) = &mut self.device_steps {
            steps.enqueued += 1;
        }
        Ok(())
    }

    /// Enqueues the update of parameters and state. Call it after [`Self::enqueue_advance`]. A
    /// skipped step writes nothing.
    ///
    /// # Errors
    /// The slices do not match the segments, or the stream failed.
    pub fn enqueue_update(
        &mut self,
        stream: &D::Stream,
        units: &[UnitSlices<'_, D>],
    ) -> Result<(), OptimError> {
        self.check_units(units)?;
        self.enter(stream)?;
        self.enqueue_updates(stream, units.iter().enumerate())
    }

    /// Registers one step that was enqueued on `stream`, by a call or by a graph launch. Its record
    /// is complete when the work enqueued so far has run. With 64 or more unread outcomes, reading
    /// them fails with [`OptimError::OutcomeLost`].
    ///
    /// # Errors
    /// [`OptimError::NotPrepared`], or the stream is closed.
    pub fn expect_outcome(&mut self, stream: &D::Stream) -> Result<(), OptimError> {
        self.prepared()?;
        self.enter(stream)?;
        let event = stream.record()?;
        let steps = self.device_steps.as_mut().ok_or(OptimError::NotPrepared)?;
        steps.expected.push_back((steps.next, event));
        steps.next += 1;
        steps.enqueued = steps.enqueued.max(steps.next);
        Ok(())
    }

    /// Waits at most `limit` for all registered steps and returns their unread outcomes, in order.
    /// Reading outcomes advances [`Self::progress`] and [`Self::loss_scale`].
    ///
    /// # Errors
    /// A step failed or halted the run: gradients overflowed with the loss scale at its minimum, or
    /// no rates were uploaded for it. Outcomes before the failure are returned first; the failure
    /// is returned by every later call. Or the limit passed.
    pub fn all_outcomes(&mut self, limit: Duration) -> Result<Vec<StepOutcome>, OptimError> {
        match self.wait_for_all(limit)? {
            Some(count) => self.read_outcomes(count, limit),
            None => Ok(Vec::new()),
        }
    }

    /// As [`Self::all_outcomes`], and forgets what it reads: for
    /// [schedules](zero_alloc::schedule), in which no step runs.
    ///
    /// # Errors
    /// A step failed, or the limit passed.
    pub fn skip_outcomes(&mut self, limit: Duration) -> Result<(), OptimError> {
        match self.wait_for_all(limit)? {
            Some(count) => self.read_records(count, limit).map(drop),
            None => Ok(()),
        }
    }

    /// Waits for all registered steps, and returns their number; `None` if no steps are prepared.
    fn wait_for_all(&self, limit: Duration) -> Result<Option<usize>, OptimError> {
        let Some(steps) = &self.device_steps else {
            return Ok(None);
        };
        if let Some((_, last)) = steps.expected.back() {
            last.synchronize(limit)?;
        }
        Ok(Some(steps.expected.len()))
    }

    /// Reads the first `count` registered records, whose steps have run.
    fn read_outcomes(
        &mut self,
        count: usize,
        limit: Duration,
    ) -> Result<Vec<StepOutcome>, OptimError> {
        let records = self.read_records(count, limit)?;
        let mut outcomes = Vec::with_capacity(count);
        for (iteration, record) in records {
            let outcome = match record.filter(|record| record.iteration == iteration) {
                Some(record) => self.controller.replay(&record, &self.names),
                None => Err(OptimError::OutcomeLost { iteration }),
            };
            match outcome {
                Ok(outcome) => outcomes.push(outcome),
                Err(error) => {
                    if let Some(steps) = &mut self.device_steps {
                        steps.halted = Some(error.clone());
                    }
                    if outcomes.is_empty() {
                        return Err(error);
                    }
                    break;
                }
            }
        }
        Ok(outcomes)
    }

    /// Takes the first `count` registered records, with the numbers of their steps; `None` for
    /// records that are lost.
    fn read_records(
        &mut self,
        count: usize,
        limit: Duration,
    ) -> Result<Vec<(u64, Option<StepRecord>)>, OptimError> {
        let steps = self.device_steps.as_mut().ok_or(OptimError::NotPrepared)?;
        if let Some(error) = &steps.halted {
            return Err(error.clone());
        }
        let Some((_, last)) = count
            .checked_sub(1)
            .and_then(|last| steps.expected.get(last))
        else {
            return Ok(Vec::new());
        };

        steps.reading.wait(last)?;
        // The range wraps at most once. Only these records are read, since a running step may be
        // writing another.
        let first = steps
            .expected
            .front()
            .map_or(0, |(iteration, _)| *iteration);
        let lost = first + RECORDS as u64 <= steps.enqueued;
        let start = (first % RECORDS as u64) as usize;
        let readable = if lost { 0 } else { count };
        let mut read = vec![StepRecord::default(); readable];
        let (head, tail) = read.split_at_mut(readable.min(RECORDS - start));

        for (at, records) in [(start, head), (0, tail)] {
            if !records.is_empty() {
                let from = bytes(steps.records().slice(at..at + records.len()));
                self.device.download(
                    &steps.reading,
                    from,
                    bytemuck::cast_slice_mut(records),
                    limit,
                )?;
            }
        }

        let iterations = steps
            .expected
            .drain(..count)
            .map(|(iteration, _)| iteration);
        let read = read.into_iter().map(Some).chain(std::iter::repeat(None));
        Ok(iterations.zip(read).collect())
    }
}
