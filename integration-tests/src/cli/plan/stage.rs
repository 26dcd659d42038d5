//! Memory and traffic of one stage, exact except for the activations.

use serde::Serialize;
use zero_shard::{
    ActivationBytes, ActivationOptions, Grid, GridLayout, Layout, MemoryModel, Placement, Routing, ShardError,
    Sharding, ZeroStage,
};

use super::request::Request;
use crate::trainer::device_steps;

/// Figures of one stage for one GPU.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Stage {
    pub(super) stage: u8,
    /// Whether the configuration file selects this stage.
    pub(super) configured: bool,
    /// Parameters, gradients and optimizer state on all devices.
    pub(super) states_bytes: u64,
    pub(super) gpu: Gpu,
    /// Host memory for this GPU.
    pub(super) host_bytes: u64,
    /// Disk space for this GPU.
    pub(super) nvme_bytes: u64,
    pub(super) sent: Sent,
    /// Whether `gpu.total_bytes` fits the memory of the GPU; `None` if that is unknown.
    pub(super) fits: Option<bool>,
    /// Parameters of the largest model that fits with these activations, buckets and gathered units.
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

/// Upper bounds of the bytes sent per step.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Sent {
    pub(super) reduce_scatter_bytes: u64,
    pub(super) all_gather_bytes: u64,
    pub(super) all_reduce_bytes: u64,
    pub(super) total_bytes: u64,
    /// Bytes that leave each node; 0 with one node.
    pub(super) node_egress_bytes: u64,
}

/// The layout of the model over the GPUs.
pub(super) fn layout(request: &Request, sharding: Sharding) -> Result<GridLayout, ShardError> {
    let grid = Grid::new(request.gpus, request.gpus / request.nodes)?;
    GridLayout::new(&request.model.units, grid, sharding, request.model.options.clone())
}

/// Computes the figures of `stage`.
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
    let mut placement = Placement::offload_optimizer(stage, request.offload.optimizer.tier());
    if stage.shards_params() {
        placement.params = request.offload.params.tier();
    }
    let activations = ActivationOptions::new(request.micro_batch, request.seq_len, widths.param_bytes)
        .checkpointing(request.checkpointing);
    let largest_unit = layout.units().iter().map(|u| u.padded_elems).max().unwrap_or(0);
    let bucket_limit = if request.trims_bucket { largest_unit } else { u64::MAX };
    Ok(MemoryModel::state_only(stage, widths)
        .placement(placement)
        .gathered_elems(gathered_elems(request, layout))
        .bucket_elems(request.bucket_elems.min(bucket_limit).max(request.gpus))
        .buckets(2)
        .scratch_bytes(scratch_bytes(layout)?.saturating_add(device_steps(request.gpus as usize).bytes(1) as u64))
        .sub_group_elems(request.sub_group_elems.min(layout.shard_elems()))
        .sub_group_buffers(request.offload.buffers as u64)
        .activations_bytes(ActivationBytes::estimate(&request.model.shape, &activations)?.total_bytes()))
}

/// Peak number of gathered elements in the trainer's order: units up to the persistence threshold stay gathered; the
/// next units are gathered while the current one is in use, as far as they fit the limits.
fn gathered_elems(request: &Request, layout: &Layout) -> u64 {
    let elems: Vec<u64> = layout.units().iter().map(|u| u.padded_elems).collect();
    let sum = |units: &[usize]| units.iter().fold(0, |sum: u64, &unit| sum.saturating_add(elems[unit]));
    let (kept, others): (Vec<usize>, Vec<usize>) =
        (0..elems.len()).partition(|&unit| elems[unit] <= request.persistence_threshold_elems);
    let needed = |unit| layout.units_needed_by(unit).into_iter().filter(|unit| others.contains(unit)).collect();
    let forward: Vec<Vec<usize>> = (0..elems.len()).map(needed).collect();
    let uses: Vec<&[usize]> = forward.iter().chain(forward.iter().rev()).map(Vec::as_slice).collect();
    let live = uses.iter().enumerate().map(|(at, now)| {
        let alone = sum(&kept).saturating_add(sum(now));
        let last = if request.prefetch_elems.is_some() { uses.len() } else { uses.len().min(at + 2) };
        let mut ahead: Vec<usize> = Vec::new();
        for &unit in uses[at + 1..last].iter().copied().flatten().filter(|unit| !now.contains(unit)) {
            let with = sum(&ahead).saturating_add(elems[unit]);
            let fits = match request.prefetch_elems {
                None => ahead.is_empty(),
                Some(limit) => limit > 0 && (ahead.is_empty() || with <= limit),
            };
            if ahead.contains(&unit) {
                continue;
            }
            if !fits || alone.saturating_add(with) > request.max_live_elems {
                break;
            }
            ahead.push(unit);
        }
        // Kept units are freed before the limit is exceeded by anything but the use itself.
        alone.saturating_add(sum(&ahead)).min(request.max_live_elems.max(sum(now)))
    });
    live.max().unwrap_or(0)
}

/// Bytes of flat fp32 gradients. The gradient of a unit whose parameters are tied into another unit stays allocated
/// beside that of the current unit.
fn scratch_bytes(layout: &Layout) -> Result<u64, ShardError> {
    let tied: Vec<usize> = layout.ties().map(|(_, _, id)| id.unit).collect();
    let elems = |tied_ones: bool| {
        let units = layout.units().iter().enumerate().filter(|(i, _)| tied.contains(i) == tied_ones);
        units.map(|(_, u)| u.padded_elems).max().unwrap_or(0)
    };
    let bytes = elems(true).checked_add(elems(false)).and_then(|n| n.checked_mul(4));
    bytes.ok_or_else(|| ShardError::TooLarge { what: "gradients of a unit".to_owned() })
}
