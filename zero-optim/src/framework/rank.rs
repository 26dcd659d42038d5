//! The context of a rank.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use zero_alloc::Pool;
use zero_alloc::device::Device;
use zero_alloc::host::HostDevice;
use zero_comm::Communicator;
use zero_kernels::Kernels;
use zero_kernels::host::HostKernels;

use super::FrameworkError;
use super::rank_calls::Call;

/// The context of a rank: its communicator, memory, streams and kernels.
pub struct Rank<D: Device> {
    pub(super) comm: Arc<dyn Communicator<D>>,
    pub(super) pool: Pool<D>,
    pub(super) compute: D::Stream,
    pub(super) comm_stream: D::Stream,
    pub(super) kernels: Arc<dyn Kernels<D>>,
    pub(super) limit: Duration,
}

impl<D: Device> fmt::Debug for Rank<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rank = self.comm.rank();
        let ranks = self.comm.world_size();
        write!(f, "Rank({rank} of {ranks})")
    }
}

impl Rank<HostDevice> {
    /// A rank on the host, with one thread for its kernels.
    ///
    /// # Errors
    /// A thread could not be started.
    pub fn on_host(comm: impl Communicator<HostDevice> + 'static) -> Result<Self, FrameworkError> {
        let pool = Pool::new(HostDevice::new(), usize::MAX);
        Self::new(Arc::new(comm), pool, Arc::new(HostKernels::new(1)?))
    }
}

impl<D: Device> Rank<D> {
    /// A rank on the pool's device, with new streams. Several ranks may share a device, each with
    /// another pool.
    ///
    /// # Errors
    /// A stream could not be made.
    pub fn new(
        comm: Arc<dyn Communicator<D>>,
        pool: Pool<D>,
        kernels: Arc<dyn Kernels<D>>,
    ) -> Result<Self, FrameworkError> {
        let name = format!("rank {} compute", comm.rank());
        let compute = pool.device().create_stream(&name)?;
        Self::with_stream(comm, pool, kernels, compute)
    }

    /// As [`Self::new`], with the framework's stream as the compute stream.
    ///
    /// # Errors
    /// The communication stream could not be made.
    pub fn with_stream(
        comm: Arc<dyn Communicator<D>>,
        pool: Pool<D>,
        kernels: Arc<dyn Kernels<D>>,
        compute: D::Stream,
    ) -> Result<Self, FrameworkError> {
        let name = format!("rank {} comm", comm.rank());
        let comm_stream = pool.device().create_urgent_stream(&name)?;
        Ok(Self {
            comm,
            pool,
            compute,
            comm_stream,
            kernels,
            limit: Duration::from_secs(900),
        })
    }

    /// Sets the limit of each wait of the host. Default: 15 minutes. Set it above the communicator's
    /// (default 10), whose error names the rank that is late.
    #[must_use]
    pub fn limit(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// The communicator: rank, number of ranks, bytes sent.
    pub fn comm(&self) -> &dyn Communicator<D> {
        &*self.comm
    }

    /// The pool of the memory.
    pub fn pool(&self) -> &Pool<D> {
        &self.pool
    }

    /// The compute stream. What is enqueued on it within a call reads parameters in order.
    pub fn compute(&self) -> &D::Stream {
        &self.compute
    }

    /// The number of this rank, in the type of layouts.
    pub(super) fn id(&self) -> u64 {
        self.comm.rank() as u64
    }

    /// Sends `message` to all ranks, which are in the same call, and returns those of all ranks, in
    /// rank order.
    pub(super) fn exchange(
        &self,
        call: Call,
        message: &[u8],
    ) -> Result<Vec<Vec<u8>>, FrameworkError> {
        self.exchanger(call)(message)
    }

    /// [`Self::exchange`] that outlives the rank.
    pub(super) fn exchanger(
        &self,
        call: Call,
    ) -> impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, FrameworkError> + use<D> {
        let comm = Arc::clone(&self.comm);
        let pool = self.pool.clone();
        let compute = self.compute.clone();
        let limit = self.limit;
        move |message| {
            call.exchange(message, |message| {
                comm.exchange(&pool, &compute, message, limit)
            })
        }
    }
}
