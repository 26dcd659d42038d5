//! Ranks as processes under MPI (cargo feature `mpi`): host memory on one machine or a cluster.
//!
//! [`MpiWorld::init`] starts MPI; [`MpiWorld::comm`] is the communicator of all processes. Sums are
//! taken in rank order by the same code as over [`threads`](crate::threads), so both give the same
//! bits.
//!
//! Each collective consists of direct, non-blocking transfers between pairs of ranks
//! ([`operation`]), so that a wait can have a limit, calls can be compared before data flows, and a
//! failure can reach all ranks. A waiting rank sleeps between polls.
//!
//! **Failure.** The first failure of any communicator ends the whole world: on every rank,
//! collectives in flight and later ones fail. After a failure MPI is not finalized, since that
//! would wait for the lost rank; the process should report the error and exit. `mpirun` by default
//! ends all processes when one is killed.
//!
//! **Memory.** MPI accesses copies of the buffers only ([`staging`]): it cannot withdraw a transfer
//! whose peer was lost, and an RDMA network may write to the memory at any later time. A collective
//! that fails waits for its transfers for at most a second and leaks the copies of those that have
//! not ended; its buffers may be freed as usual.

mod notice;
mod operation;
mod raw;
mod staging;
mod tags;
mod world;

use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ::mpi::Threading;
use ::mpi::environment::Universe;
use parking_lot::Mutex;
use zero_alloc::device::{AnySlice, Cause, DType, DeviceError, DeviceId, Stream};
use zero_alloc::host::{HostDevice, HostStream};

use crate::call::{Checked, Group};
use crate::split_request::{SplitRequest, members};
use crate::{CommError, CommOptions, Communicator, Traffic};
use notice::Notice;
use operation::{Members, Operation};
use raw::{MpiError, Raw};
use tags::{MAX_CONTEXT, Pending};
use world::World;

/// An initialized MPI; dropping it finalizes MPI. Keep it on the main thread until all streams are
/// synchronized.
pub struct MpiWorld {
    universe: Option<Universe>,
    world: Arc<World>,
    comm: Arc<MpiComm>,
}

impl fmt::Debug for MpiWorld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MpiWorld({:?})", self.comm)
    }
}

fn back_end(error: MpiError) -> CommError {
    CommError::BackEnd {
        back_end: "mpi",
        message: format!("{}: {}", error.call, error.message),
    }
}

impl MpiWorld {
    /// Initializes MPI. Every process calls it once.
    ///
    /// # Errors
    /// MPI was initialized before, does not allow calls from several threads, or a call failed.
    pub fn init(options: CommOptions) -> Result<Self, CommError> {
        Self::init_within(options, c_int::MAX)
    }

    /// As [`MpiWorld::init`], with tags of at most `max_tag`, the same on all ranks: for tests of
    /// libraries whose `MPI_TAG_UB` is small.
    ///
    /// # Errors
    /// As [`MpiWorld::init`], or `max_tag` is less than 767.
    #[cfg(feature = "testing")]
    pub fn init_with_tags_up_to(options: CommOptions, max_tag: c_int) -> Result<Self, CommError> {
        Self::init_within(options, max_tag)
    }

    fn init_within(options: CommOptions, max_tag: c_int) -> Result<Self, CommError> {
        let error = |message: &str| CommError::BackEnd {
            back_end: "mpi",
            message: message.to_owned(),
        };

        let (universe, threading) = ::mpi::initialize_with_threading(Threading::Serialized)
            .ok_or_else(|| error("MPI was initialized before in this process"))?;
        if threading < Threading::Serialized {
            return Err(error("this MPI library allows calls from one thread only"));
        }
        let raw = Raw::new(&universe, max_tag).map_err(back_end)?;
        let members = Members {
            context: 0,
            rank: raw.rank,
            world_ranks: (0..raw.size).collect(),
        };

        let world = Arc::new(World::new(raw, options.limit));
        let comm = Arc::new(MpiComm::new(Arc::clone(&world), members));
        Ok(Self {
            universe: Some(universe),
            world,
            comm,
        })
    }

    /// The communicator of all processes.
    pub fn comm(&self) -> Arc<MpiComm> {
        Arc::clone(&self.comm)
    }
}

impl Drop for MpiWorld {
    fn drop(&mut self) {
        let universe = self.universe.take();
        if self.world.poll().is_some() {
            // Finalizing would wait for the lost process.
            std::mem::forget(universe);
        } else {
            self.world.leave(0, self.comm.enqueued.lock().sequence);
            self.world.raw.finalize(universe);
        }
    }
}

/// Counters of the calls of this rank.
#[derive(Default)]
struct Enqueued {
    sequence: u64,
    traffic: Traffic,
}

/// One process's communicator of a group of processes.
pub struct MpiComm {
    world: Arc<World>,
    members: Members,
    enqueued: Mutex<Enqueued>,
    pending: Pending,
}

