//! `zero train`: from flags to a run, and from its results to text.

mod agreement;
mod args;
mod backend;
mod checks;
mod cuda;
mod loss_curve;
mod memory_check;
mod memory_limits;
mod memory_picture;
mod metrics_file;
mod mpi;
mod observer;
mod opening;
mod picture;
mod record;
mod resume;
mod run_setup;
mod save_folder;
mod schedule;
mod settings;
mod signals;
mod summary;
mod unused_keys;
mod utilization;
mod validation;

pub use args::TrainArgs;
pub(crate) use memory_check::rank_overhead_bytes;
pub(crate) use settings::BUCKET_ELEMS;

use super::CliError;
use super::output::print_text;
use args::DeviceChoice;
use backend::Backend;
use observer::Observer;
use resume::Resumed;
use run_setup::RunSetup;
use signals::Signals;
use zero_trainer::TrainError;
use zero_trainer::{RankSummary, StepMetrics, run_on_threads};

/// Trains.
///
/// # Errors
/// Wrong use, found before any rank starts; or the failure that ended the run.
pub fn run(args: &TrainArgs) -> Result<(), CliError> {
    // `None` with --resume: rank 0 finds the checkpoint, once the ranks are connected.
    let deferred = resume::is_deferred(args, mpi::launched_ranks(args));
    let resumed = if deferred { None } else { Resumed::open(args)? };
    let filled = match &resumed {
        Some(resumed) => resumed.fill(args),
        None if resume::recorded_device(args) == Some(DeviceChoice::Cpu) => TrainArgs {
            device: DeviceChoice::Cpu,
            ..args.clone()
        },
        None => args.clone(),
    };
    let (args, resumed) = (&filled, resumed.as_ref());
    if let Backend::Cuda { gpus, launched } = backend::choose(args)? {
        return cuda::run(args, resumed, gpus, launched);
    }
    if mpi::is_selected(args)? {
        return mpi::run(args, resumed);
    }
    let mut setup = RunSetup::new(
        args,
        resumed,
        args.ranks.or(args.recorded_ranks).unwrap_or(4),
        None,
    )?;
    memory_check::check(&setup, setup.ranks, args.memory_limit)?;
    if args.checkpoint.is_none() {
        setup.reserve_folder()?;
    }
    let signals = Signals::handle()?;
    setup.options.cancel = signals.received.clone();
    let (settings, workload, options) = (&setup.settings, &setup.workload, &setup.options);
    observed(&setup, &signals, true, |observe| {
        run_on_threads(
            setup.ranks,
            workload.threads,
            settings,
            workload,
            options,
            observe,
        )
        .map_err(run_error)
    })
}

/// Receives the metrics of each step.
type Observe<'a> = &'a mut (dyn FnMut(&StepMetrics) -> Result<(), TrainError> + Send);

/// Calls `train`. If this process prints, it shows settings, progress and results, and writes the
/// report.
///
/// # Errors
/// The failure of the run, or [`CliError::Interrupted`] if a signal ended it before its last step.
fn observed(
    setup: &RunSetup,
    signals: &Signals,
    prints: bool,
    train: impl FnOnce(Observe<'_>) -> Result<Vec<RankSummary>, CliError>,
) -> Result<(), CliError> {
    let ended = |summaries: &[RankSummary]| match summaries.iter().any(|s| s.cancelled) {
        true => Err(signals.interruption()),
        false => Ok(()),
    };
    if !prints {
        return ended(&train(&mut |_| Ok(()))?);
    }
    print_text(opening::text(setup))?;
    signals.announce()?;
    let mut observer = Observer::new(setup)?;
    let summaries = train(&mut |metrics| {
        observer.step(metrics);
        Ok(())
    });
    observer.finish();
    let summaries = summaries?;
    let closing = summary::closing(
        setup,
        &summaries,
        &observer.seen,
        observer.utilization.as_ref(),
    );
    print_text(&closing)?;
    observer.write_report(setup, &summaries, &closing)?;
    if let Some(failure) = observer.failure {
        return Err(failure);
    }
    ended(&summaries)?;
    match summary::diverged(setup, &observer.seen) {
        Some(message) => Err(CliError::Failure(message)),
        None => Ok(()),
    }
}

fn run_error(error: TrainError) -> CliError {
    match error {
        TrainError::Usage(message) => CliError::Usage(message),
        other => CliError::failure(other),
    }
}
