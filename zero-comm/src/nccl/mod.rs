//! Ranks as processes, one per GPU, over NVIDIA's NCCL.
//!
//! ```no_run
//! use zero_alloc::cuda::CudaDevice;
//! use zero_comm::CommOptions;
//! use zero_comm::nccl::NcclCommunicator;
//! use zero_comm::world::Ranks;
//!
//! // Set by torchrun, mpirun or srun; otherwise set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
//! let ranks = Ranks::from_env()?.expect("several processes");
//! let device = CudaDevice::open(ranks.local_rank)?;
//! let comm = NcclCommunicator::join(&device, &ranks, CommOptions::default())?;
//! # Ok::<(), zero_comm::CommError>(())
//! ```
//!
//! The library is found at run time (`ZERO_NCCL`, else `libnccl.so.2`), 2.18 or later.
//!
//! **Several machines.** The ranks meet as [`world`](crate::world) describes. NCCL's data is neither
//! encrypted nor authenticated, so train on a network in which nobody alters packets.
//!
//! **Sums.** NCCL chooses the order of additions, and may round sums of fp16 and bf16 at each hop:
//! with N ranks, the sum of N values of one sign is within (N - 1) units in the last place of the
//! host back ends' sum, which rounds once. Repeating a call on the same ranks gives the same bits.
//! The result of `Max` with NaN is not specified.
//!
//! **Order.** One communicator runs its collectives one after the other, even on different streams.
//! Concurrent collectives of two communicators must be enqueued in the same order on all ranks.
//!
//! **Waiting.** The host waits when NCCL connects ranks: in `join` and `split` and in
//! the first collective of each kind; always within the limit. Otherwise it only enqueues.
//!
//! **Graphs.** A collective can be captured once one of its kind has run. During capture NCCL tries
//! to open the peers' buffers for direct access. It cannot open pages of a pool, and each attempt
//! leaks a reference to a page, whose memory is then not freed before the process ends. A program
//! that captures collectives calls [`set_environment`] at the start of `main`, or is started with
//! `NCCL_GRAPH_REGISTER=0`; a communicator cannot set the variable, because other threads may be
//! reading the environment when it is made. NCCL releases a communicator only after all graphs with
//! its collectives are destroyed, so drop graphs before communicators.
//!
//! **Failure.** NCCL reports few faults and names no rank. So every process also keeps a TCP
//! connection to the *coordinator*, a thread in rank 0's process that listens at the rendezvous
//! address. Off the critical path, each rank reports the call at which it is, with a hash of all
//! calls before: every ten milliseconds in a small world, every second from 1,000 ranks on. The
//! coordinator compares those of one number; it also detects processes that end and ranks that are
//! late. The first failure ends the world: every rank returns the same [`CommError`], which names
//! ranks by their numbers in the whole world; for differing calls, two ranks, the calls at which
//! they are, and how many calls before are known to be equal. Until then, a call that differs from
//! its peers' may succeed with wrong results. Only the capture of a graph is
//! compared, not its replays: a stalled replay appears as the timeout of a wait on the stream, and
//! the stream is not poisoned. Check [`Communicator::failure`] before using the results of a
//! replay.

mod config;
mod handle;
mod library;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use zero_alloc::TimeLimit;
use zero_alloc::cuda::{CudaDevice, CudaStream, interop};
use zero_alloc::device::{AnySlice, Cause, DType, DeviceError, Event, Memory, Stream};

use crate::call::{Checked, Group};
use crate::split_request::SplitRequest;
use crate::world::message::{Context, SplitRank};
use crate::world::process::{Operation, Transport, World};
use crate::world::watcher::Connection;
use crate::world::{Ranks, error, rendezvous};
use crate::{CommError, CommOptions, Communicator, Traffic};
use handle::{Handle, Interrupt, Wait};
use library::Nccl;

/// Sets the environment variable `NCCL_GRAPH_REGISTER` to 0, unless it is set: the start of `main`
/// in a program that captures collectives into graphs (see the [module](self)'s documentation).
/// Child processes inherit it.
///
/// ```no_run
/// // SAFETY: `main` has started no thread yet.
/// unsafe { zero_comm::nccl::set_environment() };
/// ```
///
/// # Safety
/// As for [`std::env::set_var`]: no other thread reads or writes the environment meanwhile.
pub unsafe fn set_environment() {
    const NAME: &str = "NCCL_GRAPH_REGISTER";
    if std::env::var_os(NAME).is_none() {
        // SAFETY: the caller's promise.
        unsafe { std::env::set_var(NAME, "0") };
    }
}

/// The version of the NCCL library, such as `2.30.7`.
///
/// # Errors
/// [`CommError::NoLibrary`] if no library was found; [`CommError::BackEnd`] if it is too old or not
/// NCCL.
pub fn version() -> Result<String, CommError> {
    Nccl::get().map(|nccl| error::version_text(nccl.version as u64))
}

