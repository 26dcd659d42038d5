//! Ranks on the host as processes of this machine, over memory that they share. This process starts
//! them or is one of them.

use std::sync::Arc;
use std::time::Duration;

use zero_alloc::host::HostDevice;
use zero_comm::CommOptions;
use zero_comm::processes::ProcessComm;
use zero_comm::world::Ranks;

use super::process_rank::{ProcessRank, join_error};
use super::resume::Resumed;
use super::start_ranks::start_ranks;
use crate::error::CliError;
use crate::settings::args::TrainArgs;

/// Trains in processes of this machine: as one rank if a launcher started this process (`launched`).
///
/// # Errors
/// Wrong use, or the failure of the run.
pub(crate) fn run(
    args: &TrainArgs,
    resumed: Option<&Resumed>,
    launched: Option<&Ranks>,
) -> Result<(), CliError> {
    let Some(launched) = launched else {
        let ranks = args.ranks.or(args.recorded_ranks).unwrap_or(4);
        return start_ranks(ranks, [], resumed);
    };

    let ranks = launched.world_size;
    if let Some(flag) = args.ranks.filter(|flag| *flag != ranks) {
        return Err(usage!("--ranks {flag}: the launcher started {ranks} ranks"));
    }
    // A rank that cannot start ends before it connects: its launcher ends the others, which wait for
    // it. With --resume rank 0 finds the checkpoint first.
    let is_deferred = args.resume.is_some() && resumed.is_none();
    let early = match is_deferred {
        true => None,
        false => Some(ProcessRank::setup(args, resumed, ranks)?),
    };

    let limit = Duration::from_secs(args.time_limit);
    let comm = ProcessComm::join(launched, CommOptions::default().limit(limit));
    let comm = comm.map_err(|error| join_error(launched.rank, error))?;
    let rank = ProcessRank {
        args,
        resumed,
        device: HostDevice::new(),
        comm: Arc::new(comm),
        notice: None,
    };
    rank.run_on_host(Ok(early))
}
