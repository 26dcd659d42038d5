//! Ranks as processes, one a GPU, over NVIDIA's NCCL.
//!
//! ```no_run
//! use zero_alloc::cuda::CudaDevice;
//! use zero_comm::CommOptions;
//! use zero_comm::nccl::{NcclCommunicator, Ranks};
//!
//! // Under torchrun, mpirun or srun; who else starts processes sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
//! let ranks = Ranks::from_env()?.expect("somebody started several processes");
//! let device = CudaDevice::open(ranks.local_rank)?;
//! let comm = NcclCommunicator::join(&device, &ranks, CommOptions::default())?;
//! # Ok::<(), zero_comm::CommError>(())
//! ```
//!
//! It is compiled in every build; the library is found at run time (`ZERO_NCCL`, else `libnccl.so.2`), 2.18 or later.
//!
//! **Sums.** NCCL adds in an order of its own choice, and may round sums of fp16 and bf16 once a hop: with N ranks a
//! result is within (N - 1) units in the last place of the travelling type, for N values of one sign, of the sum that
//! the host's back ends round once. The same call on the same ranks gives the same bits again. What Max gives where
//! one value is NaN is NCCL's to say.
//!
//! **Order.** One communicator runs its collectives one after the other, whatever streams they are on. Collectives of
//! two communicators that are under way at once must be enqueued in one order on all ranks.
//!
//! **Waiting.** The host waits where NCCL connects ranks: in `join`, in `split`, where memory is registered, and in
//! the first collective of each kind, or on registered memory; always within the limit. Otherwise it only enqueues.
//!
//! **Graphs.** A collective may be recorded once one of its kind has run. While it is recorded NCCL tries to have
//! ranks open one another's buffers; pages of a pool cannot be opened, so `NCCL_GRAPH_REGISTER=0` saves the attempt.
//! NCCL gives a communicator up only when all graphs with its collectives are gone: drop them first.
//!
//! **Registration.** NCCL copies through buffers of its own, unless it is told of the memory:
//! [`NcclCommunicator::register_pool`], for a pool of
//! [shareable backings](zero_alloc::cuda::CudaDevice::with_shareable_backings).
//! ```no_run
//! # use zero_alloc::{Pool, cuda::CudaDevice};
//! # use zero_comm::nccl::NcclCommunicator;
//! # fn example(device: &CudaDevice, comm: &NcclCommunicator) -> Result<(), zero_alloc::device::DeviceError> {
//! // For what collectives read and write; the rest stays in a pool of pages.
//! let pool = Pool::new(device.clone().with_shareable_backings()?, 1 << 30);
//! match comm.register_pool(&pool) {
//!     Ok(registration) => println!("{registration:?}: keep it"),
//!     Err(error) => println!("collectives copy, as without it: {error}"),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! **Failure.** NCCL itself tells of few faults, and names no rank. So the processes of a world keep a second, thin
//! connection: to the *hub*, a few threads in rank 0's process, at the address where they met. Off the critical path,
//! some ten milliseconds later, the hub hears of every call and compares it with those of the others; it sees
//! processes end; and it knows who is late. Whatever it finds ends the world on every rank with the same
//! [`CommError`], in whose words ranks are those of the whole world. A call that differs from its peers' may have
//! delivered nonsense, or have seemed to succeed, before that. What a recorded graph repeats is not seen: its
//! collectives were compared when they were recorded, and a stall shows as the limit of whoever waits for the stream.
//! Nor is a stream poisoned for them: before the results of a launch are believed, [`Communicator::failure`] must be
//! asked.

mod abort;
mod config;
mod coordinator;
mod error;
mod handle;
mod library;
mod message;
mod ranks;
mod registration;
mod rendezvous;
mod server;
#[cfg(all(test, not(miri)))] // Miri has no sockets.
mod tests;
mod wire;
mod world;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use zero_alloc::cuda::{CudaDevice, CudaStream, interop};
use zero_alloc::device::{AnySlice, DType, DeviceError, Event, Memory, Stream};

pub use error::RendezvousError;
pub use ranks::{LaunchError, Launcher, Ranks};
pub use registration::Registration;

use crate::call::{Checked, Group};
use crate::split_request::{SplitRequest, colors, members};
use crate::{CommError, CommOptions, Communicator, Traffic};
use handle::{Handle, Interrupt};
use library::Nccl;
use message::Context;
use world::{Operation, Transport, World};

