//! The whole plan: all stages, the topologies and the advice.

use serde::Serialize;
use zero_shard::{Routing, ShardError, Sharding, ZeroStage};

use super::advice;
use super::largest::largest_model_params;
use super::request::Request;
use super::stage::{Stage, evaluate_on, layout};
use zero_trainer::{Home, OffloadSettings};

/// The input of the plan and its results.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    pub(super) model: Model,
    pub(super) gpus: u64,
    pub(super) nodes: u64,
    pub(super) gpu_memory_bytes: Option<u64>,
    pub(super) dtype: String,
    pub(super) micro_batch: u64,
    pub(super) grad_accum: u64,
    pub(super) seq_len: u64,
    pub(super) activation_checkpointing: bool,
    /// As requested; each stage has what it plans with.
    pub(super) recompute_gelu: Option<bool>,
    /// The offload.
    pub(super) offload: OffloadSettings,
    /// The assumed speed of a GPU.
    pub(super) peak_tflops: f64,
    /// The assumed life of a drive: terabytes written.
    pub(super) drive_tbw: f64,
    /// The assumed speed of a drive.
    pub(super) drive_gb_per_s: f64,
    pub(super) stages: Vec<Stage>,
    /// Distributions of stage 3 over several nodes; empty for one node.
    pub(super) topologies: Vec<Topology>,
    /// `None` if no stage fits.
    pub(super) recommended_stage: Option<u8>,
    /// Recommendations, one sentence each.
    pub(super) advice: Vec<String>,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Model {
    pub(super) name: String,
    pub(super) params: u64,
    pub(super) units: usize,
    pub(super) layers: u64,
    pub(super) hidden: u64,
    /// Whether layers and width are derived from the number of parameters.
    pub(super) assumed_shape: bool,
}

/// One distribution of stage 3 over the nodes.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Topology {
    pub(super) name: &'static str,
    pub(super) states_bytes: u64,
    pub(super) sent_bytes: u64,
    pub(super) node_egress_bytes: u64,
}

impl Report {
    pub(super) fn new(request: &Request) -> Result<Self, ShardError> {
        let layout = layout(request, Sharding::Flat)?;
        let stage = |stage| {
            let largest_model_params = largest_model_params(request, stage);
            evaluate_on(request, &layout, stage).map(|figures| Stage {
                largest_model_params,
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
                params: layout.primary().numel_elems(),
                units: layout.primary().units().len(),
                layers: request.model.shape.layers,
                hidden: request.model.shape.hidden,
                assumed_shape: request.model.assumed,
            },
            gpus: request.gpus,
            nodes: request.nodes,
            gpu_memory_bytes: request.gpu_memory_bytes,
            dtype: request.dtype.to_string(),
            micro_batch: request.micro_batch,
            grad_accum: request.grad_accum,
            seq_len: request.seq_len,
            activation_checkpointing: request.checkpointing,
            recompute_gelu: request.recompute_gelu,
            offload: request.offload.clone(),
            peak_tflops: request.peak_tflops,
            drive_tbw: request.drive_tbw,
            drive_gb_per_s: request.drive_bytes_per_s / 1e9,
            topologies: topologies(request)?,
            recommended_stage: recommended,
            advice: advice::advice(request, &layout, &stages, recommended)?,
            stages,
        })
    }
}

/// All distributions of stage 3 over several nodes; empty for one node.
fn topologies(request: &Request) -> Result<Vec<Topology>, ShardError> {
    if request.nodes == 1 || request.offload.params != Home::Device {
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
            "and a copy in each node (hpZ)",
            Sharding::Secondary,
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
            layout.step_traffic(ZeroStage::Three, &widths, request.grad_accum, routing)?;
        Ok(Topology {
            name,
            states_bytes: layout.state_bytes(ZeroStage::Three, &widths)?.total_bytes(),
            sent_bytes: traffic.rank_total_bytes(),
            node_egress_bytes: traffic.group_egress_bytes,
        })
    };
    ways.into_iter().map(topology).collect()
}
