//! The contract of collectives: counts, rank offsets and the in-place rule of each.
//!
//! All ranks of a communicator call the same collectives in the same order, each on a stream of its own.
//! A call enqueues and returns; the operation runs in stream order, and its failure poisons the stream.
//! Sums of fp16 and bf16 are taken in fp32 in rank order and rounded once.

use zero_alloc::device::{AnySlice, DType, Device, DeviceError};

/// How elements of different ranks are combined, in rank order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Their sum.
    Sum,
    /// Their sum divided by the number of ranks.
    Avg,
    /// The greatest.
    Max,
}

/// Which collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Every rank gets its segment of the reduction.
    ReduceScatter,
    /// Every rank gets the segments of all.
    AllGather,
    /// Every rank gets the whole reduction.
    AllReduce,
    /// Every rank gets the root's buffer.
    Broadcast,
    /// Every rank gets one segment from each.
    AllToAll,
    /// Every rank waits for all.
    Barrier,
}

/// Bytes that this rank has sent, by collective: what a rank must put on a wire with a bandwidth-optimal
/// algorithm, S being the bytes of the whole buffer and N the ranks: (N-1)/N x S for reduce-scatter,
/// all-gather and all-to-all, twice that for all-reduce; for broadcast S (N-1)/N on every rank
/// (scatter and all-gather, the root's scatter included).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// By reduce-scatter.
    pub reduce_scatter_bytes: u64,
    /// By all-gather.
    pub all_gather_bytes: u64,
    /// By all-reduce.
    pub all_reduce_bytes: u64,
    /// By broadcast.
    pub broadcast_bytes: u64,
    /// By all-to-all.
    pub all_to_all_bytes: u64,
}

/// Why a collective could not be enqueued or did not finish.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// The counts of a call do not fit together.
    #[error("{what}: expected {expected} elements, got {got}")]
    Count {
        /// The call and argument.
        what: &'static str,
        /// Elements expected.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// The operation is not defined for the dtype.
    #[error("{collective:?} with {op:?} is not defined for {dtype}")]
    Unsupported {
        /// The collective.
        collective: Collective,
        /// The reduction.
        op: ReduceOp,
        /// The dtype.
        dtype: DType,
    },
    /// A rank died, stalled, called something else or aborted.
    #[error("rank {rank}: {message}")]
    Peer {
        /// The rank at fault.
        rank: usize,
        /// What was seen.
        message: String,
    },
    /// The stream refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A group of ranks. `send` and `recv` follow NCCL: elements are counted, `recv` may be the rank's own
/// part of `send` (reduce_scatter) or `send` the rank's own part of `recv` (all_gather), or both the same
/// (all_reduce); any other overlap is forbidden.
pub trait Communicator<D: Device>: Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;

    /// How many ranks.
    fn world_size(&self) -> usize;

    /// `recv[i] = op over ranks q of send_q[rank * recv.len() + i]`; `send.len() == recv.len() * world_size`.
    ///
    /// # Errors
    /// Counts or dtypes do not fit, or the stream refused.
    fn reduce_scatter(
        &self,
        stream: &D::Stream,
        send: AnySlice,
        recv: AnySlice,
        op: ReduceOp,
    ) -> Result<(), CommError>;

    /// `recv[q * send.len() + i] = send_q[i]` for all ranks q; `recv.len() == send.len() * world_size`.
    ///
    /// # Errors
    /// Counts or dtypes do not fit, or the stream refused.
    fn all_gather(&self, stream: &D::Stream, send: AnySlice, recv: AnySlice) -> Result<(), CommError>;

    /// `recv[i] = op over ranks q of send_q[i]`; `send.len() == recv.len()`.
    ///
    /// # Errors
    /// Counts or dtypes do not fit, or the stream refused.
    fn all_reduce(&self, stream: &D::Stream, send: AnySlice, recv: AnySlice, op: ReduceOp) -> Result<(), CommError>;

    /// `buffer` of every rank becomes that of `root`.
    ///
    /// # Errors
    /// There is no such root, or the stream refused.
    fn broadcast(&self, stream: &D::Stream, buffer: AnySlice, root: usize) -> Result<(), CommError>;

    /// `recv[q * n + i] = send_q[rank * n + i]`, `n = send.len() / world_size`.
    ///
    /// # Errors
    /// Counts or dtypes do not fit, or the stream refused.
    fn all_to_all(&self, stream: &D::Stream, send: AnySlice, recv: AnySlice) -> Result<(), CommError>;

    /// Nothing enqueued on `stream` after this runs before every rank's stream is here.
    ///
    /// # Errors
    /// The stream refused.
    fn barrier(&self, stream: &D::Stream) -> Result<(), CommError>;

    /// Bytes sent so far, counted when enqueued.
    fn traffic(&self) -> Traffic;

    /// Ends every collective under way or to come, on all ranks, with an error that names this rank and `reason`.
    fn abort(&self, reason: &str);
}
