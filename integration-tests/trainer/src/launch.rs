//! Runs ranks: all host ranks as threads of this process, one host rank of several processes, or
//! one CUDA rank.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::Mutex;
use zero_alloc::cuda::{CudaDevice, CudaStream, Graph, PinnedMemory};
use zero_alloc::device::{Device, DeviceError};
use zero_alloc::host::{HostDevice, Timeline};
use zero_ckpt::CkptError;
use zero_comm::threads::World;
use zero_comm::{Collective, CommOptions, Communicator};
use zero_kernels::KernelError;
use zero_kernels::cuda::{CudaKernels, MatrixProducts};
use zero_optim::OptimError;

use crate::error::TrainError;
use crate::options::RunOptions;
use crate::rank::{HostSide, Rank};
use crate::run::run_rank;
use crate::settings::Settings;
use crate::step::replay::Replay;
use crate::telemetry::metrics::StepMetrics;
use crate::units::RunUnits;
use crate::workload::{RankSummary, Workload};

/// Trains on `world_size` ranks of this process, with `threads` threads each. Calls `observe` with
/// rank 0's metrics of each step.
///
/// # Errors
/// The first failure, as [`TrainError::Rank`] or [`TrainError::Echo`]; it ends all ranks.
pub fn run_on_threads(
    world_size: usize,
    threads: usize,
    settings: &Settings,
    workload: &dyn Workload<HostDevice>,
    options: &RunOptions,
    observe: &mut (dyn FnMut(&StepMetrics) -> Result<(), TrainError> + Send),
) -> Result<Vec<RankSummary>, TrainError> {
    let units = RunUnits::new(settings, workload, world_size)?;
    let comms = World::new(world_size, CommOptions::default().limit(settings.limit))?;
    let failures: Mutex<Vec<Failure>> = Mutex::default();
    let observe = Mutex::new(observe);

    let run = |index: usize, comm: Arc<dyn Communicator<HostDevice>>| {
        let rank = host_rank(
            HostDevice::new(),
            comm,
            threads,
            settings,
            workload,
            units.clone(),
        )?;
        let mut observe_rank = |metrics: &StepMetrics| {
            if index == 0 {
                observe.lock()(metrics)
            } else {
                Ok(())
            }
        };
        run_rank(&rank, workload, options, &mut observe_rank)
    };

    let summaries = std::thread::scope(|scope| {
        let spawn = |(index, comm)| {
            let comm: Arc<dyn Communicator<HostDevice>> = Arc::new(comm);
            let run = &run;
            let failures = &failures;
            let name = format!("rank {index}");
            let spawned = std::thread::Builder::new()
                .name(name)
                .spawn_scoped(scope, move || {
                    caught(&*comm, || run(index, Arc::clone(&comm)))
                        .map_err(|f| failures.lock().push(f))
                        .ok()
                });
            // Without a thread the rank's communicator is dropped, which aborts the others.
            spawned.inspect_err(|e| {
                let message = format!("failed to start the rank's thread: {e}; try fewer --ranks");
                failures.lock().push(Failure {
                    rank: index,
                    message,
                    kind: FailureKind::Own,
                });
            })
        };
        let ranks: Vec<_> = comms.into_iter().enumerate().map(spawn).collect();
        ranks
            .into_iter()
            .map(|rank| rank.ok().and_then(|r| r.join().ok()).flatten())
            .collect::<Vec<_>>()
    });

    let failures = failures.into_inner();
    let cause = failures
        .iter()
        .position(|f| f.kind != FailureKind::Echo)
        .unwrap_or(0);

    match failures.into_iter().nth(cause) {
        Some(failure) => Err(failure.into()),
        None => Ok(summaries.into_iter().flatten().collect()),
    }
}

/// Trains as one rank of `comm`; the other ranks are other processes. Calls `observe` with this
/// rank's metrics.
///
/// # Errors
/// A failure of this rank, or a collective that failed because another rank did.
pub fn run_as_rank(
    comm: Arc<dyn Communicator<HostDevice>>,
    threads: usize,
    settings: &Settings,
    workload: &dyn Workload<HostDevice>,
    options: &RunOptions,
    observe: &mut dyn FnMut(&StepMetrics) -> Result<(), TrainError>,
) -> Result<RankSummary, TrainError> {
    run_on_host_device(
        HostDevice::new(),
        comm,
        threads,
        settings,
        workload,
        options,
        observe,
    )
}

/// [`run_as_rank`] on a host device with other streams, such as those of tests.
///
/// # Errors
/// As [`run_as_rank`].
pub fn run_on_host_device(
    device: HostDevice,
    comm: Arc<dyn Communicator<HostDevice>>,
    threads: usize,
    settings: &Settings,
    workload: &dyn Workload<HostDevice>,
    options: &RunOptions,
    observe: &mut dyn FnMut(&StepMetrics) -> Result<(), TrainError>,
) -> Result<RankSummary, TrainError> {
    let make = |comm, units| host_rank(device, comm, threads, settings, workload, units);
    run_caught(&comm, make, settings, workload, options, observe)
}

