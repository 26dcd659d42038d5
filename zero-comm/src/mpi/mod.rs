//! Ranks as processes under MPI (cargo feature `mpi`): host memory on one machine or a cluster of them.
//!
//! [`MpiWorld::init`] starts MPI; [`MpiWorld::comm`] is the communicator of all processes. Sums are taken in rank
//! order by the same code as over [`threads`](crate::threads), so both give the same bits.
//!
//! Each collective is made of direct, non-blocking transfers between pairs of ranks ([`operation`]), so that
//! a wait can have a limit, calls can be compared before data flows, and a failure can be told to all. A waiting
//! rank sleeps between looks.
//!
//! **Failure.** The first failure of any communicator ends the whole world of processes: every rank's collectives,
//! under way or to come, fail. After a failure MPI is not finalised, since that would wait for the lost rank;
//! the process should say what happened and exit. `mpirun` by itself ends all processes when one is killed.

mod operation;
mod raw;
mod wire;
mod world;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ::mpi::Threading;
use ::mpi::environment::Universe;
use parking_lot::Mutex;
use zero_alloc::device::{AnySlice, DType, DeviceError, Stream};
use zero_alloc::host::{HostDevice, HostStream};

use crate::call::{Checked, Group};
use crate::{CommError, CommOptions, Communicator, Traffic};
use operation::{MAX_CONTEXT, Members, Operation};
use raw::{MpiError, Raw};
use wire::Notice;
use world::World;

/// MPI, from its initialisation to its end: keep it on the main thread until all streams are drained.
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

fn refused(error: MpiError) -> CommError {
    CommError::BackEnd { back_end: "mpi", message: format!("{}: {}", error.call, error.message) }
}

impl MpiWorld {
    /// Initialises MPI. Every process calls it, once.
    ///
    /// # Errors
    /// MPI was initialised before, allows one thread only, or a call failed.
    pub fn init(options: CommOptions) -> Result<Self, CommError> {
        let error = |message: &str| CommError::BackEnd { back_end: "mpi", message: message.to_owned() };
        let (universe, threading) = ::mpi::initialize_with_threading(Threading::Serialized)
            .ok_or_else(|| error("MPI was initialised before in this process"))?;
        if threading < Threading::Serialized {
            return Err(error("this MPI library allows calls from one thread only"));
        }
        let raw = Raw::new(&universe).map_err(refused)?;
        let members = Members { context: 0, rank: raw.rank, world_ranks: (0..raw.size).collect() };
        let world = Arc::new(World::new(raw, options.limit));
        let comm = Arc::new(MpiComm { world: Arc::clone(&world), members, enqueued: Mutex::default() });
        Ok(Self { universe: Some(universe), world, comm })
    }

    /// The communicator of all processes.
    pub fn comm(&self) -> Arc<MpiComm> {
        Arc::clone(&self.comm)
    }
}

impl Drop for MpiWorld {
    fn drop(&mut self) {
        let universe = self.universe.take();
        if self.world.failure().is_some() {
            // Finalising waits for all processes, and one of them is lost.
            std::mem::forget(universe);
        } else {
            self.world.leave(0, self.comm.enqueued.lock().sequence);
            self.world.raw.finalize(universe);
        }
    }
}

/// What the host thread of a rank changes when it enqueues.
#[derive(Default)]
struct Enqueued {
    sequence: u64,
    traffic: Traffic,
}

/// One process's handle of a group of processes.
pub struct MpiComm {
    world: Arc<World>,
    members: Members,
    enqueued: Mutex<Enqueued>,
}

impl fmt::Debug for MpiComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MpiComm(rank {} of {})", self.members.rank, self.members.world_ranks.len())
    }
}

impl MpiComm {
    fn operation(&self, enqueued: &mut Enqueued, checked: Checked, stream: &str) -> Operation {
        let (world, members, sequence) = (Arc::clone(&self.world), self.members.clone(), enqueued.sequence);
        enqueued.sequence += 1;
        Operation { world, members, sequence, checked, stream: stream.to_owned(), begun: false }
    }
}

impl Communicator<HostDevice> for MpiComm {
    fn group(&self) -> Group {
        Group { rank: self.members.rank, world_size: self.members.world_ranks.len() }
    }

    fn enqueue(&self, stream: &HostStream, checked: Checked) -> Result<(), CommError> {
        // Held over `stream.enqueue`, so that sequence numbers and stream order agree.
        let mut enqueued = self.enqueued.lock();
        let (label, name) = (checked.call.collective.name(), stream.name().to_owned());
        self.group().count(&checked.call, &mut enqueued.traffic);
        let operation = self.operation(&mut enqueued, checked, &name);
        stream.enqueue(label, move || {
            operation.run().map_err(|error| DeviceError::Operation {
                stream: name,
                op: label.to_owned(),
                message: error.to_string(),
            })
        })?;
        Ok(())
    }

    fn split(&self, color: Option<u64>, key: u64) -> Result<Option<Arc<dyn Communicator<HostDevice>>>, CommError> {
        // An all-gather of (has a color, color, key, greatest context known) on this thread.
        const WORDS: usize = 4;
        let n = self.world_size();
        let mut enqueued = self.enqueued.lock();
        let known = u64::from(self.world.contexts.load(Ordering::Relaxed));
        let mut request = [u64::from(color.is_some()), color.unwrap_or(0), key, known];
        let mut requests = vec![0u64; n * WORDS];
        // SAFETY: both outlive the operation, which runs here and now.
        let send = unsafe { AnySlice::from_raw_parts(request.as_mut_ptr().cast(), size_of_val(&request), DType::U8) };
        let len = requests.len() * size_of::<u64>();
        // SAFETY: as above.
        let recv = unsafe { AnySlice::from_raw_parts(requests.as_mut_ptr().cast(), len, DType::U8) };
        let checked = self.group().control_all_gather(send, recv)?;
        self.operation(&mut enqueued, checked, "split").run()?;
        let requests: Vec<&[u64]> = requests.chunks_exact(WORDS).collect();
        // New to every member. Groups of one split share it: they have no member in common.
        let context = requests.iter().map(|w| w[3]).max().unwrap_or(0) + 1;
        let Some(context) = u32::try_from(context).ok().filter(|&context| context <= MAX_CONTEXT) else {
            let message = format!("more than {MAX_CONTEXT} splits");
            return Err(CommError::BackEnd { back_end: "mpi", message });
        };
        self.world.contexts.fetch_max(context, Ordering::Relaxed);
        let Some(color) = color else { return Ok(None) };
        let mut members: Vec<(u64, usize)> = Vec::new();
        for (rank, request) in requests.iter().enumerate().filter(|(_, w)| w[0] == 1 && w[1] == color) {
            members.push((request[2], rank));
        }
        members.sort_unstable();
        let rank = members.iter().position(|&(_, q)| q == self.members.rank).unwrap_or(0);
        let world_ranks = members.iter().map(|&(_, q)| self.members.world_ranks[q]).collect();
        let members = Members { context, rank, world_ranks };
        let child = Self { world: Arc::clone(&self.world), members, enqueued: Mutex::default() };
        Ok(Some(Arc::new(child)))
    }

    fn traffic(&self) -> Traffic {
        self.enqueued.lock().traffic
    }

    fn abort(&self, reason: &str) {
        let (rank, reason) = (self.members.rank, reason.to_owned());
        self.world.fail(CommError::Aborted { rank, reason: reason.clone() }, &Notice::Aborted(reason));
    }

    fn failure(&self) -> Option<CommError> {
        self.world.poll()
    }
}
