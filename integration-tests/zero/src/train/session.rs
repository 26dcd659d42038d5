//! A run as its user sees it: settings, progress, results.

use zero_trainer::{RankSummary, StepMetrics, TrainError};

use super::observer::Observer;
use super::setup::RunSetup;
use super::signals::{Signals, ended};
use super::{opening, summary};
use crate::error::CliError;
use crate::output::print_text;

/// Receives the metrics of each step.
pub(crate) type Observe<'a> = &'a mut (dyn FnMut(&StepMetrics) -> Result<(), TrainError> + Send);

/// Calls `train`. If this process prints, it shows settings, progress and results, and writes the
/// report.
///
/// # Errors
/// The failure of the run, or [`CliError::Interrupted`] if a signal ended it before its last step.
pub(crate) fn observed(
    setup: &RunSetup,
    signals: &Signals,
    prints: bool,
    train: impl FnOnce(Observe<'_>) -> Result<Vec<RankSummary>, CliError>,
) -> Result<(), CliError> {
    if !prints {
        return ended(&train(&mut |_| {
            setup.release_checkpoint();
            Ok(())
        })?);
    }
    print_text(opening::text(setup))?;
    signals.announce()?;
    let mut observer = Observer::new(setup)?;
    let summaries = train(&mut |metrics| {
        setup.release_checkpoint();
        observer.step(metrics, setup.samples.as_ref());
        Ok(())
    });

    observer.finish();
    let summaries = summaries?;
    observer.measure_again();
    let closing = summary::closing(setup, &summaries, &observer.seen, observer.utilization());
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

/// The error of a run.
pub(crate) fn run_error(error: TrainError) -> CliError {
    match error {
        TrainError::Usage(message) => CliError::Usage(message),
        other => CliError::failure(other),
    }
}
