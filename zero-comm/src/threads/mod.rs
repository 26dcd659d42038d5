//! Ranks as threads of one process. Each rank's stream reads and writes its peers' buffers
//! directly.
//!
//! ```text
//! rank 0's stream   ... | post, wait | work | wait | ...
//! rank 1's stream     ... | post, wait | work | wait | ...
//! ```
//!
//! An operation posts its call and buffers, waits until every rank has posted the same call with
//! the same sequence number, does its share (`work`), and waits until every rank has done its
//! share; only then may the buffers change again. There are no intermediate copies: each byte of a
//! result is written once, by the rank that computed it. A waiting rank spins for about the time of
//! a wake-up (yields if there are more ranks than cores), then sleeps.
//!
//! **Failure.** The first failure ends the world: every running and later collective returns that
//! failure on every rank. No rank leaves an operation while another still works in its buffers.

#[cfg(all(test, loom))]
mod loom_tests;
mod shared;
mod slot;
mod split;
mod ticket;
mod work;

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use zero_alloc::device::{Cause, DeviceError, DeviceId, Stream};
use zero_alloc::host::{HostDevice, HostStream};

use crate::call::{Checked, Group};
use crate::split_request::SplitRequest;
use crate::{CommError, CommOptions, Communicator, Traffic};
use shared::Shared;
use ticket::Ticket;

/// Maximum number of ranks; a process cannot have as many threads.
const MOST_RANKS: usize = 1 << 16;

/// Creates the communicators of a world of threads.
#[derive(Clone, Copy, Debug)]
pub struct World;

impl World {
    /// Creates one communicator for each of `world_size` ranks, in rank order.
    ///
    /// # Errors
    /// [`CommError::NoRanks`], or [`CommError::TooManyRanks`] above 65536.
    #[expect(
        clippy::new_ret_no_self,
        reason = "a world is the set of its ranks' communicators"
    )]
    pub fn new(world_size: usize, options: CommOptions) -> Result<Vec<ThreadsComm>, CommError> {
        if world_size == 0 {
            return Err(CommError::NoRanks);
        }
        if world_size > MOST_RANKS {
            return Err(CommError::TooManyRanks {
                world_size,
                most: MOST_RANKS,
            });
        }
        let shared = Arc::new(Shared::new(world_size, options));
        Ok((0..world_size)
            .map(|rank| ThreadsComm::new(Arc::clone(&shared), rank))
            .collect())
    }
}

/// Counters of the calls of this rank.
#[derive(Default)]
struct Enqueued {
    /// Collectives enqueued so far; the next one's sequence number.
    sequence: u64,
    /// Splits called so far.
    splits: u64,
    traffic: Traffic,
}

/// One rank's communicator. After it is dropped, the other ranks can complete the collectives that
/// it had enqueued; later ones fail with [`CommError::Left`].
///
/// A rank may use several streams; all ranks must enqueue collectives in the same order.
pub struct ThreadsComm {
    shared: Arc<Shared>,
    rank: usize,
    enqueued: Mutex<Enqueued>,
}

impl fmt::Debug for ThreadsComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ThreadsComm(rank {} of {})",
            self.rank, self.shared.world_size
        )
    }
}

impl Drop for ThreadsComm {
    fn drop(&mut self) {
        self.shared
            .leave(self.rank, self.enqueued.get_mut().sequence);
    }
}

impl ThreadsComm {
    fn new(shared: Arc<Shared>, rank: usize) -> Self {
        Self {
            shared,
            rank,
            enqueued: Mutex::default(),
        }
    }
}

// SAFETY: an operation ends when no rank uses the buffers that it posted (`slot`).
unsafe impl Communicator<HostDevice> for ThreadsComm {
    fn group(&self) -> Group {
        Group {
            rank: self.rank,
            world_size: self.shared.world_size,
        }
    }

    fn enqueue(&self, stream: &HostStream, checked: Checked) -> Result<(), CommError> {
        checked.check(self.group(), DeviceId::HOST)?;
        stream.check_runs(checked.call.collective.name())?;
        // Held during `stream.enqueue`, so that sequence numbers follow the stream's order.
        let mut enqueued = self.enqueued.lock();
        let sequence = enqueued.sequence;
        let group = self.group();
        let label = checked.call.collective.name();
        enqueued.sequence += 1;
        group.count(&checked.call, &mut enqueued.traffic);

        let ticket = Ticket::new(
            Arc::clone(&self.shared),
            self.rank,
            sequence,
            checked,
            stream.name().to_owned(),
        );

        let name = stream.name().to_owned();
        stream.enqueue(label, move || {
            ticket
                .run(|call, posted| work::run(group, call, posted))
                .map_err(|error| DeviceError::Operation {
                    stream: name,
                    op: label.to_owned(),
                    cause: Cause::new(error),
                })
        })?;

        Ok(())
    }

    fn split(
        &self,
        color: Option<u64>,
        key: u64,
    ) -> Result<Option<Arc<dyn Communicator<HostDevice>>>, CommError> {
        let number = {
            let mut enqueued = self.enqueued.lock();
            enqueued.splits += 1;
            enqueued.splits - 1
        };
        let answer = split::split(&self.shared, self.rank, number, SplitRequest { color, key })?;
        Ok(answer.map(|(rank, child)| {
            Arc::new(Self::new(child, rank)) as Arc<dyn Communicator<HostDevice>>
        }))
    }

    fn traffic(&self) -> Traffic {
        self.enqueued.lock().traffic
    }

    fn abort(&self, reason: &str) {
        self.shared.fail(CommError::Aborted {
            rank: self.rank,
            reason: reason.to_owned(),
        });
    }

    fn failure(&self) -> Option<CommError> {
        self.shared.failure()
    }
}
