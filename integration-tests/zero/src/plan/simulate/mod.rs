//! `zero plan --simulate`: the time of a step of each stage, by the trainer's own schedule and the
//! formulas of zero-simulator; and tables of predictions beside measurements.

pub(super) mod extras;
mod machines;
mod predict;
mod prepared;
pub(super) mod result;
mod runs;
mod sweep;
mod timeline;

use std::path::Path;

use serde::Serialize;
use zero_ckpt::files::{self, SMALL_FILE_BYTES};
use zero_shard::ZeroStage;
use zero_simulator::{
    Cluster, Efficiencies, Machine, MachineError, SimulatedStep, from_text, likely_range,
};

use super::args::{PlanArgs, SimulateArgs};
use super::request::PlanRequest;
use crate::error::CliError;
use crate::flags::DTypeFlag;
use crate::measure;
use crate::settings::communication::BUCKET_ELEMS;

pub(crate) use machines::Machines;
use prepared::{Prepared, shape, software};
use result::{Calibration, Simulated};
pub(super) use sweep::table as sweep_table;

/// GPUs of the largest published run that the formulas were compared with.
const MEASURED_GPUS: u64 = 128;

/// The machine of a simulation, and how well it is known.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct SimulatedOn {
    pub(crate) machine: Machine,
    pub(crate) efficiencies: Efficiencies,
    /// The source of the efficiencies.
    pub(crate) calibrated_on: Option<String>,
    #[serde(skip)]
    tokens: Option<u64>,
    /// Whether to compute what faster parts would save.
    #[serde(skip)]
    explains: bool,
}

/// The GPUs of `--hardware`.
pub(crate) fn cluster(value: &str) -> Result<Cluster, CliError> {
    let name = value.rsplit_once(':').map_or(value, |(name, _)| name);
    let is_file = name.ends_with(".json") || name.ends_with(".toml");
    let machine = match name {
        "this" => Some(measure::this_machine()?),
        _ => None,
    };
    let find = |name: &str| match machine {
        Some(machine) => Ok(machine),
        None if is_file => {
            let text = files::read_text(Path::new(name), SMALL_FILE_BYTES);
            let text = text.map_err(|source| MachineError::Read {
                file: name.to_owned(),
                source,
            })?;
            Machine::parse(&text, name)
        }
        None => Machine::preset(name),
    };
    Cluster::parse(value, find).map_err(CliError::usage)
}

/// The arguments with the GPUs, nodes and memory of `--hardware`, where flags do not say them.
pub(super) fn with_hardware(args: &PlanArgs) -> Result<PlanArgs, CliError> {
    let mut args = args.clone();
    let Some(hardware) = &args.simulate.hardware else {
        return Ok(args);
    };
    let cluster = cluster(hardware)?;
    let gpus = cluster.gpus() as u64;
    if args.gpus.is_some_and(|said| said != gpus) {
        return Err(usage!(
            "--gpus and --hardware {hardware} differ, which has {gpus}: pass one of them"
        ));
    }
    args.gpus = Some(gpus);
    args.nodes = cluster.nodes as u64;
    let mut memory_bytes = cluster.machine.memory_bytes as u64;
    if let Some(cores) = cluster.machine.cores {
        // The ranks of a host share its memory, and have the defaults of a run on the host.
        args.host_threads = Some((cores / cluster.gpus_per_node).max(1) as u64);
        memory_bytes /= cluster.gpus_per_node as u64;
        if args.config.is_none() {
            args.dtype.get_or_insert(DTypeFlag::Fp32);
            args.bucket_elems.get_or_insert(BUCKET_ELEMS as u64);
        }
    }
    args.gpu_memory.get_or_insert(memory_bytes);
    Ok(args)
}

/// Calibrates and predicts, if the flags say no more. Returns whether it did.
pub(super) fn predicted(args: &SimulateArgs) -> Result<bool, CliError> {
    if args.calibrate.is_empty() {
        return Ok(false);
    }
    let files = args.calibrate.iter().chain(&args.predict);
    let mut ends = files.filter_map(|path| path.extension());
    let is_table = ends.any(|end| end == "csv");
    match (is_table, args.predict.is_empty()) {
        (true, false) => predict::run(args).map(|()| true),
        (true, true) => Err(usage!(
            "--calibrate with a table: pass --predict with another one, or the same"
        )),
        (false, false) => runs::predict(args).map(|()| true),
        (false, true) if args.simulate => Ok(false),
        (false, true) => runs::show(args).map(|()| true),
    }
}

