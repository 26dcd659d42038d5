//! The training loop of one rank, from the initial weights to the last checkpoint.
//!
//! [`Run::step`] enqueues a step and waits for its decision; [`Observer`] measures it. Between
//! steps the loop evaluates, saves and compares replicas.

use std::ops::Range;
use std::path::{Path, PathBuf};

use zero_alloc::device::Device;
use zero_ckpt::Reader;
use zero_optim::StepOutcome;
use zero_shard::ZeroStage;

use crate::error::TrainError;
use crate::model::Model;
use crate::offload::settings::Home;
use crate::options::RunOptions;
use crate::rank::Rank;
use crate::rank_exchange::RankExchange;
use crate::samples;
use crate::saving::replicas;
use crate::saving::saver::Saver;
use crate::saving::state::{self, TrainerState};
use crate::stages::grad_errors::SavedErrors;
use crate::stages::optimizer::STEPS_AHEAD;
use crate::stages::stage::{MicroBatches, Stage};
use crate::stages::stage3::Stage3;
use crate::stages::stages_0_to_2::Stages0To2;
use crate::step::batch_loader::BatchLoader;
use crate::step::flags::{self, Enqueued, Flags};
use crate::step::inputs::StepInputs;
use crate::step::recorder::{GraphPart, Recorder};
use crate::telemetry::metrics::Best;
use crate::telemetry::metrics::{QuantFigures, StepMetrics};
use crate::telemetry::observer::{Moved, Observed, Observer, tokens_per_step};
use crate::telemetry::phase::Phase;
use crate::telemetry::phased::{Phased, run_in};
use crate::validation::Evaluations;
use crate::workload::{RankSummary, Workload};

/// Under a static loss scale, this many skipped steps in a row mean that the weights are not
/// finite: skipping does not repair weights that produce infinite gradients. Until then no
/// checkpoint deletes older ones, and weights whose loss is not finite are not saved.
const MAX_SKIPPED: u64 = 100;

/// Receives the metrics of each step.
type Observe<'a> = &'a mut dyn FnMut(&StepMetrics) -> Result<(), TrainError>;

/// Trains on one rank; all ranks call it. Calls `observe` with the metrics of each step.
///
/// # Errors
/// A failure of this rank, or a collective that failed because another rank did.
pub(crate) fn run_rank<D: Device>(
    rank: &Rank<D>,
    workload: &dyn Workload<D>,
    options: &RunOptions,
    observe: Observe<'_>,
) -> Result<RankSummary, TrainError> {
    let mut recorder = Recorder::new(rank)?;
    let mut model = workload.model(&rank.pool, &rank.compute, &rank.mesh.model)?;
    let mut stage = create(rank, &*model)?;
    // Declared last: its drop drains the compute stream before the others free memory.
    let flags = Flags::new(rank)?;
    let _guard = AbortOnPanic(rank);

    let parts = StepContext {
        rank,
        workload,
        options,
        flags: &flags,
        model: Phased::new(&mut *model, rank),
        stage: &mut *stage,
        recorder: &mut recorder,
    };

    let result = Run::start(parts).and_then(|run| run.train(observe));
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
        ZeroStage::Zero | ZeroStage::One | ZeroStage::Two => {
            Box::new(Stages0To2::new(rank, model)?)
        }
        ZeroStage::Three => Box::new(Stage3::new(rank, model)?),
    })
}

/// What computes a step.
struct StepContext<'a, D: Device> {
    rank: &'a Rank<D>,
    workload: &'a dyn Workload<D>,
    options: &'a RunOptions,
    flags: &'a Flags<'a, D>,
    model: Phased<'a, D>,
    stage: &'a mut dyn Stage<D>,
    recorder: &'a mut Recorder<'a, D>,
}

