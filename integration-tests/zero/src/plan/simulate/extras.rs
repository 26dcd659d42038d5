//! The files of `--sweep` and `--timeline`.

use super::result::Point;
use super::{sweep, timeline};
use crate::error::CliError;
use crate::plan::args::PlanArgs;
use crate::plan::report::Report;
use crate::plan::request::PlanRequest;

/// Writes the files of `--sweep` and `--timeline`, and returns the points of the sweep.
pub(in crate::plan) fn extras(
    args: &PlanArgs,
    request: &PlanRequest,
    report: &Report,
) -> Result<Vec<Point>, CliError> {
    let Some(on) = &report.simulated_on else {
        return Ok(Vec::new());
    };
    if let Some(path) = &args.simulate.timeline {
        let beside = args.simulate.timeline_beside.as_deref();
        timeline::write(path, beside, request, on, report)?;
    }
    match args.simulate.sweep {
        Some(gpus) => sweep::run(args, gpus, on),
        None => Ok(Vec::new()),
    }
}
