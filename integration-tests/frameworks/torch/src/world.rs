//! The ranks of a job.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use zero_alloc::host::HostDevice;
use zero_comm::processes::ProcessComm;
use zero_comm::world::Ranks;
use zero_comm::{CommOptions, Communicator, Solo};

use crate::{Host, failed};

/// The communicator of this process, by the launcher's variables; a world of one without them.
fn connect(limit: Duration) -> PyResult<Arc<dyn Communicator<Host>>> {
    let ranks = Ranks::from_env().map_err(failed)?;
    let Some(ranks) = ranks.filter(|ranks| ranks.world_size > 1) else {
        return Ok(Arc::new(Solo::new(HostDevice::new())));
    };
    let comm = ProcessComm::join(&ranks, CommOptions::default().limit(limit));
    Ok(Arc::new(comm.map_err(failed)?))
}

/// The ranks of this job. A process joins them once; engines share it.
#[pyclass(frozen)]
pub(crate) struct World {
    pub(crate) comm: Arc<dyn Communicator<Host>>,
}

#[pymethods]
impl World {
    #[new]
    fn new(py: Python<'_>, limit_seconds: f64) -> PyResult<Self> {
        let limit = Duration::try_from_secs_f64(limit_seconds).map_err(failed)?;
        let comm = py.detach(|| connect(limit))?;
        Ok(Self { comm })
    }

    #[getter]
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    #[getter]
    fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    /// Bytes that this rank has sent.
    fn sent_bytes(&self) -> u64 {
        self.comm.traffic().total_bytes()
    }

    /// Ends all ranks with this rank's name and `reason`.
    fn abort(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.comm.abort(reason));
    }
}
