//! How many processes a launcher has started.

use zero_comm::nccl::Ranks;

use crate::settings::args::{CommChoice, TrainArgs};

/// The variables in which Open MPI, MPICH and Slurm's PMI pass the number of processes.
const WORLD_SIZE_VARIABLES: [&str; 2] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"];

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
