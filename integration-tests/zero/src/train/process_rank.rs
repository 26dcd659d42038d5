//! A rank in a process of its own, over the communicator of any back end.

use std::sync::Arc;

use zero_alloc::device::Device;
use zero_alloc::host::HostDevice;
use zero_comm::{CommError, Communicator};
use zero_trainer::{RankSummary, TrainError, run_as_rank};

use super::exchange::StartExchange;
use super::resume::{self, Resumed};
use super::session::{Observe, observed, run_error};
use super::setup::RunSetup;
use super::signals::Signals;
use crate::error::CliError;
use crate::memory;
use crate::settings::args::TrainArgs;

/// A rank that is connected with the others.
pub(crate) struct ProcessRank<'a, D: Device> {
    pub(crate) args: &'a TrainArgs,
    /// `None` with `--resume`: rank 0 finds the checkpoint.
    pub(crate) resumed: Option<&'a Resumed>,
    pub(crate) device: D,
    pub(crate) comm: Arc<dyn Communicator<D>>,
    /// A note for the user.
    pub(crate) notice: Option<String>,
}

impl<D: Device> ProcessRank<'_, D> {
    /// Agrees with the other ranks and trains; rank 0 prints. `early` is this rank's setup if it was
    /// made before the ranks were connected, or the reason why the rank cannot start; otherwise
    /// `make` returns it.
    ///
    /// # Errors
    /// The error of a rank, the first setting that differs, or the failure of the run.
    pub(crate) fn run(
        self,
        early: Result<Option<RunSetup>, CliError>,
        make: impl FnOnce(&TrainArgs, Option<&Resumed>) -> Result<RunSetup, CliError>,
        train: impl FnOnce(
            &RunSetup,
            Arc<dyn Communicator<D>>,
            Observe<'_>,
        ) -> Result<RankSummary, CliError>,
    ) -> Result<(), CliError> {
        let start = StartExchange::new(&*self.comm, self.device, self.args.time_limit)?;
        let early = start.agree(early, |_| resume::start_settings(self.args))?;
        let setup = match early {
            Some(setup) => Ok(setup),
            None => {
                let found = match self.resumed {
                    None => Resumed::open_on_ranks(self.args, &start)?,
                    Some(_) => None,
                };
                let filled = found.as_ref().map(|found| found.fill(self.args));
                let args = filled.as_ref().unwrap_or(self.args);
                make(args, found.as_ref().or(self.resumed))
            }
        };

        let mut setup = RunSetup::agree(setup, &start)?;
        drop(start);

        setup.notices.extend(self.notice);
        let signals = Signals::handle()?;
        signals.end(&mut setup.options);
        let prints = self.comm.rank() == 0;
        observed(&setup, &signals, prints, |observe| {
            train(&setup, self.comm, observe).map(|summary| vec![summary])
        })
    }
}

impl ProcessRank<'_, HostDevice> {
    /// The run of a rank on the host, of `ranks`.
    pub(crate) fn setup(
        args: &TrainArgs,
        resumed: Option<&Resumed>,
        ranks: usize,
    ) -> Result<RunSetup, CliError> {
        let setup = RunSetup::new(args, resumed, ranks, None)?;
        memory::check(&setup.memory(), 1, args.memory_limit)?;
        Ok(setup)
    }

    /// [`Self::run`] on the host.
    pub(crate) fn run_on_host(
        self,
        early: Result<Option<RunSetup>, CliError>,
    ) -> Result<(), CliError> {
        let ranks = self.comm.world_size();
        self.run(
            early,
            |args, resumed| Self::setup(args, resumed, ranks),
            |setup, comm, observe| {
                let workload = &setup.workload;
                let summary = run_as_rank(
                    Arc::clone(&comm),
                    workload.threads,
                    &setup.settings,
                    workload,
                    &setup.options,
                    observe,
                );
                named(summary, comm)
            },
        )
    }
}

/// The result of a rank, which leaves `comm`; an error that another rank caused is an echo.
pub(crate) fn named<D: Device>(
    summary: Result<RankSummary, TrainError>,
    comm: Arc<dyn Communicator<D>>,
) -> Result<RankSummary, CliError> {
    let rank = comm.rank();
    // Dropped before anything is printed, because leaving the communicator may wait for the other
    // ranks.
    let failure = comm.failure();
    drop(comm);
    summary.map_err(|error| match failure.filter(|f| !is_own(rank, f)) {
        // The cause is shorter than the error of this rank's stream, and names the rank that
        // failed.
        Some(cause) => CliError::Echo(cause.to_string()),
        None => run_error(error),
    })
}

/// Whether `rank` itself caused the failure.
fn is_own(rank: usize, failure: &CommError) -> bool {
    match failure {
        CommError::Aborted { rank: by, .. }
        | CommError::Peer { rank: by, .. }
        | CommError::Skipped { rank: by, .. }
        | CommError::Panicked { rank: by, .. } => *by == rank,
        _ => false,
    }
}

/// The failure of a rendezvous names the rank at fault.
pub(crate) fn join_error(rank: usize, error: CommError) -> CliError {
    if is_own(rank, &error) {
        CliError::failure(error)
    } else {
        CliError::Echo(error.to_string())
    }
}
