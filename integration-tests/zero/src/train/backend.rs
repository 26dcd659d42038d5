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
        Err(reason) if required => return Err(usage!("{flag}: {reason}")),
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
            return Err(usage!(
                "{excess}: use fewer --ranks, or --share-gpus for a test whose speed does not matter"
            ));
        }
        tracing::warn!("training on the host: {excess}");
        return Ok(Backend::Host);
    }

    if ranks > 1
        && let Err(reason) = (machine.nccl)()
    {
        if required {
            return Err(usage!("{flag} with {ranks} ranks: {reason}"));
        }
        return on_host(&reason);
    }

    Ok(Backend::Cuda { gpus, launched })
}

const fn is_of_host(comm: CommChoice) -> bool {
    matches!(
        comm,
        CommChoice::Threads | CommChoice::Processes | CommChoice::Mpi
    )
}

/// Whether the flags allow GPUs.
///
/// # Errors
/// The flags contradict each other.
fn may_use_gpus(args: &TrainArgs) -> Result<bool, CliError> {
    let contradiction = match (args.device, args.comm) {
        (DeviceChoice::Cuda, comm) if is_of_host(comm) => {
            "--device cuda: ranks on CUDA communicate through NCCL; remove --comm"
        }
        (DeviceChoice::Cpu, CommChoice::Nccl) => "--comm nccl requires --device cuda",
        (DeviceChoice::Cpu, _) => return Ok(false),
        (DeviceChoice::Auto, comm) if is_of_host(comm) => return Ok(false),
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
        (Some(flag), Some(ranks)) if flag != ranks.world_size => Err(usage!(
            "--ranks {flag}: the launcher started {} ranks",
            ranks.world_size
        )),
        (Some(0), _) => Err(usage!("--ranks 0: expected at least 1")),
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
    use integration_tests::Printed;

    use super::*;
    use crate::settings::args::parsed;

    /// Chooses on a machine that lacks the part `missing`.
    fn choose_with(
        flags: &str,
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
        choose_on(&parsed(flags), &machine, || Ok(launched)).map_err(|e| {
            assert_eq!(e.exit_code(), 2);
            e.to_string()
        })
    }

    fn rank(local_rank: usize, world_size: usize) -> Ranks {
        Ranks::new(local_rank, world_size, local_rank, "127.0.0.1", 1).one_machine(true)
    }

    const fn on_cuda(gpus: usize) -> Backend {
        Backend::Cuda {
            gpus,
            launched: None,
        }
    }

    #[test]
    fn auto_falls_back_and_cuda_names_missing_part() {
        let auto = "--ranks 2";
        for flags in [auto, "--ranks 2 --device cuda", "--ranks 2 --comm nccl"] {
            assert_eq!(choose_with(flags, 2, "", None), Ok(on_cuda(2)));
            for missing in ["driver", "nvrtc", "cublaslt", "nccl"] {
                match choose_with(flags, 2, missing, None) {
                    Ok(chosen) => assert_eq!((flags, chosen), (auto, Backend::Host), "{missing}"),
                    Err(error) => {
                        assert_ne!(flags, auto, "{error}");
                        error.shows(&["--device cuda", &format!("lib{missing}.so")]);
                    }
                }
            }
            let without_gpus = choose_with(flags, 0, "", None);
            assert_eq!(without_gpus == Ok(Backend::Host), flags == auto);
        }

        // One rank needs no NCCL.
        let alone = choose_with("--ranks 1 --device cuda", 2, "nccl", None);
        assert_eq!(alone, Ok(on_cuda(2)));
    }

    #[test]
    fn more_ranks_than_gpus_need_flag() {
        let three = "--ranks 3 --device cuda";
        let error = choose_with(three, 1, "", None).unwrap_err();
        error.shows(&["3 ranks", "1 GPU", "--share-gpus"]);
        let shared = choose_with(&format!("{three} --share-gpus"), 1, "", None);
        assert_eq!(shared, Ok(on_cuda(1)));
        assert_eq!(choose_with("--ranks 3", 1, "", None), Ok(Backend::Host));

        // Only the launcher's ranks on this machine count.
        let of_16 = |gpus| choose_with("--device cuda", gpus, "", Some(rank(7, 16)));
        of_16(8).unwrap();
        of_16(4).unwrap_err().shows(&["--share-gpus"]);
    }

    #[test]
    fn contradictions_are_usage_errors() {
        for (flags, launched, part) in [
            ("--ranks 2 --device cuda --comm threads", None, "NCCL"),
            ("--ranks 2 --device cpu --comm nccl", None, "--device cuda"),
            (
                "--ranks 2 --device cuda",
                Some(rank(0, 4)),
                "the launcher started 4",
            ),
            ("--ranks 0 --device cuda", None, "--ranks 0"),
        ] {
            let error = choose_with(flags, 4, "", launched).unwrap_err();
            error.shows(&[part]);
        }
        let threads = choose_with("--ranks 2 --comm threads", 2, "", None);
        assert_eq!(threads, Ok(Backend::Host));
    }
}
