//! A request with the recorded schedules of its step, for any efficiencies.

use std::sync::Arc;

use zero_alloc::device::DType;
use zero_alloc::host::OpSpan;
use zero_models::ModelConfig;
use zero_shard::ZeroStage;
use zero_simulator::{
    Adapters, Attention, Costs, Efficiencies, Machine, Run, Shape, SimulatedStep, Software,
    StepSchedules, Units,
};

use super::result::Gain;
use crate::plan::request::PlanRequest;

/// A part of a step that is not worth a line.
const LEAST_GAIN: f64 = 0.005;

/// A run on a machine, whose step is recorded.
pub(super) struct Prepared {
    machine: Machine,
    shape: Shape,
    software: Software,
    schedules: StepSchedules,
    /// Tokens of a step of all ranks, per rank.
    tokens_gpu: f64,
}

/// Tokens of a step of all ranks, per rank.
fn tokens_gpu(request: &PlanRequest) -> f64 {
    let batches = request.machine.gpus as f64 / request.run.mesh.ranks_of_batch() as f64;
    let sequences = batches * (request.micro_batch() * request.grad_accum()) as f64;
    sequences * request.seq_len() as f64 / request.machine.gpus as f64
}

impl Prepared {
    /// Records the step of `request` at `stage`, for a model whose largest unit has `largest_unit`
    /// elements. `threads`: of a rank on the host; `None`: its part of the cores.
    ///
    /// # Errors
    /// Why it cannot be simulated: an assumed shape, a setting whose cost the formulas do not know,
    /// or groups that do not fit the stage.
    pub(super) fn new(
        machine: &Machine,
        request: &PlanRequest,
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
        let of_node = (request.machine.gpus / request.machine.nodes) as usize;
        let run = Run::new(
            [request.machine.gpus as usize, of_node],
            request.settings(stage, largest_unit),
            units,
            &shape,
            request.micro_batch(),
            request.options.activation_checkpointing,
        );
        let run = match machine.cores {
            None => run,
            Some(cores) => run.on_host(threads.unwrap_or((cores / of_node).max(1))),
        };
        Ok(Self {
            machine: machine.clone(),
            shape,
            software: software(
                machine,
                request.run.dtype,
                request.options.activation_checkpointing,
            ),
            schedules: run.schedules().map_err(|error| error.to_string())?,
            tokens_gpu: tokens_gpu(request),
        })
    }

    /// Sets the batch to that of `request`, which is otherwise that of [`Self::new`].
    ///
    /// # Errors
    /// As [`Self::new`].
    pub(super) fn set_batch(&mut self, request: &PlanRequest) -> Result<(), String> {
        self.tokens_gpu = tokens_gpu(request);
        let recorded = self
            .schedules
            .set_batch(request.micro_batch(), request.grad_accum() as usize);
        recorded.map_err(|error| error.to_string())
    }

    /// The step.
    pub(super) fn step(&self, efficiencies: &Efficiencies) -> SimulatedStep {
        self.schedules.step(&self.costs(efficiencies))
    }

    /// The operations of the recorded steps.
    pub(super) fn spans(&self, efficiencies: &Efficiencies) -> Vec<OpSpan> {
        self.schedules.spans(&self.costs(efficiencies))
    }

    fn costs<'a>(&'a self, efficiencies: &'a Efficiencies) -> Costs<'a> {
        Costs {
            machine: &self.machine,
            shape: &self.shape,
            software: &self.software,
            efficiencies,
        }
    }

    /// The part of the step that would be saved by twice the rate of each part of the machine, of those
    /// that save anything.
    pub(super) fn gains(&self, efficiencies: &Efficiencies) -> Vec<Gain> {
        let seconds = self.step(efficiencies).seconds;
        type Double = fn(&mut Machine);
        let twice: [(&'static str, Double); 7] = [
            ("products", |m| m.peak_flops *= 2.0),
            ("memory", |m| {
                m.memory_bytes_per_s *= 2.0;
                m.elementwise_bytes_per_s = m.elementwise_bytes_per_s.map(|rate| 2.0 * rate);
            }),
            ("links within a node", |m| m.link_bytes_per_s *= 2.0),
            ("network", |m| m.network_bytes_per_s *= 2.0),
            ("link to the host", |m| m.host_link_bytes_per_s *= 2.0),
            ("memory of the host", |m| m.host_memory_bytes_per_s *= 2.0),
            ("disk", |m| m.disk_bytes_per_s *= 2.0),
        ];
        let gain = |(what, double): (&'static str, Double)| {
            let mut machine = self.machine.clone();
            double(&mut machine);
            let faster = self.schedules.step(&Costs {
                machine: &machine,
                ..self.costs(efficiencies)
            });
            Gain {
                what,
                part: 1.0 - faster.seconds / seconds,
            }
        };
        let mut gains: Vec<_> = twice.into_iter().map(gain).collect();
        gains.retain(|gain| gain.part >= LEAST_GAIN);
        gains.sort_by(|a, b| b.part.total_cmp(&a.part));
        gains
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
fn unknown(request: &PlanRequest, on_host: bool) -> Option<&'static str> {
    match request {
        _ if request.run.dtype == DType::F32 && !on_host => {
            Some("products in fp32; use --dtype bf16 or fp16")
        }
        _ if request.run.offload.activations => Some("--offload-activations"),
        _ => None,
    }
}

/// The sizes of a model and of a rank's sequences.
pub(super) fn shape(request: &PlanRequest, params: u64) -> Shape {
    let sizes = &request.model.shape;
    let config = request.model.config.as_ref();
    let kv_heads = config.map_or(sizes.heads, |config| config.kv_heads() as u64);
    let gated = matches!(config, Some(ModelConfig::Llama(_)));
    Shape {
        layers: sizes.layers,
        width: sizes.hidden,
        heads: sizes.heads,
        kv_heads,
        ffn: sizes.inner,
        gated,
        vocab: sizes.vocab,
        seq: request.seq_len(),
        sequence_ranks: request.run.mesh.sequence_ranks() as u64,
        params,
        adapters: config.and_then(adapters),
    }
}

/// The adapters of a block, whose unit is the first.
fn adapters(config: &ModelConfig) -> Option<Adapters> {
    let r = config.lora()?.r as u64;
    let units = config.units();
    let unit = units.first()?;
    let elems = unit
        .params
        .iter()
        .filter_map(|param| param.numel_elems().ok());
    Some(Adapters {
        r,
        modules: (unit.params.len() / 2) as u64,
        widths: elems.sum::<u64>() / r,
    })
}
