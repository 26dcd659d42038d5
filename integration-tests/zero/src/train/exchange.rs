//! The agreement of ranks in separate processes, which read their settings from their own command
//! lines and files.
//!
//! ```text
//! connect
//! agree             the program, and whether to resume: they decide which collectives follow
//! resume            rank 0 chooses the checkpoint
//! exchange          the route of collectives: one ring where launchers report other machines to each
//! agree             the settings of run.json and the data; or the error of a rank that cannot start
//!agree_on_weights  the weights of a model's folder
//! train
//! ```
//!
//! Why: two ranks with other learning rates, seeds, data or weights train without an error, since
//! collectives compare counts and types only, and at stages 2 and 3 a checkpoint has shards of
//! both. The weights of a model's folder are hashed only where ranks read different files, each
//! rank of a machine a part; machines that share a network folder read it once each.

use std::time::Duration;

use zero_alloc::Pool;
use zero_alloc::device::Device;
use zero_comm::Communicator;
use zero_models::hf::HfFolder;
use zero_optim::{AgreementError, RankSettings, agree};
use zero_trainer::RankExchange;

use crate::error::CliError;

/// The messages between ranks before a run.
pub(crate) struct StartExchange<'a, D: Device> {
    comm: &'a dyn Communicator<D>,
    pool: Pool<D>,
    stream: D::Stream,
    limit: Duration,
}

impl<'a, D: Device> StartExchange<'a, D> {
    /// Each collective of `comm` has a limit of `time_limit_s` seconds.
    pub(crate) fn new(
        comm: &'a dyn Communicator<D>,
        device: D,
        time_limit_s: u64,
    ) -> Result<Self, CliError> {
        let stream = device.create_stream("start").map_err(CliError::failure)?;
        // Longer than that of a collective, whose error names the missing rank.
        let limit = Duration::from_secs(time_limit_s).saturating_mul(2);
        Ok(Self {
            comm,
            pool: Pool::new(device, usize::MAX),
            stream,
            limit,
        })
    }

    /// This rank.
    pub(crate) fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// The exchange of the opening of a checkpoint.
    pub(crate) fn messages(&self) -> RankExchange<'_, D> {
        RankExchange::new(self.comm, &self.pool, &self.stream, self.limit)
    }

    /// Passes the failure of a rank to all ranks.
    pub(crate) fn agree_on_success<T>(&self, own: Result<T, CliError>) -> Result<T, CliError> {
        self.agree(own, |_| RankSettings::new())
    }

    /// Compares the weights of the ranks' folders. Ranks that read the same files share the work.
    pub(crate) fn agree_on_weights(&self, folder: &HfFolder) -> Result<(), CliError> {
        let identities = self.exchange_u64(folder.identity())?;
        let same = |rank: &usize| identities[*rank] == identities[self.rank()];
        let sharers: Vec<usize> = (0..identities.len()).filter(same).collect();
        if sharers.len() == identities.len() {
            return Ok(());
        }
        let part = sharers
            .iter()
            .position(|rank| *rank == self.rank())
            .unwrap_or(0);
        let own = folder.checksum(part, sharers.len());

        let parts = self.exchange_u64(*own.as_ref().unwrap_or(&0))?;
        let checksum = sharers
            .iter()
            .fold(0_u64, |sum, rank| sum.wrapping_add(parts[*rank]));
        self.agree(own.map(drop).map_err(CliError::usage), |()| {
            [(
                "--model (checksum of the weights)",
                format!("{checksum:016x}"),
            )]
            .into_iter()
            .collect()
        })
    }

    /// The number that each rank sends.
    pub(crate) fn exchange_u64(&self, own: u64) -> Result<Vec<u64>, CliError> {
        if self.comm.world_size() == 1 {
            return Ok(vec![own]);
        }
        let messages = self
            .messages()
            .exchange(&own.to_le_bytes())
            .map_err(CliError::failure)?;
        let number =
            |message: &Vec<u8>| Some(u64::from_le_bytes(message.as_slice().try_into().ok()?));
        let numbers: Option<Vec<u64>> = messages.iter().map(number).collect();
        numbers
            .ok_or_else(|| failure!("a rank sent a message of another kind while the run started"))
    }

    /// Returns `own` if all ranks succeeded with equal settings; otherwise the error of the lowest
    /// rank that failed, or the first setting that differs.
    pub(crate) fn agree<T>(
        &self,
        own: Result<T, CliError>,
        settings: impl FnOnce(&T) -> RankSettings,
    ) -> Result<T, CliError> {
        if self.comm.world_size() == 1 {
            return own;
        }
        let messages = self.messages();
        let exchange = |message: &[u8]| messages.exchange(message);
        let agreed = match &own {
            Ok(own) => agree(self.rank(), Ok(&settings(own)), exchange),
            Err(error) => agree(self.rank(), Err(error), exchange),
        };
        match (agreed, own) {
            (Ok(()), own) => own,
            (Err(AgreementError::Failed { rank, .. }), Err(own)) if rank == self.rank() => Err(own),
            // All ranks print it: a launcher may end the others as soon as one has ended.
            (Err(error @ (AgreementError::Failed { .. } | AgreementError::Differs { .. })), _) => {
                Err(CliError::usage(error))
            }
            (Err(error), _) => Err(CliError::failure(error)),
        }
    }
}
