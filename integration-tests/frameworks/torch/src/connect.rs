//! The communicator of a process.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use zero_alloc::cuda::CudaDevice;
use zero_alloc::host::HostDevice;
use zero_comm::nccl::NcclCommunicator;
use zero_comm::processes::ProcessComm;
use zero_comm::world::Ranks;
use zero_comm::{CommOptions, Communicator, Solo};

use crate::failed;
use crate::transport::Transport;

/// The communicator of this process, and its GPU.
#[derive(Clone)]
pub(crate) enum Comm {
    Host(Arc<dyn Communicator<HostDevice>>),
    Cuda(CudaDevice, Arc<dyn Communicator<CudaDevice>>),
}

impl Comm {
    pub(crate) fn rank(&self) -> usize {
        match self {
            Self::Host(comm) => comm.rank(),
            Self::Cuda(_, comm) => comm.rank(),
        }
    }

    pub(crate) fn world_size(&self) -> usize {
        match self {
            Self::Host(comm) => comm.world_size(),
            Self::Cuda(_, comm) => comm.world_size(),
        }
    }

    pub(crate) fn abort(&self, reason: &str) {
        match self {
            Self::Host(comm) => comm.abort(reason),
            Self::Cuda(_, comm) => comm.abort(reason),
        }
    }

    pub(crate) fn sent_bytes(&self) -> u64 {
        let traffic = match self {
            Self::Host(comm) => comm.traffic(),
            Self::Cuda(_, comm) => comm.traffic(),
        };
        traffic.total_bytes()
    }
}

/// Connects this process: over NCCL with GPU `gpu`, over `transport`, or else over shared memory. A
/// world of one without a launcher and `transport`.
pub(crate) fn connect(
    limit: Duration,
    transport: Option<(Transport, Ranks)>,
    gpu: Option<usize>,
) -> PyResult<Comm> {
    let options = CommOptions::default().limit(limit);
    if let Some((transport, ranks)) = transport {
        let comm = ProcessComm::join_over(&ranks, options, Arc::new(transport));
        return Ok(Comm::Host(Arc::new(comm.map_err(failed)?)));
    }
    let ranks = Ranks::from_env().map_err(failed)?;
    let ranks = ranks.filter(|ranks| ranks.world_size > 1);
    if let Some(gpu) = gpu {
        let device = CudaDevice::open(gpu).map_err(failed)?;
        let comm: Arc<dyn Communicator<CudaDevice>> = match ranks {
            None => Arc::new(Solo::new(device.clone())),
            Some(ranks) => {
                Arc::new(NcclCommunicator::join(&device, &ranks, options).map_err(failed)?)
            }
        };
        return Ok(Comm::Cuda(device, comm));
    }
    Ok(Comm::Host(match ranks {
        None => Arc::new(Solo::new(HostDevice::new())),
        Some(ranks) => Arc::new(ProcessComm::join(&ranks, options).map_err(failed)?),
    }))
}
