//! Compares the bytes of a run's checkpoints with the room of their folder, before the first step:
//! a run of days must not find out at its first save that the disk is too small.
//!
//! The bytes are those of the state alone. Headers, manifests and padding are not counted, so a
//! run is rejected only if its next checkpoint cannot fit.

use std::path::Path;

use rustix::fs::statvfs;
use zero_ckpt::{count_checkpoints, staged_saves};
use zero_models::ModelConfig;
use zero_trainer::RunOptions;

use super::save_folder;
use crate::error::CliError;
use crate::output::bytes;

/// The checkpoints that a run saves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Saves {
    /// Bytes of each: all states in fp32, of whichever sharding.
    checkpoint_bytes: u64,
    /// The number of saves, those of the lowest validation loss included.
    count: u64,
    /// Checkpoints of the folder at once, while one is saved: one more than are kept.
    at_once: Option<u64>,
}

impl Saves {
    /// The saves after `first_step`, of `states` values a parameter.
    pub(crate) fn of(
        options: &RunOptions,
        first_step: u64,
        model: &ModelConfig,
        states: usize,
    ) -> Self {
        let every = options.checkpoint.as_ref().map_or(0, |(_, every)| *every);
        let state_bytes = (states * size_of::<f32>()) as u64;
        // The best checkpoint is kept beside the newest ones, and may be of a step between them.
        let validates_between = options.validation.as_ref().is_some_and(|v| v.every > 0);
        let best = u64::from(validates_between);

        let count = if first_step < options.steps {
            numbers_of_saves(first_step, options.steps, every) + best
        } else {
            // No step runs: the state is saved again, unless it is there.
            u64::from(!options.saves_in_place())
        };

        let elems = match model.lora() {
            Some(_) => model.adapter_elems(),
            None => model.parameter_count(),
        };
        Self {
            checkpoint_bytes: elems.saturating_mul(state_bytes),
            count,
            at_once: options
                .keep_last
                .map(|keep| (keep.max(1) as u64).saturating_add(1 + best)),
        }
    }

    /// The most checkpoints that the run adds to a folder with `present` ones.
    fn added(&self, present: u64) -> u64 {
        let free = self
            .at_once
            .map_or(u64::MAX, |most| most.saturating_sub(present).max(1));
        self.count.min(free)
    }
}

/// Saves after `first` up to `last`, one every `every` steps and one after the last step.
fn numbers_of_saves(first: u64, last: u64, every: u64) -> u64 {
    match every {
        0 => 1,
        every => last / every - first / every + u64::from(!last.is_multiple_of(every)),
    }
}

/// Checks that the file system of `dir` has room for the next checkpoint. Returns a note if it has
/// less than the run may keep at once. Only the process that checks the folder does it.
///
/// # Errors
/// There is no room for one checkpoint: exit code 2.
pub(crate) fn check(dir: &Path, saves: &Saves) -> Result<Option<String>, CliError> {
    if !save_folder::is_checked_here() {
        return Ok(None);
    }
    let Some(free_bytes) = free_bytes(dir) else {
        return Ok(None);
    };
    // The files of failed saves are removed before the first save.
    let staged_bytes = staged_saves(dir).map_or(0, |staged| staged.bytes);
    let present = count_checkpoints(dir).map_err(CliError::usage)?;

    fits(
        dir,
        saves,
        present as u64,
        free_bytes.saturating_add(staged_bytes),
    )
}

/// The bytes that this user may write to the file system of `dir`, which need not exist; `None` if
/// the file system does not tell.
fn free_bytes(dir: &Path) -> Option<u64> {
    let absolute = std::path::absolute(dir).ok()?;
    let existing = absolute.ancestors().find(|folder| folder.exists())?;
    let system = statvfs(existing).ok()?;
    (system.f_blocks > 0).then(|| system.f_bavail.saturating_mul(system.f_frsize))
}

