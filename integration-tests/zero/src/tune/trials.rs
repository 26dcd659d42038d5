//! The file of finished trials, one JSON object a line.
//!
//! A line is written once its trial has ended, so that a tune that is killed goes on after it. A
//! last line that a crash cut short is removed.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use zero_ckpt::files;

use super::outcome::Outcome;
use crate::error::CliError;

/// The file of trials in the folder of results.
const TRIALS: &str = "trials.jsonl";
/// The file of the machine's figures there.
const MACHINE: &str = "machine.toml";

/// Longest file of trials.
const TRIALS_BYTES: u64 = 1 << 30;

/// The run of a trial: trials of one setup are interchangeable.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TrialSetup {
    pub(crate) model: String,
    /// The absolute path.
    pub(crate) data: String,
    /// The processors, and how many.
    #[serde(default)]
    pub(crate) machine: String,
    /// Of `zero train`.
    pub(crate) flags: Vec<String>,
    /// Steps at the start that do not count.
    pub(crate) warm_up: u64,
    /// The DeepSpeed configuration, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) config: Option<Value>,
}

/// A finished trial.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Trial {
    /// The number of its files.
    #[serde(rename = "trial")]
    pub(crate) number: u64,
    #[serde(flatten)]
    pub(crate) setup: TrialSetup,
    #[serde(flatten)]
    pub(crate) outcome: Outcome,
}

/// The folder of results.
#[derive(Debug)]
pub(crate) struct ResultsFolder {
    path: PathBuf,
    /// Locked: another tune in the folder is refused.
    file: File,
    trials: Vec<Trial>,
}

impl ResultsFolder {
    /// Opens the folder, or creates it.
    ///
    /// # Errors
    /// It holds other files, another tune uses it, or its trials cannot be read.
    pub(crate) fn open(path: &Path) -> Result<Self, CliError> {
        let shown = path.display();
        let refused = |why: &dyn std::fmt::Display| usage!("--out {shown}: {why}");
        fs::create_dir_all(path).map_err(|e| refused(&e))?;
        if let Some(other) = foreign_file(path).map_err(|e| refused(&e))? {
            return Err(refused(&format_args!(
                "the folder has {other} and no results of zero tune: choose another folder"
            )));
        }

        let file = path.join(TRIALS);
        // Opening a pipe to append to it would wait for its reader.
        files::read_if_present(&file, TRIALS_BYTES).map_err(|e| refused(&e))?;
        let opened = OpenOptions::new().append(true).create(true).open(&file);
        let opened = opened.map_err(|e| refused(&e))?;
        if let Err(TryLockError::WouldBlock) = opened.try_lock() {
            return Err(refused(&"another zero tune uses the folder"));
        }
        let bytes = files::read(&file, TRIALS_BYTES).map_err(|e| refused(&e))?;
        let (trials, valid_bytes) = parse(&bytes).map_err(|e| {
            refused(&format_args!(
                "{TRIALS}: {e}; correct or remove the file, or choose another folder"
            ))
        })?;
        if valid_bytes < bytes.len() {
            let cut = opened.set_len(valid_bytes as u64);
            cut.map_err(|e| refused(&e))?;
        }
        Ok(Self {
            path: path.to_owned(),
            file: opened,
            trials,
        })
    }

    /// A file in the folder.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The file of the machine's figures.
    pub(crate) fn machine(&self) -> PathBuf {
        self.file(MACHINE)
    }

    /// The number of the next trial.
    pub(crate) fn next_number(&self) -> u64 {
        let numbers = self.trials.iter().map(|trial| trial.number);
        numbers.max().unwrap_or(0) + 1
    }

    /// The last trial of this setup, unless it had less than `minutes` minutes.
    pub(crate) fn find(&self, setup: &TrialSetup, minutes: u64) -> Option<&Trial> {
        let trial = self.trials.iter().rfind(|trial| trial.setup == *setup)?;
        (!trial.outcome.had_less_than(minutes)).then_some(trial)
    }

    /// Keeps a finished trial.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn add(&mut self, trial: Trial) -> Result<(), CliError> {
        let failed = |error: io::Error| {
            let file = self.path.join(TRIALS);
            failure!("failed to write {}: {error}", file.display())
        };
        let line = serde_json::to_string(&trial).map_err(CliError::failure)? + "\n";
        self.file.write_all(line.as_bytes()).map_err(failed)?;
        self.file.sync_data().map_err(failed)?;
        self.trials.push(trial);
        Ok(())
    }
}

/// A file of a folder that has no results.
fn foreign_file(folder: &Path) -> io::Result<Option<String>> {
    match folder.join(TRIALS).metadata() {
        Ok(_) => return Ok(None),
        Err(e) if e.kind() == ErrorKind::NotFound => {}
        Err(e) => return Err(e),
    }
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        if name != MACHINE {
            return Ok(Some(name.display().to_string()));
        }
    }
    Ok(None)
}

