//! The whole plan: all stages, the topologies and the advice.

use serde::Serialize;
use zero_shard::{Routing, ShardError, Sharding, ZeroStage};

use super::advice;
use super::largest::{largest_model_params, longest_seq_len};
use super::request::PlanRequest;
use super::simulate::SimulatedOn;
use super::simulate::result::Point;
use super::stage::{Stage, evaluate_on, layout};
use zero_trainer::{Home, OffloadSettings};

/// The input of the plan and its results.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) model: Model,
    pub(crate) gpus: u64,
    pub(crate) nodes: u64,
    pub(crate) gpu_memory_bytes: Option<u64>,
    pub(crate) dtype: String,
    pub(crate) micro_batch: u64,
    pub(crate) grad_accum: u64,
    pub(crate) seq_len: u64,
    /// Ranks that share each sequence.
    pub(crate) ulysses: usize,
    /// Ranks that have a part of each parameter.
    pub(crate) tensor_parallel: usize,
    pub(crate) partition_activations: bool,
    pub(crate) sequence_parallel: bool,
    pub(crate) activation_checkpointing: bool,
    /// As requested; each stage has what it plans with.
    pub(crate) recompute_gelu: Option<bool>,
    /// The offload.
    pub(crate) offload: OffloadSettings,
    /// The assumed speed of a GPU.
    pub(crate) peak_tflops: f64,
    /// The assumed life of a drive: terabytes written.
    pub(crate) drive_tbw: f64,
    /// The assumed speed of a drive.
    pub(crate) drive_gb_per_s: f64,
    /// The machine of the simulated steps.
    pub(crate) simulated_on: Option<SimulatedOn>,
    /// Elements of the largest unit.
    #[serde(skip)]
    pub(crate) largest_unit_elems: u64,
    pub(crate) stages: Vec<Stage>,
    /// Distributions of stage 3 over several nodes; empty for one node.
    pub(crate) topologies: Vec<Topology>,
    /// `None` if no stage fits.
    pub(crate) recommended_stage: Option<u8>,
    /// The points of `--sweep`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) sweep: Vec<Point>,
    /// Recommendations, one sentence each.
    pub(crate) advice: Vec<String>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Model {
    pub(crate) name: String,
    pub(crate) params: u64,
    pub(crate) units: usize,
    pub(crate) layers: u64,
    pub(crate) hidden: u64,
    /// Whether layers and width are derived from the number of parameters.
    pub(crate) assumed_shape: bool,
}

/// One distribution of stage 3 over the nodes.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Topology {
    pub(crate) name: &'static str,
    pub(crate) states_bytes: u64,
    pub(crate) sent_bytes: u64,
    pub(crate) node_egress_bytes: u64,
}

impl Report {
    /// The report, with the times of steps on a machine.
    pub(crate) fn with_times(
        request: &PlanRequest,
        on: Option<&SimulatedOn>,
    ) -> Result<Self, ShardError> {
        let layout = layout(request, Sharding::Flat)?;
        let largest_unit_elems = request.largest_trained(layout.parts());
        let stage = |stage| {
            let largest_model_params = largest_model_params(request, stage);
            let simulated = on.and_then(|on| on.stage(request, stage, largest_unit_elems));
            evaluate_on(request, &layout, stage).map(|figures| Stage {
                largest_model_params,
                longest_seq_len: longest_seq_len(request, stage),
                simulated,
                ..figures
            })
        };

        let stages = ZeroStage::ALL
            .into_iter()
            .map(stage)
            .collect::<Result<Vec<_>, _>>()?;
        let recommended = advice::recommended(&stages);

        Ok(Self {
            model: Model {
                name: request.model.name.clone(),
                params: match &request.model.config {
                    Some(config) if request.tensor_ranks() > 1 => config.parameter_count(),
                    _ => layout.parts().numel_elems(),
                },
                units: layout.parts().units().len(),
                layers: request.model.shape.layers,
                hidden: request.model.shape.hidden,
                assumed_shape: request.model.assumed,
            },
            gpus: request.machine.gpus,
            nodes: request.machine.nodes,
            gpu_memory_bytes: request.machine.gpu_memory_bytes,
            dtype: request.run.dtype.to_string(),
            micro_batch: request.micro_batch(),
            grad_accum: request.grad_accum(),
            seq_len: request.seq_len(),
            ulysses: request.run.mesh.sequence_ranks(),
            tensor_parallel: request.tensor_ranks(),
            partition_activations: request.options.partition_activations,
            sequence_parallel: request.options.sequence_parallel,
            activation_checkpointing: request.options.activation_checkpointing,
            recompute_gelu: request.recompute_gelu,
            offload: request.run.offload.clone(),
            peak_tflops: request.machine.peak_tflops,
            drive_tbw: request.machine.drive_tbw,
            drive_gb_per_s: request.machine.drive_bytes_per_s / 1e9,
            simulated_on: on.cloned(),
            largest_unit_elems,
            topologies: topologies(request)?,
            recommended_stage: recommended,
            sweep: Vec::new(),
            advice: advice::advice(request, &layout, &stages, recommended)?,
            stages,
        })
    }
}

/// All distributions of stage 3 over several nodes; empty for one node.
fn topologies(request: &PlanRequest) -> Result<Vec<Topology>, ShardError> {
    if request.machine.nodes == 1 || request.run.offload.params != Home::Device {
        return Ok(Vec::new());
    }
    let ways = [
        ("over all GPUs, one ring", Sharding::Flat, Routing::Ring),
        (
            "over all GPUs, node by node",
            Sharding::Flat,
            Routing::TwoLevel,
        ),
        (
            "parameters within a node (hpZ)",
            Sharding::Secondary,
            Routing::TwoLevel,
        ),
        (
            "optimizer state over all GPUs (HFSDP)",
            Sharding::Hybrid,
            Routing::TwoLevel,
        ),
        (
            "within a node, nodes alike (MiCS, HSDP)",
            Sharding::Replicated,
            Routing::TwoLevel,
        ),
    ];

    let topology = |(name, sharding, routing)| {
        let layout = layout(request, sharding)?;
        let widths = request.settings(ZeroStage::Three, 0).widths();
        let traffic =
            layout.step_traffic(ZeroStage::Three, &widths, request.grad_accum(), routing)?;
        Ok(Topology {
            name,
            states_bytes: layout.state_bytes(ZeroStage::Three, &widths)?.total_bytes(),
            sent_bytes: traffic.rank_total_bytes(),
            // Each GPU of a node's tensor parallelism is on another ring.
            node_egress_bytes: traffic
                .group_egress_bytes
                .saturating_mul(request.tensor_ranks() as u64),
        })
    };

    ways.into_iter().map(topology).collect()
}
