//! How many processes a launcher has started.

use zero_comm::nccl::Ranks;

use crate::error::CliError;
use crate::settings::args::{CommChoice, TrainArgs};

/// The variables in which Open MPI, MPICH and Slurm's PMI pass the number of processes.
const WORLD_SIZE_VARIABLES: [&str; 2] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"];

/// The variables in which torchrun and this program's launcher, Open MPI, MPICH and Slurm pass the
/// number of processes of a machine.
const LOCAL_SIZE_VARIABLES: [&str; 4] = [
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
];

/// Consecutive ranks of a machine: by the flag, or as a launcher tells them; `None` if they do not
/// divide the `ranks` of the run. Ranks that no launcher has started are on one machine.
///
/// # Errors
/// The flag does not divide the number of ranks.
pub(crate) fn node_ranks(args: &TrainArgs, ranks: usize) -> Result<Option<usize>, CliError> {
    let divides = |of_node: &usize| *of_node > 0 && ranks.is_multiple_of(*of_node);
    match args.ranks_per_node {
        Some(of_node) if divides(&of_node) => Ok(Some(of_node)),
        Some(of_node) => Err(CliError::Usage(format!(
            "--ranks-per-node {of_node}: expected a number that divides the {ranks} ranks"
        ))),
        None if launched_ranks(args) == 1 => Ok(Some(ranks)),
        None => {
            let size = |name| std::env::var(name).ok()?.parse().ok();
            let of_launcher = LOCAL_SIZE_VARIABLES.into_iter().find_map(size);
            Ok(of_launcher.filter(divides))
        }
    }
}

/// The number of processes that `mpirun` started, or 1.
pub(crate) fn mpi_ranks() -> usize {
    let size = |name| std::env::var(name).ok()?.parse().ok();
    WORLD_SIZE_VARIABLES
        .into_iter()
        .filter_map(size)
        .max()
        .unwrap_or(1)
}

/// The number of processes, as a launcher tells them, that train one run together.
pub(crate) fn launched_ranks(args: &TrainArgs) -> usize {
    if args.comm == CommChoice::Threads {
        return 1;
    }
    let launched = Ranks::from_env()
        .ok()
        .flatten()
        .map_or(1, |ranks| ranks.world_size);
    launched.max(mpi_ranks())
}
