//! `zero plan`: memory and traffic of each stage on a given number of GPUs, the stages that fit,
//! and changes that make one fit. The arithmetic is zero-shard's; the activations of a GPT-2 are
//! exact, others an estimate.

mod advice;
mod args;
mod largest;
mod report;
mod request;
mod simulate;
mod stage;
mod table;
#[cfg(test)]
mod tests;
mod transfers;

use crate::error::CliError;
use crate::output::{print_note, print_text};
pub(crate) use advice::recommended;
pub use args::PlanArgs;
pub(crate) use report::Report;
pub(crate) use request::PlanRequest;
pub(crate) use simulate::{Machines, calibrated, cluster};
pub(crate) use stage::{CONTEXT_BYTES, Stage, evaluate};

/// Runs `zero plan`.
///
/// # Errors
/// A model, a configuration or sizes that cannot be used.
pub fn run(args: &PlanArgs) -> Result<(), CliError> {
    if simulate::predicted(&args.simulate)? {
        return Ok(());
    }
    let args = &simulate::with_hardware(args)?;
    let (request, mut report, notices) = plan_of(args)?;
    for notice in notices {
        print_note(format_args!("warning: {notice}"));
    }
    report.sweep = simulate::extras::extras(args, &request, &report)?;
    if args.json {
        print_text(serde_json::to_string_pretty(&report).map_err(CliError::failure)? + "\n")
    } else {
        print_text(table::text(&report) + &simulate::sweep_table(&report.sweep))
    }
}

/// The request, its report, and warnings for the user.
fn plan_of(args: &PlanArgs) -> Result<(PlanRequest, Report, Vec<String>), CliError> {
    let (request, notices) = PlanRequest::new(args)?;
    let on = simulate::SimulatedOn::of(args)?;
    let report = Report::with_times(&request, on.as_ref()).map_err(CliError::usage)?;
    Ok((request, report, notices))
}

/// The report, and warnings for the user.
#[cfg(test)]
fn plan(args: &PlanArgs) -> Result<(Report, Vec<String>), CliError> {
    let (_, report, notices) = plan_of(&simulate::with_hardware(args)?)?;
    Ok((report, notices))
}
