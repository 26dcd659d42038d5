//! Selects the host or CUDA, by the flags and by the libraries and GPUs of this machine.

use std::path::Path;

use zero_alloc::cuda::CudaDevice;
use zero_comm::nccl;
use zero_comm::world::Ranks;
use zero_kernels::cuda::Nvrtc;

use crate::error::CliError;
use crate::settings::args::{CommChoice, DeviceChoice, TrainArgs};
use zero_models::cuda::matmul;

/// Exists where the kernel's driver for NVIDIA GPUs is loaded.
const NVIDIA_DEVICE: &str = "/dev/nvidiactl";

/// The device type of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Backend {
    /// The host.
    Host,
    /// CUDA, with the number of GPUs of this machine, and the rank of this process if a launcher
    /// started it.
    Cuda {
        gpus: usize,
        launched: Option<Ranks>,
    },
}

/// Probes for what a run on CUDA needs from the machine.
struct Machine<'a> {
    gpus: &'a dyn Fn() -> Result<usize, String>,
    nvrtc: &'a dyn Fn() -> Result<(), String>,
    cublaslt: &'a dyn Fn() -> Result<(), String>,
    nccl: &'a dyn Fn() -> Result<(), String>,
}

impl Machine<'_> {
    /// The number of GPUs of a machine that has what a rank on one needs.
    ///
    /// # Errors
    /// The library that the machine lacks, or that it has no GPU.
    fn usable_gpus(&self) -> Result<usize, String> {
        let gpus = (self.gpus)()?;
        if gpus == 0 {
            return Err("the driver reports no GPU".to_owned());
        }
        (self.nvrtc)()?;
        (self.cublaslt)()?;
        Ok(gpus)
    }
}

/// Chooses the back end.
///
/// # Errors
/// The flags contradict each other or the environment, or require something that this machine does
/// not have.
pub(crate) fn choose(args: &TrainArgs) -> Result<Backend, CliError> {
    let machine = Machine {
        gpus: &|| CudaDevice::count().map_err(|e| e.to_string()),
        nvrtc: &|| Nvrtc::find().map(drop).map_err(|e| e.to_string()),
        cublaslt: &|| matmul::find_library().map_err(|e| e.to_string()),
        nccl: &|| nccl::version().map(drop).map_err(|e| e.to_string()),
    };
    choose_on(args, &machine, || {
        Ranks::from_env().map_err(CliError::usage)
    })
}

fn choose_on(
    args: &TrainArgs,
    machine: &Machine<'_>,
    launched: impl FnOnce() -> Result<Option<Ranks>, CliError>,
) -> Result<Backend, CliError> {
    if !may_use_gpus(args)? {
        return Ok(Backend::Host);
    }
    let required = args.device == DeviceChoice::Cuda || args.comm == CommChoice::Nccl;
    let flag = if args.device == DeviceChoice::Cuda {
        "--device cuda"
    } else {
        "--comm nccl requires --device cuda"
    };

    let launched = launched();
    // The other ranks of a launcher may use GPUs, and then wait for this one.
    let is_one_of_many = matches!(&launched, Ok(Some(ranks)) if ranks.world_size > 1);
    let on_host = |reason: &str| {
        if is_one_of_many && Path::new(NVIDIA_DEVICE).exists() {
            tracing::warn!("training on the host: {reason}; --device cuda makes this an error");
        } else {
            tracing::debug!("training on the host: {reason}");
        }
        Ok(Backend::Host)
    };

    let gpus = match machine.usable_gpus() {
        Ok(gpus) => gpus,
        Err(reason) if required => return Err(CliError::Usage(format!("{flag}: {reason}"))),
        Err(reason) => return on_host(&reason),
    };

    let launched = launched?;
    let ranks = ranks(args, launched.as_ref(), gpus)?;
    let here = launched.as_ref().map_or(ranks, |l| l.local_rank + 1);
    if here > gpus && !args.share_gpus && !own_gpu_each(launched.as_ref(), gpus) {
        let excess = format!(
            "{here} ranks on a machine with {gpus} GPU{}",
            if gpus == 1 { "" } else { "s" }
        );
        if required {
            return Err(CliError::Usage(format!(
                "{excess}: use fewer --ranks, or --share-gpus for a test whose speed does not matter"
            )));
        }
        tracing::warn!("training on the host: {excess}");
        return Ok(Backend::Host);
    }

    if ranks > 1
        && let Err(reason) = (machine.nccl)()
    {
        if required {
            return Err(CliError::Usage(format!(
                "{flag} with {ranks} ranks: {reason}"
            )));
        }
        return on_host(&reason);
    }

    Ok(Backend::Cuda { gpus, launched })
}

/// Whether the flags allow GPUs.
///
/// # Errors
/// The flags contradict each other.
fn may_use_gpus(args: &TrainArgs) -> Result<bool, CliError> {
    let contradiction = match (args.device, args.comm) {
        (DeviceChoice::Cuda, CommChoice::Threads | CommChoice::Mpi) => {
            "--device cuda: ranks on CUDA communicate through NCCL; remove --comm"
        }
        (DeviceChoice::Cpu, CommChoice::Nccl) => "--comm nccl requires --device cuda",
        (DeviceChoice::Cpu, _) | (DeviceChoice::Auto, CommChoice::Threads | CommChoice::Mpi) => {
            return Ok(false);
        }
        _ => return Ok(true),
    };
    Err(CliError::Usage(contradiction.to_owned()))
}

