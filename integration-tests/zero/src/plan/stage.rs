//! Memory and traffic of one stage, exact except for the activations of a model whose shape is
//! assumed.

use std::num::NonZero;

use serde::Serialize;
use zero_shard::{
    ActivationBytes, ActivationOptions, Grid, GridLayout, Layout, MemoryModel, ParamSpec,
    Placement, Routing, ShardError, Sharding, StateBytes, StepTraffic, Tier, UnitLayout, ZeroStage,
};

use super::request::PlanRequest;
use super::simulate::result::Simulated;
use super::transfers::{Transfers, Wear, transfers};
use crate::memory::rank_overhead_bytes;
use crate::settings::communication::BUCKET_ELEMS;
use zero_kernels::cuda::orthogonalise_scratch_elems;
use zero_models::GpuBytes;
use zero_models::cuda::matmul::{self, PRODUCTS_WORKSPACE_BYTES};
use zero_models::{TensorBytes, TensorElems};
use zero_trainer::{
    OffloadSettings, RankBytes, Settings, device_steps, encoded_bytes, gathers, held_matrix_bytes,
    matrix_bytes, piece_elems, planned_matrices, scratch_elems,
};

/// Memory of a GPU that is left for the CUDA context and its libraries by the default of
/// `recompute_gelu` and by `--stage auto`. The default depends on the total memory of the card: its
/// free memory differs from start to start. `run.json` records the choice, and a resumed run keeps
/// it.
pub(crate) const CONTEXT_BYTES: u64 = 1 << 30;

/// Figures of one stage for one GPU.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Stage {
    pub(crate) stage: u8,
    /// Whether the configuration file selects this stage.
    pub(crate) configured: bool,
    /// Whether GELU's output is recomputed in backward.
    pub(crate) recompute_gelu: bool,
    /// Parameters, gradients and optimizer state on all devices.
    pub(crate) states_bytes: u64,
    pub(crate) gpu: Gpu,
    /// Host memory for this GPU; 0 on a host, whose ranks have it in `gpu.total_bytes`.
    pub(crate) host_bytes: u64,
    pub(crate) host: Host,
    /// Disk space for this GPU.
    pub(crate) nvme_bytes: u64,
    pub(crate) nvme: Nvme,
    /// Bytes of a step between the tiers; empty without offload.
    pub(crate) transfers: Vec<Transfers>,
    /// The wear of a drive, if anything is on NVMe.
    pub(crate) wear: Option<Wear>,
    /// Memory of a rank that runs on this machine's cores instead of a GPU, and saves checkpoints.
    /// `None`: more than 64 bits can count.
    pub(crate) on_cores: Option<RankBytes>,
    /// Memory of one process with all of these ranks.
    pub(crate) process_bytes: Option<u64>,
    pub(crate) sent: Sent,
    /// Whether `gpu.total_bytes` fits the memory of the GPU; `None` if that is unknown.
    pub(crate) fits: Option<bool>,
    /// Parameters of the largest transformer of typical shape that fits; see [`super::largest`].
    pub(crate) largest_model_params: Option<u64>,
    /// The longest sequence of this model that fits; `None` if the memory of a GPU is unknown.
    pub(crate) longest_seq_len: Option<u64>,
    /// The simulated step; `None` without `--simulate`, for a model of assumed shape, or if groups
    /// of ranks do not fit the stage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) simulated: Option<Simulated>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Gpu {
    pub(crate) params_bytes: u64,
    pub(crate) grads_bytes: u64,
    pub(crate) optimizer_bytes: u64,
    pub(crate) gathered_bytes: u64,
    pub(crate) buckets_bytes: u64,
    pub(crate) scratch_bytes: u64,
    /// The part of `scratch_bytes` that only a GPU has: the workspace of matrix products.
    pub(crate) matmul_workspace_bytes: u64,
    pub(crate) activations_bytes: u64,
    /// Buffers of transfers to and from host memory.
    pub(crate) staging_bytes: u64,
    pub(crate) total_bytes: u64,
}

/// Host memory for one GPU.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Host {
    pub(crate) params_bytes: u64,
    pub(crate) grads_bytes: u64,
    pub(crate) optimizer_bytes: u64,
    /// Copies of parameters that are on the GPU.
    pub(crate) copies_bytes: u64,
    /// Buffers of transfers to and from NVMe.
    pub(crate) staging_bytes: u64,
    pub(crate) activations_bytes: u64,
    /// None: moments are decoded where they are updated. For scripts that read it.
    pub(crate) workspace_bytes: u64,
}

