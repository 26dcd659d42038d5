//! The folder of `--report`: whose report it holds, and who may replace it.

use std::path::{Path, PathBuf};
use std::{fs, io};

use zero_ckpt::files::{self, SMALL_FILE_BYTES};
use zero_ckpt::has_checkpoints;
use zero_trainer::StepMetrics;

use super::{aside, metrics_file};
use crate::error::CliError;
use crate::paths::absolute;
use crate::settings::record::RUN_JSON;

/// The figures of a report.
pub(super) const SUMMARY: &str = "summary.json";

/// The steps of the report in `dir`.
pub(crate) fn reported_steps(dir: &Path) -> impl Iterator<Item = StepMetrics> {
    let path = dir.join(SUMMARY);
    let is_file = path.metadata().is_ok_and(|metadata| metadata.is_file());
    let summary = if is_file {
        fs::read(path).unwrap_or_default()
    } else {
        Vec::new()
    };
    let mut summary: serde_json::Value = serde_json::from_slice(&summary).unwrap_or_default();
    let steps = summary
        .get_mut("steps")
        .and_then(|steps| steps.as_array_mut())
        .map(std::mem::take);
    steps
        .unwrap_or_default()
        .into_iter()
        .filter_map(|step| metrics_file::parse_step(&step.to_string()))
}

/// The place of the figures of a report that has steps after `step`, when a run resumed there
/// replaces it; `None` if it has none.
pub(crate) fn aside(dir: &Path, step: u64) -> Option<PathBuf> {
    let has_later = reported_steps(dir).any(|reported| reported.step > step);
    has_later.then(|| aside::path(&dir.join(SUMMARY), step))
}

/// Moves the figures of a report with steps after `step` aside.
///
/// # Errors
/// A failed rename.
pub(crate) fn move_aside(dir: &Path, step: u64) -> io::Result<()> {
    match aside(dir, step) {
        Some(aside) => fs::rename(dir.join(SUMMARY), aside),
        None => Ok(()),
    }
}

/// Checks that a resumed run may replace the report in `dir` that its record names, and no flag:
/// the report is of one of `runs`, on this machine. Links are not theirs, and writing to them would
/// write elsewhere.
///
/// # Errors
/// The reason.
pub(crate) fn check_recorded(dir: &Path, runs: &[&str]) -> Result<(), String> {
    let is_link = |path: &Path| {
        path.symlink_metadata()
            .is_ok_and(|metadata| metadata.is_symlink())
    };
    if is_link(dir) || FILES.iter().any(|name| is_link(&dir.join(name))) {
        return Err("links are there now".to_owned());
    }
    if !report_run(dir).is_some_and(|run| runs.contains(&run.as_str())) {
        return Err("no report of it is there now".to_owned());
    }
    Ok(())
}

/// The run whose report is in `dir`.
fn report_run(dir: &Path) -> Option<String> {
    let record: serde_json::Value =
        serde_json::from_slice(&files::read(&dir.join(RUN_JSON), SMALL_FILE_BYTES).ok()?).ok()?;
    record["run"].as_str().map(str::to_owned)
}

/// The files of a report.
const FILES: [&str; 6] = [
    "summary.txt",
    SUMMARY,
    RUN_JSON,
    "loss.svg",
    "trace.json",
    "memory.svg",
];

/// Checks that the run, which saves to `checkpoints`, may write its report to `dir`: it is no
/// folder of checkpoints, and no file of a report is there, or they are the report of one of
/// `runs`.
///
/// # Errors
/// Exit code 2; the folder stays as it is.
pub(crate) fn check(dir: &Path, checkpoints: Option<&Path>, runs: &[&str]) -> Result<(), CliError> {
    let dir_name = dir.display();
    let saves_here = checkpoints.is_some_and(|checkpoints| absolute(checkpoints) == absolute(dir));
    if saves_here || has_checkpoints(dir).map_err(CliError::usage)? {
        return Err(CliError::Usage(format!(
            "--report {dir_name}: the folder is for checkpoints; name another folder"
        )));
    }
    let Some(file) = FILES.iter().find(|name| dir.join(name).exists()) else {
        return Ok(());
    };
    match report_run(dir) {
        Some(run) if runs.contains(&run.as_str()) => Ok(()),
        Some(run) => Err(CliError::Usage(format!(
            "--report {dir_name}: the folder holds the report of another run ({run}); name another folder"
        ))),
        None => Err(CliError::Usage(format!(
            "--report {dir_name}: the folder holds a file {file} that is not of a report; name another folder"
        ))),
    }
}
