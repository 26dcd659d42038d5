//! `zero plan --simulate`: the time of a step of each stage, by the trainer's own schedule and the
//! formulas of zero-simulator; and tables of predictions beside measurements.

mod machines;
mod predict;
mod sweep;
mod timeline;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use serde::{Deserialize, Serialize};
use zero_alloc::device::DType;
use zero_shard::{ShardError, ZeroStage};
use zero_simulator::{
    Attention, Cluster, Costs, Efficiencies, Machine, MachineError, Run, Shape, Software, Step,
    Units, likely_range,
};

use super::request::Request;
use super::{PlanArgs, Report};
use crate::error::CliError;
use crate::flags::parse_params;

pub(crate) use machines::Machines;
pub(super) use predict::run as predict;

/// GPUs of the largest published run that the formulas were compared with.
const MEASURED_GPUS: u64 = 128;

/// Step times.
#[derive(Args, Clone, Debug, Default)]
pub struct SimulateArgs {
    /// Simulate a step of each stage on --hardware: its time, tokens/s and what bounds it
    #[arg(long, requires = "hardware")]
    pub simulate: bool,
    /// GPUs and nodes: a machine (v100-32g, a100-40g, a100-80g, h100-80g, h200-141g, b200-180g,
    /// rtx4090-24g, or a JSON file) with GPUs of a node x nodes, such as h100-80g:8x64
    #[arg(long, value_name = "NAME:GPUSxNODES")]
    pub hardware: Option<String>,
    /// The parts of the machine's figures that a program reaches, from --save-efficiencies; without
    /// it those of our trainer on one H200
    #[arg(long, value_name = "FILE.json", requires = "simulate")]
    pub efficiencies: Option<PathBuf>,
    /// Tokens of the whole training, such as 1.4T: days and GPU hours are printed
    #[arg(long, value_name = "COUNT", value_parser = parse_params, requires = "simulate")]
    pub tokens: Option<u64>,
    /// Also simulate other numbers of GPUs, doubling: gpus=8..16384, in whole nodes
    #[arg(long, value_name = "gpus=FROM..TO", requires = "simulate")]
    pub sweep: Option<sweep::Gpus>,
    /// Draw the curve of --sweep
    #[arg(long, value_name = "FILE.svg", requires = "sweep")]
    pub sweep_svg: Option<PathBuf>,
    /// Write the simulated steps of the fastest stage that fits as a timeline for Perfetto
    #[arg(long, value_name = "FILE.json", requires = "simulate")]
    pub timeline: Option<PathBuf>,
    /// Measured steps to calibrate on: a CSV file with the columns of
    /// integration-tests/simulator/tests/data/steps.csv, of one machine and software
    #[arg(long, value_name = "A.csv", requires = "predict")]
    pub calibrate: Option<PathBuf>,
    /// Steps to predict, with the same columns: prints them with predicted_tok_s_gpu, then the errors
    #[arg(long, value_name = "B.csv", requires = "calibrate")]
    pub predict: Option<PathBuf>,
    /// The rows of --calibrate that count: all, or at most eight by a rule that does not look at
    /// their times
    #[arg(long, value_enum, default_value_t, requires = "calibrate")]
    pub rows: predict::Rows,
    /// Where to write the efficiencies that --calibrate finds
    #[arg(long, value_name = "FILE.json", requires = "calibrate")]
    pub save_efficiencies: Option<PathBuf>,
}

/// Efficiencies in a file, and where they are from.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Calibration {
    pub(crate) source: String,
    pub(crate) efficiencies: Efficiencies,
    /// ln(predicted / measured) of the rows that were fitted.
    pub(crate) residuals: Vec<f64>,
}

/// The simulated step of a stage.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Simulated {
    /// Of a step, and its likely range.
    pub(crate) step_ms: f64,
    pub(crate) step_ms_range: [f64; 2],
    pub(crate) tokens_per_s: f64,
    pub(crate) tokens_per_s_gpu: f64,
    /// Of the peak, with the operations of the model: recomputation does not count.
    pub(crate) mfu: f64,
    pub(crate) tflops_gpu: f64,
    /// The compute stream waits.
    pub(crate) exposed_ms: f64,
    /// Collectives between nodes, and within them.
    pub(crate) network_ms: f64,
    pub(crate) links_ms: f64,
    /// The bottleneck of the step.
    pub(crate) bound: &'static str,
    /// Days and GPU hours of `--tokens`.
    pub(crate) days: Option<f64>,
    pub(crate) gpu_hours: Option<f64>,
    /// Whether the number of GPUs is beyond those of published runs.
    pub(crate) extrapolated: bool,
}

/// The machine of a simulation, and how well it is known.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct SimulatedOn {
    pub(crate) machine: Machine,
    pub(crate) efficiencies: Efficiencies,
    /// The source of the efficiencies.
    pub(crate) calibrated_on: Option<String>,
    #[serde(skip)]
    tokens: Option<u64>,
}

/// The GPUs of `--hardware`.
pub(crate) fn cluster(value: &str) -> Result<Cluster, CliError> {
    let find = |name: &str| match name.ends_with(".json") {
        true => {
            let text = std::fs::read_to_string(name).map_err(|source| MachineError::Read {
                file: name.to_owned(),
                source,
            })?;
            Machine::from_json(&text, name)
        }
        false => Machine::preset(name),
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
        return Err(CliError::Usage(format!(
            "--gpus and --hardware {hardware} differ, which has {gpus}: pass one of them"
        )));
    }
    args.gpus = Some(gpus);
    args.nodes = cluster.nodes as u64;
    args.gpu_memory
        .get_or_insert(cluster.machine.memory_bytes as u64);
    Ok(args)
}