/// Disk space for one GPU.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Nvme {
    pub(crate) params_bytes: u64,
    pub(crate) optimizer_bytes: u64,
}

/// Upper bounds of the bytes sent per step.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Sent {
    pub(crate) reduce_scatter_bytes: u64,
    pub(crate) all_gather_bytes: u64,
    pub(crate) all_reduce_bytes: u64,
    /// Activations, between ranks that share sequences, quantised gradients, and Muon's matrices.
    pub(crate) all_to_all_bytes: u64,
    pub(crate) total_bytes: u64,
    /// Bytes that leave each node; 0 with one node.
    pub(crate) node_egress_bytes: u64,
}

#[cfg(test)]
thread_local! {
    /// The units of all layouts and evaluations of this thread, a measure of the time that they
    /// take.
    pub(crate) static UNITS_VISITED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
fn count_units(request: &PlanRequest) {
    UNITS_VISITED.set(UNITS_VISITED.get() + request.model.units.len());
}

/// The layout of the model over the GPUs with the same part of it.
pub(crate) fn layout(request: &PlanRequest, sharding: Sharding) -> Result<GridLayout, ShardError> {
    #[cfg(test)]
    count_units(request);
    let cut = request.tensor_ranks() as u64;
    let grid = Grid::new(
        request.machine.gpus / cut,
        request.machine.gpus / request.machine.nodes / cut,
    )?;
    GridLayout::new(
        &request.model.units,
        grid,
        sharding,
        request.run.aligned(request.model.options.clone()),
    )
}

/// Computes the figures of `stage`. If the request does not say whether to recompute GELU's output,
/// it is recomputed where the memory of the GPU is too small otherwise.
pub(crate) fn evaluate(request: &PlanRequest, stage: ZeroStage) -> Result<Stage, ShardError> {
    evaluate_on(request, &layout(request, Sharding::Flat)?, stage)
}

/// As [`evaluate`], on the flat `layout` of the request.
pub(crate) fn evaluate_on(
    request: &PlanRequest,
    layout: &GridLayout,
    stage: ZeroStage,
) -> Result<Stage, ShardError> {
    let kept = evaluate_with(
        request,
        layout,
        stage,
        request.recompute_gelu.unwrap_or(false),
    )?;
    match request.machine.gpu_memory_bytes {
        Some(memory)
            if request.recompute_gelu.is_none()
                && request.can_recompute_gelu()
                && kept.gpu.total_bytes.saturating_add(CONTEXT_BYTES) > memory =>
        {
            evaluate_with(request, layout, stage, true)
        }
        _ => Ok(kept),
    }
}

/// Whether the run fits a GPU at `stage`, as [`evaluate`] has it; false if its memory is unknown.
pub(crate) fn fits(request: &PlanRequest, stage: ZeroStage) -> Result<bool, ShardError> {
    fits_on(request, &layout(request, Sharding::Flat)?, stage)
}

/// As [`fits`], on the flat `layout` of the request.
pub(crate) fn fits_on(
    request: &PlanRequest,
    layout: &GridLayout,
    stage: ZeroStage,
) -> Result<bool, ShardError> {
    if request.machine.gpu_memory_bytes.is_none() {
        return Ok(false);
    }
    if let Some(fits) = fits_host(request, layout, stage) {
        return Ok(fits);
    }
    WithoutActivations::new(request, layout, stage)?.fits(request)
}

/// Whether a rank fits its part of a host's memory, which has offloaded state, too; `None` on GPUs.
pub(crate) fn fits_host(
    request: &PlanRequest,
    layout: &GridLayout,
    stage: ZeroStage,
) -> Option<bool> {
    let settings = request.settings(stage, request.largest_trained(layout.parts()));
    let need = host_rank_bytes(request, &settings, layout.parts())?;
    Some(need <= request.machine.gpu_memory_bytes.unwrap_or(0))
}

/// The memory of a rank that the request has on a host and that saves checkpoints; `None` on GPUs.
fn host_rank_bytes(request: &PlanRequest, settings: &Settings, layout: &Layout) -> Option<u64> {
    let overhead = rank_overhead_bytes(request.machine.host_threads?);
    let need = on_cores(request, settings, layout);
    Some(need.map_or(u64::MAX, |need| need.total().saturating_add(overhead)))
}

/// The memory of a run without its activations. It depends on whether a step has several
/// micro-batches, and not on their number or size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WithoutActivations {
    state: StateBytes,
    updated_elems: u64,
    model: MemoryModel,
}

