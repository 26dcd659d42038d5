//! Starts one process per rank on this machine and ends them together.
//!
//! - Rank 0 uses the terminal. Output lines of other ranks get the rank as a prefix.
//! - Each rank gets the variables of torchrun and a random token that only this job has
//!   ([`Job::variables`]).
//! - Each rank has its own process group, so that the terminal signals only this program, which
//!   forwards the first signal to every rank once. The second one kills the ranks.
//! - After a failure the other ranks get a grace period to detect it and to end; then they are
//!   killed. The job's error is the root cause: the error of the first rank whose failure no other
//!   rank caused (`report`).
//! - If this program is killed, the system kills the ranks.

mod output;
mod process;
mod report;

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use rustix::process::Signal;
use thiserror::Error;
use zero_alloc::TimeLimit;
use zero_comm::world::Token;

use output::Prefixed;
pub(crate) use process::ProcessGroup;
use process::Rank;
pub use report::{REPORT_VARIABLE, Report};

/// Interval between two polls of the ranks.
const TICK: Duration = Duration::from_millis(10);

/// The ranks to run.
#[derive(Clone, Debug)]
pub struct Job {
    /// The number of ranks.
    pub ranks: usize,
    /// The program of each rank.
    pub program: PathBuf,
    /// The program's arguments.
    pub args: Vec<OsString>,
    /// Additional environment variables.
    pub variables: Vec<(String, String)>,
    /// Time from the first failure until the remaining ranks are killed.
    pub grace: Duration,
}

/// Why a job failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum JobError {
    /// A rank could not be started.
    #[error("failed to start rank {rank}: {message}")]
    Start {
        /// The rank.
        rank: usize,
        /// The system's error.
        message: String,
    },
    /// A rank failed and reported an error.
    #[error("{}", report.message)]
    Reported {
        /// The rank.
        rank: usize,
        /// The report.
        report: Report,
    },
    /// A rank was killed.
    #[error("rank {rank} was killed by signal {signal}")]
    Killed {
        /// The rank.
        rank: usize,
        /// The signal.
        signal: i32,
    },
    /// A signal of this program ended the ranks.
    #[error("ended by signal {signal}")]
    Interrupted {
        /// The signal.
        signal: i32,
    },
    /// A rank failed without a report.
    #[error(
        "rank {rank} failed with exit code {code} without an error message; see its output above"
    )]
    Exit {
        /// The rank.
        rank: usize,
        /// The exit code.
        code: i32,
    },
}

impl JobError {
    fn start(rank: usize, error: &std::io::Error) -> Self {
        Self::Start {
            rank,
            message: error.to_string(),
        }
    }

    /// Whether the failure of another rank caused this one.
    fn is_echo(&self) -> bool {
        matches!(self, Self::Reported { report, .. } if report.echo)
    }

    /// The result of a signal that reached a rank and not this program: it ended the run on all
    /// ranks, after a save.
    fn interruption(&self) -> Option<Self> {
        match self {
            Self::Reported { report, .. } if report.echo && report.code > 128 => {
                let signal = i32::from(report.code - 128);
                Some(Self::Interrupted { signal })
            }
            _ => None,
        }
    }

    fn of(rank: usize, status: ExitStatus, report: Option<Report>) -> Self {
        if let Some(signal) = status.signal() {
            return Self::Killed { rank, signal };
        }
        match report {
            Some(report) => Self::Reported { rank, report },
            None => Self::Exit {
                rank,
                code: status.code().unwrap_or(1),
            },
        }
    }
}

