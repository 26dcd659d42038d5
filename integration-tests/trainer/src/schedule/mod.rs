//! The schedule of a step: what one rank enqueues, recorded and not run.
//!
//! The same stages, prefetcher, buckets, mesh and offload as in a run enqueue the steps, on a
//! device whose streams record and with a communicator whose other ranks do not exist. So there is
//! no second description of a step, and a schedule for any number of ranks takes milliseconds.
//! [`Schedule::times`](zero_alloc::schedule::Schedule::times) gives its times for any costs.

mod kernels;

use std::sync::Arc;

use zero_alloc::device::Device;
use zero_alloc::host::{HostDevice, HostStream, Timeline};
use zero_alloc::schedule::{Recorder, Schedule, ScheduledDevice};
use zero_comm::{ScheduledComm, ScheduledGroups};

use crate::error::TrainError;
use crate::options::RunOptions;
use crate::rank::{HostSide, Rank};
use crate::run::enqueue_steps;
use crate::settings::Settings;
use crate::units::RunUnits;
use crate::workload::Workload;
use kernels::ScheduledKernels;

/// The steps of one rank. The schedule has a mark before each step and one after the last; the
/// first step has no update to wait for, the later ones are alike.
///
/// Labels are those of the host's kernels and of collectives, and whatever the model enqueues.
/// [`Work::class`](zero_alloc::schedule::Work::class) of a collective is the index of its
/// communicator.
#[derive(Clone, Debug)]
pub struct StepSchedule {
    /// The operations of the rank.
    pub schedule: Schedule,
    /// The ranks of each communicator.
    pub communicators: Vec<Arc<[usize]>>,
}

/// Records `options.steps` steps of rank `rank` of `ranks` ranks on the host.
///
/// Offload to NVMe makes no file.
///
/// # Errors
/// As a run: settings or a model that cannot be used.
pub fn record_on_host(
    rank: usize,
    ranks: usize,
    settings: &Settings,
    workload: &dyn Workload<HostDevice>,
    options: &RunOptions,
) -> Result<StepSchedule, TrainError> {
    Recorded::new(HostDevice::clone).steps(rank, ranks, settings, workload, options)
}

/// Records `options.steps` steps of rank `rank` of `ranks` ranks, each with a device that is not
/// the host.
///
/// # Errors
/// As [`record_on_host`].
pub fn record_on_device(
    rank: usize,
    ranks: usize,
    settings: &Settings,
    workload: &dyn Workload<ScheduledDevice>,
    options: &RunOptions,
) -> Result<StepSchedule, TrainError> {
    let device = |host: &HostDevice| ScheduledDevice::with_streams_of(host.clone());
    Recorded::new(device).steps(rank, ranks, settings, workload, options)
}

/// The place where a rank's steps are recorded.
struct Recorded<D> {
    recorder: Recorder,
    timeline: Timeline,
    device: D,
    host: HostDevice,
}

impl<D: Device<Stream = HostStream>> Recorded<D> {
    /// With the device that `device` makes of a host that records.
    fn new(device: impl FnOnce(&HostDevice) -> D) -> Self {
        let recorder = Recorder::new();
        let timeline = Timeline::new();
        let host = recorder.host().with_timeline(timeline.clone());
        Self {
            recorder,
            timeline,
            device: device(&host),
            host,
        }
    }

    fn steps(
        self,
        rank: usize,
        ranks: usize,
        settings: &Settings,
        workload: &dyn Workload<D>,
        options: &RunOptions,
    ) -> Result<StepSchedule, TrainError> {
        let Self {
            recorder,
            timeline,
            device,
            host,
        } = self;
        let groups = ScheduledGroups::default();
        let comm = Arc::new(ScheduledComm::new(&device, rank, ranks, &groups)?);
        let units = RunUnits::new(settings, workload, ranks)?;
        let passes = workload.passes();
        let rank = Rank::new(device, timeline, comm, units, passes, settings, |_, _| {
            let kernels = Arc::new(ScheduledKernels);
            let memory = Arc::new(host.clone());
            let host =
                HostSide::with_kernels(&host, memory, None, [kernels.clone(), kernels.clone()])?;
            Ok((kernels, host))
        })?;
        enqueue_steps(&rank, workload, options, &mut || recorder.mark())?;
        Ok(StepSchedule {
            schedule: recorder.take(),
            communicators: groups.all(),
        })
    }
}