impl SimulatedOn {
    /// `None` without `--simulate`.
    pub(super) fn of(args: &PlanArgs) -> Result<Option<Self>, CliError> {
        let simulate = &args.simulate;
        let Some(hardware) = simulate.hardware.as_ref().filter(|_| simulate.simulate) else {
            return Ok(None);
        };
        let calibration = simulate.efficiencies.as_deref().map(read).transpose()?;
        let (efficiencies, calibrated_on) = match calibration {
            Some(calibration) => (calibration.efficiencies, Some(calibration.source)),
            None => (Efficiencies::OURS, None),
        };
        Ok(Some(Self {
            machine: cluster(hardware)?.machine,
            efficiencies,
            calibrated_on,
            tokens: simulate.tokens,
        }))
    }

    /// The step of `stage`, and what to print of it. `None` for a model of assumed shape.
    pub(super) fn stage(
        &self,
        request: &Request,
        stage: ZeroStage,
        largest_unit: u64,
    ) -> Result<Option<(Simulated, Step)>, ShardError> {
        let Some(config) = request.model.config.clone() else {
            return Ok(None);
        };
        if let Some(what) = unknown(request) {
            tracing::warn!("{stage} is not simulated: the formulas do not know {what}");
            return Ok(None);
        }
        let shape = shape(request, config.parameter_count());
        let software = Software {
            attention: Attention::Fused,
            wide_reduce: false,
            fp8: false,
            recompute: request.checkpointing,
        };
        let settings = request.settings(stage, largest_unit);
        let [gpus, nodes] = [request.gpus, request.nodes];
        let cut = {
            let config = config.clone();
            Arc::new(move |param: &_| config.tensor_cut(param))
        };
        let units = Units {
            units: config.units(),
            passes: config.passes(),
            cut,
        };
        let ranks = [gpus as usize, (gpus / nodes) as usize];
        let micro_batch = request.micro_batch;
        let run = Run::new(
            ranks,
            settings,
            units,
            &shape,
            micro_batch,
            request.checkpointing,
        );
        // Groups that do not fit the stage, or state on NVMe, which needs a file.
        let schedules = match run.schedules() {
            Ok(schedules) => schedules,
            Err(error) => {
                tracing::warn!("{stage} is not simulated: {error}");
                return Ok(None);
            }
        };
        let costs = Costs {
            machine: &self.machine,
            shape: &shape,
            software: &software,
            efficiencies: &self.efficiencies,
        };
        let step = schedules.step(&costs);
        let flops_per_token = config.flops_per_token(request.seq_len as usize);
        Ok(Some((
            self.simulated(request, &step, flops_per_token),
            step,
        )))
    }

    fn simulated(&self, request: &Request, step: &Step, flops_per_token: f64) -> Simulated {
        let gpus = request.gpus as f64;
        let batches = gpus / request.mesh.ranks_of_batch() as f64;
        let sequences = batches * (request.micro_batch * request.grad_accum) as f64;
        let tokens_per_s = sequences * request.seq_len as f64 / step.seconds;
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
            bound: bound(step),
            days: seconds.map(|seconds| seconds / 86_400.0),
            gpu_hours: seconds.map(|seconds| seconds / 3_600.0 * gpus),
            extrapolated: request.gpus > MEASURED_GPUS,
        }
    }
}

/// A setting whose cost the formulas do not know.
fn unknown(request: &Request) -> Option<&'static str> {
    match request {
        _ if request.mesh.sequence_ranks() > 1 => Some("ranks that share sequences (--ulysses)"),
        _ if request.dtype == DType::F32 => Some("products in fp32; use --dtype bf16 or fp16"),
        _ if request.offload.activations => Some("--offload-activations"),
        _ => None,
    }
}

/// The bottleneck of a step: where less than a tenth of it is exposed, the GPU itself.
fn bound(step: &Step) -> &'static str {
    if step.idle_s < 0.1 * step.seconds {
        return "products and memory of the GPU";
    }
    let collectives = step.network_s + step.links_s;
    match () {
        () if collectives < 0.5 * step.idle_s => "the host: its link, its memory or its processor",
        () if step.network_s >= step.links_s => "the network between nodes",
        () => "links within a node",
    }
}

fn shape(request: &Request, params: u64) -> Shape {
    let sizes = &request.model.shape;
    let config = request.model.config.as_ref();
    let kv_heads = config.map_or(sizes.heads, |config| config.kv_heads() as u64);
    let gated = matches!(config, Some(zero_models::ModelConfig::Llama(_)));
    Shape {
        layers: sizes.layers,
        width: sizes.hidden,
        heads: sizes.heads,
        kv_heads,
        ffn: sizes.inner,
        gated,
        vocab: sizes.vocab,
        seq: request.rank_tokens(),
        params,
    }
}

fn read(path: &Path) -> Result<Calibration, CliError> {
    let shown = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| CliError::Usage(format!("--efficiencies {shown}: {error}")))?;
    serde_json::from_str(&text).map_err(|error| {
        CliError::Usage(format!(
            "--efficiencies {shown}: {error}; pass a file that --save-efficiencies wrote"
        ))
    })
}

/// Writes the files of `--sweep` and `--timeline`, and returns the text of the sweep.
pub(super) fn extras(
    args: &PlanArgs,
    request: &Request,
    report: &Report,
) -> Result<String, CliError> {
    let Some(on) = &report.simulated_on else {
        return Ok(String::new());
    };
    if let Some(path) = &args.simulate.timeline {
        timeline::write(path, request, on, report)?;
    }
    match args.simulate.sweep {
        Some(gpus) => sweep::run(args, gpus, on),
        None => Ok(String::new()),
    }
}
