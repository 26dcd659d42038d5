//! The memory of a rank on the host, computed before it starts.

use zero_alloc::device::DType;
use zero_optim::StateKind;
use zero_shard::Layout;

use super::gradients::scratch_slots;
use super::rank::Settings;
use super::stage::device_steps;
use crate::model::Pass;

/// Bytes of one rank on the host at the peak of a step, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankBytes {
    /// Parameters, gradients and optimizer state.
    pub state: u64,
    /// Activations.
    pub activations: u64,
    /// Gradient buckets.
    pub buckets: u64,
    /// Units that stage 3 gathers.
    pub gathered: u64,
    /// Flat fp32 gradients of units in backward, and fp32 copies of 16-bit parameters.
    pub workspace: u64,
    /// The copy of the state that is written to a checkpoint in the background.
    pub staging: u64,
}

impl RankBytes {
    /// The bytes of a run whose model has `activations` bytes of activations; `saves` if it writes checkpoints.
    /// `None` if a sum does not fit 64 bits.
    pub fn new(settings: &Settings, layout: &Layout, passes: &[Pass], activations: u64, saves: bool) -> Option<Self> {
        let widths = settings.widths();
        let elems = |unit: &usize| layout.units().get(*unit).map_or(0, |u| u.padded_elems);
        let groups = settings.groups.resolve(layout).ok()?;
        let (_, slots) = scratch_slots(layout, passes, &groups);
        let upcast = |pass: &Pass| pass.forward_reads.iter().map(elems).sum::<u64>();
        let upcast = if settings.dtype == DType::F32 { 0 } else { passes.iter().map(upcast).max().unwrap_or(0) };
        let scratch = slots.iter().map(|&elems| elems as u64).sum::<u64>().checked_add(upcast)?;
        let rate_sets = groups.rate_sets(&settings.optimizer);
        let steps = device_steps(layout.world_size() as usize).bytes(rate_sets) as u64;
        let buckets = (settings.bucket_capacity_elems as u64).max(layout.world_size());
        let gathered = if settings.stage.shards_params() { gathered_elems(settings, layout, passes) } else { 0 };
        let saved = if saves { layout.shard_elems() } else { 0 };
        Some(Self {
            state: groups.state_bytes(layout, settings.stage, &widths)?.total_bytes(),
            activations,
            buckets: buckets.checked_mul(2 * widths.comm_grad_bytes)?,
            gathered: gathered.checked_mul(widths.param_bytes)?,
            workspace: scratch.checked_mul(size_of::<f32>() as u64)?.checked_add(steps)?,
            staging: saved.checked_mul((StateKind::ALL.len() * size_of::<f32>()) as u64)?,
        })
    }

    /// The sum.
    pub fn total(&self) -> u64 {
        let parts = [self.state, self.activations, self.buckets, self.gathered, self.workspace, self.staging];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}

/// The most elements that are gathered at once: those of a pass, of the next uses, and small units that stay gathered.
fn gathered_elems(settings: &Settings, layout: &Layout, passes: &[Pass]) -> u64 {
    let options = settings.prefetch;
    let elems = |unit: usize| layout.units().get(unit).map_or(0, |u| u.padded_elems);
    let is_kept = |unit: &usize| elems(*unit) <= options.persistence_threshold_elems as u64;
    let kept: u64 = (0..layout.units().len()).filter(is_kept).map(elems).sum();
    let forward = passes.iter().map(|pass| &pass.forward_reads);
    let reads: Vec<&Vec<usize>> = forward.chain(passes.iter().rev().map(|pass| &pass.backward_reads)).collect();
    let live = (0..reads.len()).map(|at| {
        let now = reads[at];
        let later = reads[at + 1..].iter().copied().flatten().filter(|unit| !now.contains(unit));
        let units = now.iter().chain(later.take(options.ahead));
        units.copied().filter(|unit| !is_kept(unit)).map(elems).sum::<u64>()
    });
    kept.saturating_add(live.max().unwrap_or(0)).min((options.max_live_elems as u64).max(1))
}