impl<D: Device> StepContext<'_, D> {
    /// Enqueues the step after `done` steps, and loads the first batch of the next one. `ready` is
    /// called behind backward: whether the rank is ready to advance the save in progress.
    fn enqueue_step(
        &mut self,
        batches: &mut BatchLoader<'_, D>,
        done: u64,
        ready: impl FnOnce() -> bool,
    ) -> Result<Enqueued<D::Event>, TrainError> {
        let Self {
            rank,
            options,
            flags,
            model,
            stage,
            recorder,
            ..
        } = self;

        let rank = *rank;
        let on_host = stage.optimizer().on_host().is_some();

        rank.timeline.set_phase(Phase::Gradients.name());
        // SAFETY: used on the compute stream, that of the passes, which is drained before the model
        // is dropped.
        let loss = unsafe { model.loss() };
        rank.pool.device().fill_zero(&rank.compute, loss.erase())?;
        let load = &mut |model: &mut dyn Model<D>, micro| {
            run_in(rank, Phase::Data, || batches.load(model, done, micro))
        };
        stage.gradients(rank, model, &mut MicroBatches { recorder, load })?;

        rank.timeline.set_phase(Phase::Decision.name());
        let mut enqueued = flags.enqueue(&options.cancel, ready())?;
        if on_host {
            // The host decides, so it waits for the flags here.
            flags.watch(&options.cancel, &enqueued)?;
        }
        let inputs = StepInputs {
            loss,
            flags: enqueued.flags,
        };

        let optimizer = stage.optimizer();
        recorder.run(GraphPart::Decision, || optimizer.decide(rank, inputs))?;
        optimizer.expect_outcome(rank)?;
        let device = rank.pool.device();
        let sums = rank.quant_sums.as_ref();
        let quantised = sums.map(|sums| sums.exchange(device, &*rank.comm));
        enqueued.quantised = quantised.transpose()?;

        rank.timeline.set_phase(Phase::Optimizer.name());
        recorder.run(GraphPart::Update, || stage.update(rank))?;
        if done + 1 < options.steps {
            // An error recurs when the batch is needed.
            let _ignored = run_in(rank, Phase::Data, || batches.load(model, done + 1, 0));
        }
        Ok(enqueued)
    }
}

/// Elements of the last weights that a recording sets.
const LAST_ELEMS: usize = 1 << 24;

/// Enqueues `steps` steps of a rank whose streams record, from weights that nobody sets. Calls
/// `mark` before each step and after the last.
///
/// # Errors
/// As the first steps of [`run_rank`].
pub(crate) fn enqueue_steps<D: Device>(
    rank: &Rank<D>,
    workload: &dyn Workload<D>,
    options: &RunOptions,
    mark: &mut dyn FnMut(),
) -> Result<(), TrainError> {
    let mut recorder = Recorder::new(rank)?;
    let mut model = workload.model(&rank.pool, &rank.compute, &rank.mesh.model)?;
    let mut stage = create(rank, &*model)?;
    let flags = Flags::new(rank)?;
    let mut batches = BatchLoader::new(rank, workload, options);
    let mut parts = StepContext {
        rank,
        workload,
        options,
        flags: &flags,
        model: Phased::new(&mut *model, rank),
        stage: &mut *stage,
        recorder: &mut recorder,
    };
    // Weights that are set decide which pieces of a file the first update finds in memory. That are
    // the last ones.
    let on_file = matches!(rank.settings.offload.optimizer, Home::Nvme(_));
    let elems_of = |unit| {
        let held = rank.held(unit);
        (held.end - held.start) as usize
    };
    let mut behind: usize = (0..rank.units()).map(elems_of).sum();
    for unit in 0..rank.units() {
        let is_last = behind <= LAST_ELEMS || unit + 1 == rank.units();
        let elems = if on_file && is_last {
            elems_of(unit)
        } else {
            0
        };
        behind -= elems_of(unit);
        let any = &mut |part: Range<usize>, values: &mut Vec<f32>| {
            values.resize(part.len(), 0.0);
            Ok(())
        };
        let optimizer = parts.stage.optimizer();
        optimizer.set_weights(rank, unit, elems, any)?;
    }
    parts.stage.publish(rank)?;
    parts.stage.synchronize(rank)?;
    parts.stage.optimizer().prepare_steps(rank)?;
    for done in 0..options.steps {
        mark();
        let enqueued = parts.enqueue_step(&mut batches, done, || false)?;
        flags.watch(&options.cancel, &enqueued)?;
        parts.stage.optimizer().skip_outcome(rank)?;
    }
    mark();
    Ok(())
}

