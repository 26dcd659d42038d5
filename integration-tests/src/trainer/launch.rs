//! Running ranks: on the host all as threads of this process, or one, the others being other processes; on CUDA one.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::Mutex;
use zero_alloc::cuda::{CudaDevice, CudaStream, Graph, PinnedMemory};
use zero_alloc::device::{Device, DeviceError};
use zero_alloc::host::{HostDevice, HostStream, Timeline};
use zero_comm::threads::World;
use zero_comm::{Collective, CommOptions, Communicator};
use zero_kernels::cuda::CudaKernels;
use zero_kernels::host::HostKernels;
use zero_optim::OptimError;
use zero_shard::Layout;

use super::metrics::StepMetrics;
use super::rank::{HostSide, Rank, Settings};
use super::recorder::Replay;
use super::run::run_rank;
use super::workload::{RankSummary, RunOptions, Workload};
use crate::error::TrainError;

/// Elements to which shards are aligned: 32 bytes of a 16-bit type.
pub const SHARD_ALIGN_ELEMS: u64 = 16;

/// Trains on `world_size` ranks of this process, with `threads` threads each. `observe` is given rank 0's
/// figures of each step.
///
/// # Errors
/// The first rank's failure, as [`TrainError::Rank`]; the others end with it.
pub fn run_on_threads(
    world_size: usize,
    threads: usize,
    settings: &Settings,
    workload: &dyn Workload<HostDevice>,
    options: &RunOptions,
    observe: &mut (dyn FnMut(&StepMetrics) -> Result<(), TrainError> + Send),
) -> Result<Vec<RankSummary>, TrainError> {
    let layout = Arc::new(Layout::new(&workload.units(), world_size as u64, SHARD_ALIGN_ELEMS)?);
    let comms = World::new(world_size, CommOptions { limit: settings.limit })?;
    let failures: Mutex<Vec<Failure>> = Mutex::default();
    let observe = Mutex::new(observe);
    let run = |index: usize, comm: Arc<dyn Communicator<HostDevice>>| {
        let rank = host_rank(comm, threads, settings, workload, Arc::clone(&layout))?;
        let mut observe_rank = |metrics: &StepMetrics| if index == 0 { observe.lock()(metrics) } else { Ok(()) };
        run_rank(&rank, workload, options, &mut observe_rank)
    };
    let summaries = std::thread::scope(|scope| {
        let spawn = |(index, comm)| {
            let comm: Arc<dyn Communicator<HostDevice>> = Arc::new(comm);
            let (run, failures) = (&run, &failures);
            let name = format!("rank {index}");
            let spawned = std::thread::Builder::new().name(name).spawn_scoped(scope, move || {
                let (message, echo) = match catch_unwind(AssertUnwindSafe(|| run(index, Arc::clone(&comm)))) {
                    Ok(Ok(summary)) => return Some(summary),
                    Ok(Err(error)) => (error.to_string(), is_echo(&error)),
                    Err(panic) => (format!("panicked: {}", panic_message(&*panic)), false),
                };
                comm.abort(&message);
                failures.lock().push(Failure { rank: index, message, echo });
                None
            });
            // A rank that has no thread has dropped its communicator, which tells the others.
            spawned.inspect_err(|e| {
                let message = format!("its thread was refused: {e}");
                failures.lock().push(Failure { rank: index, message, echo: false });
            })
        };
        let ranks: Vec<_> = comms.into_iter().enumerate().map(spawn).collect();
        ranks.into_iter().map(|rank| rank.ok().and_then(|r| r.join().ok()).flatten()).collect::<Vec<_>>()
    });
    let failures = failures.into_inner();
    match failures.iter().find(|f| !f.echo).or(failures.first()) {
        Some(f) => Err(TrainError::Rank { rank: f.rank, message: f.message.clone() }),
        None => Ok(summaries.into_iter().flatten().collect()),
    }
}

/// Trains as one rank of `comm`, whose other ranks are other processes. `observe` is given this rank's figures.
///
/// # Errors
/// Anything that went wrong on this rank, or what another rank's failure looks like from here.
pub fn run_as_rank(
    comm: Arc<dyn Communicator<HostDevice>>,
    threads: usize,
    settings: &Settings,
    workload: &dyn Workload<HostDevice>,
    options: &RunOptions,
    observe: &mut dyn FnMut(&StepMetrics) -> Result<(), TrainError>,
) -> Result<RankSummary, TrainError> {
    let make = |comm, layout| host_rank(comm, threads, settings, workload, layout);
    run_caught(&comm, make, workload, options, observe)
}

