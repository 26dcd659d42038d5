//! The folder that a run saves into.

use std::path::{Path, PathBuf};

use zero_ckpt::{CkptError, StoreOptions, has_checkpoints};

use crate::cli::CliError;

/// The folder of a run without `--checkpoint`.
const DEFAULT: &str = "checkpoints";

/// Checks that `run` may save into `dir`, the value of `--checkpoint` or of `--resume`.
///
/// # Errors
/// The folder holds checkpoints of another run, or it is itself a checkpoint: exit code 2.
pub(super) fn check(dir: &Path, run: &StoreOptions) -> Result<(), CliError> {
    let dir_name = dir.display();
    run.check_runs(dir).map_err(|error| match error {
        CkptError::AnotherRun { path, run } => {
            let newest = path.file_name().unwrap_or_default().display();
            let run = run.map(|run| format!(" ({run})")).unwrap_or_default();
            CliError::Usage(format!(
                "--checkpoint {dir_name}: the folder holds checkpoints of another run{run}, the newest is {newest}: \
                 continue that run with --resume {dir_name}, or name another folder"
            ))
        }
        other => CliError::usage(other),
    })
}

/// The folder of a run without `--checkpoint`: the first of `checkpoints`, `checkpoints-2`, ...
/// without checkpoints, so that the same command works again. Adds a note if that is not the first.
///
/// # Errors
/// A folder cannot be read.
pub(super) fn default(notices: &mut Vec<String>) -> Result<PathBuf, CliError> {
    let mut folder = PathBuf::from(DEFAULT);
    for number in 2.. {
        if !has_checkpoints(&folder).map_err(CliError::usage)? {
            break;
        }
        folder = PathBuf::from(format!("{DEFAULT}-{number}"));
    }
    if folder != Path::new(DEFAULT) {
        notices.push(format!(
            "{DEFAULT} holds an earlier run, so this one saves to {}; --resume {DEFAULT} --steps N \
             continues the earlier one",
            folder.display()
        ));
    }
    Ok(folder)
}
