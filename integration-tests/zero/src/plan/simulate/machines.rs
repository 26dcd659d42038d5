//! A model on a machine, for a search over its configurations.

use std::path::PathBuf;

use zero_shard::{GridLayout, ShardError, Sharding, ZeroStage};
use zero_simulator::{Cluster, Costs};

use super::result::Simulated;
use super::{MEASURED_GPUS, Prepared, SimulatedOn, cluster, shape, software, with_hardware};
use crate::error::CliError;
use crate::flags::DTypeFlag;
use crate::plan::args::{PlanArgs, SimulateArgs};
use crate::plan::request::PlanRequest;
use crate::plan::stage::{WithoutActivations, evaluate_on, fits_host, layout};
use crate::tune::{Candidate, Choice, Tried, Tuned, UnitSizes};

/// A model on a machine.
pub(crate) struct Machines {
    base: PlanArgs,
    cluster: Cluster,
    on: SimulatedOn,
    /// One micro-batch of one sequence, without groups.
    request: PlanRequest,
    /// By the ranks of tensor parallelism.
    parts: Vec<(usize, ModelPart)>,
}

/// A rank's part of a model.
struct ModelPart {
    request: PlanRequest,
    /// The flat one.
    layout: GridLayout,
    units: UnitSizes,
}

impl ModelPart {
    /// The part with `tensor_ranks`, or why the model cannot be cut so.
    fn new(base: &PlanArgs, tensor_ranks: usize) -> Result<Self, CliError> {
        let mut args = base.clone();
        args.mesh.tensor_parallel = Some(tensor_ranks);
        let (request, _) = PlanRequest::new(&args)?;
        let layout = layout(&request, Sharding::Flat).map_err(CliError::usage)?;
        let units = layout.parts().units().iter();
        let mut elems: Vec<_> = units.map(|unit| unit.padded_elems).collect();
        elems.sort_unstable();
        let units = UnitSizes {
            largest: elems.last().copied().unwrap_or(0),
            block: elems.get(elems.len() / 2).copied().unwrap_or(0),
            all: elems.iter().sum(),
        };
        Ok(Self {
            request,
            layout,
            units,
        })
    }
}

/// A run with any micro-batches.
pub(crate) struct Run<'a> {
    machines: &'a Machines,
    part: &'a ModelPart,
    stage: ZeroStage,
    request: PlanRequest,
    /// Whether a step has several micro-batches, and the memory of such.
    memory: Option<(bool, WithoutActivations)>,
    prepared: Option<Prepared>,
}

impl PlanArgs {
    /// The plan that `zero tune` varies.
    pub(crate) fn of_tune(
        model: &str,
        hardware: &str,
        seq_len: Option<u64>,
        dtype: Option<DTypeFlag>,
        efficiencies: Option<PathBuf>,
    ) -> Self {
        Self {
            model: Some(model.to_owned()),
            seq_len,
            dtype,
            nodes: 1,
            peak_tflops: 1.0,
            drive_tbw: 1.0,
            drive_gb_per_s: 1.0,
            simulate: SimulateArgs {
                simulate: true,
                hardware: Some(hardware.to_owned()),
                efficiencies,
                ..SimulateArgs::default()
            },
            ..Self::default()
        }
    }
}

impl Machines {
    pub(crate) fn new(args: &PlanArgs) -> Result<Self, CliError> {
        let base = with_hardware(args)?;
        let hardware = base.simulate.hardware.clone().unwrap_or_default();
        let (Some(on), cluster) = (SimulatedOn::of(&base)?, cluster(&hardware)?) else {
            return Err(usage!("--hardware says no machine"));
        };
        let (request, _) = PlanRequest::new(&base)?;
        let parts = tensor_ranks(&cluster).filter_map(|ranks| {
            let part = ModelPart::new(&base, ranks).ok()?;
            Some((ranks, part))
        });
        Ok(Self {
            parts: parts.collect(),
            request,
            on,
            cluster,
            base,
        })
    }

