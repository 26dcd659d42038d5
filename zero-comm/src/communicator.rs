//! The contract of collectives: their counts, rank offsets and in-place rules.
//!
//! All ranks of a communicator call the same collectives in the same order, each rank on its own
//! stream. A call enqueues and returns; the operation runs in stream order, and its failure poisons
//! the stream. The host back ends add fp16 and bf16 in fp32, in rank order, and round once.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use zero_alloc::Pool;
use zero_alloc::device::{AnySlice, Device};

use crate::CommError;
use crate::call::{Checked, Group};
use crate::small_messages::exchange;

/// A reduction over ranks; the host back ends combine in rank order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum; of bytes, modulo 256.
    Sum,
    /// The sum divided by the number of ranks; not defined for bytes.
    Avg,
    /// The maximum; NaN if any value is NaN (with NCCL, unspecified).
    Max,
}

impl ReduceOp {
    /// `sum`, `avg` or `max`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Avg => "avg",
            Self::Max => "max",
        }
    }
}

/// A kind of collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Collective {
    /// Every rank receives its segment of the reduction.
    ReduceScatter,
    /// Every rank receives the segments of all ranks.
    AllGather,
    /// Every rank receives the whole reduction.
    AllReduce,
    /// Every rank receives the root's buffer.
    Broadcast,
    /// Every rank receives one segment from each rank.
    AllToAll,
    /// Every rank waits for all ranks.
    Barrier,
}

impl Collective {
    /// All collectives.
    pub const ALL: [Self; 6] = [
        Self::ReduceScatter,
        Self::AllGather,
        Self::AllReduce,
        Self::Broadcast,
        Self::AllToAll,
        Self::Barrier,
    ];

    /// The name of its method: `reduce_scatter`, `all_gather`, ...
    pub const fn name(self) -> &'static str {
        match self {
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::AllReduce => "all_reduce",
            Self::Broadcast => "broadcast",
            Self::AllToAll => "all_to_all",
            Self::Barrier => "barrier",
        }
    }
}

/// Bytes that this rank has sent, by collective, as a bandwidth-optimal algorithm sends them. With
/// S bytes in the whole buffer and N ranks: (N-1)/N x S for reduce-scatter, all-gather and
/// all-to-all, twice that for all-reduce; for broadcast S (N-1)/N on every rank (scatter and
/// all-gather, the root's scatter included).
///
/// An all-to-all with counts per pair of ranks sends `send_counts` but that of this rank itself:
/// exactly what others receive from it.
///
/// If N does not divide S, segments are as equal as possible
/// ([`Counts::Balanced`](crate::backend::Counts)), and the bytes are those of this rank's segment: exact
/// integers whose sum over the ranks is N times the formula.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
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
    /// By [`Communicator::control_all_gather`]: statistics of a step, a few bytes.
    pub control_bytes: u64,
}

impl Traffic {
    /// The sum.
    pub const fn total_bytes(self) -> u64 {
        self.reduce_scatter_bytes
            + self.all_gather_bytes
            + self.all_reduce_bytes
            + self.broadcast_bytes
            + self.all_to_all_bytes
            + self.control_bytes
    }

    /// Bytes sent since `earlier`, a reading of the same communicator.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        self.zip(earlier, |now, earlier| now - earlier)
    }

    fn zip(self, other: Self, of: fn(u64, u64) -> u64) -> Self {
        Self {
            reduce_scatter_bytes: of(self.reduce_scatter_bytes, other.reduce_scatter_bytes),
            all_gather_bytes: of(self.all_gather_bytes, other.all_gather_bytes),
            all_reduce_bytes: of(self.all_reduce_bytes, other.all_reduce_bytes),
            broadcast_bytes: of(self.broadcast_bytes, other.broadcast_bytes),
            all_to_all_bytes: of(self.all_to_all_bytes, other.all_to_all_bytes),
            control_bytes: of(self.control_bytes, other.control_bytes),
        }
    }
}

impl std::ops::Add for Traffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
}

/// Declares collectives: the method of that name of the [`Group`] checks the call, which is then
/// enqueued.
macro_rules! collectives {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),*);)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Errors
            /// A count, a dtype or the root does not match, or the stream returned an error.
            fn $name(&self, stream: &D::Stream, $($argument: $type),*) -> Result<(), CommError> {
                self.enqueue(stream, self.group().$name($($argument),*)?)
            }
        )*
    };
}

/// One rank's handle of a group of ranks. `send` and `recv` follow NCCL: counts are in elements. In
/// place means that `recv` is this rank's segment of `send` (reduce_scatter), `send` is this rank's
/// segment of `recv` (all_gather), or both are the same (all_reduce); any other overlap is an
/// error.
///
/// A back end implements [`group`](Self::group), its rank and world size, and
/// [`enqueue`](Self::enqueue), which runs a checked call; the collectives are default methods.
///
/// # Safety
/// `group` never changes. `enqueue` uses the call's buffers only in operations that it enqueues on
/// `stream`, which end before later operations of the stream begin: callers free or reuse the
/// buffers behind that point.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no communicator of `{D}`",
    note = "zero_comm has threads::ThreadsComm and Solo for the host, processes::ProcessComm with the feature `processes`, mpi::MpiComm with the feature `mpi`, and nccl::NcclCommunicator for CudaDevice with the feature `cuda`"
)]
pub unsafe trait Communicator<D: Device>: Send + Sync {
    /// This rank and the number of ranks.
    fn group(&self) -> Group;

    /// Enqueues a call that [`group`](Self::group) has checked, and counts its traffic.
    ///
    /// # Errors
    /// The stream returned an error.
    fn enqueue(&self, stream: &D::Stream, checked: Checked) -> Result<(), CommError>;

