//! The training loop of one rank, from the initial weights to the last checkpoint.

use std::path::PathBuf;
use std::time::Duration;

use zero_alloc::Pool;
use zero_alloc::device::{Device, Stream};
use zero_alloc::host::OpSpan;
use zero_ckpt::Reader;
use zero_comm::overlap::Overlap;
use zero_optim::StepOutcome;
use zero_shard::ZeroStage;

use crate::error::TrainError;
use crate::exchange::RankExchange;
use crate::model::Model;
use crate::offload::host_optimizer::{self, Optimizer};
use crate::rank::Rank;
use crate::saving::replicas;
use crate::saving::saver::Saver;
use crate::saving::state::{self, TrainerState};
use crate::stages::dense::Dense;
use crate::stages::stage::{self, MicroBatches, Stage, StepInputs};
use crate::stages::stage3::Stage3;
use crate::stages::stages_1_and_2::Stages1And2;
use crate::step::batch_loader::BatchLoader;
use crate::step::flags::{self, Flags};
use crate::step::recorder::{Part, Recorder};
use crate::telemetry::breakdown::{Breakdown, Tracks};
use crate::telemetry::memory_trace::{MemoryRecord, live};
use crate::telemetry::metrics::{CommBytes, MemoryBytes, NvmeBytes, StepMetrics};
use crate::telemetry::phase::{self, Phased, run_in};
use crate::validation::{Best, Evaluations};
use crate::workload::{RankSummary, RunOptions, Workload};

/// Under a static loss scale, this many skipped steps in a row mean that the weights are not
/// finite: skipping does not repair weights that produce infinite gradients. Until then no
/// checkpoint deletes older ones, and weights whose loss is not finite are not saved.
const MAX_SKIPPED: u64 = 100;

/// The results of one step.
struct StepResult {
    metrics: StepMetrics,
    /// Whether a rank requested to stop.
    stop: bool,
    spans: Vec<OpSpan>,
    memory: MemoryRecord,
}

/// The position of the run before a step.
#[derive(Clone, Copy, Debug)]
struct Before {
    /// Completed steps.
    steps: u64,
    /// Tokens of all ranks.
    tokens: u64,
    /// The end of the last step, in the timeline's time.
    end: Duration,
    /// Steps of this run.
    run_steps: u64,
    /// Seconds a step, with what is done between steps: an average that forgets old steps.
    step_s: f64,
}

impl Before {
    /// The least weight of the newest step in the average.
    const NEWEST: f64 = 0.2;

    /// Adds a step that ended at `end`.
    fn add(&mut self, tokens: u64, end: Duration) {
        let step_s = end.saturating_sub(self.end).as_secs_f64();
        // The second step replaces the first, which also loads kernels.
        let newest = (1.0 / self.run_steps.max(1) as f64).max(Self::NEWEST);
        self.step_s += newest * (step_s - self.step_s);
        (self.steps, self.run_steps) = (self.steps + 1, self.run_steps + 1);
        (self.tokens, self.end) = (self.tokens + tokens, end);
    }
}

/// Trains on one rank; all ranks call it. Calls `observe` with the metrics of each step.
///
/// # Errors
/// A failure of this rank, or a collective that failed because another rank did.
pub(crate) fn run_rank<D: Device>(
    rank: &Rank<D>,
    workload: &dyn Workload<D>,
    options: &RunOptions,
    observe: &mut dyn FnMut(&StepMetrics) -> Result<(), TrainError>,
) -> Result<RankSummary, TrainError> {
    let mut recorder = Recorder::new(rank)?;
    let mut model = workload.model(&rank.pool, &rank.compute)?;
    let mut stage = create(rank, &*model)?;
    // Declared last: its drop drains the compute stream before the others free memory.
    let flags = Flags::new(rank)?;
    let _guard = AbortOnPanic(rank);
    let result = Runner {
        rank,
        workload,
        options,
        flags: &flags,
    }
    .run(&mut *model, &mut *stage, &mut recorder, observe);
    if let Err(error) = &result {
        // Before memory is freed: otherwise peers wait for this rank, and its streams wait for
        // them.
        rank.comm.abort(&error.to_string());
    }
    result
}