impl WithoutActivations {
    /// `layout`: the flat one of the request.
    pub(crate) fn new(
        request: &PlanRequest,
        layout: &GridLayout,
        stage: ZeroStage,
    ) -> Result<Self, ShardError> {
        let settings = request.settings(stage, request.largest_trained(layout.parts()));
        let over_groups = settings.mesh.layouts(layout.parts())?;
        let (state, updated_elems) = state(&settings, &over_groups)?;
        Ok(Self {
            state,
            updated_elems,
            model: memory_model(request, &settings, layout.parts())?,
        })
    }

    /// Whether the run fits a GPU; false if its memory is unknown.
    pub(crate) fn fits(&self, request: &PlanRequest) -> Result<bool, ShardError> {
        let Some(memory) = request.machine.gpu_memory_bytes else {
            return Ok(false);
        };
        // Without a request, it is recomputed where the model does not fit otherwise.
        let recompute_gelu = request
            .recompute_gelu
            .unwrap_or(request.can_recompute_gelu());
        let model = with_activations(self.model, request, recompute_gelu)?;
        let footprint = model.footprint(&self.state, self.updated_elems)?;
        Ok(footprint.device.total_bytes()? <= memory)
    }
}

/// The state of a rank, and the elements that it updates. What is frozen, small or updated by another
/// rule has other state.
fn state(settings: &Settings, over_groups: &GridLayout) -> Result<(StateBytes, u64), ShardError> {
    let (stage, widths) = (settings.stage, settings.widths());
    let of_groups = || {
        let groups = settings.resolve_groups(over_groups.parts()).ok()?;
        let state = groups.grid_bytes(over_groups, stage, &widths)?;
        Some((
            state,
            groups.updated_elems(over_groups.optimizer(0).0, stage)?,
        ))
    };
    match of_groups() {
        Some(of_groups) => Ok(of_groups),
        None => Ok((
            over_groups.state_bytes(stage, &widths)?,
            over_groups.updated_elems(stage),
        )),
    }
}

fn evaluate_with(
    request: &PlanRequest,
    layout: &GridLayout,
    stage: ZeroStage,
    recompute_gelu: bool,
) -> Result<Stage, ShardError> {
    let settings = request.settings(stage, request.largest_trained(layout.parts()));
    let over_groups = settings.mesh.layouts(layout.parts())?;
    let (state, updated_elems) = state(&settings, &over_groups)?;
    let model = memory_model(request, &settings, layout.parts())?;
    let model = with_activations(model, request, recompute_gelu)?;
    let on_cores = on_cores(request, &settings, layout.parts());
    let footprint = model.footprint(&state, updated_elems)?;
    let (gpu, host, nvme) = (footprint.device, footprint.host, footprint.nvme);
    let (transfers, wear) = transfers(
        request,
        &settings,
        layout.parts(),
        model.host_activations_bytes,
    );
    let on_host = host_rank_bytes(request, &settings, layout.parts());
    let (_, held) = matrix_buffers(request, &settings, &over_groups);
    let total_bytes = match on_host {
        Some(bytes) => bytes,
        None => gpu.total_bytes()?,
    };
    let host_bytes = match on_host {
        Some(_) => 0,
        None => host.total_bytes()?.saturating_add(held),
    };

    Ok(Stage {
        stage: stage.number(),
        configured: request.configured_stage == Some(stage),
        recompute_gelu,
        states_bytes: state.total_bytes(),
        gpu: Gpu {
            params_bytes: gpu.state.params_bytes,
            grads_bytes: gpu.state.grads_bytes,
            optimizer_bytes: gpu.state.optimizer_bytes,
            gathered_bytes: gpu.gathered_bytes,
            buckets_bytes: gpu.buckets_bytes,
            scratch_bytes: gpu.scratch_bytes,
            matmul_workspace_bytes: matmul_workspace_bytes(request),
            activations_bytes: gpu.activations_bytes,
            staging_bytes: gpu.staging_bytes,
            total_bytes,
        },
        host_bytes,
        host: Host {
            params_bytes: host.state.params_bytes,
            grads_bytes: host.state.grads_bytes,
            optimizer_bytes: host.state.optimizer_bytes,
            copies_bytes: host.copies_bytes,
            staging_bytes: host.staging_bytes,
            activations_bytes: host.activations_bytes,
            workspace_bytes: if on_host.is_some() { 0 } else { held },
        },
        nvme_bytes: nvme.total_bytes()?,
        nvme: Nvme {
            params_bytes: nvme.state.params_bytes,
            optimizer_bytes: nvme.state.optimizer_bytes,
        },
        transfers,
        wear,
        on_cores,
        process_bytes: on_cores.and_then(|rank| process_bytes(request, &rank)),
        sent: all_sent(request, layout, &over_groups, &settings)?,
        fits: request
            .machine
            .gpu_memory_bytes
            .map(|memory| total_bytes <= memory),
        largest_model_params: None,
        longest_seq_len: None,
        simulated: None,
    })
}

