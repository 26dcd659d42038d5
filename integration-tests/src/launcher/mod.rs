//! One process a rank on this machine, as one program: it ends as a whole, and leaves nobody behind.
//!
//! - Rank 0 has the terminal. What the others print comes line by line with the rank in front.
//! - Each rank is told who it is in the variables that torchrun sets ([`Job::variables`]).
//! - Interrupts go to every rank, once each: a rank is in a process group of its own, so that the terminal's signals
//!   reach this program alone, which passes them on.
//! - When a rank fails the others have a little while to see it and to end by themselves; then they are killed. What is
//!   told is the cause: the first rank that failed by its own fault, in its own words (`report`).
//! - When this program is killed, the system kills the ranks.

mod output;
mod process;
mod report;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use thiserror::Error;

use output::Prefixed;
use process::Rank;
pub use report::{REPORT_VARIABLE, Report};

/// Between two looks at the ranks.
const TICK: Duration = Duration::from_millis(10);

/// What is run.
#[derive(Clone, Debug)]
pub struct Job {
    /// How many ranks.
    pub ranks: usize,
    /// The program of each.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Variables beside those that say who a rank is.
    pub variables: Vec<(String, String)>,
    /// How long the others may go on when one has failed, or when they were interrupted twice.
    pub grace: Duration,
}

/// Why a job failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum JobError {
    /// The system did not start the ranks.
    #[error("rank {rank} did not start: {message}")]
    Start {
        /// Which rank.
        rank: usize,
        /// What the system said.
        message: String,
    },
    /// A rank failed and said why.
    #[error("{}", report.message)]
    Reported {
        /// Which rank.
        rank: usize,
        /// What it said.
        report: Report,
    },
    /// A rank was killed.
    #[error("rank {rank} was ended by signal {signal}")]
    Killed {
        /// Which rank.
        rank: usize,
        /// By which signal.
        signal: i32,
    },
    /// A rank ended with a code and no word.
    #[error("rank {rank} ended with exit code {code}")]
    Exit {
        /// Which rank.
        rank: usize,
        /// Its code.
        code: i32,
    },
}

impl JobError {
    /// Whether the rank failed because another one had.
    fn is_echo(&self) -> bool {
        matches!(self, Self::Reported { report, .. } if report.echo)
    }

    fn of(rank: usize, status: ExitStatus, report: Option<Report>) -> Self {
        #[cfg(unix)]
        if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
            return Self::Killed { rank, signal };
        }
        match report {
            Some(report) => Self::Reported { rank, report },
            None => Self::Exit { rank, code: status.code().unwrap_or(1) },
        }
    }
}

impl Job {
    /// What rank `rank` is told; rank 0 listens at `port` of this machine.
    pub fn variables(&self, rank: usize, port: u16) -> Vec<(String, String)> {
        let own = [
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("WORLD_SIZE", self.ranks.to_string()),
            ("LOCAL_WORLD_SIZE", self.ranks.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", port.to_string()),
        ];
        let own = own.into_iter().map(|(name, value)| (name.to_owned(), value));
        self.variables.iter().cloned().chain(own).collect()
    }

    /// Runs it. `interrupts` counts the signals that asked this program to end.
    ///
    /// # Errors
    /// What failed first by its own fault.
    pub fn run(&self, interrupts: &AtomicUsize) -> Result<(), JobError> {
        let start = |rank, e: std::io::Error| JobError::Start { rank, message: e.to_string() };
        let reports = report::Folder::new().map_err(|e| start(0, e))?;
        let port = free_port().map_err(|e| start(0, e))?;
        let output = Prefixed::default();
        let mut running = Vec::with_capacity(self.ranks);
        for rank in 0..self.ranks {
            let mut variables = self.variables(rank, port);
            variables.push((REPORT_VARIABLE.to_owned(), reports.file(rank).display().to_string()));
            // Those that run already are killed where this fails.
            running.push(Rank::start(self, rank, &variables, &output).map_err(|e| start(rank, e))?);
        }
        let mut failures = Vec::new();
        let (mut passed_on, mut deadline) = (0, None);
        while !running.is_empty() {
            std::thread::sleep(TICK);
            let interrupted = interrupts.load(Ordering::Relaxed);
            for _ in passed_on..interrupted {
                running.iter().for_each(Rank::interrupt);
            }
            passed_on = interrupted;
            running.retain_mut(|rank| match rank.ended() {
                Ok(None) => true,
                Ok(Some(status)) if status.success() => false,
                Ok(Some(status)) => {
                    failures.push(JobError::of(rank.number, status, reports.read(rank.number)));
                    false
                }
                Err(e) => {
                    failures.push(start(rank.number, e));
                    false
                }
            });
            if deadline.is_none() && (!failures.is_empty() || interrupted > 1) {
                deadline = Some(Instant::now() + self.grace);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                // Dropping a rank kills it.
                running.clear();
            }
        }
        output.finish();
        let cause = failures.iter().find(|failure| !failure.is_echo()).or(failures.first());
        cause.cloned().map_or(Ok(()), Err)
    }
}

/// A port that is free now. Another program may take it before rank 0 does; then rank 0 says so.
fn free_port() -> std::io::Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
