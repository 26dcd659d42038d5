//! Ranks that are processes of one machine, over memory that they share: no MPI, and no library
//! (Linux; cargo feature `processes`).
//!
//! ```sh
//! torchrun --nproc-per-node 4 ...    # or mpirun, srun: the ranks find each other by its variables
//! ```
//!
//! ```no_run
//! use zero_comm::{CommOptions, processes::ProcessComm, world::Ranks};
//!
//! let ranks = Ranks::from_env()?.expect("started by a launcher");
//! let comm = ProcessComm::join(&ranks, CommOptions::default())?;
//! # Ok::<(), zero_comm::CommError>(())
//! ```
//!
//! A collective runs in rounds (`rounds`): each rank writes a piece to its own part of the memory
//! (`shared_memory`), and reads those of the others. Sums are taken in rank order by the same code as over
//! [`threads`](crate::threads), so both give the same bits. The collectives of a communicator run in
//! the order of their calls, also on several streams.
//!
//! Ranks that share no memory, on several machines, let the program move the bytes
//! ([`ProcessComm::join_over`]); all else is the same.
//!
//! **Failure.** As over NCCL, the ranks keep connections to a coordinator in rank 0's process
//! ([`world`](crate::world)), which notices processes that end and ranks that are late. The first
//! failure ends the world: every rank returns the same error, which names the rank at fault. Calls
//! that differ are found before any data is used.
//!
//! **Trust.** The memory is passed to processes of the same user that know a random name, which the
//! rendezvous tells them. A process that writes to it outside of the protocol can change results.

mod carried;
mod collective;
mod rounds;
mod shared_memory;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use zero_alloc::TimeLimit;
use zero_alloc::device::{Cause, DeviceError, DeviceId, Stream};
use zero_alloc::host::{HostDevice, HostStream};

use crate::call::{Checked, Group};
use crate::split_request::SplitRequest;
use crate::world::message::Context;
use crate::world::process::{self, Transport, World};
use crate::world::watcher::Connection;
use crate::world::{Ranks, rendezvous};
use crate::{CommError, CommOptions, Communicator, Traffic};
use carried::Carried;
pub use carried::{Carrier, Part};
use collective::{Flags, Link, Operation};
use shared_memory::{MOST_RANKS, Memory, Refused};

/// Bytes of the random name under which the ranks meet.
const NAME_BYTES: usize = 16;

/// The state that a process's communicators share.
struct Process {
    connection: Connection,
    /// The random name; `None` for ranks that share no memory.
    name: Option<String>,
}

impl Process {
    fn world(&self) -> &Arc<World> {
        &self.connection.world
    }

    /// Meets the other ranks of a communicator at their memory.
    fn open(self: &Arc<Self>, context: Context, group: Group) -> Result<ProcessComm, CommError> {
        let world = self.world();
        let time = Mutex::new(TimeLimit::new(world.limit));
        let wait = || match world.failure() {
            Some(failure) => Err(Refused::Failed(failure)),
            None if time.lock().has_passed() => Err(Refused::Late),
            None => Ok(()),
        };
        let Some(name) = &self.name else {
            return Err(CommError::BackEnd {
                back_end: "exchange",
                message: "the ranks cannot be split into groups: use shared memory, MPI or NCCL"
                    .to_owned(),
            });
        };
        let name = format!("{name}/{context}");
        let memory = Memory::meet(&name, group, world.rank, &wait).map_err(|refused| {
            let message = match refused {
                Refused::Failed(failure) => return failure,
                Refused::Late => format!(
                    "the {} ranks did not share their memory within {:?}",
                    group.world_size, world.limit
                ),
                Refused::System(message) => format!(
                    "the ranks of this machine cannot share memory: {message}; use MPI, or threads of one process"
                ),
            };
            world.fail(CommError::Peer {
                rank: world.rank,
                message,
            })
        })?;
        Ok(self.over(context, group, Link::over(memory)))
    }

    fn over(self: &Arc<Self>, context: Context, group: Group, link: Link) -> ProcessComm {
        let link = Arc::new(link);
        self.world()
            .open(context, Arc::clone(&link) as Arc<dyn Transport>);
        ProcessComm {
            process: Arc::clone(self),
            link,
            context,
            group,
            enqueued: Mutex::default(),
        }
    }
}

/// Counters of the calls of this rank.
#[derive(Default)]
struct Enqueued {
    sequence: u64,
    /// Splits so far.
    splits: u64,
    traffic: Traffic,
}

/// One rank's communicator of a group of processes on one machine. After it is dropped, later
/// collectives of the other ranks fail with [`CommError::Left`].
pub struct ProcessComm {
    process: Arc<Process>,
    link: Arc<Link>,
    context: Context,
    group: Group,
    enqueued: Mutex<Enqueued>,
}

impl fmt::Debug for ProcessComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Group { rank, world_size } = self.group;
        write!(f, "ProcessComm(rank {rank} of {world_size})")
    }
}

