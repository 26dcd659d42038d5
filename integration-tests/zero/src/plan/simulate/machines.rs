//! A model on a machine, for a search over its configurations.

use std::path::PathBuf;

use zero_shard::ZeroStage;
use zero_simulator::{Cluster, Costs};

use super::{MEASURED_GPUS, SimulateArgs, SimulatedOn, cluster, shape, software, with_hardware};
use crate::error::CliError;
use crate::flags::DTypeFlag;
use crate::plan::stage::{evaluate, fits};
use crate::plan::{PlanArgs, Request};
use crate::tune::{Candidate, Choice, Tried, Tuned};

/// A model on a machine.
pub(crate) struct Machines {
    base: PlanArgs,
    cluster: Cluster,
    on: SimulatedOn,
    /// One micro-batch of one sequence, without groups.
    request: Request,
    largest_unit: u64,
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
            return Err(CliError::Usage("--hardware says no machine".to_owned()));
        };
        let (request, _) = Request::new(&base)?;
        let largest_unit = request.model.largest_unit_elems();
        Ok(Self {
            largest_unit: largest_unit.map_err(CliError::usage)?,
            request,
            on,
            cluster,
            base,
        })
    }

    /// GPUs, GPUs of a node, tokens of a sequence.
    pub(crate) fn sizes(&self) -> (u64, u64, u64) {
        let node = self.cluster.gpus_per_node as u64;
        (self.request.gpus, node, self.request.seq_len)
    }

    /// Powers of two of ranks that tensor parallelism may have: within a node, where it divides it.
    pub(crate) fn tensor_ranks(&self) -> Vec<usize> {
        let node = self.cluster.gpus_per_node;
        let powers = (0..).map(|power| 1usize << power);
        powers
            .take_while(|&ranks| ranks <= node)
            .filter(|&ranks| node.is_multiple_of(ranks))
            .collect()
    }

    /// Data ranks of a node.
    fn group(&self, candidate: &Candidate) -> usize {
        self.cluster.gpus_per_node / candidate.tensor_parallel
    }

    /// Tokens per second that the candidate cannot exceed: its passes alone.
    pub(crate) fn most_tokens_per_s(&self, candidate: &Candidate) -> f64 {
        let config = self.request.model.config.as_ref();
        let params = config.map_or(0, |config| config.parameter_count());
        let shape = shape(&self.request, params);
        let costs = Costs {
            machine: &self.on.machine,
            shape: &shape,
            software: &software(
                &self.on.machine,
                self.request.dtype,
                candidate.checkpointing,
            ),
            efficiencies: &self.on.efficiencies,
        };
        let passes = costs.passes(candidate.micro_batch, candidate.stage > 0);
        let both = |[forward, backward]: [f64; 2]| forward + backward;
        let blocks = shape.layers as f64 * both(passes.block);
        let of_batch = both(passes.embedding) + blocks + both(passes.head);
        let tensor_ranks = candidate.tensor_parallel as f64;
        let (gpus, _, seq_len) = self.sizes();
        let sequences = gpus as f64 / tensor_ranks * candidate.micro_batch as f64;
        sequences * seq_len as f64 / (of_batch / tensor_ranks)
    }

    /// The candidate with its simulated step. Its memory is computed in full only if it has at least
    /// `tokens_per_s`.
    ///
    /// # Errors
    /// The trainer refuses it.
    pub(crate) fn choice(
        &self,
        candidate: &Candidate,
        tokens_per_s: f64,
    ) -> Result<Tried, CliError> {
        let group = self.group(candidate);
        let plan = candidate.plan(&self.base, group, self.largest_unit);
        let (request, _) = Request::new(&plan)?;
        let stage = ZeroStage::from_number(candidate.stage.into())
            .ok_or_else(|| CliError::Usage("no such stage".to_owned()))?;
        if !fits(&request, stage).map_err(CliError::usage)? {
            return Ok(Tried::DoesNotFit);
        }
        let simulated = self.on.stage(&request, stage, self.largest_unit);
        let Some((simulated, ..)) = simulated.map_err(CliError::usage)? else {
            return Err(CliError::Usage("it cannot be simulated".to_owned()));
        };
        if simulated.tokens_per_s < tokens_per_s {
            return Ok(Tried::Slower);
        }
        let memory = evaluate(&request, stage).map_err(CliError::usage)?;
        let dtype = request.dtype.to_string();
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
            flags: candidate.flags(group, self.largest_unit),
            deepspeed: candidate.deepspeed(&dtype, group, self.largest_unit),
            candidate: *candidate,
        })))
    }

    /// The result of a search.
    pub(crate) fn tuned(
        &self,
        candidates: usize,
        [simulated, did_not_fit, refused]: [usize; 3],
        best: Vec<Choice>,
    ) -> Tuned {
        let request = &self.request;
        Tuned {
            model: request.model.name.clone(),
            gpus: request.gpus,
            nodes: request.nodes,
            seq_len: request.seq_len,
            dtype: request.dtype.to_string(),
            gpu_memory_bytes: request.gpu_memory_bytes.unwrap_or(0),
            candidates,
            simulated,
            did_not_fit,
            refused,
            calibrated_on: self.on.calibrated_on.clone(),
            on_host: self.on.machine.cores.is_some(),
            extrapolated: request.gpus > MEASURED_GPUS,
            best,
        }
    }
}