/// Trains as one rank of `comm` on `device`. `observe` is given this rank's figures; the device's operations are in its
/// timeline, and their overlap in the figures, where `record` says so: that costs two events an operation.
///
/// # Errors
/// Anything that went wrong on this rank, or what another rank's failure looks like from here.
pub fn run_on_cuda(
    device: &CudaDevice,
    comm: Arc<dyn Communicator<CudaDevice>>,
    record: bool,
    settings: &Settings,
    workload: &dyn Workload<CudaDevice>,
    options: &RunOptions,
    observe: &mut dyn FnMut(&StepMetrics) -> Result<(), TrainError>,
) -> Result<RankSummary, TrainError> {
    let timeline = Timeline::new();
    let device = if record { device.clone().with_timeline(timeline.clone()) } else { device.clone() };
    let make = |comm, layout| {
        Rank::new(device, timeline, comm, layout, workload.passes(), settings, |device, compute| {
            let kernels = CudaKernels::new(device)?;
            // Before the first collective: loading waits for the device.
            kernels.warm(compute, settings.limit)?;
            let host = HostSide {
                memory: Arc::new(PinnedMemory::new(device)),
                enqueue: CudaStream::enqueue_host,
                record: Some(capture),
            };
            Ok((Arc::new(kernels), host))
        })
    };
    run_caught(&comm, make, workload, options, observe)
}

/// Makes a rank and trains as it; whatever ends it, the others are told.
fn run_caught<D: Device>(
    comm: &Arc<dyn Communicator<D>>,
    make: impl FnOnce(Arc<dyn Communicator<D>>, Arc<Layout>) -> Result<Rank<D>, TrainError>,
    workload: &dyn Workload<D>,
    options: &RunOptions,
    observe: &mut dyn FnMut(&StepMetrics) -> Result<(), TrainError>,
) -> Result<RankSummary, TrainError> {
    let (index, world_size) = (comm.rank(), comm.world_size() as u64);
    let layout = Arc::new(Layout::new(&workload.units(), world_size, SHARD_ALIGN_ELEMS)?);
    let ended = catch_unwind(AssertUnwindSafe(|| {
        let rank = make(Arc::clone(comm), layout)?;
        run_rank(&rank, workload, options, observe)
    }));
    let error = match ended {
        Ok(Ok(summary)) => return Ok(summary),
        Ok(Err(error)) => error.to_string(),
        Err(panic) => format!("panicked: {}", panic_message(&*panic)),
    };
    comm.abort(&error);
    Err(TrainError::Rank { rank: index, message: error })
}

/// A rank on the host.
fn host_rank(
    comm: Arc<dyn Communicator<HostDevice>>,
    threads: usize,
    settings: &Settings,
    workload: &dyn Workload<HostDevice>,
    layout: Arc<Layout>,
) -> Result<Rank<HostDevice>, TrainError> {
    let timeline = Timeline::new();
    let device = HostDevice::new().with_timeline(timeline.clone());
    Rank::new(device, timeline, comm, layout, workload.passes(), settings, |device, _| {
        let host = HostSide { memory: Arc::new(device.clone()), enqueue: HostStream::enqueue, record: None };
        Ok((Arc::new(HostKernels::new(threads)?), host))
    })
}

fn capture(
    stream: &CudaStream,
    enqueue: &mut dyn FnMut() -> Result<(), DeviceError>,
) -> Result<Box<dyn Replay<CudaDevice>>, DeviceError> {
    Ok(Box::new(stream.capture(enqueue)?))
}

impl Replay<CudaDevice> for Graph {
    fn launch(&self, stream: &CudaStream) -> Result<(), DeviceError> {
        self.launch(stream)
    }
}

/// How a rank ended.
struct Failure {
    rank: usize,
    message: String,
    /// It failed in a collective, perhaps because another rank had.
    echo: bool,
}

fn is_echo(error: &TrainError) -> bool {
    let collective = |op: &str| Collective::ALL.iter().any(|c| c.name() == op);
    match error {
        TrainError::Device(DeviceError::Operation { op, .. })
        | TrainError::Optim(OptimError::Device(DeviceError::Operation { op, .. })) => collective(op),
        TrainError::Comm(_) => true,
        _ => false,
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}