impl fmt::Debug for MpiComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "MpiComm(rank {} of {})",
            self.members.rank,
            self.members.world_ranks.len()
        )
    }
}

impl MpiComm {
    fn new(world: Arc<World>, members: Members) -> Self {
        Self {
            world,
            members,
            enqueued: Mutex::default(),
            pending: Pending::default(),
        }
    }

    fn operation(&self, enqueued: &mut Enqueued, checked: Checked, stream: &str) -> Operation {
        let world = Arc::clone(&self.world);
        let members = self.members.clone();
        let sequence = enqueued.sequence;
        let pending = self.pending.clone();
        enqueued.sequence += 1;
        pending.insert(sequence);
        Operation {
            world,
            members,
            sequence,
            checked,
            stream: stream.to_owned(),
            begun: false,
            pending,
        }
    }
}

// SAFETY: MPI never accesses the buffers; an operation accesses them only while it runs
// (`staging`).
unsafe impl Communicator<HostDevice> for MpiComm {
    fn group(&self) -> Group {
        Group {
            rank: self.members.rank,
            world_size: self.members.world_ranks.len(),
        }
    }

    fn enqueue(&self, stream: &HostStream, checked: Checked) -> Result<(), CommError> {
        checked.check(self.group(), DeviceId::HOST)?;
        stream.check_runs(checked.call.collective.name())?;
        // Held during `stream.enqueue`, so that sequence numbers follow the stream's order.
        let mut enqueued = self.enqueued.lock();
        let label = checked.call.collective.name();
        let name = stream.name().to_owned();
        self.group().count(&checked.call, &mut enqueued.traffic);
        let operation = self.operation(&mut enqueued, checked, &name);
        stream.enqueue(label, move || {
            operation.run().map_err(|error| DeviceError::Operation {
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
        // An all-gather, on this thread, of four integers per rank: 1 if there is a color, the
        // color, the key, and the greatest context that this process knows.
        const WORDS: usize = 4;
        let n = self.world_size();
        // Until the new context is known here: a split of another communicator would take the same
        // one. Processes that split two communicators at once in different orders end with the
        // error of a late rank.
        let _one_at_a_time = self.world.splitting.lock();
        let mut enqueued = self.enqueued.lock();
        let known = u64::from(self.world.contexts.load(Ordering::Relaxed));
        let mut own = [u64::from(color.is_some()), color.unwrap_or(0), key, known];
        let mut all = vec![0u64; n * WORDS];

        // SAFETY: `own` and `all` outlive the operation, which ends within this function, and alone
        // accesses them.
        let send = unsafe {
            AnySlice::from_raw_parts(
                own.as_mut_ptr().cast(),
                size_of_val(&own),
                DType::U8,
                DeviceId::HOST,
            )
        };

        // SAFETY: as above.
        let recv = unsafe {
            AnySlice::from_raw_parts(
                all.as_mut_ptr().cast(),
                size_of_val(&all[..]),
                DType::U8,
                DeviceId::HOST,
            )
        };

        let checked = self.group().control_all_gather(send, recv)?;
        self.operation(&mut enqueued, checked, "split").run()?;
        // A number that no member has used. All groups of one split share it, since they have no
        // member in common.
        let context = all
            .chunks_exact(WORDS)
            .map(|words| words[3])
            .max()
            .unwrap_or(0)
            + 1;

        let Some(context) = u32::try_from(context)
            .ok()
            .filter(|&context| context <= MAX_CONTEXT)
        else {
            let message = format!("more than {MAX_CONTEXT} splits");
            return Err(CommError::BackEnd {
                back_end: "mpi",
                message,
            });
        };

        self.world.contexts.fetch_max(context, Ordering::Relaxed);
        let Some(color) = color else { return Ok(None) };
        let request = |words: &[u64]| SplitRequest {
            color: (words[0] == 1).then_some(words[1]),
            key: words[2],
        };

        let requests: Vec<SplitRequest> = all.chunks_exact(WORDS).map(request).collect();
        let members = members(&requests, color);
        let rank = members
            .iter()
            .position(|&rank| rank == self.members.rank)
            .unwrap_or(0);
        let world_ranks = members
            .into_iter()
            .map(|rank| self.members.world_ranks[rank])
            .collect();
        let members = Members {
            context,
            rank,
            world_ranks,
        };

        Ok(Some(Arc::new(Self::new(Arc::clone(&self.world), members))))
    }

    fn traffic(&self) -> Traffic {
        self.enqueued.lock().traffic
    }

    fn abort(&self, reason: &str) {
        let rank = self.members.rank;
        let reason = reason.to_owned();
        self.world.fail(
            CommError::Aborted {
                rank,
                reason: reason.clone(),
            },
            &Notice::Aborted(reason),
        );
    }

    fn failure(&self) -> Option<CommError> {
        self.world.poll()
    }
}