/// The state that a process's communicators share.
struct Process {
    connection: Connection,
    /// One byte of device memory for barriers. It is never freed, because freeing it would wait for
    /// the whole device.
    barrier: AnySlice,
}

/// Counters of the calls of this rank.
#[derive(Default)]
struct Enqueued {
    sequence: u64,
    /// Splits so far.
    splits: u64,
}

/// One rank's communicator of a group of processes, each with a GPU. After it is dropped, later
/// collectives of the other ranks fail with [`CommError::Left`]. Dropping waits, for some seconds
/// at most, until the other ranks of the machine drop theirs and all graphs with its collectives
/// are destroyed; drop those first.
pub struct NcclCommunicator {
    // Declared before `process`, so that NCCL's communicator is destroyed before the world.
    handle: Arc<Handle>,
    process: Arc<Process>,
    context: Context,
    group: Group,
    enqueued: Mutex<Enqueued>,
    traffic: Mutex<Traffic>,
}

impl fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "NcclCommunicator(rank {} of {})",
            self.group.rank, self.group.world_size
        )
    }
}

impl NcclCommunicator {
    /// Joins the world of `ranks`, with `device` as this rank's GPU. Every process calls it once.
    ///
    /// It ends within `options.limit`, from the first attempt to connect to the last connection of
    /// NCCL; so the limit must cover the time between the starts of the first and the last rank.
    /// Rank 0 waits for the others for three quarters of it, and NCCL has at least an eighth. If
    /// NCCL hangs, releasing it takes some seconds more.
    ///
    /// # Errors
    /// NCCL was not found, the rendezvous failed or exceeded the limit, or NCCL cannot connect the
    /// ranks.
    pub fn join(
        device: &CudaDevice,
        ranks: &Ranks,
        options: CommOptions,
    ) -> Result<Self, CommError> {
        let (nccl, limit, mut time) = (Nccl::get()?, options.limit, TimeLimit::new(options.limit));
        let joined = rendezvous::join(
            ranks,
            nccl.version as u64,
            || handle::unique_id(nccl),
            limit,
        )?;
        let id = joined.id.clone();
        let connection = Connection::start(joined, ranks.rank, limit)?;
        let memory = Memory::allocate(device, 1)?;
        // SAFETY: the allocation has one byte and is never freed.
        let barrier =
            unsafe { AnySlice::from_raw_parts(memory.as_ptr(), 1, DType::U8, device.id()) };
        let process = Arc::new(Process {
            connection,
            barrier,
        });

        let group = Group {
            rank: ranks.rank,
            world_size: ranks.world_size,
        };

        let wait = Wait {
            limit: time.left(),
            failure: &|| process.world().failure(),
        };

        let handle = Handle::init(nccl, device, group, &id, wait);
        let handle = handle.map_err(|interrupt| {
            process.fail(interrupt, "NCCL did not connect the ranks", limit)
        })?;
        Ok(Self::open(process, handle, 0, group))
    }

    fn open(process: Arc<Process>, handle: Handle, context: Context, group: Group) -> Self {
        let handle = Arc::new(handle);
        let transport = Arc::clone(&handle) as Arc<dyn Transport>;
        process.world().open(context, transport);
        Self {
            handle,
            process,
            context,
            group,
            enqueued: Mutex::default(),
            traffic: Mutex::default(),
        }
    }

    /// Enqueues call `sequence`. Any error fails the world.
    fn run(
        &self,
        stream: &CudaStream,
        checked: &Checked,
        sequence: u64,
    ) -> Result<Operation, CommError> {
        let world = self.process.world();
        let call = checked.call();
        let label = call.collective.name();
        let skipped = |error: DeviceError| {
            let (call, rank, stream) =
                (Box::new(call.clone()), world.rank, stream.name().to_owned());
            world.fail(CommError::Skipped {
                sequence,
                call,
                rank,
                stream,
            });
            CommError::Device(error)
        };

        let reached = stream.record().map_err(skipped)?;
        let mut failure = None;
        let enqueued = stream.labelled(label, || {
            let raw = interop::raw_stream(stream);
            let wait = Wait {
                limit: world.limit,
                failure: &|| world.failure(),
            };
            // SAFETY: `enqueue` compared the groups; `raw` is a stream of the communicator's
            // device; `barrier` is one byte of it that is never freed.
            let enqueued = unsafe {
                self.handle
                    .enqueue(checked, self.group, self.process.barrier, raw, wait)
            };
            enqueued.map_err(|interrupt| {
                let error = match interrupt {
                    Interrupt::Late => world.late(self.context, sequence, call.clone()),
                    other => self.process.fail(other, label, world.limit),
                };
                let cause = Cause::new(error.clone());
                failure = Some(error);
                DeviceError::Operation {
                    stream: stream.name().to_owned(),
                    op: label.to_owned(),
                    cause,
                }
            })
        });

        match (enqueued, failure) {
            (_, Some(failure)) => {
                // NCCL may still be about to enqueue the call, behind what the caller records from
                // now on.
                world.abort(&*self.handle).wait();
                return Err(failure);
            }
            (Err(error), None) => return Err(skipped(error)),
            (Ok(()), None) => {}
        }

        let ended = stream.record().map_err(skipped)?;
        let poisoned = stream.clone();
        Ok(Operation {
            stream: stream.name().to_owned(),
            reached: Box::new(move || reached.is_done()),
            ended: Box::new(move || ended.is_done()),
            poison: Box::new(move |failure| poison(&poisoned, label, failure)),
        })
    }
}

