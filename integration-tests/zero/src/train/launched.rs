//! How many processes a launcher has started.

use zero_comm::nccl::Ranks;

use crate::error::CliError;
use crate::settings::args::{CommChoice, TrainArgs};

/// The variables in which Open MPI, MPICH and Slurm's PMI pass the number of processes.
const WORLD_SIZE_VARIABLES: [&str; 2] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"];

/// The variables in which torchrun and this program's launcher, Open MPI, MPICH and Slurm pass the
/// number of processes of a machine, the rank of a process, and its number on its machine.
const MACHINE_VARIABLES: [[&str; 3]; 4] = [
    ["LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK"],
    [
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ],
    ["MPI_LOCALNRANKS", "PMI_RANK", "MPI_LOCALRANKID"],
    ["SLURM_NTASKS_PER_NODE", "SLURM_PROCID", "SLURM_LOCALID"],
];

/// The processes of a machine by a launcher's variables; `None` if this process has a place on its
/// machine that consecutive ranks do not have.
fn launched_node_ranks(variable: impl Fn(&str) -> Option<usize>) -> Option<usize> {
    let [size, rank, local_rank] = MACHINE_VARIABLES
        .into_iter()
        .map(|names| names.map(&variable))
        .find(|[size, ..]| size.is_some())?;
    let size = size.filter(|size| *size > 0)?;
    match (rank, local_rank) {
        (Some(rank), Some(local_rank)) if local_rank != rank % size => None,
        _ => Some(size),
    }
}

/// Consecutive ranks of a machine: by the flag, or by a launcher's variables; `None` if they do not
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
            let variable = |name: &str| std::env::var(name).ok()?.parse().ok();
            Ok(launched_node_ranks(variable).filter(fits))
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

/// The variable of `mpirun --mca odls_base_sigkill_timeout SECONDS`, which the ranks have, too.
#[cfg(feature = "mpi")]
pub(crate) const OPEN_MPI_LIMIT: &str = "OMPI_MCA_odls_base_sigkill_timeout";

/// Whether Open MPI's mpirun has started this process as one of several.
pub(crate) fn is_under_open_mpi() -> bool {
    std::env::var_os("OMPI_COMM_WORLD_SIZE").is_some() && mpi_ranks() > 1
}

/// The rank of this process, as a launcher tells it.
#[cfg(feature = "mpi")]
pub(crate) fn launched_rank() -> Option<usize> {
    let rank = |[_, rank, _]: [&str; 3]| std::env::var(rank).ok()?.parse().ok();
    MACHINE_VARIABLES.into_iter().find_map(rank)
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
    fn launchers_pass_consecutive_ranks() {
        let of = |variables: &[(&str, usize)]| {
            launched_node_ranks(|name| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| *value)
            })
        };
        for [size, rank, local_rank] in MACHINE_VARIABLES {
            assert_eq!(of(&[(size, 4), (rank, 6), (local_rank, 2)]), Some(4));
            assert_eq!(of(&[(size, 4)]), Some(4));
            // Ranks are dealt to the machines one by one.
            assert_eq!(of(&[(size, 4), (rank, 6), (local_rank, 3)]), None);
            assert_eq!(of(&[(size, 0), (rank, 6), (local_rank, 3)]), None);
        }
        assert_eq!(of(&[]), None);
    }

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
