//! The figures, exact where they can be.

use serde::Serialize;
use zero_shard::{
    ActivationBytes, ActivationOptions, Grid, GridLayout, Layout, MemoryModel, Placement, Routing, ShardError,
    Sharding, Tier, ZeroStage,
};

use super::advice;
use super::request::Request;
use crate::trainer::device_steps;

/// What is planned for, and what it takes.
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
    pub(super) stages: Vec<Stage>,
    /// Ways to lay stage 3 over several nodes.
    pub(super) topologies: Vec<Topology>,
    /// The stage that is recommended, where one fits.
    pub(super) recommended_stage: Option<u8>,
    /// What to do, a sentence each.
    pub(super) advice: Vec<String>,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Model {
    pub(super) name: String,
    pub(super) params: u64,
    pub(super) units: usize,
    pub(super) layers: u64,
    pub(super) hidden: u64,
    /// Layers and width are a guess from the number of parameters.
    pub(super) assumed_shape: bool,
}

/// One stage, on one GPU.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Stage {
    pub(super) stage: u8,
    /// The configuration file asks for this one.
    pub(super) configured: bool,
    /// Parameters, gradients and optimizer state, wherever they live.
    pub(super) states_bytes: u64,
    pub(super) gpu: Gpu,
    /// In host memory, for this GPU.
    pub(super) host_bytes: u64,
    /// On disk, for this GPU.
    pub(super) nvme_bytes: u64,
    pub(super) sent: Sent,
    /// Whether it fits the memory of the GPU.
    pub(super) fits: Option<bool>,
    /// The most parameters that fit with these activations, buckets and gathered units.
    pub(super) largest_model_params: Option<u64>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Gpu {
    pub(super) params_bytes: u64,
    pub(super) grads_bytes: u64,
    pub(super) optimizer_bytes: u64,
    pub(super) gathered_bytes: u64,
    pub(super) buckets_bytes: u64,
    pub(super) scratch_bytes: u64,
    pub(super) activations_bytes: u64,
    pub(super) total_bytes: u64,
}

/// Sent in a step, at most.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Sent {
    pub(super) reduce_scatter_bytes: u64,
    pub(super) all_gather_bytes: u64,
    pub(super) all_reduce_bytes: u64,
    pub(super) total_bytes: u64,
    /// Leaving each node, where there are several.
    pub(super) node_egress_bytes: u64,
}

/// Stage 3 laid over the nodes in one way.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Topology {
    pub(super) name: &'static str,
    pub(super) states_bytes: u64,
    pub(super) sent_bytes: u64,
    pub(super) node_egress_bytes: u64,
}

impl Report {
    pub(super) fn new(request: &Request) -> Result<Self, ShardError> {
        let stages = ZeroStage::ALL.map(|stage| evaluate(request, stage));
        let stages = stages.into_iter().collect::<Result<Vec<_>, _>>()?;
        let layout = layout(request, Sharding::Flat)?;
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
            topologies: topologies(request)?,
            recommended_stage: recommended,
            advice: advice::advice(request, &stages, recommended)?,
            stages,
        })
    }
}

fn layout(request: &Request, sharding: Sharding) -> Result<GridLayout, ShardError> {
    let grid = Grid::new(request.gpus, request.gpus / request.nodes)?;
    GridLayout::new(&request.model.units, grid, sharding, request.model.options.clone())
}

/// One stage of a request.
pub(super) fn evaluate(request: &Request, stage: ZeroStage) -> Result<Stage, ShardError> {
    let layout = layout(request, Sharding::Flat)?;
    let widths = request.widths();
    let state = layout.state_bytes(stage, &widths)?;
    let model = memory_model(request, stage, layout.primary())?;
    let footprint = model.footprint(&state)?;
    let gpu = footprint.device;
    let traffic = layout.step_traffic(stage, &widths, request.grad_accum, Routing::TwoLevel)?;
    let total_bytes = gpu.total_bytes()?;
    let largest = |memory| model.largest_model_elems(request.gpus, memory);
    Ok(Stage {
        stage: stage.number(),
        configured: request.configured_stage == Some(stage),
        states_bytes: state.total_bytes(),
        gpu: Gpu {
            params_bytes: gpu.state.params_bytes,
            grads_bytes: gpu.state.grads_bytes,
            optimizer_bytes: gpu.state.optimizer_bytes,
            gathered_bytes: gpu.gathered_bytes,
            buckets_bytes: gpu.buckets_bytes,
            scratch_bytes: gpu.scratch_bytes,
            activations_bytes: gpu.activations_bytes,
            total_bytes,
        },
        host_bytes: footprint.host.total_bytes()?,
        nvme_bytes: footprint.nvme.total_bytes()?,
        sent: Sent {
            reduce_scatter_bytes: traffic.rank.reduce_scatter_bytes,
            all_gather_bytes: traffic.rank.all_gather_bytes,
            all_reduce_bytes: traffic.rank.all_reduce_bytes,
            total_bytes: traffic.rank_total_bytes(),
            node_egress_bytes: traffic.group_egress_bytes,
        },
        fits: request.gpu_memory_bytes.map(|memory| total_bytes <= memory),
        largest_model_params: request.gpu_memory_bytes.map(largest).transpose()?,
    })
}

