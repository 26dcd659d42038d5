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
use zero_comm::nccl::Token;

use output::Prefixed;
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
    /// Whether the failure of another rank caused this one.
    fn is_echo(&self) -> bool {
        matches!(self, Self::Reported { report, .. } if report.echo)
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
        let start = |rank, e: std::io::Error| JobError::Start {
            rank,
            message: e.to_string(),
        };
        let reports = report::Folder::new().map_err(|e| start(0, e))?;
        let port = free_port().map_err(|e| start(0, e))?;
        let token = Token::random().map_err(|e| start(0, e))?;
        let output = Prefixed::default();
        let mut running = Vec::with_capacity(self.ranks);
        for rank in 0..self.ranks {
            let mut variables = self.variables(rank, port, &token);
            variables.push((
                REPORT_VARIABLE.to_owned(),
                reports.file(rank).display().to_string(),
            ));
            // On an error, dropping `running` kills the ranks that have started.
            running.push(Rank::start(&self.program, &self.args, rank, &variables, &output).map_err(|e| start(rank, e))?);
        }
        let mut failures = Vec::new();
        let (mut forwarded, mut interrupted, mut grace) = (None, false, None);
        while !running.is_empty() {
            std::thread::sleep(TICK);
            match (received(), forwarded) {
                (Some(signal), None) => {
                    let named = Signal::from_named_raw(signal).unwrap_or(Signal::TERM);
                    running.iter().for_each(|rank| rank.signal(named));
                    forwarded = Some(signal);
                }
                // Dropping a rank kills it.
                (Some(signal), Some(_)) => return Err(JobError::Interrupted { signal }),
                (None, _) => {}
            }
            running.retain_mut(|rank| match rank.ended() {
                Ok(None) => true,
                Ok(Some(status)) if status.success() => false,
                // It had no handler yet, and the others miss it.
                Ok(Some(status)) if status.signal().is_some() && status.signal() == forwarded => {
                    failures.insert(
                        0,
                        JobError::Interrupted {
                            signal: forwarded.unwrap_or_default(),
                        },
                    );
                    false
                }
                Ok(Some(status))
                    if forwarded.is_some()
                        && status.code() == forwarded.map(|signal| 128 + signal) =>
                {
                    interrupted = true;
                    false
                }
                Ok(Some(status)) => {
                    failures.push(JobError::of(rank.number, status, reports.read(rank.number)));
                    false
                }
                Err(e) => {
                    failures.push(start(rank.number, e));
                    false
                }
            });
            if !failures.is_empty()
                && grace
                    .get_or_insert_with(|| TimeLimit::new(self.grace))
                    .has_passed()
            {
                running.clear();
            }
        }
        output.finish();
        let cause = failures
            .iter()
            .find(|failure| !failure.is_echo())
            .or(failures.first());
        match (cause, forwarded) {
            (Some(cause), _) => Err(cause.clone()),
            (None, Some(signal)) if interrupted => Err(JobError::Interrupted { signal }),
            _ => Ok(()),
        }
    }
}

/// Returns a free port. If another program binds it before rank 0 does, rank 0 fails with an error.
fn free_port() -> std::io::Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?
        .local_addr()?
        .port())
}
