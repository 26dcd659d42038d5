//! Where to compute: what was asked for, and what this machine has.

use zero_alloc::cuda::CudaDevice;
use zero_comm::nccl::{self, Ranks};
use zero_kernels::cuda::Nvrtc;

use super::args::{CommChoice, DeviceChoice, TrainArgs};
use crate::cli::CliError;
use crate::cuda::matmul;

/// Where a run computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Chosen {
    /// On the host.
    Host,
    /// On GPUs, of which this machine has so many; and who this process is, if a launcher started several.
    Cuda { gpus: usize, launched: Option<Ranks> },
}

/// What a machine must have for a run on CUDA, and what was found.
struct Machine<'a> {
    gpus: &'a dyn Fn() -> Result<usize, String>,
    nvrtc: &'a dyn Fn() -> Result<(), String>,
    cublaslt: &'a dyn Fn() -> Result<(), String>,
    nccl: &'a dyn Fn() -> Result<(), String>,
}

/// Chooses by the flags and by what is there.
///
/// # Errors
/// The flags contradict each other or the environment, or ask for what is not there.
pub(super) fn choose(args: &TrainArgs) -> Result<Chosen, CliError> {
    let machine = Machine {
        gpus: &|| CudaDevice::count().map_err(|e| e.to_string()),
        nvrtc: &|| Nvrtc::find().map(drop).map_err(|e| e.to_string()),
        cublaslt: &|| matmul::find_library().map_err(|e| e.to_string()),
        nccl: &|| nccl::version().map(drop).map_err(|e| e.to_string()),
    };
    choose_on(args, &machine, || Ranks::from_env().map_err(CliError::usage))
}

fn choose_on(
    args: &TrainArgs,
    machine: &Machine<'_>,
    launched: impl FnOnce() -> Result<Option<Ranks>, CliError>,
) -> Result<Chosen, CliError> {
    let usage = |text: &str| Err(CliError::Usage(text.to_owned()));
    match (args.device, args.comm) {
        (DeviceChoice::Cuda, CommChoice::Threads | CommChoice::Mpi) => {
            return usage("--device cuda: its ranks are processes that talk by NCCL; leave --comm away");
        }
        (DeviceChoice::Cpu, CommChoice::Nccl) => return usage("--comm nccl is for --device cuda"),
        (DeviceChoice::Cpu, _) | (DeviceChoice::Auto, CommChoice::Threads | CommChoice::Mpi) => {
            return Ok(Chosen::Host);
        }
        _ => {}
    }
    let asked = args.device == DeviceChoice::Cuda || args.comm == CommChoice::Nccl;
    let gpus = match (machine.gpus)() {
        Ok(0) => Err("there is a driver, but no GPU".to_owned()),
        other => other,
    };
    let gpus = gpus.and_then(|gpus| {
        (machine.nvrtc)()?;
        (machine.cublaslt)()?;
        Ok(gpus)
    });
    let gpus = match gpus {
        Ok(gpus) => gpus,
        Err(why) if asked => return Err(CliError::Usage(format!("--device cuda: {why}"))),
        Err(why) => {
            tracing::debug!("the host computes: {why}");
            return Ok(Chosen::Host);
        }
    };
    let launched = launched()?;
    let ranks = ranks(args, launched.as_ref(), gpus)?;
    let here = launched.as_ref().map_or(ranks, |l| l.local_rank + 1);
    if here > gpus && !args.share_gpus && !own_gpu_each(launched.as_ref(), gpus) {
        if asked {
            let hint = "--share-gpus lets ranks share them, for tests: then speeds mean nothing";
            return Err(CliError::Usage(format!(
                "{here} ranks on this machine, but it has {}; {hint}",
                gpus_text(gpus)
            )));
        }
        tracing::warn!("the host computes: {here} ranks were asked for, and there is {}", gpus_text(gpus));
        return Ok(Chosen::Host);
    }
    if ranks > 1
        && let Err(why) = (machine.nccl)()
    {
        if asked {
            return Err(CliError::Usage(format!("--device cuda with {ranks} ranks: {why}")));
        }
        tracing::debug!("the host computes: {why}");
        return Ok(Chosen::Host);
    }
    Ok(Chosen::Cuda { gpus, launched })
}

/// How many ranks the run has.
fn ranks(args: &TrainArgs, launched: Option<&Ranks>, gpus: usize) -> Result<usize, CliError> {
    match (args.ranks, launched) {
        (Some(asked), Some(ranks)) if asked != ranks.world_size => {
            Err(CliError::Usage(format!("--ranks {asked}: the launcher started {} ranks", ranks.world_size)))
        }
        (Some(0), _) => Err(CliError::Usage("--ranks 0: a run has at least one rank".to_owned())),
        (_, Some(ranks)) => Ok(ranks.world_size),
        (Some(asked), None) => Ok(asked),
        (None, None) => Ok(gpus),
    }
}

/// Slurm may show each of its tasks one GPU of its own.
fn own_gpu_each(launched: Option<&Ranks>, gpus: usize) -> bool {
    launched.is_some() && gpus == 1 && std::env::var_os("CUDA_VISIBLE_DEVICES").is_some_and(|v| !v.is_empty())
}