/// Aborts the communicator when this rank panics, before its buffers are freed.
struct AbortOnPanic<'a, D: Device>(&'a Rank<D>);

impl<D: Device> Drop for AbortOnPanic<'_, D> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.comm.abort("panicked");
        }
    }
}

fn create<D: Device>(
    rank: &Rank<D>,
    model: &dyn Model<D>,
) -> Result<Box<dyn Stage<D>>, TrainError> {
    Ok(match rank.settings.stage {
        ZeroStage::Zero => Box::new(Dense::new(rank, model)?),
        ZeroStage::One => Box::new(Stages1And2::stage_1(rank, model)?),
        ZeroStage::Two => Box::new(Stages1And2::stage_2(rank, model)?),
        ZeroStage::Three => Box::new(Stage3::new(rank, model)?),
    })
}

struct Runner<'a, D: Device> {
    rank: &'a Rank<D>,
    workload: &'a dyn Workload<D>,
    options: &'a RunOptions,
    flags: &'a Flags<'a, D>,
}

impl<D: Device> Runner<'_, D> {
    fn run(
        &self,
        model: &mut dyn Model<D>,
        stage: &mut dyn Stage<D>,
        recorder: &mut Recorder<'_, D>,
        observe: &mut dyn FnMut(&StepMetrics) -> Result<(), TrainError>,
    ) -> Result<RankSummary, TrainError> {
        let Self {
            rank,
            workload,
            options,
            ..
        } = *self;
        let (resumed_at, tokens_before, best) = match &options.resume {
            Some(dir) => {
                // Rank 0 checks that the checkpoint is complete; every rank opens the files that it
                // reads.
                let (exchange, index) = (&mut RankExchange::of(rank), rank.comm.rank() as u64);
                let reader = Reader::open_on_ranks(dir, index, exchange, || {
                    Ok::<_, TrainError>(Reader::open(dir)?)
                })?;
                let state = state::restore(rank, stage, &reader)?;
                (
                    state.step,
                    state
                        .tokens_seen
                        .unwrap_or(state.step * self.tokens_per_step()),
                    state.best,
                )
            }
            None => {
                state::set_weights(rank, stage, &mut *workload.weights()?)?;
                (0, 0, None)
            }
        };
        let mut evaluations = Evaluations::new(options, best);
        let mut saver = match &options.checkpoint {
            Some((dir, _)) => Some(Saver::new(rank, dir, options.store())?),
            None => None,
        };
        stage.synchronize(rank)?;
        // Setting the weights is no part of the first step.
        drop(rank.timeline.take());
        let passes = rank.passes.len();
        let model: &mut dyn Model<D> = &mut Phased {
            model,
            timeline: &rank.timeline,
            passes,
        };

        let mut summary = RankSummary {
            step: resumed_at,
            cancelled: false,
            resumed_at,
            last: None,
            checkpoint: None,
            best: None,
            backing_allocations: [0; 2],
            last_spans: Vec::new(),
            memory: None,
            nvme: None,
        };
        let mut memory = MemoryRecord::default();
        let end = rank.timeline.now();
        let mut before = Before {
            steps: resumed_at,
            tokens: tokens_before,
            end,
            run_steps: 0,
            step_s: 0.0,
        };
        let mut batches = BatchLoader::new(rank, workload, options);
        let mut backings_after_two = None;
        let mut skipped_in_row = 0;
        while summary.step < options.steps && !summary.cancelled {
            if (summary.step - resumed_at).is_multiple_of(stage::STEPS_AHEAD) {
                stage::decide_on_device(rank, stage)?;
            }
            let StepResult {
                mut metrics,
                stop,
                spans,
                memory: record,
            } = self.step(
                model,
                stage,
                recorder,
                &mut batches,
                saver.as_mut(),
                &mut before,
            )?;
            (summary.last_spans, memory) = (spans, record);
            summary.cancelled = stop && metrics.step < options.steps;
            // An interrupted run saves at once.
            if !summary.cancelled && evaluations.is_due(metrics.step) {
                metrics.validation = evaluations.run(rank, stage, model)?;
                summary.cancelled = metrics.validation.is_none();
                batches.forget();
            }
            observe(&metrics)?;
            skipped_in_row = if metrics.skipped && self.is_static() {
                skipped_in_row + 1
            } else {
                0
            };
            if skipped_in_row == MAX_SKIPPED {
                return Err(TrainError::Diverged {
                    step: metrics.step,
                    skipped: skipped_in_row,
                });
            }
            summary.step = metrics.step;
            let validation = metrics.validation;
            let is_finite = skipped_in_row == 0 || metrics.loss.is_finite();
            summary.last = Some(metrics);
            if summary.step == resumed_at + 2 {
                backings_after_two = Some(rank.pool.report().backing_allocations);
                recorder.warm();
            }
            // A checkpoint of weights that may not be finite must not replace an older one; those
            // that give no finite loss are of no use.
            let every = options.checkpoint.as_ref().map_or(0, |(_, every)| *every);
            let due = every > 0 && summary.step.is_multiple_of(every) && skipped_in_row == 0;
            let is_last = summary.cancelled || summary.step == options.steps;
            let saves = due || is_last && is_finite;
            if saves
                && skipped_in_row > 0
                && let (Some((dir, _)), Some(mut old)) = (&options.checkpoint, saver.take())
            {
                old.complete(rank)?;
                drop(old);
                saver = Some(Saver::new(rank, dir, options.store().keep_last(None))?);
            }
            let old_best = evaluations.best;
            let is_best = evaluations.is_best(summary.step, validation, saves);
            if options
                .check_replicas
                .is_due(summary.step, saver.is_some() && (saves || is_best))
            {
                run_in(rank, phase::CHECKPOINT, || {
                    replicas::check(rank, stage, summary.step)
                })?;
            }
            if let (true, Some(saver)) = (saves || is_best, &mut saver) {
                let superseded = old_best.filter(|_| is_best);
                run_in(rank, phase::CHECKPOINT, || {
                    self.save(stage, saver, &before, evaluations.best, superseded)
                })?;
            }
        }
        if let Some(saver) = &mut saver {
            // No step ran: save the resumed state to the new directory, sharded for these ranks.
            if summary.last.is_none() && !options.saves_in_place() {
                if options.check_replicas.is_due(summary.step, true) {
                    replicas::check(rank, stage, summary.step)?;
                }
                self.save(stage, saver, &before, evaluations.best, None)?;
            }
            saver.complete(rank)?;
            summary.checkpoint = saver.newest().map(PathBuf::from);
        }
        let best_path = saver
            .as_ref()
            .and_then(|saver| saver.best().map(PathBuf::from));
        summary.best = evaluations.best.map(|best| (best, best_path));
        stage.synchronize(rank)?;
        // The update of the last step.
        summary.last_spans.extend(rank.timeline.take());
        summary.nvme = stage.optimizer().on_host().and_then(|host| host.nvme());
        let backings = rank.pool.report().backing_allocations;
        summary.backing_allocations = [backings_after_two.unwrap_or(backings), backings];
        if options.log_memory && summary.last.is_some() {
            summary.memory = Some(memory.trace(&summary.last_spans, rank.compute.name()));
        }
        Ok(summary)
    }

    /// Whether an overflow leaves the loss scale as it is. A skipped step then changes nothing, and
    /// only other data can end the skips.
    fn is_static(&self) -> bool {
        !self.rank.settings.optimizer.loss_scaling.can_fall()
    }

    /// The tokens of all ranks in a step.
    fn tokens_per_step(&self) -> u64 {
        let micro_batches = self.rank.comm.world_size() * self.rank.settings.grad_accum_steps;
        (self.options.micro_batch * self.options.seq_len * micro_batches) as u64
    }

    /// Runs the next step and adds it to `before`.
    fn step(
        &self,
        model: &mut dyn Model<D>,
        stage: &mut dyn Stage<D>,
        recorder: &mut Recorder<'_, D>,
        batches: &mut BatchLoader<'_, D>,
        mut saver: Option<&mut Saver>,
        before: &mut Before,
    ) -> Result<StepResult, TrainError> {
        let Self {
            rank,
            options,
            flags,
            ..
        } = *self;
        let grad_accum_steps = rank.settings.grad_accum_steps;
        let (start, done) = (rank.timeline.now(), before.steps);
        let sent = rank.comm.traffic() + recorder.sent();
        let host_pools = [&rank.host.plain, &rank.host.pinned];
        host_pools.iter().for_each(|pool| pool.reset_peaks());
        let on_file = stage.optimizer().on_host().and_then(|host| host.nvme());
        rank.pool.reset_peaks();
        if options.log_memory {
            rank.pool.record_changes();
        }
        let base = live(&rank.pool.report());

        rank.timeline.set_phase(phase::GRADIENTS);
        // SAFETY: used on the compute stream, that of the passes, which is drained before the model
        // is dropped.
        let loss = unsafe { model.loss() };
        rank.pool.device().fill_zero(&rank.compute, loss.erase())?;
        let load = &mut |model: &mut dyn Model<D>, micro| {
            run_in(rank, phase::DATA, || batches.load(model, done, micro))
        };
        stage.gradients(rank, model, &mut MicroBatches { recorder, load })?;
        rank.timeline.set_phase(phase::DECISION);
        let staging_bytes = saver.as_ref().map_or(0, |saver| saver.staging_bytes());
        let ready = saver.as_mut().is_some_and(|saver| saver.ready());
        let enqueued = flags.enqueue(&options.cancel, ready)?;
        if stage.optimizer().on_host().is_some() {
            // The host decides, so it waits for the flags here.
            flags.watch(&options.cancel, &enqueued)?;
        }
        let inputs = StepInputs {
            loss,
            flags: enqueued.flags,
        };
        recorder.run(Part::Decision, || stage.decide(rank, inputs))?;
        if let Optimizer::Device { optimizer, .. } = stage.optimizer() {
            optimizer.expect_outcome(&rank.compute)?;
        }
        rank.timeline.set_phase(phase::OPTIMIZER);
        recorder.run(Part::Update, || stage.update(rank))?;
        if done + 1 < options.steps {
            // An error recurs when the batch is needed.
            let _ignored = run_in(rank, phase::DATA, || batches.load(model, done + 1, 0));
        }
        // The only wait of a step, for the decision. The update overlaps it, and at stages 1 and 2
        // the gather after the update overlaps the next step's forward.
        flags.watch(&options.cancel, &enqueued)?;
        let outcome = stage::outcome(rank, stage)?;
        // A collective of a graph does not fail its stream when it is aborted, so its failure is
        // checked here.
        if let Some(failure) = rank.comm.failure() {
            return Err(failure.into());
        }
        if let (true, Some(saver)) = (flags::ready(outcome.flags()), saver) {
            run_in(rank, phase::CHECKPOINT, || saver.advance(rank))?;
        }

        let host = phase::host_track(rank.comm.rank());
        let update = host_optimizer::update_track(rank.comm.rank());
        let tracks = Tracks {
            compute: rank.compute.name(),
            update: &update,
            comm: rank.comm_stream.name(),
            host: &host,
        };
        let names = [tracks.compute, tracks.comm, tracks.host];
        let (spans, end) = (rank.timeline.take(), rank.timeline.now());
        let of_training = |s: &OpSpan| {
            *s.stream != *host && ![phase::CHECKPOINT, phase::VALIDATION].contains(&s.phase)
        };
        let (named, of_offload): (Vec<_>, Vec<_>) =
            spans.into_iter().partition(|s| names.contains(&&*s.stream));
        let (mut spans, others): (Vec<_>, Vec<_>) = named.into_iter().partition(of_training);
        let overlap = Overlap::of(&spans, tracks.comm);
        spans.extend(others);
        // The host's update and its transfers.
        let own = format!("rank {} ", rank.comm.rank());
        spans.extend(
            of_offload
                .into_iter()
                .filter(|span| span.stream.starts_with(&own)),
        );
        let step_ms = end.saturating_sub(start).as_secs_f64() * 1e3;
        let breakdown = options
            .breakdown
            .then(|| Breakdown::of(&spans, &tracks, before.end..end));
        let changes = rank.pool.take_changes().into_iter();
        let changes = changes
            .map(|change| {
                (
                    rank.timeline.at(change.at),
                    change.purpose,
                    change.bytes as i64,
                )
            })
            .collect();
        let memory = MemoryRecord {
            step: start..end,
            base,
            changes,
        };
        let micro_batches = rank.comm.world_size() * grad_accum_steps;
        let tokens = self.tokens_per_step();
        before.add(tokens, end);
        let metrics = StepMetrics {
            step: done + 1,
            loss: outcome.loss() / micro_batches as f64,
            grad_norm: outcome.grad_norm(),
            lr: outcome.lr(),
            loss_scale: outcome.loss_scale(),
            skipped: outcome.is_skipped(),
            tokens,
            step_ms,
            tokens_per_s: tokens as f64 / step_ms * 1e3,
            comm_bytes: CommBytes::from((rank.comm.traffic() + recorder.sent()).since(sent)),
            memory: MemoryBytes::from(&rank.pool.report())
                .with_host(&host_pools.map(Pool::report), rank.is_host())
                .with_staging(staging_bytes, rank.is_host()),
            nvme: stage
                .optimizer()
                .on_host()
                .and_then(|host| host.nvme())
                .zip(on_file)
                .map(|(now, before)| NvmeBytes {
                    read_bytes: now.read_bytes - before.read_bytes,
                    written_bytes: now.written_bytes - before.written_bytes,
                    ..now
                }),
            overlap: overlap.into(),
            tokens_seen: before.tokens,
            eta_s: options.steps.saturating_sub(before.steps) as f64 * before.step_s,
            breakdown,
            validation: None,
        };
        if let StepOutcome::Skipped {
            overflow,
            next_loss_scale,
            ..
        } = &outcome
            && rank.comm.rank() == 0
        {
            tracing::warn!(
                "step {} skipped: {} gradient elements are not finite (first on rank {}, unit {}); loss scale {} -> {}",
                metrics.step,
                overflow.nonfinite,
                overflow.rank,
                overflow.unit,
                metrics.loss_scale,
                next_loss_scale
            );
        }
        Ok(StepResult {
            metrics,
            stop: flags::stop(outcome.flags()),
            spans,
            memory,
        })
    }

    /// Begins a save. `best` is the best step so far; it has just replaced `superseded`.
    fn save(
        &self,
        stage: &mut dyn Stage<D>,
        saver: &mut Saver,
        before: &Before,
        best: Option<Best>,
        superseded: Option<Best>,
    ) -> Result<(), TrainError> {
        let state = TrainerState {
            step: before.steps,
            progress: stage.optimizer().progress(),
            seed: self.options.seed,
            data_fingerprint: self.workload.data_fingerprint(),
            tokens_seen: Some(before.tokens),
            best,
        };
        let documents = &self.options.documents;
        state::save(
            self.rank,
            stage,
            saver,
            &state,
            &self.workload.model_config(),
            documents,
            superseded,
        )
    }
}