impl ProcessComm {
    /// Joins the world of `ranks`. Every process calls it once. It ends within about
    /// `options.limit`, so the limit must cover the time between the starts of the first and the
    /// last rank.
    ///
    /// # Errors
    /// The ranks are on several machines, the rendezvous failed or exceeded the limit, or the system
    /// lets them share no memory.
    pub fn join(ranks: &Ranks, options: CommOptions) -> Result<Self, CommError> {
        if !ranks.one_machine {
            return Err(CommError::BackEnd {
                back_end: "processes",
                message: format!(
                    "the {} ranks are on several machines, as the launcher says: use MPI or NCCL between them",
                    ranks.world_size
                ),
            });
        }
        if ranks.world_size > MOST_RANKS {
            return Err(CommError::TooManyRanks {
                world_size: ranks.world_size,
                most: MOST_RANKS,
            });
        }
        let make_name = || {
            let mut name = vec![0; NAME_BYTES];
            getrandom::fill(&mut name).map_err(|error| CommError::BackEnd {
                back_end: "processes",
                message: format!("the system has no random numbers: {error}"),
            })?;
            Ok(name)
        };
        let joined = rendezvous::join(ranks, 0, make_name, options.limit)?;
        let name = joined.id.iter().map(|byte| format!("{byte:02x}")).collect();
        let connection = Connection::start(joined, ranks.rank, options.limit)?;
        let process = Arc::new(Process {
            connection,
            name: Some(name),
        });
        process.open(0, group_of(ranks))
    }

    /// Joins the world of `ranks`, which may be on several machines, and moves the data by
    /// `carrier`. Otherwise as [`join`](Self::join); [`split`](Communicator::split) is an error.
    ///
    /// # Errors
    /// The rendezvous failed or exceeded the limit.
    pub fn join_over(
        ranks: &Ranks,
        options: CommOptions,
        carrier: Arc<dyn Carrier>,
    ) -> Result<Self, CommError> {
        let joined = rendezvous::join(ranks, 0, || Ok(Vec::new()), options.limit)?;
        let connection = Connection::start(joined, ranks.rank, options.limit)?;
        let process = Arc::new(Process {
            connection,
            name: None,
        });
        let group = group_of(ranks);
        let medium = Carried {
            group,
            carrier: Arc::clone(&carrier),
        };
        let link = Link::new(medium, move || carrier.abort());
        Ok(process.over(0, group, link))
    }

    fn world(&self) -> &Arc<World> {
        self.process.world()
    }
}

fn group_of(ranks: &Ranks) -> Group {
    Group {
        rank: ranks.rank,
        world_size: ranks.world_size,
    }
}

impl Drop for ProcessComm {
    fn drop(&mut self) {
        let done = self.enqueued.get_mut().sequence;
        // The peers cannot complete collectives in flight without this rank.
        if self.world().drain(self.context).is_err() {
            self.world().abort(&*self.link).wait();
        }
        self.world().close(self.context, done);
    }
}

// SAFETY: the buffers are accessed by the operation on the stream alone; peers access copies.
unsafe impl Communicator<HostDevice> for ProcessComm {
    fn group(&self) -> Group {
        self.group
    }

    fn enqueue(&self, stream: &HostStream, checked: Checked) -> Result<(), CommError> {
        checked.check(self.group, DeviceId::HOST)?;
        let label = checked.call.collective.name();
        stream.check_runs(label)?;
        let world = self.world();
        // Held during `stream.enqueue`, so that sequence numbers follow the stream's order.
        let mut enqueued = self.enqueued.lock();
        let sequence = enqueued.sequence;
        enqueued.sequence += 1;
        self.group.count(&checked.call, &mut enqueued.traffic);
        world.called(self.context, checked.call.clone());

        let name = stream.name().to_owned();
        let flags = Arc::new(Flags::default());
        let operation = Operation {
            link: Arc::clone(&self.link),
            world: Arc::clone(world),
            flags: Arc::clone(&flags),
            sequence,
            checked,
            stream: name.clone(),
        };
        let of_stream = name.clone();
        stream.enqueue(label, move || {
            operation.run().map_err(|error| DeviceError::Operation {
                stream: of_stream,
                op: label.to_owned(),
                cause: Cause::new(error),
            })
        })?;

        let probe = |which: fn(&Flags) -> &AtomicBool| -> process::Probe {
            let flags = Arc::clone(&flags);
            Box::new(move || Ok(which(&flags).load(Ordering::Acquire)))
        };
        world.watch(
            self.context,
            process::Operation {
                stream: name,
                reached: probe(|flags| &flags.reached),
                ended: probe(|flags| &flags.ended),
                // The operation returns the failure, which poisons its stream.
                poison: Box::new(|_| {}),
            },
        );
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
        let request = SplitRequest { color, key };
        let Some(place) = self.world().split(self.context, number, request)? else {
            return Ok(None);
        };
        let group = Group {
            rank: place.rank,
            world_size: place.size,
        };
        Ok(Some(Arc::new(self.process.open(place.context, group)?)))
    }

    fn traffic(&self) -> Traffic {
        self.enqueued.lock().traffic
    }

    fn abort(&self, reason: &str) {
        self.world().fail(CommError::Aborted {
            rank: self.world().rank,
            reason: reason.to_owned(),
        });
    }

    fn failure(&self) -> Option<CommError> {
        self.world().failure()
    }
}