/// A run on one rank.
struct Run<'a, D: Device> {
    parts: StepContext<'a, D>,
    batches: BatchLoader<'a, D>,
    evaluations: Evaluations<'a>,
    saver: Option<Saver>,
    observer: Observer<'a, D>,
    /// Skipped steps in a row that no lower loss scale can end.
    skipped_in_row: u64,
    /// The pool's allocations from the device up to the end of the second step.
    backings_after_two: Option<u64>,
    summary: RankSummary,
}

/// The decision of a step.
struct Decided {
    outcome: StepOutcome,
    /// Host memory of a checkpoint while the step ran.
    staging_bytes: u64,
    /// The error of quantised values and its bound.
    quantised: Option<[QuantFigures; 2]>,
}

impl<'a, D: Device> Run<'a, D> {
    /// Sets the weights, or restores a checkpoint.
    fn start(mut parts: StepContext<'a, D>) -> Result<Self, TrainError> {
        let StepContext {
            rank,
            workload,
            options,
            ..
        } = parts;

        let resumed = match &options.resume {
            Some(dir) => Some(restore(&mut parts, dir)?),
            None => {
                state::set_weights(rank, parts.stage, &mut *workload.weights()?)?;
                None
            }
        };

        let resumed_at = resumed.as_ref().map_or(0, |state| state.step);
        let tokens = resumed.as_ref().map_or(0, |state| {
            let by_steps = state.step * tokens_per_step(rank, options);
            state.tokens_seen.unwrap_or(by_steps)
        });

        let evaluations = Evaluations::new(options, resumed.and_then(|state| state.best));
        let saver = match &options.checkpoint {
            Some((dir, _)) => Some(Saver::new(rank, dir, options.store())?),
            None => None,
        };

        parts.stage.synchronize(rank)?;
        // Setting the weights is no part of the first step.
        drop(rank.timeline.take());

        Ok(Self {
            parts,
            batches: BatchLoader::new(rank, workload, options),
            evaluations,
            saver,
            observer: Observer::new(rank, options, resumed_at, tokens),
            skipped_in_row: 0,
            backings_after_two: None,
            summary: RankSummary::starting_at(resumed_at),
        })
    }

    fn train(mut self, observe: Observe<'_>) -> Result<RankSummary, TrainError> {
        while self.summary.step < self.parts.options.steps && !self.summary.cancelled {
            let metrics = self.observed_step(observe)?;
            self.summary.step = metrics.step;
            if metrics.step == self.summary.resumed_at + 2 {
                let report = self.parts.rank.pool.report();
                self.backings_after_two = Some(report.backing_allocations);
                self.parts.recorder.warm();
            }
            self.save_if_due(&metrics)?;
            self.summary.last = Some(metrics);
        }
        self.finish()
    }

    /// Runs a step and the evaluation after it, and passes the metrics to `observe`.
    fn observed_step(&mut self, observe: Observe<'_>) -> Result<StepMetrics, TrainError> {
        let done = self.summary.step;
        let StepContext { rank, options, .. } = self.parts;
        if (done - self.summary.resumed_at).is_multiple_of(STEPS_AHEAD) {
            self.parts.stage.optimizer().prepare_steps(rank)?;
        }

        let before = self.moved();
        let began = self.observer.begin(before);
        let Decided {
            outcome,
            staging_bytes,
            quantised,
        } = self.step(done)?;

        let moved = self.moved();
        let Observed { mut metrics, spans } =
            self.observer.end(began, &outcome, moved, staging_bytes);
        self.summary.last_spans = spans;
        metrics.quant_error = quantised.map(|[error, _]| error);
        metrics.quant_bound = quantised.map(|[_, bound]| bound);

        self.summary.cancelled = flags::stop(outcome.flags()) && metrics.step < options.steps;
        // An interrupted run saves at once.
        if !self.summary.cancelled && self.evaluations.is_due(metrics.step) {
            let StepContext { stage, model, .. } = &mut self.parts;
            metrics.validation = self.evaluations.run(rank, *stage, model)?;
            self.summary.cancelled = metrics.validation.is_none();
            self.batches.forget();
        }

        if let Some(samples) = &options.samples
            && !self.summary.cancelled
            && samples.is_due(metrics.step, options.steps)
        {
            let StepContext { stage, model, .. } = &mut self.parts;
            metrics.sample = run_in(rank, Phase::Validation, || {
                samples::run(rank, *stage, model, options, samples)
            })?;
            self.batches.forget();
        }

        if self.summary.cancelled {
            self.summary.signal = flags::signal(rank, &options.signal)?;
        }
        observe(&metrics)?;
        self.count_skipped(&metrics)?;
        Ok(metrics)
    }