/// Options of a rank on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct CudaOptions {
    /// Whether the timeline and the metrics of overlap include the device's operations, at a cost
    /// of two events an operation.
    pub record: bool,
    /// Loads the products of matrices, for an optimizer that updates some on the GPU.
    pub products: fn(&CudaDevice) -> Result<Arc<dyn MatrixProducts>, KernelError>,
}

/// Trains as one rank of `comm` on `device`. Calls `observe` with this rank's metrics.
///
/// # Errors
/// A failure of this rank, or a collective that failed because another rank did.
pub fn run_on_cuda(
    device: &CudaDevice,
    comm: Arc<dyn Communicator<CudaDevice>>,
    on_cuda: CudaOptions,
    settings: &Settings,
    workload: &dyn Workload<CudaDevice>,
    options: &RunOptions,
    observe: &mut dyn FnMut(&StepMetrics) -> Result<(), TrainError>,
) -> Result<RankSummary, TrainError> {
    let timeline = Timeline::new();
    let host_timeline = timeline.clone();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let device = if on_cuda.record {
        device.clone().with_timeline(timeline.clone())
    } else {
        device.clone()
    };

    let pinned = PinnedMemory::new(&device);
    let mut warned = false;
    // After the first step, which has allocated all memory of the run.
    let mut observe = |metrics: &StepMetrics| {
        if !std::mem::replace(&mut warned, true) {
            pinned
                .notices()
                .iter()
                .for_each(|notice| tracing::warn!("{notice}"));
        }
        observe(metrics)
    };

    let make = |comm, units: RunUnits| {
        let groups = settings.resolve_groups(units.layouts.params(0).0)?;
        Rank::new(
            device,
            timeline,
            comm,
            units,
            workload.passes(),
            settings,
            |device, compute| {
                let mut kernels = CudaKernels::new(device)?;
                if groups.has_matrices() {
                    kernels = kernels.with_products((on_cuda.products)(device)?);
                }
                // Before the first collective, because loading waits for the device.
                kernels.warm(compute, settings.limit)?;
                let host = HostDevice::new().with_timeline(host_timeline);
                let memory = Arc::new(PinnedMemory::new(device));
                let threads = if settings.offload.updates_on_host() {
                    threads
                } else {
                    1
                };
                Ok((
                    Arc::new(kernels),
                    HostSide::new(&host, memory, Some(capture), threads)?,
                ))
            },
        )
    };

    run_caught(&comm, make, settings, workload, options, &mut observe)
}

/// Creates a rank and trains; a failure or panic aborts the communicator.
fn run_caught<D: Device>(
    comm: &Arc<dyn Communicator<D>>,
    make: impl FnOnce(Arc<dyn Communicator<D>>, RunUnits) -> Result<Rank<D>, TrainError>,
    settings: &Settings,
    workload: &dyn Workload<D>,
    options: &RunOptions,
    observe: &mut dyn FnMut(&StepMetrics) -> Result<(), TrainError>,
) -> Result<RankSummary, TrainError> {
    let run = || {
        let units = RunUnits::new(settings, workload, comm.world_size())?;
        run_rank(&make(Arc::clone(comm), units)?, workload, options, observe)
    };
    Ok(caught(&**comm, run)?)
}

/// Runs `work`; a failure or a panic aborts `comm`.
fn caught<D: Device>(
    comm: &dyn Communicator<D>,
    work: impl FnOnce() -> Result<RankSummary, TrainError>,
) -> Result<RankSummary, Failure> {
    let failure = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(summary)) => return Ok(summary),
        Ok(Err(error)) => failure_of(comm, error),
        Err(panic) => Failure {
            rank: comm.rank(),
            message: format!("panicked: {}", panic_message(&*panic)),
            kind: FailureKind::Own,
        },
    };
    comm.abort(&failure.message);
    Err(failure)
}

/// The failure of the rank that `error` names, or else of this one.
fn failure_of<D: Device>(comm: &dyn Communicator<D>, error: TrainError) -> Failure {
    let own = comm.rank();
    let failure = |rank, message, kind| Failure {
        rank,
        message,
        kind,
    };

    match error {
        // The cause is shorter than the error of this rank's stream, and names the rank that
        // failed.
        error if is_echo(&error) => {
            let cause = comm.failure().map(|cause| cause.to_string());
            let message = cause.unwrap_or_else(|| error.to_string());
            failure(own, message, FailureKind::Echo)
        }
        // All ranks return the error of the rank that failed to save or open.
        TrainError::Ckpt(CkptError::Rank { rank, message }) => {
            failure(rank as usize, message, FailureKind::Own)
        }
        // All ranks return these; they name the rank.
        TrainError::Ckpt(error @ CkptError::NotShared { rank, .. }) => {
            failure(rank as usize, error.to_string(), FailureKind::Usage)
        }
        error @ TrainError::Replicas { rank, .. } => {
            failure(rank, error.to_string(), FailureKind::Own)
        }
        error => failure(own, error.to_string(), FailureKind::Own),
    }
}

