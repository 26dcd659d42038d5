//! Small messages between ranks over the communicator, also those of zero-ckpt's saves and opens.

use std::time::Duration;

use zero_alloc::Pool;
use zero_alloc::device::Device;
use zero_ckpt::{Exchange, ExchangeFn};
use zero_comm::{CommError, Communicator};

use crate::error::TrainError;
use crate::mesh::Replicas;
use crate::rank::Rank;

/// The exchange of a rank: through device memory, on one stream.
pub struct RankExchange<'a, D: Device> {
    comm: &'a dyn Communicator<D>,
    pool: &'a Pool<D>,
    stream: &'a D::Stream,
    /// Timeout of the host's waits for the stream.
    host_limit: Duration,
    /// The rank at each place of an exchange; `None`: in rank order.
    order: Option<Vec<usize>>,
}

impl<'a, D: Device> RankExchange<'a, D> {
    /// The exchange of a rank of `comm`; `host_limit` is longer than the communicator's limit.
    pub fn new(
        comm: &'a dyn Communicator<D>,
        pool: &'a Pool<D>,
        stream: &'a D::Stream,
        host_limit: Duration,
    ) -> Self {
        Self {
            comm,
            pool,
            stream,
            host_limit,
            order: None,
        }
    }

    /// The exchange of a rank of a run, on its communication stream.
    pub(crate) fn of(rank: &'a Rank<D>) -> Self {
        Self::new(
            &*rank.comm,
            &rank.pool,
            &rank.comm_stream,
            rank.settings.host_limit(),
        )
    }

    /// The exchange of a run in the order of the shards that ranks save: zero-ckpt knows a rank by
    /// its shard.
    pub(crate) fn of_shards(rank: &'a Rank<D>) -> Self {
        let shards = 0..rank.comm.world_size() as u64;
        let order = shards.map(|shard| rank.rank_of_shard(shard) as usize);
        Self {
            order: Some(order.collect()),
            ..Self::of(rank)
        }
    }

    /// The exchange of a rank with the other data ranks.
    pub(crate) fn of_data(rank: &'a Rank<D>) -> Self {
        Self {
            comm: &*rank.mesh.data,
            ..Self::of(rank)
        }
    }

    /// The exchange of a rank with the others of tensor parallelism.
    pub(crate) fn of_tensor(rank: &'a Rank<D>, tensor: &'a dyn Communicator<D>) -> Self {
        Self {
            comm: tensor,
            ..Self::of(rank)
        }
    }

    /// The exchange of a rank with the replicas of its shard.
    pub(crate) fn of_replicas(rank: &'a Rank<D>, replicas: &'a Replicas<D>) -> Self {
        Self {
            comm: &**replicas.comm(),
            ..Self::of(rank)
        }
    }

    /// Sends `message` to all ranks and returns the messages of all ranks, in rank order.
    ///
    /// # Errors
    /// The communicator failed.
    pub fn exchange(&self, message: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let mut messages = self
            .comm
            .exchange(self.pool, self.stream, message, self.host_limit)?;
        Ok(match &self.order {
            None => messages,
            Some(order) => order
                .iter()
                .map(|&rank| std::mem::take(&mut messages[rank]))
                .collect(),
        })
    }

    /// This rank's place in an exchange.
    fn place(&self) -> u64 {
        let own = self.comm.rank();
        let of_parts = self.order.as_ref();
        of_parts
            .and_then(|order| order.iter().position(|&rank| rank == own))
            .unwrap_or(own) as u64
    }

    /// All-gathers `bytes`, of the same length on all ranks. Returns them in rank order.
    pub(crate) fn all_gather(&self, bytes: &[u8]) -> Result<Vec<u8>, TrainError> {
        Ok(self.exchange(bytes)?.concat())
    }
}

impl<D: Device> Exchange for RankExchange<'_, D> {
    type Error = TrainError;

    /// Communicators have no gather to one rank; an all-gather of records of 64 bytes is small on
    /// every rank.
    fn gather(&mut self, record: &[u8]) -> Result<Vec<u8>, TrainError> {
        self.all_gather(record)
    }

    fn broadcast(&mut self, message: &mut [u8], root: u64) -> Result<(), TrainError> {
        Ok(
            ExchangeFn::new(self.place(), |own: &[u8]| self.exchange(own))
                .broadcast(message, root)?,
        )
    }
}
