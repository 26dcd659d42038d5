//! The process of a trial.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::CliError;
use crate::launcher::ProcessGroup;

use super::outcome::{Outcome, TrialSteps};

/// Interval between two looks at the process.
const TICK: Duration = Duration::from_millis(50);

/// The time that a process has to end before it is killed.
const GRACE: Duration = Duration::from_secs(10);

/// The lines of a file that grows.
#[derive(Default)]
struct Steps {
    read_bytes: u64,
    lines: u64,
}

impl Steps {
    /// Its lines so far; as before if it cannot be read.
    fn count(&mut self, path: &Path) -> u64 {
        let mut more = Vec::new();
        let read = File::open(path).and_then(|mut file| {
            file.seek(SeekFrom::Start(self.read_bytes))?;
            file.read_to_end(&mut more)
        });
        self.read_bytes += read.unwrap_or(0) as u64;
        self.lines += more.iter().filter(|byte| **byte == b'\n').count() as u64;
        self.lines
    }
}

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
    /// the process of the trial then ends.
    ///
    /// # Errors
    /// [`CliError::Interrupted`], or the process could not be started.
    pub(super) fn run(
        &self,
        seen: &mut dyn FnMut(u64) -> Option<i32>,
    ) -> Result<Outcome, CliError> {
        let mut process = self
            .start()
            .map_err(|error| failure!("failed to start zero train: {error}"))?;
        let limit = Duration::from_secs(self.minutes.saturating_mul(60));
        let begun = Instant::now();
        let mut steps = Steps::default();
        loop {
            std::thread::sleep(TICK);
            let status = process.ended().map_err(CliError::failure)?;
            if let Some(status) = status {
                let metrics = text(&self.metrics);
                return Ok(Outcome::of(status, &text(&self.log), &metrics, self.steps));
            }
            if let Some(signal) = seen(steps.count(&self.metrics)) {
                process.end(GRACE);
                return Err(CliError::Interrupted { signal });
            }
            if begun.elapsed() > limit {
                // The ranks of a launcher end before it does: the next trial finds their memory free.
                process.end(GRACE);
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
