//! [`AllToAll`] by zero-comm.

use std::sync::Arc;

use zero_alloc::device::{AnySlice, Device, Stream};
use zero_comm::Communicator;

use crate::{AllToAll, OptimError};

/// The exchange of matrices over a communicator, whose ranks are in the order of the shards, on a
/// stream. All collectives of the communicator are on
/// this stream.
pub struct CommExchange<D: Device> {
    comm: Arc<dyn Communicator<D>>,
    stream: D::Stream,
}

impl<D: Device> std::fmt::Debug for CommExchange<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CommExchange(rank {})", self.comm.rank())
    }
}

impl<D: Device> CommExchange<D> {
    /// An exchange over `comm` on `stream`.
    pub fn new(comm: Arc<dyn Communicator<D>>, stream: D::Stream) -> Self {
        Self { comm, stream }
    }
}

impl<D: Device> AllToAll<D> for CommExchange<D> {
    fn stream(&self) -> &D::Stream {
        &self.stream
    }

    fn all_to_all(
        &self,
        stream: &D::Stream,
        (send, send_counts): (AnySlice, &[usize]),
        (recv, recv_counts): (AnySlice, &[usize]),
    ) -> Result<D::Event, OptimError> {
        let own = &self.stream;
        own.wait(&stream.record()?)?;
        let enqueued = self
            .comm
            .all_to_all_uneven(own, send, recv, send_counts, recv_counts);
        enqueued.map_err(|error| OptimError::Exchange {
            message: error.to_string(),
        })?;
        Ok(own.record()?)
    }
}
