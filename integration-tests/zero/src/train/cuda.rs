//! Ranks on GPUs, one process each. This process starts them or is one of them.

use std::sync::Arc;
use std::time::Duration;

use zero_alloc::cuda::{CudaDevice, bind_to_node};
use zero_comm::nccl::NcclCommunicator;
use zero_comm::world::{Launcher, Ranks};
use zero_comm::{CommOptions, Communicator, Solo};

use super::backend;
use super::parts::Gpu;
use super::process_rank::{ProcessRank, join_error, named};
use super::resume::Resumed;
use super::setup::RunSetup;
use super::start_ranks::start_ranks;
use crate::error::CliError;
use crate::memory;
use crate::settings::args::TrainArgs;
use zero_models::cuda::matmul::CublasLtProducts;
use zero_trainer::{CudaOptions, run_on_cuda};

/// NCCL settings that let ranks share a GPU and limit the size of each rank's kernels; the user's
/// values override them.
const SHARING: [(&str, &str); 2] = [("NCCL_MULTI_RANK_GPU_ENABLE", "1"), ("NCCL_MAX_CTAS", "8")];

/// Trains on `gpus` GPUs of this machine, or as one rank if a launcher started this process
/// (`launched`).
pub(crate) fn run(
    args: &TrainArgs,
    resumed: Option<&Resumed>,
    gpus: usize,
    launched: Option<Ranks>,
) -> Result<(), CliError> {
    let ranks = backend::ranks(args, launched.as_ref(), gpus)?;
    match launched {
        Some(launched) => run_rank(args, resumed, gpus, Some(&launched)),
        None if ranks == 1 => run_rank(args, resumed, gpus, None),
        None => {
            let sharing = SHARING.into_iter();
            let unset = |name| args.share_gpus && std::env::var_os(name).is_none();
            let sharing = sharing.filter(|(name, _)| unset(*name));
            let variables = sharing.map(|(name, value)| (name.to_owned(), value.to_owned()));
            start_ranks(ranks, variables, resumed)
        }
    }
}

/// Trains as one rank; rank 0 prints.
fn run_rank(
    args: &TrainArgs,
    resumed: Option<&Resumed>,
    gpus: usize,
    launched: Option<&Ranks>,
) -> Result<(), CliError> {
    let local_rank = launched.map_or(0, |launched| launched.local_rank);
    // Before the driver starts threads, which inherit the cores.
    let cores = bind(launched, local_rank, gpus)?;
    let device = CudaDevice::open(local_rank % gpus).map_err(CliError::failure)?;
    let rank_setup = RankSetup {
        device: &device,
        launched,
        gpus,
        cores,
    };

    let is_deferred = args.resume.is_some() && resumed.is_none();
    // Otherwise a rank that cannot start ends before it connects: its launcher ends the others,
    // which wait for it.
    let early = if is_deferred {
        None
    } else {
        Some(rank_setup.make(args, resumed)?)
    };

    let process_rank = ProcessRank {
        args,
        resumed,
        comm: connect(args, &device, launched, gpus)?,
        device: device.clone(),
        notice: None,
    };
    process_rank.run(
        Ok(early),
        |args, resumed| rank_setup.make(args, resumed),
        |setup, comm, observe| {
            let summary = run_on_cuda(
                &device,
                Arc::clone(&comm),
                CudaOptions {
                    record: setup.is_recorded(),
                    products: CublasLtProducts::load,
                },
                &setup.settings,
                &setup.workload,
                &setup.options,
                observe,
            );
            named(summary, comm)
        },
    )
}

/// Connects the rank with the others.
fn connect(
    args: &TrainArgs,
    device: &CudaDevice,
    launched: Option<&Ranks>,
    gpus: usize,
) -> Result<Arc<dyn Communicator<CudaDevice>>, CliError> {
    let Some(ranks) = launched.filter(|ranks| ranks.world_size > 1) else {
        return Ok(Arc::new(Solo::new(device.clone())));
    };
    check_sharing(args, ranks.local_rank >= gpus)?;
    let limit = Duration::from_secs(args.time_limit);
    let joined = NcclCommunicator::join(device, ranks, CommOptions::default().limit(limit));
    Ok(Arc::new(joined.map_err(|e| join_error(ranks.rank, e))?))
}

/// The machine of a rank.
struct RankSetup<'a> {
    device: &'a CudaDevice,
    launched: Option<&'a Ranks>,
    /// GPUs of this machine.
    gpus: usize,
    /// Cores of the rank, if it is bound to some.
    cores: Option<usize>,
}

impl RankSetup<'_> {
    fn make(&self, args: &TrainArgs, resumed: Option<&Resumed>) -> Result<RunSetup, CliError> {
        let Self {
            device,
            launched,
            gpus,
            cores,
        } = *self;

        let (world_size, local_rank) =
            launched.map_or((1, 0), |ranks| (ranks.world_size, ranks.local_rank));
        let sharers = if args.share_gpus {
            ranks_here(launched, local_rank, gpus).div_ceil(gpus) as u64
        } else {
            1
        };

        let memory_bytes = device.memory_bytes().map_err(CliError::failure)?.1 as u64 / sharers;
        let gpu = Gpu {
            name: device.name().to_owned(),
            memory_bytes,
        };

        let mut setup = RunSetup::new(args, resumed, world_size, Some(gpu))?;
        if let (Some(cores), None) = (cores, args.threads) {
            setup.workload.threads = cores;
        }
        memory::check_host_of_gpus(&setup.memory(), world_size.min(gpus), args.memory_limit)?;

        // The note is printed by rank 0, whether or not that rank shares its GPU.
        if args.share_gpus && world_size > gpus {
            setup
                .notices
                .push("ranks share GPUs: timings are not meaningful".to_owned());
        }

        Ok(setup)
    }
}

/// The ranks of this machine; of several machines each GPU is assumed to have one.
fn ranks_here(launched: Option<&Ranks>, local_rank: usize, gpus: usize) -> usize {
    launched
        .map_or(1, |l| if l.one_machine { l.world_size } else { gpus })
        .max(local_rank + 1)
}

/// Binds this process to its share of the cores near its GPU, if there are several NUMA nodes.
/// Returns their number.
fn bind(
    launched: Option<&Ranks>,
    local_rank: usize,
    gpus: usize,
) -> Result<Option<usize>, CliError> {
    let ordinals: Vec<_> = (0..ranks_here(launched, local_rank, gpus))
        .map(|rank| rank % gpus)
        .collect();
    let divide = launched.is_none_or(|l| l.launcher == Launcher::Torchrun);
    let cores = bind_to_node(&ordinals, local_rank, divide).map_err(CliError::failure)?;
    Ok(cores.map(|cores| cores.len()))
}

/// Checks NCCL's variables under another launcher: this process starts too late to set them.
fn check_sharing(args: &TrainArgs, shares: bool) -> Result<(), CliError> {
    let (name, value) = SHARING[0];
    if shares && args.share_gpus && std::env::var(name).as_deref() != Ok(value) {
        return Err(usage!(
            "--share-gpus: set {name}={value} for all ranks (NCCL 2.30 or later)"
        ));
    }
    Ok(())
}