fn memory_model(request: &Request, stage: ZeroStage, layout: &Layout) -> Result<MemoryModel, ShardError> {
    let widths = request.widths();
    let mut placement = Placement::offload_optimizer(stage, request.offload_optimizer);
    if stage.shards_params() {
        placement.params = request.offload_params;
    }
    let activations = ActivationOptions {
        micro_batch: request.micro_batch,
        seq_len: request.seq_len,
        elem_bytes: widths.param_bytes,
        checkpointing: request.checkpointing,
        checkpoint_shards: request.checkpoint_shards,
        flash_attention: true,
        dropout: false,
    };
    let largest_unit = layout.units().iter().map(|u| u.padded_elems).max().unwrap_or(0);
    let bucket_limit = if request.trims_bucket { largest_unit } else { u64::MAX };
    Ok(MemoryModel {
        stage,
        widths,
        placement,
        gathered_elems: gathered_elems(request, layout),
        bucket_elems: request.bucket_elems.min(bucket_limit).max(request.gpus),
        buckets: 2,
        scratch_bytes: scratch_bytes(layout)?.saturating_add(device_steps(request.gpus as usize).bytes() as u64),
        sub_group_elems: request.sub_group_elems.min(layout.shard_elems()),
        sub_group_buffers: request.sub_group_buffers,
        activations_bytes: ActivationBytes::estimate(&request.model.shape, &activations)?.total_bytes(),
    })
}

/// The most elements that are gathered at once, as the trainer gathers: units up to the persistence threshold stay
/// from their first use on; the next unit is gathered beside the one in use, if both fit the limit.
fn gathered_elems(request: &Request, layout: &Layout) -> u64 {
    let elems: Vec<u64> = layout.units().iter().map(|u| u.padded_elems).collect();
    let sum = |units: &[usize]| units.iter().fold(0, |sum: u64, &unit| sum.saturating_add(elems[unit]));
    let (kept, others): (Vec<usize>, Vec<usize>) =
        (0..elems.len()).partition(|&unit| elems[unit] <= request.persistence_threshold_elems);
    let needed = |unit| layout.units_needed_by(unit).into_iter().filter(|unit| others.contains(unit)).collect();
    let forward: Vec<Vec<usize>> = (0..elems.len()).map(needed).collect();
    let uses: Vec<&[usize]> = forward.iter().chain(forward.iter().rev()).map(Vec::as_slice).collect();
    let next = uses.iter().skip(1).copied().chain([&[][..]]);
    let live = uses.iter().zip(next).map(|(now, next)| {
        let alone = sum(&kept).saturating_add(sum(now));
        let ahead = next.iter().find(|unit| request.prefetch && !now.contains(unit));
        let both = ahead.map_or(alone, |&unit| alone.saturating_add(elems[unit]));
        if both <= request.max_live_elems { both } else { alone }
    });
    live.max().unwrap_or(0)
}

/// Flat fp32 gradients of a unit; where one unit's parameters are tied into another, its gradient stays
/// while the others come and go.
fn scratch_bytes(layout: &Layout) -> Result<u64, ShardError> {
    let tied: Vec<usize> = layout.ties().map(|(_, _, id)| id.unit).collect();
    let elems = |tied_ones: bool| {
        let units = layout.units().iter().enumerate().filter(|(i, _)| tied.contains(i) == tied_ones);
        units.map(|(_, u)| u.padded_elems).max().unwrap_or(0)
    };
    let bytes = elems(true).checked_add(elems(false)).and_then(|n| n.checked_mul(4));
    bytes.ok_or_else(|| ShardError::TooLarge { what: "gradients of a unit".to_owned() })
}

/// Stage 3 over several nodes, in each way; none where there is one node.
fn topologies(request: &Request) -> Result<Vec<Topology>, ShardError> {
    if request.nodes == 1 || request.offload_params != Tier::Device {
        return Ok(Vec::new());
    }
    let ways = [
        ("over all GPUs, one ring", Sharding::Flat, Routing::Ring),
        ("over all GPUs, node by node", Sharding::Flat, Routing::TwoLevel),
        ("and a copy in each node (hpZ)", Sharding::Secondary, Routing::TwoLevel),
        ("within a node, nodes alike (MiCS, HSDP)", Sharding::Replicated, Routing::TwoLevel),
    ];
    let topology = |(name, sharding, routing)| {
        let layout = layout(request, sharding)?;
        let widths = request.widths();
        let traffic = layout.step_traffic(ZeroStage::Three, &widths, request.grad_accum, routing)?;
        Ok(Topology {
            name,
            states_bytes: layout.state_bytes(ZeroStage::Three, &widths)?.total_bytes(),
            sent_bytes: traffic.rank_total_bytes(),
            node_egress_bytes: traffic.group_egress_bytes,
        })
    };
    ways.into_iter().map(topology).collect()
}
