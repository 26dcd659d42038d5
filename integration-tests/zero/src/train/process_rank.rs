//! A rank in a process of its own, over the communicator of any back end.

use std::sync::Arc;

use zero_alloc::device::Device;
use zero_comm::Communicator;
use zero_trainer::RankSummary;

use super::exchange::StartExchange;
use super::resume::{self, Resumed};
use super::session::{Observe, observed};
use super::setup::RunSetup;
use super::signals::Signals;
use crate::error::CliError;
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
