//! The folder of `--report`: whose report it holds, and who may replace it.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use zero_ckpt::files::{self, SMALL_FILE_BYTES};
use zero_ckpt::has_checkpoints;
use zero_trainer::{RunOptions, StepMetrics};

use super::{aside, metrics_file};
use crate::error::CliError;
use crate::paths::absolute;
use crate::settings::record::RUN_JSON;

/// The figures of a report.
pub(super) const SUMMARY: &str = "summary.json";

/// The steps of the report in `dir`; none if there is no report.
///
/// # Errors
/// The figures of the report cannot be read.
pub(crate) fn reported_steps(dir: &Path) -> Result<Vec<StepMetrics>, CliError> {
    let path = dir.join(SUMMARY);
    let failed = |why: String| {
        usage!(
            "{}: not the figures of a report: {why}; remove the file, or name another folder with --report",
            path.display()
        )
    };
    let summary = files::read_if_present(&path, u64::MAX).map_err(|e| failed(e.to_string()))?;
    let Some(summary) = summary else {
        return Ok(Vec::new());
    };

    let mut summary: serde_json::Value =
        serde_json::from_slice(&summary).map_err(|e| failed(e.to_string()))?;
    let steps = summary["steps"].as_array_mut().map(std::mem::take);
    let steps = steps.ok_or_else(|| failed("it has no `steps`".to_owned()))?;
    let steps = steps
        .into_iter()
        .filter_map(|step| metrics_file::parse_step(&step.to_string()));
    Ok(steps.collect())
}

/// The place of the figures of a report that has steps after `step`, when a run resumed there
/// replaces it; `None` if it has none.
///
/// # Errors
/// As [`reported_steps`].
pub(crate) fn aside(dir: &Path, step: u64) -> Result<Option<PathBuf>, CliError> {
    let steps = reported_steps(dir)?;
    let has_later = steps.iter().any(|reported| reported.step > step);
    Ok(has_later.then(|| aside::path(&dir.join(SUMMARY), step)))
}

/// Moves the figures of a report with steps after `step` aside.
///
/// # Errors
/// As [`reported_steps`], or a failed rename.
pub(crate) fn move_aside(dir: &Path, step: u64) -> Result<(), CliError> {
    let Some(aside) = aside(dir, step)? else {
        return Ok(());
    };
    let summary = dir.join(SUMMARY);
    fs::rename(&summary, aside).map_err(|e| failure!("failed to rename {}: {e}", summary.display()))
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
    match report_run(dir)? {
        Some(run) if runs.contains(&run.as_str()) => Ok(()),
        _ => Err("no report of it is there now".to_owned()),
    }
}

/// The run whose report is in `dir`.
///
/// # Errors
/// Its settings cannot be read.
fn report_run(dir: &Path) -> Result<Option<String>, String> {
    let failed = |e: &dyn fmt::Display| format!("its {RUN_JSON} cannot be read: {e}");
    let record = files::read_if_present(&dir.join(RUN_JSON), SMALL_FILE_BYTES);
    let Some(record) = record.map_err(|e| failed(&e))? else {
        return Ok(None);
    };
    let record: serde_json::Value = serde_json::from_slice(&record).map_err(|e| failed(&e))?;
    Ok(record["run"].as_str().map(str::to_owned))
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

/// Checks that a run may write its report to `dir`: it is no folder of checkpoints, and no file of a
/// report is there, or they are the report of the run or of one that it resumed. Returns a note if
/// the run, resumed at `first_step`, will move figures.
///
/// # Errors
/// Exit code 2; the folder stays as it is.
pub(crate) fn check(
    dir: &Path,
    options: &RunOptions,
    first_step: u64,
) -> Result<Option<String>, CliError> {
    let dir_name = dir.display();
    let usage = |why: &str| usage!("--report {dir_name}: {why}; name another folder");
    let checkpoints = options.checkpoint.as_ref();
    let saves_here = checkpoints.is_some_and(|(folder, _)| absolute(folder) == absolute(dir));
    if saves_here || has_checkpoints(dir).map_err(CliError::usage)? {
        return Err(usage("the folder is for checkpoints"));
    }

    if let Some(file) = FILES.iter().find(|name| dir.join(name).exists()) {
        match report_run(dir).map_err(|why| usage(&why))? {
            Some(run) if options.runs().contains(&run.as_str()) => {}
            Some(run) => {
                return Err(usage(&format!(
                    "the folder holds the report of another run ({run})"
                )));
            }
            None => {
                return Err(usage(&format!(
                    "the folder holds a file {file} that is not of a report"
                )));
            }
        }
    }

    let aside = aside(dir, first_step)?;
    Ok(aside.map(|aside| {
        format!(
            "{dir_name}: figures of steps after {first_step} to be moved to {}",
            aside.display()
        )
    }))
}
