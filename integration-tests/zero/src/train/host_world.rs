//! How the ranks of the host are connected.

use zero_comm::world::{Launcher, Ranks};

use super::launched::mpi_ranks;
use crate::error::CliError;
use crate::settings::args::{CommChoice, TrainArgs};

/// The ranks of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HostWorld {
    /// Threads of this process.
    Threads,
    /// Processes under `mpirun`.
    Mpi,
    /// Processes of this machine: this one as a rank, or those that it starts.
    Processes(Option<Ranks>),
}

/// Chooses by the flags and by the launcher that has started this process.
///
/// # Errors
/// The flags contradict the launcher, or the program lacks what the launcher needs.
pub(crate) fn choose(args: &TrainArgs) -> Result<HostWorld, CliError> {
    // With --comm threads what a launcher says does not matter.
    let by_mpi = match args.comm {
        CommChoice::Threads => mpi_ranks().unwrap_or(1),
        _ => mpi_ranks()?,
    };
    if args.comm == CommChoice::Threads {
        if by_mpi > 1 {
            tracing::warn!(
                "--comm threads: a launcher started {by_mpi} processes, and each of them trains the whole run by itself"
            );
        }
        return Ok(HostWorld::Threads);
    }

    let launched = match Ranks::from_env() {
        // MPI needs no address of rank 0.
        Err(_) if by_mpi > 1 => None,
        found => found.map_err(CliError::usage)?,
    };
    if by_mpi > 1 {
        check_same(launched.as_ref(), by_mpi)?;
    }
    choose_for(args.comm, by_mpi, launched)
}

/// Chooses for `by_mpi` processes by MPI's variables, and for the ranks `launched` by those of any
/// launcher.
fn choose_for(
    comm: CommChoice,
    by_mpi: usize,
    launched: Option<Ranks>,
) -> Result<HostWorld, CliError> {
    let launched = launched.filter(|ranks| ranks.world_size > 1);
    let is_here = launched.as_ref().is_some_and(|ranks| ranks.one_machine);
    match comm {
        CommChoice::Threads | CommChoice::Nccl => Ok(HostWorld::Threads),
        CommChoice::Mpi => Ok(HostWorld::Mpi),
        CommChoice::Auto if by_mpi > 1 && cfg!(feature = "mpi") => Ok(HostWorld::Mpi),
        CommChoice::Auto if by_mpi == 1 && launched.is_none() => Ok(HostWorld::Threads),
        _ if is_here => Ok(HostWorld::Processes(launched)),
        CommChoice::Processes if by_mpi == 1 && launched.is_none() => {
            Ok(HostWorld::Processes(None))
        }
        // Every process would train the whole run by itself.
        _ => Err(not_here(launched.as_ref())),
    }
}

/// Rejects variables of torchrun that contradict those of `mpirun`, which started `processes`.
fn check_same(ranks: Option<&Ranks>, processes: usize) -> Result<(), CliError> {
    let other = ranks
        .filter(|ranks| ranks.launcher == Launcher::Torchrun)
        .map(|ranks| ranks.world_size)
        .filter(|size| *size > 1 && *size != processes);
    match other {
        Some(size) => Err(usage!(
            "mpirun started {processes} processes, but WORLD_SIZE={size}: start the run by one launcher, or unset \
             RANK and WORLD_SIZE"
        )),
        None => Ok(()),
    }
}

/// The error of processes that share no memory.
fn not_here(launched: Option<&Ranks>) -> CliError {
    let Some(ranks) = launched else {
        return not_built();
    };
    let rank = ranks.rank;
    let world_size = ranks.world_size;
    let by = match ranks.launcher {
        Launcher::Torchrun => "torchrun (RANK, WORLD_SIZE)",
        Launcher::OpenMpi => "mpirun",
        Launcher::Slurm => "srun",
        _ => "another launcher",
    };
    usage!(
        "{by} started this process as rank {rank} of {world_size} on several machines, between which ranks on the host \
         communicate by MPI only: start them by mpirun, with a program that was built with `--features mpi`; with --comm \
         threads each process trains by itself"
    )
}

/// The error of a program without MPI.
pub(crate) fn not_built() -> CliError {
    usage!(
        "this binary was built without MPI: build it with `--features mpi`, or pass --comm processes --ranks N for \
         processes of this machine, --comm threads for threads of one process"
    )
}

#[cfg(test)]
mod tests {
    use CommChoice::{Auto, Mpi, Nccl, Processes, Threads};
    use zero_comm::world::Launcher::{OpenMpi, Slurm, Torchrun};

    use super::*;

    fn ranks(world_size: usize, launcher: Launcher, one_machine: bool) -> Ranks {
        Ranks::new(0, world_size, 0, "127.0.0.1", 1)
            .launcher(launcher)
            .one_machine(one_machine)
    }

    #[test]
    fn launchers_choose_the_world() {
        let chosen = |comm, by_mpi, launched: Option<&Ranks>| {
            choose_for(comm, by_mpi, launched.cloned()).map_err(|error| {
                assert_eq!(error.exit_code(), 2);
                error.to_string()
            })
        };
        let [torchrun, slurm] = [Torchrun, Slurm].map(|launcher| ranks(4, launcher, true));
        for launched in [&torchrun, &slurm] {
            for comm in [Auto, Processes] {
                let processes = HostWorld::Processes(Some(launched.clone()));
                assert_eq!(chosen(comm, 1, Some(launched)), Ok(processes));
            }
            let far = ranks(4, launched.launcher, false);
            let error = chosen(Auto, 1, Some(&far)).unwrap_err();
            assert!(error.contains("rank 0 of 4 on several machines"), "{error}");
        }

        // A launcher of one process does not count.
        for alone in [None, Some(&ranks(1, Torchrun, true))] {
            assert_eq!(chosen(Auto, 1, alone), Ok(HostWorld::Threads));
            assert_eq!(chosen(Processes, 1, alone), Ok(HostWorld::Processes(None)));
        }
        assert_eq!(chosen(Threads, 4, Some(&torchrun)), Ok(HostWorld::Threads));
        assert_eq!(chosen(Nccl, 1, None), Ok(HostWorld::Threads));
        assert_eq!(chosen(Mpi, 4, None), Ok(HostWorld::Mpi));

        let mpirun = ranks(4, OpenMpi, true);
        let here = HostWorld::Processes(Some(mpirun.clone()));
        let of_auto = match cfg!(feature = "mpi") {
            true => HostWorld::Mpi,
            false => here.clone(),
        };
        assert_eq!(chosen(Auto, 4, Some(&mpirun)), Ok(of_auto));
        assert_eq!(chosen(Processes, 4, Some(&mpirun)), Ok(here));
        // MPICH does not tell an address.
        let error = chosen(Processes, 4, None).unwrap_err();
        assert!(error.contains("--features mpi"), "{error}");
    }

    #[test]
    fn launchers_agree() {
        for (size, fits) in [(1, true), (4, true), (2, false)] {
            let checked = check_same(Some(&ranks(size, Torchrun, true)), 4);
            assert_eq!(checked.is_ok(), fits, "{size}");
        }
        check_same(Some(&ranks(2, Slurm, true)), 4).unwrap();
    }
}
