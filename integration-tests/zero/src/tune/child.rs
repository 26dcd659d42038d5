//! The process of a trial.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::CliError;
use crate::launcher::ProcessGroup;

use super::outcome::{Outcome, TrialSteps};

/// Interval between two looks at the process.
const TICK: Duration = Duration::from_millis(50);

/// The process of a trial and its files.
pub(super) struct ChildRun<'a> {
    /// Of `zero train`, without the metrics.
    pub(super) args: &'a [String],
    pub(super) steps: TrialSteps,
    pub(super) minutes: u64,
    /// Its output.
    pub(super) log: PathBuf,
    pub(super) metrics: PathBuf,
}

impl ChildRun<'_> {
    /// Trains. `seen` receives the steps so far, and returns a signal that this process has received;
    /// the process of the trial is then killed.
    ///
    /// # Errors
    /// [`CliError::Interrupted`], or the process could not be started.
    pub(super) fn run(
        &self,
        seen: &mut dyn FnMut(u64) -> Option<i32>,
    ) -> Result<Outcome, CliError> {
        let mut process = self
            .start()
            .map_err(|error| CliError::Failure(format!("failed to start zero train: {error}")))?;
        let limit = Duration::from_secs(self.minutes.saturating_mul(60));
        let begun = Instant::now();
        loop {
            std::thread::sleep(TICK);
            let status = process.ended().map_err(CliError::failure)?;
            let metrics = text(&self.metrics);
            if let Some(status) = status {
                return Ok(Outcome::of(status, &text(&self.log), &metrics, self.steps));
            }
            // Dropping the process kills it.
            if let Some(signal) = seen(metrics.lines().count() as u64) {
                return Err(CliError::Interrupted { signal });
            }
            if begun.elapsed() > limit {
                return Ok(Outcome::TimedOut {
                    minutes: self.minutes,
                });
            }
        }
    }

    fn start(&self) -> io::Result<ProcessGroup> {
        // Those of a trial that was interrupted.
        remove(&self.metrics)?;
        let log = File::create(&self.log)?;
        let mut command = Command::new(std::env::current_exe()?);
        command
            .arg("train")
            .args(self.args)
            .arg("--metrics")
            .arg(&self.metrics)
            .stdin(Stdio::null())
            .stderr(log.try_clone()?)
            .stdout(log);
        ProcessGroup::start(&mut command)
    }
}

/// Removes a file that may be missing.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// A file's text, as far as it can be read.
fn text(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}
