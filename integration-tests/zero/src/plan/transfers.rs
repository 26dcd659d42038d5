//! Transfers of a step between the tiers, the bandwidth that hides them, and the wear of a drive.
//!
//! ZeRO-Infinity (arXiv 2104.07857, section 4.1): a step that does not overlap its transfers has
//! the efficiency `ait bw / (ait bw + peak)`, with `ait` the FLOPs of the step by the bytes of its
//! transfers. FLOPs are 6 a parameter and token, and 8 if activations are recomputed.

use serde::Serialize;
use zero_optim::Masters;
use zero_shard::{Layout, Tier};

use super::request::PlanRequest;
use zero_trainer::{Settings, gathers};

const SECONDS_A_DAY: f64 = 86_400.0;

/// The bytes of a step of one GPU between host memory and another tier.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Transfers {
    /// `gpu`, for the link between GPU and host memory, or `nvme`.
    pub(crate) tier: &'static str,
    /// Bytes from the tier to the next one towards the GPU.
    pub(crate) read_bytes: u64,
    /// Bytes to the tier.
    pub(crate) written_bytes: u64,
    /// By the elements that a GPU updates.
    pub(crate) read_bytes_per_param: f64,
    pub(crate) written_bytes_per_param: f64,
    /// FLOPs of the step by these bytes.
    pub(crate) flops_per_byte: f64,
    /// The bandwidth of one GPU's share at which transfers take as long as compute: half the
    /// efficiency without overlap.
    pub(crate) half_efficiency_bytes_per_s: f64,
    /// The bandwidth that hides the transfers: those of the update behind one forward, and all
    /// behind the step.
    pub(crate) hiding_bytes_per_s: f64,
}

/// The wear of a drive that the GPUs of a node share, if a step takes as long as its compute, or as
/// the drive needs for its transfers.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Wear {
    /// The time of a step.
    pub(crate) step_s: f64,
    /// Whether the drive takes longer than compute.
    pub(crate) waits_for_drive: bool,
    pub(crate) written_bytes_per_day: f64,
    /// Days until the rated bytes are written.
    pub(crate) rated_days: f64,
}

/// Bytes read and written.
#[derive(Clone, Copy, Debug, Default)]
struct Bytes {
    /// By the update of the parameters.
    update: [u64; 2],
    /// By forward and backward.
    compute: [u64; 2],
}

/// The transfers of a step and the wear, if anything is offloaded.
pub(crate) fn transfers(
    request: &PlanRequest,
    settings: &Settings,
    layout: &Layout,
    checkpoints_bytes: u64,
) -> (Vec<Transfers>, Option<Wear>) {
    let updated = updated_elems(settings, layout);
    let (link, nvme) = moved(request, settings, layout, checkpoints_bytes);
    let work = Work::new(request, layout);
    let mut tiers = Vec::new();
    for (tier, bytes) in [("gpu", link), ("nvme", nvme)] {
        tiers.extend(work.transfers(tier, bytes, updated));
    }
    let nvme = tiers.iter().find(|transfers| transfers.tier == "nvme");
    let wear = nvme.map(|nvme| work.wear(request, nvme));
    (tiers, wear)
}

/// The parameters that a rank updates.
fn updated_elems(settings: &Settings, layout: &Layout) -> u64 {
    let over_groups = settings.mesh.layouts(layout);
    match over_groups {
        Ok(layouts) if settings.stage.shards_optimizer() => layouts.optimizer(0).0.shard_elems(),
        _ => layout.padded_elems(),
    }
}