fn poison(stream: &CudaStream, op: &str, failure: &CommError) {
    let stream_name = stream.name().to_owned();
    let cause = Cause::new(failure.clone());
    stream.poison(DeviceError::Operation {
        stream: stream_name,
        op: op.to_owned(),
        cause,
    });
}

impl Process {
    fn world(&self) -> &World {
        &self.connection.world
    }

    /// Ends the world because of `interrupt`; returns the failure.
    fn fail(&self, interrupt: Interrupt, what: &str, limit: Duration) -> CommError {
        let rank = self.world().rank;
        let error = match interrupt {
            Interrupt::World(failure) => return failure,
            Interrupt::Failed(error) => error,
            Interrupt::Late => CommError::Peer {
                rank,
                message: format!("{what} within {limit:?}"),
            },
        };
        self.world().fail(error)
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        let world = self.process.world();
        let done = self.enqueued.get_mut().sequence;
        // The peers cannot complete collectives in flight without this rank.
        if world.drain(self.context).is_err() {
            world.abort(&*self.handle).wait();
        }
        world.close(self.context, done);
    }
}

// SAFETY: NCCL uses the buffers in its operations on the stream.
unsafe impl Communicator<CudaDevice> for NcclCommunicator {
    fn group(&self) -> Group {
        self.group
    }

    fn enqueue(&self, stream: &CudaStream, checked: Checked) -> Result<(), CommError> {
        let device = self.process.barrier.device();
        checked.check(self.group(), device)?;
        stream.check_device(checked.call().collective.name(), device)?;
        let world = self.process.world();
        // Held during the call, so that sequence numbers follow NCCL's order.
        let mut enqueued = self.enqueued.lock();
        let sequence = enqueued.sequence;
        let call = checked.call();
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

    fn split(
        &self,
        color: Option<u64>,
        key: u64,
    ) -> Result<Option<Arc<dyn Communicator<CudaDevice>>>, CommError> {
        let mut enqueued = self.enqueued.lock();
        // NCCL can split only an idle communicator.
        self.process.world().drain(self.context)?;
        let world = self.process.world();
        let number = enqueued.splits;
        enqueued.splits += 1;
        let place = world.split(self.context, number, SplitRequest { color, key })?;
        let wait = Wait {
            limit: world.limit,
            failure: &|| world.failure(),
        };

        let child = self.handle.split(
            place.map(|place| (place.context as usize, place.rank)),
            wait,
        );
        let child = child.map_err(|interrupt| {
            self.process.fail(
                interrupt,
                "NCCL did not split the communicator",
                world.limit,
            )
        })?;

        let Some((
            SplitRank {
                context,
                rank,
                size,
            },
            handle,
        )) = place.zip(child)
        else {
            return Ok(None);
        };

        let group = Group {
            rank,
            world_size: size,
        };

        Ok(Some(Arc::new(Self::open(
            Arc::clone(&self.process),
            handle,
            context,
            group,
        ))))
    }

    fn traffic(&self) -> Traffic {
        *self.traffic.lock()
    }

    fn abort(&self, reason: &str) {
        let rank = self.process.world().rank;
        self.process.world().fail(CommError::Aborted {
            rank,
            reason: reason.to_owned(),
        });
    }

    fn failure(&self) -> Option<CommError> {
        self.process.world().failure()
    }
}

#[cfg(test)]
mod tests {
    /// The body of a process of [`environment_is_set_unless_the_user_did`].
    #[test]
    #[ignore = "run by another test, as a process"]
    fn process_sets_its_environment() {
        // SAFETY: this process runs only this test, and its main thread waits for it.
        unsafe { super::set_environment() };
        println!("value {}", std::env::var("NCCL_GRAPH_REGISTER").unwrap());
    }

    #[test]
    fn environment_is_set_unless_the_user_did() {
        for (users, expected) in [(None, "value 0"), (Some("1"), "value 1")] {
            let mut process = std::process::Command::new(std::env::current_exe().unwrap());
            process.args([
                "--ignored",
                "--exact",
                "--nocapture",
                "nccl::tests::process_sets_its_environment",
            ]);
            process
                .env_remove("NCCL_GRAPH_REGISTER")
                .envs(users.map(|value| ("NCCL_GRAPH_REGISTER", value)));
            let output = process.output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(text.contains(expected), "{text}");
        }
    }
}
