//! How many processes a launcher has started, and the threads of a rank.

use std::num::NonZero;

use zero_comm::world::Ranks;

use crate::error::CliError;
use crate::settings::args::{CommChoice, TrainArgs};

/// The variables in which Open MPI, and MPICH and Slurm's PMI, pass the number of processes and the
/// rank of a process.
const MPI_VARIABLES: [[&str; 2]; 2] = [
    ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"],
    ["PMI_SIZE", "PMI_RANK"],
];

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
///
/// # Errors
/// A variable that is not a number.
fn launched_node_ranks(
    variable: impl Fn(&str) -> Result<Option<usize>, CliError>,
) -> Result<Option<usize>, CliError> {
    for [size, rank, local_rank] in MACHINE_VARIABLES {
        let Some(size) = variable(size)? else {
            continue;
        };
        let place = variable(rank)?.zip(variable(local_rank)?);
        let is_dealt = place.is_some_and(|(rank, local)| size == 0 || local != rank % size);
        return Ok(Some(size).filter(|size| *size > 0 && !is_dealt));
    }
    Ok(None)
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
        Some(of_node) => Err(usage!(
            "--ranks-per-node {of_node}: expected a number that divides the {ranks} ranks, and whole groups of {group} \
             ranks on a machine or whole machines in a group"
        )),
        None if launched_ranks(args)? == 1 => Ok(Some(ranks)),
        None => Ok(launched_node_ranks(number)?.filter(fits)),
    }
}

/// The number in a variable of the environment.
///
/// # Errors
/// It is set, but not to a number.
fn number(name: &str) -> Result<Option<usize>, CliError> {
    let Some(value) = std::env::var_os(name).filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    let text = value.to_string_lossy();
    text.trim().parse().map(Some).map_err(|_| {
        usage!("{name}={text}: expected a number, as a launcher sets it; unset the variable to start without a launcher")
    })
}

/// The number of processes that `mpirun` started, or 1.
///
/// # Errors
/// The variables of a launcher are half set, no numbers, or contradict each other.
pub(crate) fn mpi_ranks() -> Result<usize, CliError> {
    mpi_ranks_of(number)
}

fn mpi_ranks_of(
    number: impl Fn(&str) -> Result<Option<usize>, CliError>,
) -> Result<usize, CliError> {
    let usage = |why: String| {
        usage!(
            "{why}: each process would train alone; start it by the launcher, or unset the variables"
        )
    };
    let mut found: Option<(usize, &str)> = None;
    for [size_name, rank_name] in MPI_VARIABLES {
        let (size, rank) = match (number(size_name)?, number(rank_name)?) {
            (Some(size), Some(rank)) => (size, rank),
            (None, None) => continue,
            (Some(_), None) => {
                return Err(usage(format!("{size_name} is set, but {rank_name} is not")));
            }
            (None, Some(_)) => {
                return Err(usage(format!("{rank_name} is set, but {size_name} is not")));
            }
        };
        if rank >= size {
            return Err(usage(format!("{rank_name}={rank}, but {size_name}={size}")));
        }
        // One launcher starts the other, as a separate process: `srun -n 1 mpirun -n 4`.
        if size == 1 {
            continue;
        }
        match found {
            Some((other, other_name)) if other != size => {
                return Err(usage(format!(
                    "{other_name}={other}, but {size_name}={size}"
                )));
            }
            _ => found = Some((size, size_name)),
        }
    }
    Ok(found.map_or(1, |(size, _)| size))
}

/// The variable of `mpirun --mca odls_base_sigkill_timeout SECONDS`, which the ranks have, too.
#[cfg(feature = "mpi")]
pub(crate) const OPEN_MPI_LIMIT: &str = "OMPI_MCA_odls_base_sigkill_timeout";

/// Whether Open MPI's mpirun has started this process as one of several.
pub(crate) fn is_under_open_mpi() -> bool {
    std::env::var_os("OMPI_COMM_WORLD_SIZE").is_some() && mpi_ranks().is_ok_and(|ranks| ranks > 1)
}

/// The rank of this process, as a launcher tells it.
#[cfg(feature = "mpi")]
pub(crate) fn launched_rank() -> Option<usize> {
    let rank = |[_, rank, _]: [&str; 3]| std::env::var(rank).ok()?.parse().ok();
    MACHINE_VARIABLES.into_iter().find_map(rank)
}

/// The number of processes, as a launcher tells them, that train one run together.
///
/// # Errors
/// The variables of a launcher are half set, no numbers, or contradict each other.
pub(crate) fn launched_ranks(args: &TrainArgs) -> Result<usize, CliError> {
    if args.comm == CommChoice::Threads {
        return Ok(1);
    }
    let by_mpi = mpi_ranks()?;
    let launched = match Ranks::from_env() {
        // MPI needs no address of rank 0.
        Err(_) if by_mpi > 1 => None,
        found => found.map_err(CliError::usage)?,
    };
    Ok(launched.map_or(1, |ranks| ranks.world_size).max(by_mpi))
}

/// Threads of each rank on the host.
pub(super) fn host_threads(args: &TrainArgs, ranks: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    args.threads.unwrap_or_else(|| (cores / ranks).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_pass_consecutive_ranks() {
        let of = |variables: &[(&str, usize)]| {
            let found = launched_node_ranks(|name| {
                let found = variables.iter().find(|(known, _)| *known == name);
                Ok(found.map(|(_, value)| *value))
            });
            found.unwrap()
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
    fn ranks_of_mpi_agree() {
        let of = |variables: &[(&str, usize)]| {
            let found = mpi_ranks_of(|name| {
                let found = variables.iter().find(|(known, _)| *known == name);
                Ok(found.map(|(_, value)| *value))
            });
            found.map_err(|error| error.to_string())
        };
        let [open_mpi, pmi] = MPI_VARIABLES;
        assert_eq!(of(&[]), Ok(1));
        for [size, rank] in MPI_VARIABLES {
            assert_eq!(of(&[(size, 4), (rank, 3)]), Ok(4));
            assert_eq!(of(&[(size, 1), (rank, 0)]), Ok(1));
            for variables in [
                &[(size, 4)][..],
                &[(rank, 0)],
                &[(size, 4), (rank, 4)],
                &[(size, 0), (rank, 0)],
            ] {
                let error = of(variables).unwrap_err();
                assert!(error.contains("would train alone"), "{error}");
            }
        }
        let both = |sizes: [usize; 2]| {
            of(&[
                (open_mpi[0], sizes[0]),
                (open_mpi[1], 0),
                (pmi[0], sizes[1]),
                (pmi[1], 0),
            ])
        };
        assert_eq!(both([4, 4]), Ok(4));
        assert_eq!(both([4, 1]), Ok(4));
        let error = both([4, 2]).unwrap_err();
        assert!(error.contains("OMPI_COMM_WORLD_SIZE=4, but PMI_SIZE=2"));
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