/// The bytes of a step between GPU and host memory, and between host memory and NVMe.
fn moved(
    request: &PlanRequest,
    settings: &Settings,
    layout: &Layout,
    checkpoints_bytes: u64,
) -> (Bytes, Bytes) {
    let widths = settings.widths();
    let offload = &settings.offload;
    let accum = request.grad_accum();
    let updated = updated_elems(settings, layout);
    let bytes = |elems: u64, width: u64| elems.saturating_mul(width);
    let params = bytes(updated, widths.param_bytes);
    let gathered = gathers(settings, layout, &request.model.passes)
        .map_or(0, |planned| planned.gathered_elems);
    let over_groups = settings.mesh.layouts(layout);
    let holders = over_groups.map_or(layout.world_size(), |all| all.optimizer(0).0.world_size());
    let gathered = bytes(gathered / holders, widths.param_bytes);

    let mut link = Bytes::default();
    let mut nvme = Bytes::default();
    if offload.updates_on_host() {
        link.compute[1] = bytes(updated, widths.comm_grad_bytes).saturating_mul(accum);
    }

    match offload.params.tier() {
        Tier::Device if offload.updates_on_host() => link.update[0] = params,
        Tier::Device => {}
        _ => link.compute[0] = gathered,
    }

    if offload.activations {
        link.compute
            .iter_mut()
            .for_each(|n| *n = n.saturating_add(checkpoints_bytes.saturating_mul(accum)));
    }

    if offload.optimizer.tier() == Tier::Nvme {
        nvme.update = [widths.optimizer.bytes(updated).unwrap_or(u64::MAX); 2];
    }
    if offload.params.tier() == Tier::Nvme {
        // An update reads parameters that are the masters, or a part of them.
        let reads =
            settings.dtype.size_bytes() == 4 || offload.format.masters == Masters::Remainder;
        nvme.update[0] = nvme.update[0].saturating_add(if reads { params } else { 0 });
        nvme.update[1] = nvme.update[1].saturating_add(params);
        nvme.compute[0] = gathered;
    }

    if offload.grads_on_file().is_some() {
        // Each micro-batch writes the sum, all but the first read it before, and the update reads
        // it.
        let sums = bytes(updated, widths.grad_bytes);
        nvme.compute[0] = nvme.compute[0].saturating_add(sums.saturating_mul(accum - 1));
        nvme.compute[1] = sums.saturating_mul(accum);
        nvme.update[0] = nvme.update[0].saturating_add(sums);
    }

    (link, nvme)
}

/// The work of a step on one GPU.
struct Work {
    flops: f64,
    /// Time of forward and backward at the peak of the GPU.
    compute_s: f64,
    /// Time of the forward of a micro-batch.
    forward_s: f64,
}

impl Work {
    fn new(request: &PlanRequest, layout: &Layout) -> Self {
        let numel = layout.numel_elems() as f64;
        let micro_tokens = request.micro_batch() as f64 * request.rank_tokens() as f64;
        let flops_per_token = if request.options.activation_checkpointing {
            8.0
        } else {
            6.0
        } * numel;
        let flops = flops_per_token * micro_tokens * request.grad_accum() as f64;
        let peak = request.machine.peak_tflops * 1e12;
        Self {
            flops,
            compute_s: flops / peak,
            forward_s: 2.0 * numel * micro_tokens / peak,
        }
    }

    /// The transfers of `bytes`, if there are any, where a rank updates `updated` parameters.
    fn transfers(&self, tier: &'static str, bytes: Bytes, updated: u64) -> Option<Transfers> {
        let Bytes { update, compute } = bytes;
        let read_bytes = update[0].saturating_add(compute[0]);
        let written_bytes = update[1].saturating_add(compute[1]);
        let all = read_bytes as f64 + written_bytes as f64;
        let of_update = update[0] as f64 + update[1] as f64;
        (all > 0.0).then(|| Transfers {
            tier,
            read_bytes,
            written_bytes,
            read_bytes_per_param: read_bytes as f64 / updated as f64,
            written_bytes_per_param: written_bytes as f64 / updated as f64,
            flops_per_byte: self.flops / all,
            half_efficiency_bytes_per_s: all / self.compute_s,
            hiding_bytes_per_s: (all / self.compute_s).max(of_update / self.forward_s),
        })
    }

    /// The wear of the drive of a node.
    fn wear(&self, request: &PlanRequest, nvme: &Transfers) -> Wear {
        let gpus = (request.machine.gpus / request.machine.nodes) as f64;
        let drive_s = nvme.read_bytes.max(nvme.written_bytes) as f64 * gpus
            / request.machine.drive_bytes_per_s;
        let step_s = self.compute_s.max(drive_s);
        let written_bytes_per_day = nvme.written_bytes as f64 * gpus / step_s * SECONDS_A_DAY;
        Wear {
            step_s,
            waits_for_drive: drive_s > self.compute_s,
            written_bytes_per_day,
            rated_days: request.machine.drive_tbw * 1e12 / written_bytes_per_day,
        }
    }
}
