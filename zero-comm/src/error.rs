//! What can go wrong in a collective: one variant a cause.

use std::time::Duration;

use zero_alloc::device::{DType, DeviceError};

use crate::{Call, Collective, ReduceOp};

/// Why a collective could not be enqueued or did not finish.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// A world of no ranks.
    #[error("a world needs at least one rank")]
    NoRanks,
    /// A world of more ranks than its back end can have.
    #[error("a world of {world_size} ranks; there are {most} at most")]
    TooManyRanks {
        /// Ranks asked for.
        world_size: usize,
        /// The most.
        most: usize,
    },
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
    /// One count a rank was expected.
    #[error("{collective}: expected {expected} counts, one a rank, got {got}", collective = collective.name())]
    RankCounts {
        /// The collective.
        collective: Collective,
        /// Ranks.
        expected: usize,
        /// Counts given.
        got: usize,
    },
    /// The sum of the ranks' counts is beyond the address space.
    #[error("{collective}: the sum of the counts is beyond the address space", collective = collective.name())]
    CountsTooLarge {
        /// The collective.
        collective: Collective,
    },
    /// A buffer whose length the number of ranks does not divide.
    #[error("{collective}: {len} elements do not divide among {world_size} ranks", collective = collective.name())]
    NotDivisible {
        /// The collective.
        collective: Collective,
        /// Elements given.
        len: usize,
        /// Ranks.
        world_size: usize,
    },
    /// `send` and `recv` hold different types.
    #[error("{collective}: send holds {send}, recv holds {recv}", collective = collective.name())]
    DTypes {
        /// The collective.
        collective: Collective,
        /// Type of `send`.
        send: DType,
        /// Type of `recv`.
        recv: DType,
    },
    /// `send` and `recv` overlap otherwise than the in-place rule allows.
    #[error("{collective}: send and recv overlap, and not as the in-place rule allows", collective = collective.name())]
    Overlap {
        /// The collective.
        collective: Collective,
    },
    /// There is no such root.
    #[error("broadcast from rank {root} of {world_size}")]
    NoSuchRoot {
        /// The root asked for.
        root: usize,
        /// Ranks.
        world_size: usize,
    },
    /// The operation is not defined for the dtype.
    #[error("{collective} with {op} is not defined for {dtype}", collective = collective.name(), op = op.name())]
    Unsupported {
        /// The collective.
        collective: Collective,
        /// The reduction.
        op: ReduceOp,
        /// The dtype.
        dtype: DType,
    },
    /// Two ranks made different calls.
    #[error("collective {sequence}: rank {rank} called {call}, but rank {other_rank} called {other_call}")]
    Mismatch {
        /// The place of the call in the order of calls, from 0.
        sequence: u64,
        /// The one side.
        rank: usize,
        /// What it called.
        call: Box<Call>,
        /// The other side.
        other_rank: usize,
        /// What that one called.
        other_call: Box<Call>,
    },
    /// A rank did not come in time.
    #[error("collective {sequence}, {call}: rank {rank} did not come within {limit:?} (it had done {done})")]
    Stalled {
        /// The place of the call in the order of calls, from 0.
        sequence: u64,
        /// What was called.
        call: Box<Call>,
        /// The rank that is missing.
        rank: usize,
        /// How long was waited.
        limit: Duration,
        /// How many collectives that rank had reached.
        done: u64,
    },
    /// A rank's communicator is gone.
    #[error("collective {sequence}, {call}: rank {rank} left after {done} collectives")]
    Left {
        /// The place of the call in the order of calls, from 0.
        sequence: u64,
        /// What was called.
        call: Box<Call>,
        /// The rank that left.
        rank: usize,
        /// How many collectives that rank had called.
        done: u64,
    },
    /// A rank's stream failed, so that a collective enqueued on it never ran.
    #[error("collective {sequence}, {call}: stream {stream} of rank {rank} failed before it ran")]
    Skipped {
        /// The place of the call in the order of calls, from 0.
        sequence: u64,
        /// What was called.
        call: Box<Call>,
        /// The rank at fault.
        rank: usize,
        /// Its stream.
        stream: String,
    },
    /// A rank panicked within a collective.
    #[error("collective {sequence}, {call}: rank {rank} panicked")]
    Panicked {
        /// The place of the call in the order of calls, from 0.
        sequence: u64,
        /// What was called.
        call: Box<Call>,
        /// The rank at fault.
        rank: usize,
    },
    /// A rank called `abort`.
    #[error("rank {rank} aborted: {reason}")]
    Aborted {
        /// The rank that aborted.
        rank: usize,
        /// What it said.
        reason: String,
    },
    /// The library behind a back end is missing, unfit or failed.
    #[error("{back_end}: {message}")]
    BackEnd {
        /// The back end.
        back_end: &'static str,
        /// What was seen.
        message: String,
    },
    /// A rank failed in a way that the back end cannot tell more of.
    #[error("rank {rank}: {message}")]
    Peer {
        /// The rank at fault.
        rank: usize,
        /// What was seen.
        message: String,
    },
    /// A library was not found.
    #[error("{name} was not found; tried {}", tried.join(", "))]
    NoLibrary {
        /// Its name for people.
        name: &'static str,
        /// What was tried, with what the loader said.
        tried: Vec<String>,
    },
    /// What a launcher says in the environment makes no sense.
    #[error(transparent)]
    Launch(#[from] crate::nccl::LaunchError),
    /// The processes did not come together.
    #[error(transparent)]
    Rendezvous(#[from] crate::RendezvousError),
    /// The stream refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
