//! The ranks of a job.

use std::time::Duration;

use parking_lot::Mutex;
use pyo3::prelude::*;
use zero_comm::world::Ranks;

use crate::connect::{Comm, connect};
use crate::detached::detached;
use crate::failed;
use crate::transport::Transport;

/// Whether the launcher has placed ranks on several machines.
#[pyfunction]
pub(crate) fn has_several_machines() -> PyResult<bool> {
    let ranks = Ranks::from_env().map_err(failed)?;
    Ok(ranks.is_some_and(|ranks| !ranks.one_machine))
}

/// The process that has joined. A fork of it has none of the threads, so it drops nothing that waits
/// for them.
#[derive(Clone, Copy)]
pub(crate) struct Process(u32);

impl Process {
    pub(crate) fn this() -> Self {
        Self(std::process::id())
    }

    pub(crate) fn is_this(self) -> bool {
        self.0 == std::process::id()
    }
}

/// The ranks of this job. A process joins them once; engines share it.
#[pyclass(frozen)]
pub(crate) struct World {
    comm: Mutex<Option<Comm>>,
    process: Process,
}

impl World {
    pub(crate) fn comm(&self) -> PyResult<Comm> {
        if !self.process.is_this() {
            return Err(failed(
                "a fork of a rank is no rank: call initialize in the process that a launcher started",
            ));
        }
        let comm = self.comm.lock().clone();
        comm.ok_or_else(|| failed("this process has left the ranks"))
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if !self.process.is_this() {
            std::mem::forget(self.comm.get_mut().take());
        }
    }
}

#[pymethods]
impl World {
    /// `transport` moves the data of ranks that share no memory; `gpu` is the number of this rank's.
    #[new]
    fn new(
        py: Python<'_>,
        limit_seconds: f64,
        transport: Option<&Bound<'_, PyAny>>,
        gpu: Option<usize>,
    ) -> PyResult<Self> {
        let transport = transport.map(Transport::new).transpose()?;
        let limit = Duration::try_from_secs_f64(limit_seconds).map_err(failed)?;
        let comm = detached(py, None, || connect(limit, transport, gpu))?;
        let process = Process::this();
        Ok(Self {
            comm: Mutex::new(Some(comm)),
            process,
        })
    }

    #[getter]
    fn rank(&self) -> PyResult<usize> {
        Ok(self.comm()?.rank())
    }

    #[getter]
    fn world_size(&self) -> PyResult<usize> {
        Ok(self.comm()?.world_size())
    }

    /// Bytes that this rank has sent.
    fn sent_bytes(&self) -> PyResult<u64> {
        Ok(self.comm()?.sent_bytes())
    }

    /// Leaves the ranks, once no engine is open.
    fn leave(&self, py: Python<'_>) {
        if self.process.is_this() {
            py.detach(|| drop(self.comm.lock().take()));
        }
    }

    /// The sockets that a fork of this process must close: descriptors and inodes.
    #[staticmethod]
    fn sockets() -> Vec<(i32, u64)> {
        let sockets = zero_comm::world::sockets().into_iter();
        sockets.map(|socket| (socket.fd, socket.inode)).collect()
    }

    /// Ends all ranks with this rank's name and `reason`.
    fn abort(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let comm = self.comm()?;
        py.detach(|| comm.abort(reason));
        Ok(())
    }
}