impl SimulatedOn {
    /// `None` without `--simulate`.
    pub(super) fn of(args: &PlanArgs) -> Result<Option<Self>, CliError> {
        let simulate = &args.simulate;
        let Some(hardware) = simulate.hardware.as_ref().filter(|_| simulate.simulate) else {
            return Ok(None);
        };
        let machine = cluster(hardware)?.machine;
        let calibration = match &simulate.efficiencies {
            Some(path) => Some(read(path)?),
            None if simulate.calibrate.is_empty() => None,
            None => Some(runs::calibration(simulate)?),
        };
        let (efficiencies, calibrated_on) = match calibration {
            Some(calibration) => (calibration.efficiencies, Some(calibration.source)),
            None => (Efficiencies::ours(&machine), None),
        };
        Ok(Some(Self {
            machine,
            efficiencies,
            calibrated_on,
            tokens: simulate.tokens,
            explains: true,
        }))
    }

    /// The recorded step of `stage`. `None` for a model of assumed shape, or if it cannot be
    /// simulated.
    fn prepared(
        &self,
        request: &PlanRequest,
        stage: ZeroStage,
        largest_unit: u64,
    ) -> Option<Prepared> {
        request.model.config.as_ref()?;
        Prepared::new(&self.machine, request, stage, largest_unit, None)
            .inspect_err(|why| tracing::warn!("{stage} is not simulated: {why}"))
            .ok()
    }

    /// The step of `stage`. `None` as of [`Self::prepared`].
    pub(super) fn stage(
        &self,
        request: &PlanRequest,
        stage: ZeroStage,
        largest_unit: u64,
    ) -> Option<Simulated> {
        let prepared = self.prepared(request, stage, largest_unit)?;
        let gains = match self.explains {
            true => prepared.gains(&self.efficiencies),
            false => Vec::new(),
        };
        Some(Simulated {
            gains,
            ..self.simulated(request, &prepared.step(&self.efficiencies))
        })
    }

    fn simulated(&self, request: &PlanRequest, step: &SimulatedStep) -> Simulated {
        let config = request.model.config.as_ref();
        let flops_per_token = config.map_or(0.0, |config| {
            config.flops_per_token(request.seq_len() as usize)
        });
        let gpus = request.machine.gpus as f64;
        let batches = gpus / request.run.mesh.ranks_of_batch() as f64;
        let sequences = batches * (request.micro_batch() * request.grad_accum()) as f64;
        let tokens_per_s = sequences * request.seq_len() as f64 / step.seconds;
        let flops = tokens_per_s / gpus * flops_per_token;
        let [slowest, fastest] = likely_range(1.0, false);
        let seconds = self.tokens.map(|tokens| tokens as f64 / tokens_per_s);
        Simulated {
            step_ms: step.seconds * 1e3,
            step_ms_range: [fastest, slowest].map(|of_speed| step.seconds * 1e3 / of_speed),
            tokens_per_s,
            tokens_per_s_gpu: tokens_per_s / gpus,
            mfu: flops / self.machine.peak_flops,
            tflops_gpu: flops / 1e12,
            exposed_ms: step.idle_s * 1e3,
            network_ms: step.network_s * 1e3,
            links_ms: step.links_s * 1e3,
            bound: bound(step, self.machine.cores.is_some()),
            gains: Vec::new(),
            days: seconds.map(|seconds| seconds / 86_400.0),
            gpu_hours: seconds.map(|seconds| seconds / 3_600.0 * gpus),
            extrapolated: request.machine.gpus > MEASURED_GPUS,
        }
    }
}

/// The source of a simulation's efficiencies, in words.
pub(crate) fn calibrated(source: Option<&str>, on_host: bool) -> String {
    match (source, on_host) {
        (Some(source), _) => format!("calibrated on {source}"),
        (None, true) => "not calibrated: as our trainer on another host".to_owned(),
        (None, false) => {
            "not calibrated: as our trainer on one H200, with the links of other software"
                .to_owned()
        }
    }
}

/// The bottleneck of a step: where less than a tenth of it is exposed, the GPU itself.
fn bound(step: &SimulatedStep, on_host: bool) -> &'static str {
    if step.idle_s < 0.1 * step.seconds {
        return match on_host {
            true => "products and memory of the cores",
            false => "products and memory of the GPU",
        };
    }
    let collectives = step.network_s + step.links_s;
    match () {
        () if collectives < 0.5 * step.idle_s => "the host: its link, its memory or its processor",
        () if step.network_s >= step.links_s => "the network between nodes",
        () => "links within a node",
    }
}

fn read(path: &Path) -> Result<Calibration, CliError> {
    let shown = path.display();
    let text = files::read_text(path, SMALL_FILE_BYTES)
        .map_err(|error| usage!("--efficiencies {shown}: {error}"))?;
    from_text(&text, &shown.to_string()).map_err(|error| {
        usage!("--efficiencies {shown}: {error}; pass a file that --save-efficiencies wrote")
    })
}