    /// GPUs, GPUs of a node, tokens of a sequence.
    pub(crate) fn sizes(&self) -> (u64, u64, u64) {
        let node = self.cluster.gpus_per_node as u64;
        (self.request.machine.gpus, node, self.request.seq_len())
    }

    /// Ranks that tensor parallelism may have.
    pub(crate) fn tensor_ranks(&self) -> impl Iterator<Item = usize> {
        tensor_ranks(&self.cluster)
    }

    /// The sizes of a part of the model; of the whole one if it cannot be cut so.
    pub(crate) fn unit_sizes(&self, tensor_ranks: usize) -> UnitSizes {
        self.part(tensor_ranks)
            .map_or(UnitSizes::default(), |part| part.units)
    }

    fn part(&self, tensor_ranks: usize) -> Option<&ModelPart> {
        let mut parts = self.parts.iter();
        parts
            .find(|(ranks, _)| *ranks == tensor_ranks)
            .map(|(_, part)| part)
    }

    /// Data ranks of a node.
    fn group(&self, candidate: &Candidate) -> usize {
        self.cluster.gpus_per_node / candidate.tensor_parallel
    }

    /// Tokens per second that the candidate cannot exceed: its passes alone, with the sums of tensor
    /// parallelism, which a GPU waits for.
    pub(crate) fn most_tokens_per_s(&self, candidate: &Candidate) -> f64 {
        let config = self.request.model.config.as_ref();
        let params = config.map_or(0, |config| config.parameter_count());
        let shape = shape(&self.request, params);
        let costs = Costs {
            machine: &self.on.machine,
            shape: &shape,
            software: &software(
                &self.on.machine,
                self.request.run.dtype,
                candidate.checkpointing,
            ),
            efficiencies: &self.on.efficiencies,
        };
        let passes = costs.passes(candidate.micro_batch, candidate.stage > 0);
        let both = |[forward, backward]: [f64; 2]| forward + backward;
        let blocks = shape.layers as f64 * both(passes.block);
        let of_batch = both(passes.embedding) + blocks + both(passes.head);
        let sums = match self.on.machine.cores {
            None => costs.tensor_sums(candidate.micro_batch, candidate.tensor_parallel as u64),
            Some(_) => 0.0,
        };
        let tensor_ranks = candidate.tensor_parallel as f64;
        let (gpus, _, seq_len) = self.sizes();
        let sequences = gpus as f64 / tensor_ranks * candidate.micro_batch as f64;
        sequences * seq_len as f64 / (of_batch / tensor_ranks + sums)
    }

    /// Tokens of a step of all GPUs.
    pub(crate) fn batch_tokens(&self, candidate: &Candidate) -> u64 {
        let (gpus, _, seq_len) = self.sizes();
        let ranks = gpus / candidate.tensor_parallel as u64;
        ranks * candidate.micro_batch * candidate.grad_accum * seq_len
    }

    /// The run of the candidate and of those that differ from it in their micro-batches only.
    ///
    /// # Errors
    /// The trainer refuses it.
    pub(crate) fn run(&self, candidate: &Candidate) -> Result<Run<'_>, CliError> {
        let usage = |what: &str| CliError::Usage(what.to_owned());
        let part = self.part(candidate.tensor_parallel);
        let part = part.ok_or_else(|| usage("the model cannot be cut so"))?;
        let plan = candidate.plan(&self.base, self.group(candidate));
        let stage = ZeroStage::from_number(candidate.stage.into());
        Ok(Run {
            machines: self,
            part,
            stage: stage.ok_or_else(|| usage("no such stage"))?,
            request: part
                .request
                .with_run(&plan)?
                .with_prefetch(candidate.prefetch_elems),
            memory: None,
            prepared: None,
        })
    }

    /// The result of a search.
    pub(crate) fn tuned(
        &self,
        candidates: usize,
        batch_tokens: Option<u64>,
        [simulated, did_not_fit, refused]: [usize; 3],
        best: Vec<Choice>,
    ) -> Tuned {
        let request = &self.request;
        Tuned {
            model: request.model.name.clone(),
            gpus: request.machine.gpus,
            nodes: request.machine.nodes,
            seq_len: request.seq_len(),
            dtype: request.run.dtype.to_string(),
            gpu_memory_bytes: request.machine.gpu_memory_bytes.unwrap_or(0),
            batch_tokens,
            candidates,
            simulated,
            did_not_fit,
            refused,
            calibrated_on: self.on.calibrated_on.clone(),
            on_host: self.on.machine.cores.is_some(),
            extrapolated: request.machine.gpus > MEASURED_GPUS,
            best,
        }
    }
}