    /// Enqueues the step after `done` steps, loads the next batch meanwhile, and waits for the
    /// decision.
    fn step(&mut self, done: u64) -> Result<Decided, TrainError> {
        let saver = &mut self.saver;
        let mut staging_bytes = 0;
        let ready = || {
            staging_bytes = saver.as_ref().map_or(0, Saver::staging_bytes);
            saver.as_mut().is_some_and(Saver::ready)
        };
        let enqueued = self.parts.enqueue_step(&mut self.batches, done, ready)?;

        // The only wait of a step, for the decision. The update overlaps it, and at stages 1 and 2
        // the gather after the update overlaps the next step's forward.
        let StepContext {
            rank,
            options,
            flags,
            stage,
            ..
        } = &mut self.parts;
        flags.watch(&options.cancel, &enqueued)?;
        let outcome = stage.optimizer().outcome(rank)?;
        // A collective of a graph does not fail its stream when it is aborted, so its failure is
        // checked here.
        if let Some(failure) = rank.mesh.failure() {
            return Err(failure.into());
        }
        let quantised = match (&rank.quant_sums, &enqueued.quantised) {
            (Some(sums), Some(exchanged)) => {
                Some(sums.read(exchanged, rank.settings.host_limit())?)
            }
            _ => None,
        };
        let next_scale = stage.optimizer().progress().loss_scaler.scale;
        if let Some(errors) = stage.grad_errors() {
            errors.end_step(rank, done + 1, &outcome, next_scale)?;
        }
        if let (true, Some(saver)) = (flags::ready(outcome.flags()), &mut self.saver) {
            run_in(rank, Phase::Checkpoint, || saver.advance(rank))?;
        }

        Ok(Decided {
            outcome,
            staging_bytes,
            quantised,
        })
    }

    fn moved(&mut self) -> Moved {
        let host = self.parts.stage.optimizer().on_host();
        Moved {
            nvme: host.and_then(|host| host.nvme()),
            sent: self.parts.rank.mesh.sent() + self.parts.recorder.sent(),
        }
    }

    /// Fails after too many skipped steps in a row. Where the loss scale cannot fall, a skipped
    /// step changes nothing, and only other data can end the skips.
    fn count_skipped(&mut self, metrics: &StepMetrics) -> Result<(), TrainError> {
        let is_static = !self.parts.rank.settings.optimizer.loss_scaling.can_fall();
        if !metrics.skipped || !is_static {
            self.skipped_in_row = 0;
            return Ok(());
        }
        self.skipped_in_row += 1;
        if self.skipped_in_row < MAX_SKIPPED {
            return Ok(());
        }
        Err(TrainError::Diverged {
            step: metrics.step,
            skipped: self.skipped_in_row,
        })
    }