/// Whether NCCL is there, and which: `2.30.7`.
///
/// # Errors
/// [`CommError::NoLibrary`] names what was tried; or the library is too old, or not NCCL.
pub fn version() -> Result<String, CommError> {
    Nccl::get().map(|nccl| error::version_text(nccl.version as u64))
}

/// What the communicators of a process share.
struct Process {
    world: World,
    /// A byte of the device for barriers. It is never freed: that would wait for the whole device.
    barrier: AnySlice,
}

/// What the host thread of a rank changes when it enqueues.
#[derive(Default)]
struct Enqueued {
    sequence: u64,
    /// Splits and registrations.
    meetings: u64,
}

/// One process's handle of a group of processes, each with a GPU. Dropping it gives the group up: the others get
/// [`CommError::Left`] from what this rank has not called. It waits, some seconds at most, for the other ranks of the
/// machine to do the same, and for graphs with its collectives to be gone: drop those first.
pub struct NcclCommunicator {
    // First, so that NCCL's communicator goes before the world does.
    handle: Arc<Handle>,
    process: Arc<Process>,
    context: Context,
    group: Group,
    enqueued: Mutex<Enqueued>,
    traffic: Mutex<Traffic>,
}

impl fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NcclCommunicator(rank {} of {})", self.group.rank, self.group.world_size)
    }
}

impl NcclCommunicator {
    /// Joins the world that `ranks` speaks of, with `device` as this rank's GPU. Every process calls it, once.
    ///
    /// # Errors
    /// There is no NCCL, the ranks do not meet within the limit, or NCCL cannot connect them.
    pub fn join(device: &CudaDevice, ranks: &Ranks, options: CommOptions) -> Result<Self, CommError> {
        let (nccl, limit, begun) = (Nccl::get()?, options.limit, Instant::now());
        let joined = rendezvous::join(ranks, nccl.version as u64, || handle::unique_id(nccl), limit)?;
        let id = joined.id.clone();
        let world = World::start(joined, ranks.rank, limit)?;
        let at = Memory::allocate(device, 1)?;
        // SAFETY: never freed.
        let barrier = unsafe { AnySlice::from_raw_parts(at.as_ptr(), 1, DType::U8) };
        let process = Arc::new(Process { world, barrier });
        let group = Group { rank: ranks.rank, world_size: ranks.world_size };
        let left = limit.saturating_sub(begun.elapsed());
        let failure = || process.world.failure();
        let handle = Handle::init(nccl, device, group, &id, (left, &failure));
        let handle = handle.map_err(|interrupt| process.fail(interrupt, "NCCL did not connect the ranks", limit))?;
        Ok(Self::open(process, handle, 0, group))
    }

    fn open(process: Arc<Process>, handle: Handle, context: Context, group: Group) -> Self {
        let handle = Arc::new(handle);
        process.world.open(context, Arc::clone(&handle) as Arc<dyn Transport>);
        Self { handle, process, context, group, enqueued: Mutex::default(), traffic: Mutex::default() }
    }

    /// Enqueues the call with this number; the failure of the world if that fails.
    fn run(&self, stream: &CudaStream, checked: &Checked, sequence: u64) -> Result<Operation, CommError> {
        let (world, call) = (&self.process.world, checked.call());
        let label = call.collective.name();
        let refused = |error: DeviceError| {
            let skipped = CommError::Skipped {
                sequence,
                call: Box::new(call.clone()),
                rank: world.rank,
                stream: stream.name().to_owned(),
            };
            world.fail(skipped);
            CommError::Device(error)
        };
        let reached = stream.record().map_err(refused)?;
        let mut failure = None;
        let enqueued = stream.labelled(label, || {
            let raw = interop::raw_stream(stream);
            let waiting = (world.limit, &|| world.failure() as Option<CommError>);
            // SAFETY: a stream and a byte of the device.
            let ran =
                unsafe { self.handle.run(checked, self.group, self.process.barrier, raw, (waiting.0, waiting.1)) };
            ran.map_err(|interrupt| {
                let error = match interrupt {
                    Interrupt::Late => world.late(self.context, sequence, call.clone()),
                    other => self.process.fail(other, label, world.limit),
                };
                let message = error.to_string();
                failure = Some(error);
                DeviceError::Operation { stream: stream.name().to_owned(), op: label.to_owned(), message }
            })
        });
        match (enqueued, failure) {
            (_, Some(failure)) => return Err(failure),
            (Err(error), None) => return Err(refused(error)),
            (Ok(()), None) => {}
        }
        let ended = stream.record().map_err(refused)?;
        let poisoned = stream.clone();
        Ok(Operation {
            call: call.clone(),
            stream: stream.name().to_owned(),
            reached: Box::new(move || reached.is_done()),
            ended: Box::new(move || ended.is_done()),
            poison: Box::new(move |failure| poison(&poisoned, label, failure)),
        })
    }
}

