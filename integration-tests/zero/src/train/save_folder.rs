//! The folder that a run saves into.
//!
//! Why a folder belongs to a run: a folder of checkpoints, a metrics file and a report are refused
//! to another run before any work; a lock on the metrics file excludes runs that start together. A
//! resumed run that saves to the same folder keeps its id; into another one it gets a new id and
//! lists the old. A run without `--checkpoint` selects a free folder, so that the first command of
//! the README works twice and the earlier result stays. A run of one process creates that folder at
//! once, so that runs that start together get one each.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use zero_ckpt::{CkptError, StoreOptions, has_checkpoints};
use zero_comm::world::Ranks;

use crate::error::CliError;

/// The folder of a run without `--checkpoint`.
const DEFAULT: &str = "checkpoints";

/// Checks that `run` may save into `dir`, the value of `--checkpoint` or of `--resume`. Reads all
/// manifests there, so of a launcher's ranks only rank 0 does it; its error ends the job.
///
/// # Errors
/// The folder holds checkpoints of another run, or it is itself a checkpoint: exit code 2.
pub(crate) fn check(dir: &Path, run: &StoreOptions) -> Result<(), CliError> {
    if !is_checked_here() {
        return Ok(());
    }
    let dir_name = dir.display();
    run.check_runs(dir).map_err(|error| match error {
        CkptError::AnotherRun { path, run } => {
            let newest = path.file_name().unwrap_or_default().display();
            let run = run.map(|run| format!(" ({run})")).unwrap_or_default();
            usage!("--checkpoint {dir_name}: the folder holds checkpoints of another run{run}, the newest is {newest}: \
                 continue that run with --resume {dir_name}, or name another folder")
        }
        other => usage!("--checkpoint {other}"),
    })
}

/// Whether this process checks the folder: of a launcher's ranks only rank 0 does.
pub(super) fn is_checked_here() -> bool {
    let ranks = Ranks::from_env().ok().flatten();
    ranks.is_none_or(|ranks| ranks.rank == 0)
}

/// The folder of a run without `--checkpoint`: the first of `checkpoints`, `checkpoints-2`, ...
/// without checkpoints, so that the same command works again. Adds a note if that is not the first.
///
/// # Errors
/// A folder cannot be read.
pub(crate) fn default(notices: &mut Vec<String>) -> Result<PathBuf, CliError> {
    for folder in defaults() {
        if !has_checkpoints(&folder).map_err(CliError::usage)? {
            if folder != Path::new(DEFAULT) {
                notices.push(format!(
                    "{DEFAULT} holds an earlier run, so this one saves to {}; --resume {DEFAULT} --steps N \
                     continues the earlier one",
                    folder.display()
                ));
            }
            return Ok(folder);
        }
    }
    Ok(PathBuf::from(DEFAULT))
}

/// Creates the folder that [`default`] returned, or the next one that does not exist: another run
/// that started at the same time may have created it, and has not saved yet. Only for runs of one
/// process; the ranks of several would not agree.
///
/// # Errors
/// A folder cannot be created.
pub(crate) fn reserve(folder: &mut PathBuf, notices: &mut Vec<String>) -> Result<(), CliError> {
    let taken = folder.clone();
    for next in defaults().skip_while(|next| *next != taken) {
        match std::fs::create_dir(&next) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => continue,
            Err(e) => {
                return Err(usage!(
                    "failed to create the folder {}: {e}",
                    next.display()
                ));
            }
            Ok(()) if next != taken => {
                notices.push(format!(
                    "{} exists, so this run saves to {}",
                    taken.display(),
                    next.display()
                ));
                *folder = next;
            }
            Ok(()) => {}
        }
        break;
    }

    Ok(())
}

/// `checkpoints`, `checkpoints-2`, `checkpoints-3`, ...
fn defaults() -> impl Iterator<Item = PathBuf> {
    let numbered = (2u64..).map(|number| format!("{DEFAULT}-{number}"));
    std::iter::once(DEFAULT.to_owned())
        .chain(numbered)
        .map(PathBuf::from)
}
