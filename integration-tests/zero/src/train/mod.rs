//! `zero train`: from flags to a run, and from its results to text.

mod aside;
mod auto_stage;
pub(crate) mod backend;
mod checks;
mod choices;
mod csv_file;
mod cuda;
mod event_files;
mod exchange;
mod figures;
mod host_world;
pub(crate) mod launched;
mod line_file;
mod loss_curve;
mod memory_picture;
mod memory_table;
pub(crate) mod metrics_file;
mod mpi;
mod observer;
mod opening;
mod parts;
mod picture;
mod process_rank;
mod processes;
mod report_folder;
mod resume;
mod room;
mod save_folder;
mod session;
mod setup;
pub(crate) mod signals;
mod start_ranks;
mod summary;
mod tfrecord;
mod utilization;

use backend::Backend;
use host_world::HostWorld;
use launched::launched_ranks;
use resume::Resumed;
use session::{observed, run_error};
use setup::RunSetup;
use signals::Signals;
use zero_trainer::run_on_threads;

use crate::error::CliError;
use crate::memory;
use crate::settings::args::DeviceChoice;
pub use crate::settings::args::TrainArgs;
use crate::tune;

/// Trains.
///
/// # Errors
/// Wrong use, found before any rank starts; or the failure that ended the run.
pub fn run(args: &TrainArgs) -> Result<(), CliError> {
    if tune::autotuning::tuned(args)? {
        return Ok(());
    }
    // `None` with --resume: rank 0 finds the checkpoint, once the ranks are connected.
    let deferred = resume::is_deferred(args, launched_ranks(args)?);
    let resumed = if deferred { None } else { Resumed::open(args)? };
    let filled = match &resumed {
        Some(resumed) => resumed.fill(args),
        None if resume::recorded_device(args) == Some(DeviceChoice::Cpu) => TrainArgs {
            device: DeviceChoice::Cpu,
            ..args.clone()
        },
        None => args.clone(),
    };

    let (args, resumed) = (&filled, resumed.as_ref());
    if let Backend::Cuda { gpus, launched } = backend::choose(args)? {
        return cuda::run(args, resumed, gpus, launched);
    }
    match host_world::choose(args)? {
        HostWorld::Threads => {}
        HostWorld::Mpi => return mpi::run(args, resumed),
        HostWorld::Processes(launched) => {
            return processes::run(args, resumed, launched.as_ref());
        }
    }
    let mut setup = RunSetup::new(
        args,
        resumed,
        args.ranks.or(args.recorded_ranks).unwrap_or(4),
        None,
    )?;
    memory::check(&setup.memory(), setup.ranks, args.memory_limit)?;
    if args.checkpoint.is_none() {
        setup.reserve_folder()?;
    }
    let signals = Signals::handle()?;
    signals.end(&mut setup.options);
    let (settings, workload, options) = (&setup.settings, &setup.workload, &setup.options);

    observed(&setup, &signals, true, |observe| {
        run_on_threads(
            setup.ranks,
            workload.threads,
            settings,
            workload,
            options,
            observe,
        )
        .map_err(run_error)
    })
}