/// Upper bounds of all bytes that a rank sends in a step, and that leave a node. `layout` has the
/// nodes, `over_groups` the groups.
fn all_sent(
    request: &PlanRequest,
    layout: &GridLayout,
    over_groups: &GridLayout,
    settings: &Settings,
) -> Result<Sent, ShardError> {
    let (sent, node_egress_bytes) = sent(layout, over_groups, settings)?;
    let all_to_all_bytes = all_to_all_bytes(request);
    let of_matrices = exchanged_bytes(request, over_groups, settings);
    let of_parts = tensor_bytes(request);
    // Each GPU of a node's tensor parallelism sends to other nodes what the first does.
    let cut = request.tensor_ranks() as u64;
    let of_node = (request.machine.gpus / request.machine.nodes / cut) as usize;
    let mesh = &settings.mesh;
    let sequences_egress_bytes = mesh.sequence_egress_bytes(of_node, all_to_all_bytes);
    let matrices_egress_bytes = match request.machine.nodes {
        1 => 0,
        nodes => of_matrices.saturating_mul(request.machine.gpus / nodes),
    };

    Ok(Sent {
        reduce_scatter_bytes: sent
            .reduce_scatter_bytes
            .saturating_add(of_parts.reduce_scatter),
        all_gather_bytes: sent.all_gather_bytes.saturating_add(of_parts.all_gather),
        all_reduce_bytes: sent.all_reduce_bytes.saturating_add(of_parts.all_reduce),
        all_to_all_bytes: all_to_all_bytes
            .saturating_add(sent.all_to_all_bytes)
            .saturating_add(of_matrices),
        total_bytes: sent
            .total_bytes()
            .saturating_add(all_to_all_bytes)
            .saturating_add(of_matrices)
            .saturating_add(of_parts.total()),
        node_egress_bytes: node_egress_bytes
            .saturating_mul(cut)
            .saturating_add(sequences_egress_bytes.saturating_mul(cut))
            .saturating_add(matrices_egress_bytes),
    })
}

/// The bytes of activations that a rank sends to those that share its sequences in a step; 0 if the
/// model's shape is assumed.
fn all_to_all_bytes(request: &PlanRequest) -> u64 {
    let elems = request
        .model_options(false)
        .map_or(0, |(config, options)| config.sequence_elems(&options));
    let bytes = elems.saturating_mul(request.run.dtype.size_bytes() as u64);
    bytes.saturating_mul(request.grad_accum())
}

/// The bytes that the rank that sends the most sends in Muon's exchanges of a step.
fn exchanged_bytes(request: &PlanRequest, over_groups: &GridLayout, settings: &Settings) -> u64 {
    let cut_of = |param: &ParamSpec| request.model.cut_of(param);
    let Ok(Some(matrices)) = planned_matrices(settings, over_groups, cut_of) else {
        return 0;
    };
    let updaters = matrices.updaters();
    let ranks = 0..updaters.world_size();
    let most = ranks.map(|rank| updaters.sent_elems(rank)).max();
    most.unwrap_or(0).saturating_mul(size_of::<f32>() as u64)
}

/// Buffers of Muon's updates in the memory of a GPU and of its host.
fn matrix_buffers(
    request: &PlanRequest,
    settings: &Settings,
    over_groups: &GridLayout,
) -> (u64, u64) {
    let cut_of = |param: &ParamSpec| request.model.cut_of(param);
    let scratch_elems =
        |rows, cols| orthogonalise_scratch_elems(rows, cols, PRODUCTS_WORKSPACE_BYTES);
    // Rules without a match are refused before.
    let on_gpu = matrix_bytes(settings, over_groups, cut_of, scratch_elems);
    let on_host = held_matrix_bytes(settings, over_groups, cut_of);
    (on_gpu.unwrap_or(0), on_host.unwrap_or(0))
}