    /// Compares replicas and begins a save after a step, where each is due.
    fn save_if_due(&mut self, metrics: &StepMetrics) -> Result<(), TrainError> {
        let StepContext { rank, options, .. } = self.parts;
        // A checkpoint of weights that may not be finite must not replace an older one; those that
        // give no finite loss are of no use.
        let maybe_bad = self.skipped_in_row > 0;
        let every = options.checkpoint.as_ref().map_or(0, |(_, every)| *every);
        let due = every > 0 && metrics.step.is_multiple_of(every) && !maybe_bad;
        let is_last = self.summary.cancelled || metrics.step == options.steps;
        let saves = due || is_last && (!maybe_bad || metrics.loss.is_finite());
        if saves && maybe_bad {
            self.keep_older_checkpoints()?;
        }

        let old_best = self.evaluations.best;
        let is_best = self
            .evaluations
            .is_best(metrics.step, metrics.validation, saves);
        let will_save = self.saver.is_some() && (saves || is_best);

        if options.check_replicas.is_due(metrics.step, will_save) {
            let stage = &mut *self.parts.stage;
            run_in(rank, Phase::Checkpoint, || {
                replicas::check(rank, stage, metrics.step)
            })?;
        }

        if will_save {
            let superseded = old_best.filter(|_| is_best);
            run_in(rank, Phase::Checkpoint, || self.save(superseded))?;
        }

        Ok(())
    }

    /// Lets later saves delete no older checkpoint.
    fn keep_older_checkpoints(&mut self) -> Result<(), TrainError> {
        let StepContext { rank, options, .. } = self.parts;
        if let (Some((dir, _)), Some(mut old)) = (&options.checkpoint, self.saver.take()) {
            old.complete(rank)?;
            drop(old);
            let keeping = options.store().keep_last(None);
            self.saver = Some(Saver::new(rank, dir, keeping)?);
        }
        Ok(())
    }

    /// Begins a save, if the run saves. `superseded` was the best step until this one.
    fn save(&mut self, superseded: Option<Best>) -> Result<(), TrainError> {
        let StepContext {
            rank,
            workload,
            options,
            ..
        } = self.parts;

        let Some(saver) = &mut self.saver else {
            return Ok(());
        };
        let completed = self.observer.completed();
        let state = TrainerState {
            step: completed.steps,
            progress: self.parts.stage.optimizer().progress(),
            seed: options.seed,
            data_fingerprint: Some(workload.data_fingerprint()),
            tokens_seen: Some(completed.tokens),
            best: self.evaluations.best,
            grad_errors: SavedErrors::of(rank),
        };

        state::save(
            rank,
            self.parts.stage,
            saver,
            &state,
            &workload.model_config(),
            &options.documents,
            superseded,
        )
    }

    /// Completes saves and the last update.
    fn finish(mut self) -> Result<RankSummary, TrainError> {
        let StepContext { rank, options, .. } = self.parts;
        let step = self.summary.step;
        // No step ran: save the resumed state to the new directory, sharded for these ranks.
        if self.saver.is_some() && self.summary.last.is_none() && !options.saves_in_place() {
            if options.check_replicas.is_due(step, true) {
                replicas::check(rank, self.parts.stage, step)?;
            }
            self.save(None)?;
        }

        let mut summary = self.summary;
        if let Some(saver) = &mut self.saver {
            saver.complete(rank)?;
            summary.checkpoint = saver.newest().map(PathBuf::from);
        }

        let best_path = self.saver.as_ref().and_then(Saver::best).map(PathBuf::from);
        summary.best = self.evaluations.best.map(|best| (best, best_path));

        self.parts.stage.synchronize(rank)?;
        // The update of the last step.
        summary.last_spans.extend(rank.timeline.take());
        let host = self.parts.stage.optimizer().on_host();
        summary.nvme = host.and_then(|host| host.nvme());
        let backings = rank.pool.report().backing_allocations;
        summary.backing_allocations = [self.backings_after_two.unwrap_or(backings), backings];
        if options.log_memory && summary.last.is_some() {
            summary.memory = Some(self.observer.memory_trace(&summary.last_spans));
        }

        Ok(summary)
    }
}

/// Restores the checkpoint to resume from. Rank 0 checks that it is complete; every rank opens the
/// files that it reads.
fn restore<D: Device>(
    parts: &mut StepContext<'_, D>,
    dir: &Path,
) -> Result<TrainerState, TrainError> {
    let rank = parts.rank;
    let index = rank.comm.rank() as u64;
    let exchange = &mut RankExchange::of(rank);
    let reader = Reader::open_on_ranks(dir, index, exchange, || {
        Ok::<_, TrainError>(Reader::open(dir)?)
    })?;
    state::restore(rank, parts.stage, reader, || parts.workload.weights())
}