    /// Splits the communicator: ranks that pass the same `color` form a new one, in the order of
    /// `key`, then of their ranks in this one. Returns `None` if `color` is `None`. Every rank must
    /// call it; the host waits for the other ranks, within the time limit. The new communicator
    /// counts traffic separately. A failure of this communicator fails the new one; the reverse
    /// holds for `mpi` and not for `threads`.
    ///
    /// # Errors
    /// A rank failed, or did not call `split` within the limit.
    fn split(
        &self,
        color: Option<u64>,
        key: u64,
    ) -> Result<Option<Arc<dyn Communicator<D>>>, CommError>;

    /// [`split`](Self::split) by a rule that all ranks know: rank r passes the color and the key
    /// `place(r)`. A communicator that has no other ranks needs the rule
    /// ([`ScheduledComm`](crate::ScheduledComm)).
    ///
    /// # Errors
    /// As [`split`](Self::split).
    fn split_by(
        &self,
        place: &dyn Fn(usize) -> (usize, usize),
    ) -> Result<Arc<dyn Communicator<D>>, CommError> {
        let (color, key) = place(self.rank());
        let of_color = self.split(Some(color as u64), key as u64)?;
        of_color.ok_or_else(|| CommError::BackEnd {
            back_end: "split",
            message: "a split with a color returned no communicator".to_owned(),
        })
    }

    /// Bytes sent so far; a collective counts when it is enqueued.
    fn traffic(&self) -> Traffic;

    /// Fails every running and later collective, on all ranks, with an error that names this rank
    /// and `reason`.
    fn abort(&self, reason: &str);

    /// The first failure of the group, equal on all ranks: the cause of a poisoned stream.
    fn failure(&self) -> Option<CommError>;

    /// This rank, from 0.
    fn rank(&self) -> usize {
        self.group().rank
    }

    /// Number of ranks.
    fn world_size(&self) -> usize {
        self.group().world_size
    }

    collectives! {
        /// `recv[i] = op over ranks q of send_q[rank * recv.len() + i]`;
        /// `send.len() == recv.len() * world_size`.
        fn reduce_scatter(send: AnySlice, recv: AnySlice, op: ReduceOp);

        /// As [`reduce_scatter`](Self::reduce_scatter), but the contents of `send` are unspecified
        /// afterwards: a communicator of [two levels](crate::TwoLevel) sums in it.
        fn reduce_scatter_overwriting(send: AnySlice, recv: AnySlice, op: ReduceOp);

        /// Reduce-scatter with a segment of `counts[q]` elements for rank q; `send` is the
        /// concatenation of the segments; `recv.len() == counts[rank]`. All ranks pass the same
        /// counts; a count may be 0.
        fn reduce_scatter_uneven(
            send: AnySlice,
            recv: AnySlice,
            counts: &[usize],
            op: ReduceOp
        );

        /// `recv[q * send.len() + i] = send_q[i]` for all ranks q;
        /// `recv.len() == send.len() * world_size`.
        fn all_gather(send: AnySlice, recv: AnySlice);

        /// All-gather of `counts[q]` elements from rank q; `recv` is the concatenation in rank
        /// order; `send.len() == counts[rank]`. All ranks pass the same counts; a count may be 0.
        fn all_gather_uneven(send: AnySlice, recv: AnySlice, counts: &[usize]);

        /// [`all_gather`](Self::all_gather) of a few bytes of control data (norms, losses, flags),
        /// counted in [`Traffic::control_bytes`].
        fn control_all_gather(send: AnySlice, recv: AnySlice);

        /// `recv[i] = op over ranks q of send_q[i]`; `send.len() == recv.len()`.
        fn all_reduce(send: AnySlice, recv: AnySlice, op: ReduceOp);

        /// Copies the root's `buffer` into `buffer` of every rank.
        fn broadcast(buffer: AnySlice, root: usize);

        /// `recv[q * n + i] = send_q[rank * n + i]`, `n = send.len() / world_size`.
        fn all_to_all(send: AnySlice, recv: AnySlice);

        /// All-to-all of `send_counts[q]` elements to rank q and `recv_counts[q]` from it; `send` and
        /// `recv` are the concatenations in rank order. What rank p sends to q is what q receives
        /// from p; a count may be 0. Counts that do not match are a [`CommError::Unmatched`] on all
        /// ranks.
        fn all_to_all_uneven(
            send: AnySlice,
            recv: AnySlice,
            send_counts: &[usize],
            recv_counts: &[usize]
        );
    }

    /// Operations enqueued on `stream` after this run only when every rank's stream has reached it.
    ///
    /// # Errors
    /// The stream returned an error.
    fn barrier(&self, stream: &D::Stream) -> Result<(), CommError> {
        self.enqueue(stream, self.group().barrier())
    }

    /// Sends `message` to all ranks and returns the messages of all ranks, in rank order: for votes
    /// and agreements. Messages may be empty and of different lengths, at most 1 GiB. Blocks the
    /// host: each wait for `stream` takes at most `limit`. Up to 120 bytes take one all-gather of
    /// control data, longer messages a second one. Memory for all messages is allocated from `pool`
    /// for the duration of the call.
    ///
    /// # Errors
    /// A rank failed, memory is exhausted, or the limit passed. On an error the ranks may be in
    /// different calls: abort.
    fn exchange(
        &self,
        pool: &Pool<D>,
        stream: &D::Stream,
        message: &[u8],
        limit: Duration,
    ) -> Result<Vec<Vec<u8>>, CommError> {
        exchange(self, pool, stream, message, limit)
    }
}