/// Powers of two of ranks that tensor parallelism may have: within a node, where it divides it.
fn tensor_ranks(cluster: &Cluster) -> impl Iterator<Item = usize> {
    let node = cluster.gpus_per_node;
    let powers = (0..).map(|power| 1usize << power);
    powers
        .take_while(move |&ranks| ranks <= node)
        .filter(move |&ranks| node.is_multiple_of(ranks))
}

impl Run<'_> {
    /// The candidate with its simulated step. Its memory is computed in full only if it has at least
    /// `tokens_per_s`.
    ///
    /// # Errors
    /// The trainer refuses it.
    pub(crate) fn choice(
        &mut self,
        candidate: &Candidate,
        tokens_per_s: f64,
    ) -> Result<Tried, CliError> {
        let request = self.request.clone();
        let request = request.with_batch(candidate.micro_batch, candidate.grad_accum)?;
        if !self.fits(&request).map_err(CliError::usage)? {
            return Ok(Tried::DoesNotFit);
        }
        let simulated = self.simulated(&request).map_err(CliError::Usage)?;
        if simulated.tokens_per_s < tokens_per_s {
            return Ok(Tried::Slower);
        }
        let memory = evaluate_on(&request, &self.part.layout, self.stage);
        let memory = memory.map_err(CliError::usage)?;
        let dtype = request.run.dtype.to_string();
        let group = self.machines.group(candidate);
        let base = &self.machines.base;
        Ok(Tried::Fits(Box::new(Choice {
            stage: candidate.stage,
            step_ms: simulated.step_ms,
            step_ms_range: simulated.step_ms_range,
            tokens_per_s: simulated.tokens_per_s,
            mfu: simulated.mfu,
            exposed_ms: simulated.exposed_ms,
            bound: simulated.bound,
            gpu_bytes: memory.gpu.total_bytes,
            host_bytes: memory.host_bytes,
            flags: candidate.flags(group),
            deepspeed: candidate.deepspeed(
                &dtype,
                group,
                base.bucket_elems.unwrap_or(self.part.units.largest),
                self.part.units,
            ),
            candidate: *candidate,
        })))
    }

    fn fits(&mut self, request: &PlanRequest) -> Result<bool, ShardError> {
        if let Some(fits) = fits_host(request, &self.part.layout, self.stage) {
            return Ok(fits);
        }
        let several = request.grad_accum() > 1;
        let memory = match self.memory {
            Some((of_several, memory)) if of_several == several => memory,
            _ => WithoutActivations::new(request, &self.part.layout, self.stage)?,
        };
        self.memory = Some((several, memory));
        memory.fits(request)
    }

    fn simulated(&mut self, request: &PlanRequest) -> Result<Simulated, String> {
        let on = &self.machines.on;
        let prepared = match self.prepared.take() {
            Some(mut prepared) => {
                prepared.set_batch(request)?;
                prepared
            }
            None => {
                let largest = self.part.units.largest;
                Prepared::new(&on.machine, request, self.stage, largest, None)?
            }
        };
        let prepared = self.prepared.insert(prepared);
        Ok(on.simulated(request, &prepared.step(&on.efficiencies)))
    }
}