/// Whether a crash may have left this of a trial's line.
fn is_start_of_trial(line: &[u8]) -> bool {
    const START: &[u8] = b"{\"trial\":";
    let same = line.len().min(START.len());
    line[..same] == START[..same] || line.iter().all(|byte| *byte == 0)
}

/// The trials of a file, and its bytes without a last line that was cut short.
fn parse(bytes: &[u8]) -> Result<(Vec<Trial>, usize), String> {
    let mut trials = Vec::new();
    let mut valid_bytes = 0;
    for (index, line) in bytes.split_inclusive(|byte| *byte == b'\n').enumerate() {
        let is_last = valid_bytes + line.len() == bytes.len();
        let is_cut = is_last && !line.ends_with(b"\n") && is_start_of_trial(line);
        match serde_json::from_slice(line) {
            _ if is_cut => break,
            Ok(trial) => trials.push(trial),
            Err(error) => return Err(format!("line {}: {error}", index + 1)),
        }
        valid_bytes += line.len();
    }
    Ok((trials, valid_bytes))
}

#[cfg(test)]
mod tests {
    use integration_tests::{Files, Folder, Printed};

    use super::*;

    fn trial(number: u64, flags: &str, outcome: Outcome) -> Trial {
        Trial {
            number,
            setup: TrialSetup {
                model: "nano".to_owned(),
                data: "/data".to_owned(),
                machine: String::new(),
                flags: flags.split(' ').map(str::to_owned).collect(),
                warm_up: 3,
                config: None,
            },
            outcome,
        }
    }

    fn measured(number: u64, flags: &str) -> Trial {
        let step_ms = number as f64;
        let peak_bytes = Some(7);
        trial(
            number,
            flags,
            Outcome::Measured {
                step_ms,
                peak_bytes,
            },
        )
    }

    #[test]
    fn trials_are_found_again() {
        let dir = &Folder::on_disk();
        let out = dir.join("out");
        let mut folder = ResultsFolder::open(&out).unwrap();
        let message = "error".to_owned();
        let all = [
            measured(1, "--stage 1"),
            trial(2, "--stage 2", Outcome::OutOfMemory { message }),
            trial(3, "--stage 3", Outcome::TimedOut { minutes: 2 }),
        ];
        all.iter()
            .for_each(|trial| folder.add(trial.clone()).unwrap());
        let error = ResultsFolder::open(&out).unwrap_err().to_string();
        error.shows(&["another zero tune"]);
        drop(folder);

        let folder = ResultsFolder::open(&out).unwrap();
        assert_eq!(folder.next_number(), 4);
        for trial in &all {
            assert_eq!(folder.find(&trial.setup, 2), Some(trial));
        }
        // A trial with more time may end otherwise.
        assert_eq!(folder.find(&all[2].setup, 3), None);
        assert_eq!(folder.find(&measured(1, "--stage 0").setup, 2), None);
        let other = TrialSetup {
            data: "/other".to_owned(),
            ..all[0].setup.clone()
        };
        assert_eq!(folder.find(&other, 2), None);
    }

    #[test]
    fn half_written_last_line_is_removed() {
        let dir = &Folder::on_disk();
        let file = dir.join(TRIALS);
        let line = |number| serde_json::to_string(&measured(number, "--stage 1")).unwrap();
        let one = line(1) + "\n";
        let two = line(2);
        for torn in ["", "{", &two[..two.len() / 2], &two, "\0\0\0"] {
            fs::write(&file, one.clone() + torn).unwrap();
            let mut folder = ResultsFolder::open(dir).unwrap();
            assert_eq!(folder.trials, [measured(1, "--stage 1")], "{torn:?}");
            folder.add(measured(2, "--stage 2")).unwrap();
            drop(folder);
            let folder = ResultsFolder::open(dir).unwrap();
            assert_eq!(folder.trials.len(), 2, "{torn:?}");
        }
        // Another program's lines are not removed, whole or not.
        for (other, number) in [
            (format!("notes\n{one}"), 1),
            ("{\"study\":1}\n".to_owned(), 1),
            ("{\"study\":1}".to_owned(), 1),
            (
                format!("{one}{{\"trial\":2,\"result\":\"of another version\"}}\n"),
                2,
            ),
        ] {
            fs::write(&file, &other).unwrap();
            let error = ResultsFolder::open(dir).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            let line = format!("line {number}");
            assert!(error.to_string().contains(&line), "{error}");
            assert_eq!(fs::read_to_string(&file).unwrap(), other);
        }
    }

    #[test]
    fn other_folders_are_refused() {
        let dir = &Folder::on_disk();
        dir.write(MACHINE, "");
        drop(ResultsFolder::open(dir).unwrap());
        fs::remove_file(dir.join(TRIALS)).unwrap();
        dir.write("notes", "");
        let error = ResultsFolder::open(dir).unwrap_err().to_string();
        error.shows(&["notes"]);
        assert_eq!(fs::read_dir(dir).unwrap().count(), 2);
    }
}
