//! A request with the recorded schedules of its step, for any efficiencies.

use std::sync::Arc;

use zero_alloc::device::DType;
use zero_shard::ZeroStage;
use zero_simulator::{
    Attention, Costs, Efficiencies, Machine, Run, Shape, Software, Step, StepSchedules, Units,
};

use crate::plan::Request;

/// A run on a machine, whose step is recorded.
pub(super) struct Prepared {
    machine: Machine,
    shape: Shape,
    software: Software,
    schedules: StepSchedules,
    /// Tokens of a step of all ranks, per rank.
    tokens_gpu: f64,
}

impl Prepared {
    /// Records the step of `request` at `stage`, for a model whose largest unit has `largest_unit`
    /// elements. `threads`: of a rank on the host; `None`: its part of the cores.
    ///
    /// # Errors
    /// Why it cannot be simulated: an assumed shape, a setting whose cost the formulas do not know,
    /// groups that do not fit the stage, or state on NVMe, which needs a file.
    pub(super) fn new(
        machine: &Machine,
        request: &Request,
        stage: ZeroStage,
        largest_unit: u64,
        threads: Option<usize>,
    ) -> Result<Self, String> {
        let config = request.model.config.clone();
        let config = config.ok_or("only the number of its parameters is known")?;
        if let Some(what) = unknown(request, machine.cores.is_some()) {
            return Err(format!("the formulas do not know {what}"));
        }
        let shape = shape(request, config.parameter_count());
        let units = Units {
            units: config.units(),
            passes: config.passes(),
            cut: {
                let config = config.clone();
                Arc::new(move |param: &_| config.tensor_cut(param))
            },
        };
        let of_node = (request.gpus / request.nodes) as usize;
        let run = Run::new(
            [request.gpus as usize, of_node],
            request.settings(stage, largest_unit),
            units,
            &shape,
            request.micro_batch,
            request.checkpointing,
        );
        let run = match machine.cores {
            None => run,
            Some(cores) => run.on_host(threads.unwrap_or((cores / of_node).max(1))),
        };
        let batches = request.gpus as f64 / request.mesh.ranks_of_batch() as f64;
        let sequences = batches * (request.micro_batch * request.grad_accum) as f64;
        Ok(Self {
            machine: machine.clone(),
            shape,
            software: software(machine, request.dtype, request.checkpointing),
            schedules: run.schedules().map_err(|error| error.to_string())?,
            tokens_gpu: sequences * request.seq_len as f64 / request.gpus as f64,
        })
    }

    /// The step.
    pub(super) fn step(&self, efficiencies: &Efficiencies) -> Step {
        self.schedules.step(&Costs {
            machine: &self.machine,
            shape: &self.shape,
            software: &self.software,
            efficiencies,
        })
    }

    /// Tokens per second and GPU in steps of `seconds`.
    pub(super) fn tokens_per_s_gpu(&self, seconds: f64) -> f64 {
        self.tokens_gpu / seconds
    }
}

/// Our trainer.
pub(super) fn software(machine: &Machine, dtype: DType, recompute: bool) -> Software {
    Software {
        attention: match machine.cores {
            None => Attention::Fused,
            Some(_) => Attention::Host {
                upcasts: dtype != DType::F32,
            },
        },
        wide_reduce: false,
        fp8: false,
        recompute,
    }
}

/// A setting whose cost the formulas do not know.
fn unknown(request: &Request, on_host: bool) -> Option<&'static str> {
    match request {
        _ if request.mesh.sequence_ranks() > 1 => Some("ranks that share sequences (--ulysses)"),
        _ if request.dtype == DType::F32 && !on_host => {
            Some("products in fp32; use --dtype bf16 or fp16")
        }
        _ if request.offload.activations => Some("--offload-activations"),
        _ => None,
    }
}

/// The sizes of a model and of a rank's sequences.
pub(super) fn shape(request: &Request, params: u64) -> Shape {
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