/// As [`check`], for a folder with `present` checkpoints on a file system with `free_bytes`.
fn fits(
    dir: &Path,
    saves: &Saves,
    present: u64,
    free_bytes: u64,
) -> Result<Option<String>, CliError> {
    let dir = dir.display();
    let each = bytes(saves.checkpoint_bytes);
    let free = bytes(free_bytes);
    let added = saves.added(present);
    if added > 0 && free_bytes < saves.checkpoint_bytes {
        return Err(usage!(
            "a checkpoint of this run has {each}, but the file system of the folder {dir} has {free} free; free some \
             space, name a folder on another disk (--checkpoint DIR), or save nothing (--no-checkpoint)"
        ));
    }

    let added_bytes = saves.checkpoint_bytes.saturating_mul(added);
    Ok((free_bytes < added_bytes).then(|| {
        format!(
            "the run may add {added} checkpoints of {each} to {dir} before it deletes one, {} in all, but the file system \
             has {free} free; --keep-last N keeps fewer, a larger --checkpoint-every saves fewer",
            bytes(added_bytes)
        )
    }))
}

#[cfg(test)]
mod tests {
    use integration_tests::{Folder, Printed};

    use std::path::PathBuf;

    use super::*;

    fn saves(count: u64, at_once: Option<u64>) -> Saves {
        Saves {
            checkpoint_bytes: 1 << 20,
            count,
            at_once,
        }
    }

    #[test]
    fn less_room_than_a_checkpoint_is_an_error() {
        let of = |saves, present, free| fits(Path::new("a/b"), &saves, present, free);
        let error = of(saves(1, None), 0, (1 << 20) - 1024).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let error = error.to_string();
        error.shows(&["1.00 MiB", "1023.00 KiB", "a/b", "--no-checkpoint"]);

        assert_eq!(of(saves(1, None), 0, 1 << 20).unwrap(), None);
        assert!(of(saves(9, Some(2)), 7, 0).is_err());
        // A run that saves nothing needs no room.
        assert_eq!(of(saves(0, None), 0, 0).unwrap(), None);
    }

    #[test]
    fn less_room_than_is_kept_is_a_note() {
        let of = |saves, present| fits(Path::new("a"), &saves, present, 3 << 20).unwrap();
        let note = of(saves(4, None), 0).unwrap();
        note.shows(&["4 checkpoints of 1.00 MiB", "4.00 MiB in all"]);
        assert_eq!(of(saves(3, None), 0), None);
        assert_eq!(of(saves(100, Some(3)), 0), None);
        assert!(of(saves(100, Some(4)), 0).is_some());
        // One of the four is there already.
        assert_eq!(of(saves(100, Some(4)), 1), None);
    }

    #[test]
    fn saves_are_counted() {
        assert_eq!(numbers_of_saves(0, 10, 0), 1);
        for (first, last, every) in [(0, 10, 3), (3, 10, 3), (4, 9, 3), (0, 2, 5), (7, 8, 1)] {
            let due = |step: &u64| *step == last || step.is_multiple_of(every);
            let expected = (first + 1..=last).filter(due).count() as u64;
            assert_eq!(numbers_of_saves(first, last, every), expected);
        }

        let model = ModelConfig::preset("nano").unwrap();
        let options = |steps, keep_last| RunOptions {
            steps,
            keep_last,
            checkpoint: Some((PathBuf::from("a"), 2)),
            resume: Some(PathBuf::from("b")),
            ..RunOptions::default()
        };
        let run = Saves::of(&options(9, Some(2)), 3, &model, 3);
        let bytes = 12 * model.parameter_count();
        assert_eq!((run.checkpoint_bytes, run.count), (bytes, 4));
        assert_eq!(run.at_once, Some(3));
        // No step runs, and the state goes to another folder.
        assert_eq!(Saves::of(&options(3, None), 3, &model, 3).count, 1);
        let in_place = RunOptions {
            resume: Some(PathBuf::from("a")),
            ..options(3, None)
        };
        assert_eq!(Saves::of(&in_place, 3, &model, 3).count, 0);
    }

    #[test]
    fn free_bytes_of_a_folder_to_be_created() {
        let dir = &Folder::on_disk();
        assert!(free_bytes(&dir.join("a/b")).is_some());
        // The files of /proc have no blocks.
        let proc = Path::new("/proc/self");
        if proc.exists() {
            assert_eq!(free_bytes(proc), None);
        }
    }
}