/// A rank on the host.
fn host_rank(
    device: HostDevice,
    comm: Arc<dyn Communicator<HostDevice>>,
    threads: usize,
    settings: &Settings,
    workload: &dyn Workload<HostDevice>,
    units: RunUnits,
) -> Result<Rank<HostDevice>, TrainError> {
    let timeline = Timeline::new();
    let device = device.with_timeline(timeline.clone());
    Rank::new(
        device,
        timeline,
        comm,
        units,
        workload.passes(),
        settings,
        |device, _| {
            let host = HostSide::new(device, Arc::new(device.clone()), None, threads)?;
            Ok((host.kernels.clone(), host))
        },
    )
}

fn capture(
    stream: &CudaStream,
    enqueue: &mut dyn FnMut() -> Result<(), DeviceError>,
) -> Result<Box<dyn Replay<CudaDevice>>, DeviceError> {
    Ok(Box::new(stream.capture(enqueue)?))
}

impl Replay<CudaDevice> for Graph {
    unsafe fn launch(&self, stream: &CudaStream) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(stream) }
    }
}

/// The failure of a rank.
struct Failure {
    rank: usize,
    message: String,
    kind: FailureKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FailureKind {
    /// The rank itself failed.
    Own,
    /// It failed in a collective, perhaps because another rank had failed.
    Echo,
    /// The program was used wrongly; the message names the rank.
    Usage,
}

impl From<Failure> for TrainError {
    fn from(failure: Failure) -> Self {
        let Failure {
            rank,
            message,
            kind,
        } = failure;
        match kind {
            FailureKind::Own => Self::Rank { rank, message },
            FailureKind::Echo => Self::Echo(message),
            FailureKind::Usage => Self::Usage(message),
        }
    }
}

fn is_echo(error: &TrainError) -> bool {
    let collective = |op: &str| Collective::ALL.iter().any(|c| c.name() == op);
    match error {
        TrainError::Device(DeviceError::Operation { op, .. })
        | TrainError::Optim(OptimError::Device(DeviceError::Operation { op, .. })) => {
            collective(op)
        }
        TrainError::Comm(_) => true,
        _ => false,
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests {
    use zero_alloc::device::Cause;

    use super::*;

    #[test]
    fn rank_at_fault_is_named_once() {
        let comms = World::new(2, CommOptions::default()).unwrap();
        let full = || Err(TrainError::State("the disk is full".to_owned()));
        let own = caught::<HostDevice>(&comms[1], full)
            .err()
            .map(TrainError::from)
            .unwrap();
        assert_eq!(own.to_string(), "rank 1: the disk is full");
        let op = Collective::AllGather.name().to_owned();
        let cause = Cause::new(comms[0].failure().unwrap());

        let stream = || {
            Err(DeviceError::Operation {
                stream: "rank 0 comm".to_owned(),
                op,
                cause,
            }
            .into())
        };

        let echo = caught::<HostDevice>(&comms[0], stream)
            .err()
            .map(TrainError::from)
            .unwrap();
        assert_eq!(echo.to_string(), "rank 1 aborted: the disk is full");

        // The error of a save, which every rank returns.
        let save = || {
            Err(CkptError::Rank {
                rank: 1,
                message: "the disk is full".to_owned(),
            }
            .into())
        };

        let of_save = caught::<HostDevice>(&comms[0], save)
            .err()
            .map(TrainError::from)
            .unwrap();
        assert_eq!(of_save.to_string(), own.to_string());
    }

    /// A folder that the ranks do not share is wrong use on every rank, also on those that see the
    /// folder of rank 0.
    #[test]
    fn unshared_folder_is_wrong_use() {
        let comms = World::new(2, CommOptions::default()).unwrap();
        let opening = || {
            Err(CkptError::NotShared {
                rank: 1,
                message: "its folder is another one".to_owned(),
            }
            .into())
        };

        let failure = caught::<HostDevice>(&comms[0], opening).err().unwrap();

        let error = TrainError::from(failure);
        assert!(matches!(error, TrainError::Usage(_)), "{error:?}");
        let text = error.to_string();
        assert!(
            text.starts_with("rank 1: its folder is another one; all ranks must save into one"),
            "{text}"
        );
    }
}