fn poison(stream: &CudaStream, op: &str, failure: &CommError) {
    let (stream_name, message) = (stream.name().to_owned(), failure.to_string());
    stream.poison(DeviceError::Operation { stream: stream_name, op: op.to_owned(), message });
}

impl Process {
    /// Waits until the collectives of a communicator that are under way have ended.
    fn drain(&self, context: Context) -> Result<(), CommError> {
        let (world, begun) = (&self.world, Instant::now());
        while world.under_way(context) > 0 {
            if let Some(failure) = world.failure() {
                return Err(failure);
            }
            if begun.elapsed() >= world.limit {
                let message = format!("what was under way did not end within {:?}", world.limit);
                return Err(CommError::Peer { rank: world.rank, message });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// The world's failure, which `interrupt` is or becomes.
    fn fail(&self, interrupt: Interrupt, what: &str, limit: Duration) -> CommError {
        let rank = self.world.rank;
        let error = match interrupt {
            Interrupt::World(failure) => return failure,
            Interrupt::Failed(error) => CommError::Peer { rank, message: error.to_string() },
            Interrupt::Late => CommError::Peer { rank, message: format!("{what} within {limit:?}") },
        };
        self.world.fail(error)
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        let (world, done) = (&self.process.world, self.enqueued.get_mut().sequence);
        // What this rank enqueued is finished first, as its peers expect.
        if self.process.drain(self.context).is_err() {
            self.handle.abort().wait();
        }
        world.close(self.context, done);
    }
}

impl Communicator<CudaDevice> for NcclCommunicator {
    fn group(&self) -> Group {
        self.group
    }

    fn enqueue(&self, stream: &CudaStream, checked: Checked) -> Result<(), CommError> {
        let world = &self.process.world;
        // Held until it is enqueued, so that sequence numbers and NCCL's order agree.
        let mut enqueued = self.enqueued.lock();
        let (sequence, call) = (enqueued.sequence, checked.call());
        if let Some(failure) = world.failure() {
            poison(stream, call.collective.name(), &failure);
            return Err(failure);
        }
        enqueued.sequence += 1;
        self.group.count(call, &mut self.traffic.lock());
        world.called(self.context, call.clone());
        let operation = self.run(stream, &checked, sequence)?;
        world.watch(self.context, operation);
        Ok(())
    }

    fn split(&self, color: Option<u64>, key: u64) -> Result<Option<Arc<dyn Communicator<CudaDevice>>>, CommError> {
        let mut enqueued = self.enqueued.lock();
        let (world, number) = (&self.process.world, enqueued.meetings);
        enqueued.meetings += 1;
        // NCCL splits what is idle.
        self.process.drain(self.context)?;
        let (first, requests) = world.split(self.context, number, SplitRequest { color, key })?;
        let colors = colors(&requests);
        let place = color.and_then(|color| {
            let index = colors.binary_search(&color).ok()?;
            let members = members(&requests, color);
            let rank = members.iter().position(|&rank| rank == self.group.rank)?;
            Some((index, Group { rank, world_size: members.len() }))
        });
        let failure = || world.failure();
        let child = self.handle.split(place.map(|(index, group)| (index, group.rank)), (world.limit, &failure));
        let child = child
            .map_err(|interrupt| self.process.fail(interrupt, "NCCL did not split the communicator", world.limit))?;
        let Some(((index, group), handle)) = place.zip(child) else { return Ok(None) };
        let context = first + index as Context;
        Ok(Some(Arc::new(Self::open(Arc::clone(&self.process), handle, context, group))))
    }

    fn traffic(&self) -> Traffic {
        *self.traffic.lock()
    }

    fn abort(&self, reason: &str) {
        let rank = self.process.world.rank;
        self.process.world.fail(CommError::Aborted { rank, reason: reason.to_owned() });
    }

    fn failure(&self) -> Option<CommError> {
        self.process.world.failure()
    }
}
