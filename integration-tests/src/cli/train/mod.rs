//! `zero train`: flags to a run, and the run to what a person reads.

mod args;
mod cuda;
mod curve;
mod device;
mod memory;
mod mpi;
mod observe;
mod plan;
mod refused;
mod summary;
mod unused;

pub use args::TrainArgs;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::CliError;
use super::output::say;
use crate::error::TrainError;
use crate::trainer::{RankSummary, run_on_threads};
use device::Chosen;
use observe::Observer;
use plan::Plan;

/// Trains.
///
/// # Errors
/// Wrong use, found before anything is started; or the failure that ended the run.
pub fn run(args: &TrainArgs) -> Result<(), CliError> {
    if let Chosen::Cuda { gpus, launched } = device::choose(args)? {
        return cuda::run(args, gpus, launched);
    }
    if mpi::asked_for(args)? {
        return mpi::run(args);
    }
    let mut plan = Plan::new(args, args.ranks.unwrap_or(4), None)?;
    memory::check(&plan)?;
    plan.options.cancel = cancelled_by_signals()?;
    say(summary::opening(&plan))?;
    let mut observer = Observer::new(&plan)?;
    let summaries = run_on_threads(
        plan.ranks,
        plan.workload.threads,
        &plan.settings,
        &plan.workload,
        &plan.options,
        &mut |metrics| observer.step(metrics),
    );
    observer.finish();
    close(&plan, &observer, &summaries.map_err(failure)?)
}

/// The figures, printed and reported.
fn close(plan: &Plan, observer: &Observer, summaries: &[RankSummary]) -> Result<(), CliError> {
    let closing = summary::closing(plan, summaries, &observer.seen);
    say(&closing)?;
    observer.write_report(plan, summaries, &closing)
}

fn failure(error: TrainError) -> CliError {
    match error {
        TrainError::Usage(message) => CliError::Usage(message),
        other => CliError::failure(other),
    }
}

/// Set by the first SIGINT or SIGTERM: the run ends after the step under way. The second ends the process.
fn cancelled_by_signals() -> Result<Arc<AtomicBool>, CliError> {
    let cancel = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&cancel);
    let set = ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    });
    set.map_err(|e| CliError::Failure(format!("no handler for signals: {e}")))?;
    Ok(cancel)
}
