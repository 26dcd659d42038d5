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
/// fit the `ranks` of the run, which are in groups of `group`. Ranks that no launcher has started
/// are on one machine.
///
/// # Errors
/// The flag does not fit the ranks or their groups.
pub(crate) fn node_ranks(
    args: &TrainArgs,
    ranks: usize,
    group: Option<usize>,
) -> Result<Option<usize>, CliError> {
    let group = group.unwrap_or(ranks);
    let fits = |of_node: &usize| {
        let more = group.max(*of_node);
        let fewer = group.min(*of_node);
        *of_node > 0 && ranks.is_multiple_of(*of_node) && more.is_multiple_of(fewer)
    };
    match args.ranks_per_node {
        Some(of_node) if fits(&of_node) => Ok(Some(of_node)),
        Some(of_node) => Err(CliError::Usage(format!(
            "--ranks-per-node {of_node}: expected a number that divides the {ranks} ranks, and whole groups of {group} \
             ranks on a machine or whole machines in a group"
        ))),
        None if launched_ranks(args) == 1 => Ok(Some(ranks)),
        None => {
            let size = |name| std::env::var(name).ok()?.parse().ok();
            let of_launcher = LOCAL_SIZE_VARIABLES.into_iter().find_map(size);
            Ok(of_launcher.filter(fits))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_a_machine_fit_the_groups() {
        let of = |of_node, group| {
            let args = TrainArgs {
                ranks_per_node: Some(of_node),
                ..TrainArgs::default()
            };
            node_ranks(&args, 12, group).map_err(|error| error.to_string())
        };
        assert_eq!(of(4, None), Ok(Some(4)));
        assert_eq!(of(4, Some(2)), Ok(Some(4)));
        assert_eq!(of(2, Some(6)), Ok(Some(2)));
        for (of_node, group) in [(0, None), (5, None), (4, Some(6)), (3, Some(2))] {
            let error = of(of_node, group).unwrap_err();
            let start = format!("--ranks-per-node {of_node}: expected");
            assert!(error.starts_with(&start), "{error}");
        }
    }
}