/// The bytes that a rank sends in the collectives of tensor parallelism in a step.
fn tensor_bytes(request: &PlanRequest) -> TensorBytes {
    let elems = request
        .model_options(false)
        .map_or_else(TensorElems::default, |(config, options)| {
            config.tensor_elems(&options, true)
        });
    let of_micro_batch = elems.bytes(request.run.dtype.size_bytes() as u64);
    let of_step = |bytes: u64| bytes.saturating_mul(request.grad_accum());
    TensorBytes {
        all_reduce: of_step(of_micro_batch.all_reduce),
        reduce_scatter: of_step(of_micro_batch.reduce_scatter),
        all_gather: of_step(of_micro_batch.all_gather),
    }
}

/// The same of the collectives of ZeRO alone.
fn sent(
    layout: &GridLayout,
    over_groups: &GridLayout,
    settings: &Settings,
) -> Result<(StepTraffic, u64), ShardError> {
    let stage = settings.stage;
    let widths = settings.widths();
    let reductions = settings.reductions();
    if settings.mesh.shard_group.is_none() {
        let routing = match settings.mesh.two_level {
            Some(_) => Routing::TwoLevel,
            None => Routing::Ring,
        };
        let sent = layout.step_traffic(stage, &widths, reductions, routing)?;
        let Some(adapters) = settings.adapter_layout(layout.parts())? else {
            return Ok((sent.rank, sent.group_egress_bytes));
        };
        let node = layout.grid().group_size();
        let adapters = GridLayout::of_parts(adapters, node, layout.sharding())?;
        let trained = adapters.step_traffic(stage, &widths, reductions, routing)?;
        if !stage.shards_params() {
            return Ok((trained.rank, trained.group_egress_bytes));
        }
        // The bytes that leave a node are an upper bound.
        let mut rank = trained.rank;
        rank.all_gather_bytes = sent.rank.all_gather_bytes;
        return Ok((rank, sent.group_egress_bytes));
    }
    let axes = settings.axis_traffic(over_groups)?;
    let node = layout.grid().group_size();
    let egress = axes.node_egress_bytes(&over_groups.grid(), node)?;
    Ok((axes.rank()?, egress))
}

/// The memory without activations; see [`with_activations`].
fn memory_model(
    request: &PlanRequest,
    settings: &Settings,
    layout: &Layout,
) -> Result<MemoryModel, ShardError> {
    #[cfg(test)]
    count_units(request);
    let (widths, offload) = (settings.widths(), &settings.offload);
    let over_groups = settings.mesh.layouts(layout)?;
    let mut placement = Placement::offload_optimizer(offload.optimizer.tier());
    placement.params = offload.params.tier();
    if offload.grads_on_file().is_some() {
        placement.grads = Tier::Nvme;
    }

    let peak_live_elems = gathers(settings, layout, &request.model.passes)
        .map_or(0, |planned| planned.peak_live_elems);
    let (of_matrices, _) = matrix_buffers(request, settings, &over_groups);
    // By then no unit is gathered.
    let gathered = match settings.stage.shards_params() {
        true => peak_live_elems.saturating_mul(widths.param_bytes),
        false => 0,
    };
    // Rules without a match are refused before.
    let groups = settings.resolve_groups(layout).ok();
    let rate_sets = groups.map_or(1, |groups| groups.rate_sets(&settings.optimizer));
    let scratch = scratch_bytes(request, settings, layout)?
        .saturating_add(of_matrices.saturating_sub(gathered))
        .saturating_add(device_steps(request.machine.gpus as usize).bytes(rate_sets) as u64)
        .saturating_add(settings.feedback_bytes(&over_groups))
        .saturating_add(encoded_bytes(settings, &over_groups, &request.model.passes));
    Ok(MemoryModel::state_only(settings.stage, widths)
        .placement(placement)
        .gathered_elems(peak_live_elems)
        .bucket_elems(settings.bucket_capacity_elems as u64)
        .buckets(settings.buckets(over_groups.grads(0).0.world_size() as usize, false) as u64)
        .scratch_bytes(scratch)
        .sub_group_elems(piece_elems(settings, layout))
        .sub_group_buffers(offload.buffers as u64)
        .unit_shard_elems(largest(over_groups.grads(0).0, |u| {
            if settings.stage.shards_optimizer() {
                u.shard_elems
            } else {
                u.padded_elems
            }
        }))
        .param_buffers(OffloadSettings::units_ahead(&settings.prefetch, layout) as u64 + 3))
}