fn gpus_text(gpus: usize) -> String {
    if gpus == 1 { "1 GPU".to_owned() } else { format!("{gpus} GPUs") }
}

#[cfg(test)]
mod tests {
    use zero_comm::nccl::Launcher;

    use super::*;

    fn args(device: DeviceChoice, comm: CommChoice, ranks: Option<usize>, share_gpus: bool) -> TrainArgs {
        TrainArgs { device, comm, ranks, share_gpus, ..TrainArgs::default() }
    }

    /// `lacks` names what is not there.
    fn choose_with(args: &TrainArgs, gpus: usize, lacks: &str, launched: Option<Ranks>) -> Result<Chosen, String> {
        let has = |name: &str| if lacks == name { Err(format!("no {name}; tried lib{name}.so")) } else { Ok(()) };
        let machine = Machine {
            gpus: &|| has("driver").map(|()| gpus),
            nvrtc: &|| has("nvrtc"),
            cublaslt: &|| has("cublaslt"),
            nccl: &|| has("nccl"),
        };
        choose_on(args, &machine, || Ok(launched)).map_err(|e| {
            assert_eq!(e.exit_code(), 2);
            e.to_string()
        })
    }

    fn rank(local_rank: usize, world_size: usize) -> Ranks {
        let (host, launcher) = ("127.0.0.1".to_owned(), Launcher::Torchrun);
        Ranks { rank: local_rank, world_size, local_rank, host, port: 1, launcher }
    }

    #[test]
    fn auto_takes_gpus_where_all_is_there_and_asked_for_what_is_missing_is_named() {
        use CommChoice::{Auto, Nccl};
        let on_cuda = Chosen::Cuda { gpus: 2, launched: None };
        for (device, comm) in [(DeviceChoice::Auto, Auto), (DeviceChoice::Cuda, Auto), (DeviceChoice::Auto, Nccl)] {
            let args = args(device, comm, Some(2), false);
            assert_eq!(choose_with(&args, 2, "", None), Ok(on_cuda.clone()));
            for lacks in ["driver", "nvrtc", "cublaslt", "nccl"] {
                let chosen = choose_with(&args, 2, lacks, None);
                if (device, comm) == (DeviceChoice::Auto, Auto) {
                    assert_eq!(chosen, Ok(Chosen::Host), "{lacks}");
                } else {
                    let error = chosen.unwrap_err();
                    assert!(error.contains("--device cuda") && error.contains(&format!("lib{lacks}.so")), "{error}");
                }
            }
            assert!(
                choose_with(&args, 0, "", None).is_ok_and(|c| c == Chosen::Host)
                    != (device != DeviceChoice::Auto || comm == Nccl)
            );
        }
        // One rank needs no NCCL.
        let alone = args(DeviceChoice::Cuda, Auto, Some(1), false);
        assert_eq!(choose_with(&alone, 2, "nccl", None), Ok(on_cuda));
    }

    #[test]
    fn more_ranks_than_gpus_only_with_the_flag() {
        let asked = |share| args(DeviceChoice::Cuda, CommChoice::Auto, Some(3), share);
        let error = choose_with(&asked(false), 1, "", None).unwrap_err();
        assert!(error.contains("3 ranks") && error.contains("1 GPU") && error.contains("--share-gpus"), "{error}");
        assert_eq!(choose_with(&asked(true), 1, "", None), Ok(Chosen::Cuda { gpus: 1, launched: None }));
        let auto = args(DeviceChoice::Auto, CommChoice::Auto, Some(3), false);
        assert_eq!(choose_with(&auto, 1, "", None), Ok(Chosen::Host));
        // Of a launcher's ranks those of this machine count.
        let one_of_16 = args(DeviceChoice::Cuda, CommChoice::Auto, None, false);
        assert!(choose_with(&one_of_16, 8, "", Some(rank(7, 16))).is_ok());
        assert!(choose_with(&one_of_16, 4, "", Some(rank(7, 16))).unwrap_err().contains("--share-gpus"));
    }

    #[test]
    fn contradictions_are_usage_errors() {
        let with = |device, comm| choose_with(&args(device, comm, Some(2), false), 2, "", None);
        assert!(with(DeviceChoice::Cuda, CommChoice::Threads).unwrap_err().contains("NCCL"));
        assert!(with(DeviceChoice::Cpu, CommChoice::Nccl).unwrap_err().contains("--device cuda"));
        assert_eq!(with(DeviceChoice::Auto, CommChoice::Threads), Ok(Chosen::Host));
        let two = args(DeviceChoice::Cuda, CommChoice::Auto, Some(2), false);
        assert!(choose_with(&two, 4, "", Some(rank(0, 4))).unwrap_err().contains("the launcher started 4"));
        let none = args(DeviceChoice::Cuda, CommChoice::Auto, Some(0), false);
        assert!(choose_with(&none, 4, "", None).unwrap_err().contains("--ranks 0"));
    }
}