/// The number of ranks of the run. Without a flag it is that of a resumed run where the GPUs
/// suffice.
pub(crate) fn ranks(
    args: &TrainArgs,
    launched: Option<&Ranks>,
    gpus: usize,
) -> Result<usize, CliError> {
    match (args.ranks, launched) {
        (Some(flag), Some(ranks)) if flag != ranks.world_size => Err(CliError::Usage(format!(
            "--ranks {flag}: the launcher started {} ranks",
            ranks.world_size
        ))),
        (Some(0), _) => Err(CliError::Usage("--ranks 0: expected at least 1".to_owned())),
        (_, Some(ranks)) => Ok(ranks.world_size),
        (Some(flag), None) => Ok(flag),
        (None, None) => Ok(args
            .recorded_ranks
            .filter(|n| *n <= gpus || args.share_gpus)
            .unwrap_or(gpus)),
    }
}

/// Whether the launcher makes only one GPU visible to each rank, as Slurm may.
fn own_gpu_each(launched: Option<&Ranks>, gpus: usize) -> bool {
    launched.is_some()
        && gpus == 1
        && std::env::var_os("CUDA_VISIBLE_DEVICES").is_some_and(|v| !v.is_empty())
}

#[cfg(test)]
mod tests {

    use super::*;

    fn args(
        device: DeviceChoice,
        comm: CommChoice,
        ranks: Option<usize>,
        share_gpus: bool,
    ) -> TrainArgs {
        TrainArgs {
            device,
            comm,
            ranks,
            share_gpus,
            ..TrainArgs::default()
        }
    }

    /// Chooses on a machine that lacks the part `missing`.
    fn choose_with(
        args: &TrainArgs,
        gpus: usize,
        missing: &str,
        launched: Option<Ranks>,
    ) -> Result<Backend, String> {
        let has = |name: &str| {
            if missing == name {
                Err(format!("no {name}; tried lib{name}.so"))
            } else {
                Ok(())
            }
        };
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
        Ranks::new(local_rank, world_size, local_rank, "127.0.0.1", 1).one_machine(true)
    }

    #[test]
    fn auto_falls_back_and_cuda_names_missing_part() {
        use CommChoice::{Auto, Nccl};
        let on_cuda = Backend::Cuda {
            gpus: 2,
            launched: None,
        };

        for (device, comm) in [
            (DeviceChoice::Auto, Auto),
            (DeviceChoice::Cuda, Auto),
            (DeviceChoice::Auto, Nccl),
        ] {
            let args = args(device, comm, Some(2), false);
            assert_eq!(choose_with(&args, 2, "", None), Ok(on_cuda.clone()));
            for missing in ["driver", "nvrtc", "cublaslt", "nccl"] {
                let chosen = choose_with(&args, 2, missing, None);
                if (device, comm) == (DeviceChoice::Auto, Auto) {
                    assert_eq!(chosen, Ok(Backend::Host), "{missing}");
                } else {
                    let error = chosen.unwrap_err();
                    assert!(
                        error.contains("--device cuda")
                            && error.contains(&format!("lib{missing}.so")),
                        "{error}"
                    );
                }
            }
            assert!(
                choose_with(&args, 0, "", None).is_ok_and(|c| c == Backend::Host)
                    != (device != DeviceChoice::Auto || comm == Nccl)
            );
        }

        // One rank needs no NCCL.
        let alone = args(DeviceChoice::Cuda, Auto, Some(1), false);
        assert_eq!(choose_with(&alone, 2, "nccl", None), Ok(on_cuda));
    }

    #[test]
    fn more_ranks_than_gpus_need_flag() {
        let three = |share| args(DeviceChoice::Cuda, CommChoice::Auto, Some(3), share);
        let error = choose_with(&three(false), 1, "", None).unwrap_err();
        assert!(
            error.contains("3 ranks") && error.contains("1 GPU") && error.contains("--share-gpus"),
            "{error}"
        );

        assert_eq!(
            choose_with(&three(true), 1, "", None),
            Ok(Backend::Cuda {
                gpus: 1,
                launched: None
            })
        );

        let auto = args(DeviceChoice::Auto, CommChoice::Auto, Some(3), false);
        assert_eq!(choose_with(&auto, 1, "", None), Ok(Backend::Host));
        // Only the launcher's ranks on this machine count.
        let one_of_16 = args(DeviceChoice::Cuda, CommChoice::Auto, None, false);
        assert!(choose_with(&one_of_16, 8, "", Some(rank(7, 16))).is_ok());
        assert!(
            choose_with(&one_of_16, 4, "", Some(rank(7, 16)))
                .unwrap_err()
                .contains("--share-gpus")
        );
    }

    #[test]
    fn contradictions_are_usage_errors() {
        let with = |device, comm| choose_with(&args(device, comm, Some(2), false), 2, "", None);
        assert!(
            with(DeviceChoice::Cuda, CommChoice::Threads)
                .unwrap_err()
                .contains("NCCL")
        );
        assert!(
            with(DeviceChoice::Cpu, CommChoice::Nccl)
                .unwrap_err()
                .contains("--device cuda")
        );
        assert_eq!(
            with(DeviceChoice::Auto, CommChoice::Threads),
            Ok(Backend::Host)
        );
        let two = args(DeviceChoice::Cuda, CommChoice::Auto, Some(2), false);
        assert!(
            choose_with(&two, 4, "", Some(rank(0, 4)))
                .unwrap_err()
                .contains("the launcher started 4")
        );
        let none = args(DeviceChoice::Cuda, CommChoice::Auto, Some(0), false);
        assert!(
            choose_with(&none, 4, "", None)
                .unwrap_err()
                .contains("--ranks 0")
        );
    }
}
