//! The machine on which trials run.

use zero_alloc::cuda::CudaDevice;

use super::trials::ResultsFolder;
use crate::error::CliError;
use crate::measure;
use crate::plan::cluster;
use crate::settings::args::{DeviceChoice, TrainArgs};
use crate::train::backend::{self, Backend};

/// Where trials run.
pub(super) struct TrialMachine {
    pub(super) on_host: bool,
    pub(super) ranks: usize,
    /// For the search.
    pub(super) hardware: String,
    /// The name of the processor in the simulation.
    pub(super) machine: String,
    /// The processors of this machine, and how many.
    pub(super) processors: String,
}

impl TrialMachine {
    /// The place of `--hardware` or, without it, of this machine, which is measured once for a
    /// folder of results.
    ///
    /// # Errors
    /// Flags that contradict each other, or a machine that cannot be measured.
    pub(super) fn choose(
        device: DeviceChoice,
        ranks: Option<usize>,
        hardware: Option<&str>,
        folder: &ResultsFolder,
    ) -> Result<Self, CliError> {
        let on_host = is_host(device, ranks)?;
        let hardware = match hardware {
            Some(hardware) => hardware.to_owned(),
            None => {
                let file = folder.machine();
                let machine = measure::kept_in(&file, on_host)?;
                let ranks = match (ranks, machine.cores) {
                    (Some(ranks), _) | (None, Some(ranks)) => ranks,
                    (None, None) => CudaDevice::count().map_err(CliError::failure)?,
                };
                format!("{}:{ranks}x1", file.display())
            }
        };

        let cluster = cluster(&hardware)?;
        let of_node = cluster.gpus_per_node;
        let is_host = cluster.machine.cores.is_some();
        let refused = |why: &str| Err(usage!("--hardware {hardware}: {why}"));
        match () {
            () if cluster.nodes > 1 => {
                refused("trials run on this machine alone: expected one node, such as h100-80g:8x1")
            }
            () if ranks.is_some_and(|flag| flag != of_node) => {
                refused("--ranks has another number: pass one of them")
            }
            () if on_host && !is_host => {
                refused("trials would run on the host and not on GPUs: remove --hardware")
            }
            () if is_host && !on_host => {
                refused("trials would run on GPUs and not on the host: pass --device cpu")
            }
            () => Ok(Self {
                on_host,
                ranks: of_node,
                hardware,
                machine: cluster.machine.name,
                processors: measure::processors(on_host)?,
            }),
        }
    }
}

/// Whether `zero train` uses the host.
fn is_host(device: DeviceChoice, ranks: Option<usize>) -> Result<bool, CliError> {
    let args = TrainArgs {
        device,
        ranks: Some(ranks.unwrap_or(1)),
        ..TrainArgs::default()
    };
    match backend::choose(&args)? {
        Backend::Host => Ok(true),
        Backend::Cuda { launched: None, .. } => Ok(false),
        Backend::Cuda { .. } => Err(usage!(
            "a launcher started this process, but trials start their ranks themselves: start one process without it"
        )),
    }
}
