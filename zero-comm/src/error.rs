//! The errors of collectives, one variant per cause.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use zero_alloc::AllocError;
use zero_alloc::device::{DType, DeviceError};
use zero_kernels::KernelError;

use crate::call::Call;
#[cfg(feature = "processes")]
use crate::world::error::{LaunchError, RendezvousError};
use crate::{Collective, ReduceOp};

/// The reason why a collective was not enqueued or did not finish.
// Ranks send each other the variants up to `Unmatched`. Variants with `serde(skip)` must follow them:
// serde counts skipped variants when it serializes, but not when it deserializes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the messages name the fields")]
#[non_exhaustive]
pub enum CommError {
    /// Two ranks made different calls.
    #[error(
        "collective {sequence}: rank {rank} called {call}, but rank {other_rank} called {other_call}"
    )]
    Mismatch {
        /// The number of the call, from 0.
        sequence: u64,
        rank: usize,
        call: Box<Call>,
        other_rank: usize,
        other_call: Box<Call>,
    },
    /// Two ranks made different calls, of which only some were compared.
    #[error(
        "collective {sequence}: rank {rank} called {call}, rank {other_rank} {other_call}; both agreed until collective {agreed}, \
         and one since then differs: look for a call that depends on the rank"
    )]
    Diverged {
        /// The number of the call at which both ranks were, from 0.
        sequence: u64,
        rank: usize,
        call: Box<Call>,
        other_rank: usize,
        other_call: Box<Call>,
        /// The number of first calls that were compared and are equal.
        agreed: u64,
    },
    /// A rank did not reach the collective within the limit.
    #[error(
        "collective {sequence}, {call}: rank {rank} did not reach it within {limit:?}; it had reached {done} collectives"
    )]
    Stalled {
        /// The number of the call, from 0.
        sequence: u64,
        call: Box<Call>,
        rank: usize,
        /// The limit that passed.
        limit: Duration,
        /// The number of collectives that the rank had reached.
        done: u64,
    },
    /// A rank dropped its communicator.
    #[error("collective {sequence}, {call}: rank {rank} left after {done} collectives")]
    Left {
        /// The number of the call, from 0.
        sequence: u64,
        call: Box<Call>,
        /// The rank that left.
        rank: usize,
        /// The number of collectives that the rank had called.
        done: u64,
    },
    /// A rank's process or its connection ended.
    #[error("collective {sequence}, {call}: rank {rank} was lost: {message}")]
    Lost {
        /// The number of the call, from 0.
        sequence: u64,
        call: Box<Call>,
        /// The rank that was lost.
        rank: usize,
        /// How the loss was noticed.
        message: String,
    },
    /// A rank's stream failed before it ran a collective.
    #[error(
        "collective {sequence}, {call}: stream {stream} of rank {rank} failed before running it"
    )]
    Skipped {
        /// The number of the call, from 0.
        sequence: u64,
        call: Box<Call>,
        /// The rank at fault.
        rank: usize,
        stream: String,
    },
    /// A rank panicked within a collective.
    #[error("collective {sequence}, {call}: rank {rank} panicked")]
    Panicked {
        /// The number of the call, from 0.
        sequence: u64,
        call: Box<Call>,
        /// The rank at fault.
        rank: usize,
    },
    /// A rank called `abort`.
    #[error("rank {rank} aborted: {reason}")]
    Aborted {
        /// The rank that aborted.
        rank: usize,
        /// The reason that it passed.
        reason: String,
    },
    /// Any other failure of a rank.
    #[error("rank {rank}: {message}")]
    Peer {
        /// The rank at fault.
        rank: usize,
        message: String,
    },
    /// A rank sends another number of elements than its peer receives.
    #[error(
        "collective {sequence}, all_to_all: rank {rank} sends {sent} elements to rank {other_rank}, which receives {received} \
         from it; send_counts[q] of rank p must be recv_counts[p] of rank q"
    )]
    Unmatched {
        /// The number of the call, from 0.
        sequence: u64,
        /// The sender.
        rank: usize,
        sent: usize,
        /// The receiver.
        other_rank: usize,
        received: usize,
    },
    /// A rank did not reach the collective within the limit, or what it sends does not arrive at
    /// another one: over MPI the two look alike.
    #[serde(skip)]
    #[error(
        "collective {sequence}, {call}: rank {rank} did not reach it within {limit:?}, or the link between it and rank \
         {waits}, which waits for it, is cut"
    )]
    Silent {
        /// The number of the call, from 0.
        sequence: u64,
        call: Box<Call>,
        /// The rank that was waited for.
        rank: usize,
        /// The rank that waited for it.
        waits: usize,
        limit: Duration,
    },
    /// A call that was checked for another communicator.
    #[error(
        "{}: the call was checked for rank {} of {} and enqueued as rank {} of {}; check it with the group of this communicator",
        .collective.name(), .checked[0], .checked[1], .own[0], .own[1]
    )]
    #[serde(skip)]
    AnotherGroup {
        collective: Collective,
        /// The rank and the number of ranks that it was checked for.
        checked: [usize; 2],
        /// The rank and the number of ranks of the communicator.
        own: [usize; 2],
    },
    /// A world without ranks.
    #[error("a world needs at least one rank")]
    #[serde(skip)]
    NoRanks,
    /// More ranks than the back end supports.
    #[error("a world of {world_size} ranks exceeds the maximum of {most}")]
    #[serde(skip)]
    TooManyRanks { world_size: usize, most: usize },
    /// The size of a group does not divide the number of ranks.
    #[error("groups of {group_size} ranks: expected a number that divides the {world_size} ranks")]
    #[serde(skip)]
    Groups {
        world_size: usize,
        group_size: usize,
    },
    /// A buffer has the wrong length.
    #[error("{what}: expected {expected} elements, got {got}")]
    #[serde(skip)]
    Count {
        /// The call and argument.
        #[serde(skip)]
        what: &'static str,
        expected: usize,
        got: usize,
    },
    /// One count per rank was expected.
    #[error("{collective}: expected {expected} counts, one per rank, got {got}", collective = collective.name())]
    #[serde(skip)]
    RankCounts {
        collective: Collective,
        expected: usize,
        got: usize,
    },
    /// The sum of the counts exceeds the address space.
    #[error("{collective}: the sum of the counts exceeds the address space", collective = collective.name())]
    #[serde(skip)]
    CountsTooLarge { collective: Collective },
    /// The hops of a quantised reduction are not over its ranks.
    #[error(
        "hops of {hops:?} ranks: expected numbers whose product is the {world_size} ranks of the reduction, and ranks in \
         their order"
    )]
    #[serde(skip)]
    Hops { hops: Vec<usize>, world_size: usize },
    /// A quantised reduction of which every rank keeps the whole sum.
    #[error(
        "an all-reduce has no quantised form: keep a shard of the sum on each rank (Reduce::scatter, stages 1 to 3)"
    )]
    #[serde(skip)]
    QuantisedAllReduce,
    /// A piece of a shard that does not consist of whole blocks, with error feedback.
    #[error(
        "error feedback of {elems} elements of a shard: expected a multiple of a block's {block_elems} elements; align the \
         layout's shards to BlockFormat::ALIGN_ELEMS"
    )]
    #[serde(skip)]
    PartialBlock { elems: usize, block_elems: usize },
    /// The number of ranks does not divide the length of a buffer.
    #[error("{collective}: {len} elements are not divisible by {world_size} ranks", collective = collective.name())]
    #[serde(skip)]
    NotDivisible {
        collective: Collective,
        len: usize,
        world_size: usize,
    },
    /// `send` and `recv` have different types.
    #[error("{collective}: send has {send} elements, recv has {recv}", collective = collective.name())]
    #[serde(skip)]
    DTypes {
        collective: Collective,
        send: DType,
        recv: DType,
    },
    /// No collective transmits the dtype.
    #[error("{collective}: collectives do not transmit {dtype}; convert the buffer or pass it as bytes", collective = collective.name())]
    #[serde(skip)]
    DType {
        collective: Collective,
        dtype: DType,
    },
    /// `send` and `recv` overlap in a way that the in-place rule does not allow.
    #[error("{collective}: send and recv overlap in a way that the in-place rule does not allow", collective = collective.name())]
    #[serde(skip)]
    Overlap { collective: Collective },
    /// The root is not a rank of the group.
    #[error("broadcast from rank {root}, but there are {world_size} ranks")]
    #[serde(skip)]
    NoSuchRoot { root: usize, world_size: usize },
    /// The operation is not defined for the dtype.
    #[error("{collective} with {op} is not defined for {dtype}", collective = collective.name(), op = op.name())]
    #[serde(skip)]
    Unsupported {
        collective: Collective,
        op: ReduceOp,
        dtype: DType,
    },
    /// The library of a back end failed or cannot be used.
    #[error("{back_end}: {message}")]
    #[serde(skip)]
    BackEnd {
        /// The back end.
        #[serde(skip)]
        back_end: &'static str,
        message: String,
    },
    /// No library was found.
    #[error("{name} was not found; tried {}", tried.join(", "))]
    #[serde(skip)]
    NoLibrary {
        /// The name of the library.
        #[serde(skip)]
        name: &'static str,
        /// The paths tried, each with the loader's message.
        tried: Vec<String>,
    },
    /// The launcher's environment variables are inconsistent.
    #[cfg(feature = "processes")]
    #[error(transparent)]
    #[serde(skip)]
    Launch(#[from] LaunchError),
    /// The processes failed to connect.
    #[cfg(feature = "processes")]
    #[error(transparent)]
    #[serde(skip)]
    Rendezvous(#[from] RendezvousError),
    /// The pool could not allocate memory for a message.
    #[error(transparent)]
    #[serde(skip)]
    Alloc(#[from] AllocError),
    /// The kernels of a codec do not support its dtypes.
    #[error(transparent)]
    #[serde(skip)]
    Kernel(KernelError),
    /// The device or the stream failed.
    #[error(transparent)]
    #[serde(skip)]
    Device(#[from] DeviceError),
}

impl From<KernelError> for CommError {
    fn from(error: KernelError) -> Self {
        match error {
            KernelError::Device(error) => Self::Device(error),
            other => Self::Kernel(other),
        }
    }
}

/// Shortens `text` to at most `max_bytes` bytes of whole characters.
#[cfg(any(feature = "processes", feature = "mpi"))]
pub(crate) fn shorten(text: &mut String, max_bytes: usize) {
    let end = (0..=max_bytes).rev().find(|&at| text.is_char_boundary(at));
    text.truncate(end.unwrap_or(0));
}

/// A failure of NCCL.
#[cfg(feature = "cuda")]
pub(crate) fn nccl_failure(message: String) -> CommError {
    CommError::BackEnd {
        back_end: "nccl",
        message,
    }
}