/// The memory with the activations of a micro-batch and their workspace.
fn with_activations(
    model: MemoryModel,
    request: &PlanRequest,
    recompute_gelu: bool,
) -> Result<MemoryModel, ShardError> {
    let of_model = match request.model_options(recompute_gelu) {
        Some((config, options)) => config.gpu_bytes(&options),
        None => estimate(request, model.widths.param_bytes, recompute_gelu)?,
    };
    Ok(model
        .scratch_bytes(model.scratch_bytes.saturating_add(of_model.workspace))
        .activations_bytes(of_model.activations)
        .host_activations_bytes(of_model.host))
}

/// The activations of a model whose shape is assumed.
fn estimate(
    request: &PlanRequest,
    elem_bytes: u64,
    recompute_gelu: bool,
) -> Result<GpuBytes, ShardError> {
    let options = ActivationOptions::new(request.micro_batch(), request.rank_tokens(), elem_bytes);
    let options = options
        .checkpointing(request.options.activation_checkpointing)
        .recompute_gelu(recompute_gelu);
    let activations = ActivationBytes::estimate(&request.model.shape, &options)?;
    // Of the inputs of blocks and of the head, three are on the device.
    let layers = request.model.shape.layers;
    let host = match request.run.offload.activations {
        true => activations.blocks_bytes / layers.max(1) * layers.saturating_sub(2),
        false => 0,
    };
    Ok(GpuBytes {
        activations: activations.total_bytes() - host,
        workspace: matmul_workspace_bytes(request),
        host,
    })
}

/// The workspace of matrix products, for the largest weight of a block.
fn matmul_workspace_bytes(request: &PlanRequest) -> u64 {
    let shape = &request.model.shape;
    matmul::workspace_bytes(
        shape
            .hidden
            .saturating_mul(shape.inner.max(shape.hidden.saturating_mul(3))),
    )
}

/// The largest of a unit's sizes.
fn largest(layout: &Layout, size: impl Fn(&UnitLayout) -> u64) -> u64 {
    layout.units().iter().map(size).max().unwrap_or(0)
}

/// The memory of a rank that runs on this machine's cores and saves checkpoints.
fn on_cores(request: &PlanRequest, settings: &Settings, layout: &Layout) -> Option<RankBytes> {
    let activations = match (request.model_options(false), &request.model.config) {
        (Some((config, options)), _) => config.activations_bytes(&options),
        (None, Some(_)) => return None,
        // The host computes in fp32.
        (None, None) => estimate(request, 4, false)
            .ok()
            .and_then(|all| all.activations.checked_add(all.host))?,
    };
    let mut settings = settings.clone();
    // By default that of a host.
    if request.run.bucket_capacity_elems == usize::MAX {
        settings.bucket_capacity_elems = BUCKET_ELEMS.max(request.machine.gpus as usize);
    }
    let model = &request.model;
    let cut_of = |param: &ParamSpec| model.cut_of(param);
    RankBytes::new(&settings, layout, &model.passes, activations, true, cut_of)
}

/// The memory of a process with all ranks.
fn process_bytes(request: &PlanRequest, rank: &RankBytes) -> Option<u64> {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get) as u64;
    let overhead = rank_overhead_bytes((cores / request.machine.gpus).max(1));
    rank.total()
        .checked_add(overhead)?
        .checked_mul(request.machine.gpus)
}

/// Bytes of flat fp32 gradients.
fn scratch_bytes(
    request: &PlanRequest,
    settings: &Settings,
    layout: &Layout,
) -> Result<u64, ShardError> {
    let passes = &request.model.passes;
    let elems = scratch_elems(settings, layout, passes, &|pass, _| {
        zero_models::writes_grad(passes.len(), pass)
    });
    let bytes = elems.and_then(|elems| elems.checked_mul(4));
    bytes.ok_or_else(|| ShardError::TooLarge {
        what: "gradients of a unit".to_owned(),
    })
}
