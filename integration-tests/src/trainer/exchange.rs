//! Small messages between ranks over the communicator, also those of zero-ckpt's saves and opens.

use std::time::Duration;

use zero_alloc::device::{AnySlice, DType, Device};
use zero_alloc::{Pool, Purpose};
use zero_ckpt::Exchange;
use zero_comm::Communicator;

use super::rank::Rank;
use crate::error::TrainError;

/// The exchange of a rank: through device memory, on one stream.
pub struct RankExchange<'a, D: Device> {
    comm: &'a dyn Communicator<D>,
    pool: &'a Pool<D>,
    stream: &'a D::Stream,
    /// Timeout of the host's waits for the stream.
    host_limit: Duration,
}

impl<'a, D: Device> RankExchange<'a, D> {
    /// The exchange of a rank of `comm`; `host_limit` is longer than the communicator's limit.
    pub fn new(
        comm: &'a dyn Communicator<D>,
        pool: &'a Pool<D>,
        stream: &'a D::Stream,
        host_limit: Duration,
    ) -> Self {
        Self { comm, pool, stream, host_limit }
    }

    /// The exchange of a rank of a run, on its communication stream.
    pub(super) fn of(rank: &'a Rank<D>) -> Self {
        Self::new(&*rank.comm, &rank.pool, &rank.comm_stream, rank.settings.host_limit())
    }

    /// All-gathers `bytes`, of the same length on all ranks, as control traffic. Returns them in rank order.
    pub(super) fn all_gather(&self, bytes: &[u8]) -> Result<Vec<u8>, TrainError> {
        let (rank, ranks) = (self.comm.rank(), self.comm.world_size());
        let mut all = vec![0; bytes.len() * ranks];
        let own = rank * bytes.len()..(rank + 1) * bytes.len();
        all[own.clone()].copy_from_slice(bytes);
        self.through_device(&mut all, |slice| {
            Ok(self.comm.control_all_gather(self.stream, slice.slice(own), slice)?)
        })?;
        Ok(all)
    }

    /// Copies `bytes` to device memory, enqueues `collective` on it, and copies the result back.
    fn through_device(
        &self,
        bytes: &mut [u8],
        collective: impl FnOnce(AnySlice) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let Self { pool, stream, host_limit, .. } = *self;
        let mut block = pool.allocate(bytes.len(), DType::U8, Purpose::Workspace, stream)?;
        // SAFETY: only this stream uses the block, and it is recorded before the block is dropped.
        let slice = unsafe { block.slice() };
        let exchanged = pool
            .device()
            .upload(stream, bytes, slice, host_limit)
            .map_err(TrainError::from)
            .and_then(|()| collective(slice))
            .and_then(|()| Ok(pool.device().download(stream, slice, bytes, host_limit)?));
        block.record_use(stream)?;
        exchanged
    }
}

impl<D: Device> Exchange for RankExchange<'_, D> {
    type Error = TrainError;

    /// Communicators have no gather to one rank; an all-gather of records of 64 bytes is small on every rank.
    fn gather(&mut self, record: &[u8]) -> Result<Vec<u8>, TrainError> {
        self.all_gather(record)
    }

    fn broadcast(&mut self, message: &mut [u8], root: u64) -> Result<(), TrainError> {
        self.through_device(message, |slice| Ok(self.comm.broadcast(self.stream, slice, root as usize)?))
    }
}