impl Job {
    /// The environment variables of rank `rank`; rank 0 will listen on `port` of this machine. They
    /// contain the secret of `token`.
    pub fn variables(&self, rank: usize, port: u16, token: &Token) -> Vec<(String, String)> {
        let own = [
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("WORLD_SIZE", self.ranks.to_string()),
            ("LOCAL_WORLD_SIZE", self.ranks.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", port.to_string()),
            ("ZERO_TOKEN", token.to_variable()),
        ];
        let own = own
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value));
        self.variables.iter().cloned().chain(own).collect()
    }

    /// Starts the ranks and waits until all have ended. `received` returns the next signal that
    /// should end the job, if this program has received one.
    ///
    /// # Errors
    /// The first failure that no other rank caused, or [`JobError::Interrupted`].
    pub fn run(&self, received: &mut dyn FnMut() -> Option<i32>) -> Result<(), JobError> {
        let reports = report::Folder::new().map_err(|e| JobError::start(0, &e))?;
        let output = Prefixed::default();
        let mut running = Running {
            ranks: self.start(&reports, &output)?,
            reports,
            failures: Vec::new(),
            forwarded: None,
            interrupted: false,
        };

        let mut grace = None;
        while !running.ranks.is_empty() {
            std::thread::sleep(TICK);
            if let Some(signal) = received() {
                running.forward(signal)?;
            }
            running.reap();
            if !running.failures.is_empty() {
                let grace = grace.get_or_insert_with(|| TimeLimit::new(self.grace));
                if grace.has_passed() {
                    // Dropping a rank kills it.
                    running.ranks.clear();
                }
            }
        }

        output.finish();
        running.outcome()
    }

    /// Starts the ranks.
    fn start(&self, reports: &report::Folder, output: &Prefixed) -> Result<Vec<Rank>, JobError> {
        let port = free_port().map_err(|e| JobError::start(0, &e))?;
        let token = Token::random().map_err(|e| JobError::start(0, &e))?;
        let mut ranks = Vec::with_capacity(self.ranks);
        for rank in 0..self.ranks {
            let mut variables = self.variables(rank, port, &token);
            let report = reports.file(rank).display().to_string();
            variables.push((REPORT_VARIABLE.to_owned(), report));
            // On an error, dropping `ranks` kills those that have started.
            let started = Rank::start(&self.program, &self.args, rank, &variables, output);
            ranks.push(started.map_err(|e| JobError::start(rank, &e))?);
        }
        Ok(ranks)
    }
}

/// The ranks of a job that has started.
struct Running {
    /// Those that have not ended.
    ranks: Vec<Rank>,
    reports: report::Folder,
    failures: Vec<JobError>,
    /// The first signal, which every rank got.
    forwarded: Option<i32>,
    /// Whether a rank ended because of that signal.
    interrupted: bool,
}

impl Running {
    /// Passes the first signal to the ranks.
    ///
    /// # Errors
    /// At the second signal, which ends the job: dropping the ranks kills them.
    fn forward(&mut self, signal: i32) -> Result<(), JobError> {
        if self.forwarded.is_some() {
            return Err(JobError::Interrupted { signal });
        }
        let named = Signal::from_named_raw(signal).unwrap_or(Signal::TERM);
        for rank in &self.ranks {
            rank.signal(named);
        }
        self.forwarded = Some(signal);
        Ok(())
    }

    /// Removes the ranks that have ended, and keeps their failures.
    fn reap(&mut self) {
        let mut ended = Vec::new();
        self.ranks.retain_mut(|rank| match rank.ended() {
            Ok(None) => true,
            Ok(Some(status)) => {
                ended.push((rank.number, Ok(status)));
                false
            }
            Err(error) => {
                ended.push((rank.number, Err(error)));
                false
            }
        });
        for (rank, status) in ended {
            match status {
                Ok(status) => self.record(rank, status),
                Err(error) => self.failures.push(JobError::start(rank, &error)),
            }
        }
    }

    /// Records how a rank has ended.
    fn record(&mut self, rank: usize, status: ExitStatus) {
        if status.success() {
            return;
        }
        match self.forwarded {
            // It had no handler yet, and the others miss it.
            Some(signal) if status.signal() == Some(signal) => {
                self.failures.insert(0, JobError::Interrupted { signal });
            }
            Some(signal) if status.code() == Some(128 + signal) => self.interrupted = true,
            _ => {
                let report = self.reports.read(rank);
                self.failures.push(JobError::of(rank, status, report));
            }
        }
    }

    /// The first failure that no other rank caused.
    fn outcome(&self) -> Result<(), JobError> {
        let cause = self.failures.iter().find(|failure| !failure.is_echo());
        match (cause.or(self.failures.first()), self.forwarded) {
            (Some(cause), _) => Err(cause.interruption().unwrap_or_else(|| cause.clone())),
            (None, Some(signal)) if self.interrupted => Err(JobError::Interrupted { signal }),
            _ => Ok(()),
        }
    }
}

/// Returns a free port. If another program binds it before rank 0 does, rank 0 fails with an error.
pub(crate) fn free_port() -> std::io::Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?
        .local_addr()?
        .port())
}
