//! The memory of a rank on the host, computed before it starts.
//!
//! Why here: `RankBytes` counts a rank whose device is the host, and what a GPU's rank has in host
//! memory; zero-shard's `MemoryModel` counts the GPU. `zero plan` and the check before a run use
//! the same two, so a run is refused by the number that the plan shows.
//!
//! A `layout` here is over all ranks; the settings have their groups.

use serde::Serialize;
use zero_alloc::device::DType;
use zero_comm::{PlannedStep, plan_step};
use zero_kernels::host::orthogonalise_scratch_elems;
use zero_optim::Matrices;
use zero_shard::{GridLayout, Layout, ParamPlacement, ParamSpec, TensorCut, TensorPart, Tier};

use crate::error::TrainError;
use crate::model::Pass;
use crate::offload::settings::OffloadSettings;
use crate::rank::uses;
use crate::settings::Settings;
use crate::stages::optimizer::device_steps;
use crate::stages::places::places;
use crate::stages::rank_matrices;

/// The alignment of transfers to and from NVMe, in elements: 4 KiB of 16-bit parts.
const PIECE_ALIGN_ELEMS: u64 = 2048;

/// Bytes of one rank on the host at the peak of a step, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
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
    /// Buffers of the update of matrices, without what takes the place of `gathered`, which is free
    /// by then.
    pub matrices: u64,
    /// Buffers of transfers to and from NVMe.
    pub transfers: u64,
    /// The copy of the state that is written to a checkpoint in the background.
    pub staging: u64,
}

impl RankBytes {
    /// The bytes of a rank whose device is the host and whose model has `activations` bytes of
    /// activations; `saves` if it writes checkpoints. `cut_of` returns how tensor parallelism cuts
    /// a parameter. `None` if a sum does not fit 64 bits.
    pub fn new(
        settings: &Settings,
        layout: &Layout,
        passes: &[Pass],
        activations: u64,
        saves: bool,
        cut_of: impl Fn(&ParamSpec) -> TensorCut,
    ) -> Option<Self> {
        let widths = settings.widths();
        let elems = |unit: &usize| layout.units().get(*unit).map_or(0, |u| u.padded_elems);
        let groups = settings.resolve_groups(layout).ok()?;
        let upcast = |pass: &Pass| pass.forward_reads.iter().map(elems).sum::<u64>();
        let upcast = if settings.dtype == DType::F32 {
            0
        } else {
            passes.iter().map(upcast).max().unwrap_or(0)
        };

        // The host's models add to fp32 gradients.
        let scratch =
            scratch_elems(settings, layout, passes, &|_, _| false)?.checked_add(upcast)?;
        let rate_sets = groups.rate_sets(&settings.optimizer);
        let ranks = layout.world_size() as usize * settings.mesh.tensor_ranks.unwrap_or(1);
        let steps = device_steps(ranks).bytes(rate_sets) as u64;
        let reduced_over = settings.mesh.layouts(layout).ok()?.grads(0).0.world_size();
        let count = settings.buckets(reduced_over as usize, true) as u64;
        let buckets = (settings.bucket_capacity_elems as u64)
            .max(reduced_over)
            .checked_mul(count)?;
        let gathered = if settings.stage.shards_params() {
            gathers(settings, layout, passes).ok()?.peak_live_elems
        } else {
            0
        };
        let gathered = gathered.checked_mul(widths.param_bytes)?;

        let layouts = settings.mesh.layouts(layout).ok()?;
        let encoded = encoded_bytes(settings, &layouts, passes);
        // Beside the device, if the update is on the host.
        let held = held_matrix_bytes(settings, &layouts, &cut_of)?;
        let state = groups.grid_bytes(&layouts, settings.stage, &widths)?;
        let in_memory = |tier: Tier, bytes: u64| if tier == Tier::Nvme { 0 } else { bytes };
        let params = in_memory(settings.offload.params.tier(), state.params_bytes);
        let optimizer = in_memory(settings.offload.optimizer.tier(), state.optimizer_bytes);
        let workspace = scratch
            .checked_mul(size_of::<f32>() as u64)?
            .checked_add(steps)?;

        Some(Self {
            state: params
                .checked_add(in_memory(settings.offload.params.tier(), state.grads_bytes))?
                .checked_add(optimizer)?
                .checked_add(settings.feedback_bytes(&layouts))?,
            activations,
            buckets: buckets
                .checked_mul(widths.comm_grad_bytes)?
                .checked_add(encoded)?,
            gathered,
            workspace,
            matrices: matrix_bytes(settings, &layouts, &cut_of, orthogonalise_scratch_elems)?
                .checked_sub(held)?
                .saturating_sub(gathered)
                .checked_add(held)?,
            transfers: transfers(settings, layout)?,
            staging: staging(settings, layout, saves)?,
        })
    }

    /// The host memory of a rank whose device is a GPU, with `checkpoints` bytes of activation
    /// checkpoints on the host; `cut_of` as for [`Self::new`]. `None` if a sum does not fit 64
    /// bits.
    pub fn host_of_gpu(
        settings: &Settings,
        layout: &Layout,
        checkpoints: u64,
        saves: bool,
        cut_of: impl Fn(&ParamSpec) -> TensorCut,
    ) -> Option<Self> {
        let widths = settings.widths();
        let offload = &settings.offload;
        let groups = settings.resolve_groups(layout).ok()?;
        let layouts = settings.mesh.layouts(layout).ok()?;
        let state = groups.grid_bytes(&layouts, settings.stage, &widths)?;
        let on_host = |tier: Tier, bytes: u64| if tier == Tier::Host { bytes } else { 0 };
        let updated = if offload.updates_on_host() {
            groups.updated_elems(layouts.optimizer(0).0, settings.stage)?
        } else {
            0
        };

        // The host updates a copy of parameters that are on the device.
        let copied = if offload.params.tier() == Tier::Device {
            updated
        } else {
            0
        };

        let parts = [
            on_host(offload.params.tier(), state.params_bytes),
            on_host(offload.optimizer.tier(), state.optimizer_bytes),
            if offload.grads_on_file().is_some() {
                0
            } else {
                updated.checked_mul(widths.grad_bytes)?
            },
            copied.checked_mul(widths.param_bytes)?,
        ];

        Some(Self {
            state: parts.into_iter().try_fold(0, u64::checked_add)?,
            activations: if offload.activations { checkpoints } else { 0 },
            matrices: held_matrix_bytes(settings, &layouts, cut_of)?,
            transfers: transfers(settings, layout)?,
            staging: staging(settings, layout, saves)?,
            ..Self::default()
        })
    }

    /// The sum.
    pub fn total(&self) -> u64 {
        let Self {
            state,
            activations,
            buckets,
            gathered,
            workspace,
            matrices,
            transfers,
            staging,
        } = *self;
        let parts = [
            state,
            activations,
            buckets,
            gathered,
            workspace,
            matrices,
            transfers,
            staging,
        ];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}

/// Elements of flat fp32 gradients of units in backward. `writes(pass, unit)`: whether the model's
/// pass writes the gradient of the unit instead of adding to it. `None` if the sum does not fit 64
/// bits, or a rule of tensors has no match.
pub fn scratch_elems(
    settings: &Settings,
    layout: &Layout,
    passes: &[Pass],
    writes: &dyn Fn(usize, usize) -> bool,
) -> Option<u64> {
    let groups = settings.resolve_groups(layout).ok()?;
    let layouts = settings.mesh.layouts(layout).ok()?;
    let (_, slots) = places(settings, layouts.grads(0).0, passes, &groups, writes);
    slots
        .iter()
        .try_fold(0, |sum: u64, &elems| sum.checked_add(elems as u64))
}

/// Elements of the largest sub-group of optimizer state that is read from NVMe at once.
pub fn piece_elems(settings: &Settings, layout: &Layout) -> u64 {
    let held = |u: &zero_shard::UnitLayout| match settings.stage.shards_optimizer() {
        true => u.shard_elems,
        false => u.padded_elems,
    };
    let layouts = settings.mesh.layouts(layout).ok();
    let updated = layouts.as_ref().map_or(layout, |all| all.optimizer(0).0);
    let largest = updated.units().iter().map(held).max().unwrap_or(0);
    let elems = largest.min(settings.optimizer.sub_group_elems as u64);
    elems
        .checked_next_multiple_of(PIECE_ALIGN_ELEMS)
        .unwrap_or(elems)
}

/// Buffers of sub-groups of optimizer state and of shards of units, if those are on NVMe.
fn transfers(settings: &Settings, layout: &Layout) -> Option<u64> {
    let widths = settings.widths();
    let offload = &settings.offload;
    let on_nvme = |tier: Tier, count: u64| if tier == Tier::Nvme { count } else { 0 };
    let pieces = widths.optimizer.bytes(piece_elems(settings, layout))?;
    let pieces = pieces.checked_mul(on_nvme(offload.optimizer.tier(), offload.buffers as u64))?;
    let layouts = settings.mesh.layouts(layout).ok()?;
    let largest = |layout: &Layout| {
        let shards = layout.units().iter().map(|unit| unit.shard_elems);
        shards.max().unwrap_or(0)
    };
    let shard = largest(layouts.optimizer(0).0);
    let reduced = largest(layouts.grads(0).0);
    // Those of units ahead, one in use, one that is updated and one that is written.
    let shards = OffloadSettings::units_ahead(&settings.prefetch, layout) as u64 + 3;
    let shards = on_nvme(offload.params.tier(), shards)
        .checked_mul(shard)?
        .checked_mul(widths.param_bytes)?;
    // Two units that leave the device, and two whose sums are read or written.
    let buffers =
        |elems: u64, width: u64| on_nvme(offload.params.tier(), 2 * width).checked_mul(elems);
    let grads = buffers(reduced, widths.comm_grad_bytes)?
        .checked_add(buffers(shard, widths.grad_bytes)?)?;

    pieces.checked_add(shards)?.checked_add(grads)
}

/// The matrices of the first rank, if Muon updates some, before a run. `cut_of` returns how tensor
/// parallelism cuts a parameter.
///
/// # Errors
/// A rule of tensors has no match, or the matrices are not all of their tensors.
pub fn planned_matrices(
    settings: &Settings,
    layouts: &GridLayout,
    cut_of: impl Fn(&ParamSpec) -> TensorCut,
) -> Result<Option<Matrices>, TrainError> {
    let groups = settings.resolve_groups(layouts.parts())?;
    if !groups.has_matrices() {
        return Ok(None);
    }
    let parts = settings.mesh.tensor_ranks.unwrap_or(1) as u64;
    // The ranks divide the matrices that they cut.
    let whole_of = |param: &ParamPlacement| {
        let mut whole = ParamSpec::new(param.name.as_str(), param.shape.clone());
        let cut = cut_of(&whole);
        if let TensorCut::Dim { dim, .. } = cut {
            whole.shape[dim] *= parts;
        }
        Some((whole, cut))
    };
    let first = (0, TensorPart::new(0, parts)?);
    rank_matrices::matrices(settings, &groups, layouts, first, whole_of).map(Some)
}

/// Buffers of the update of matrices on the rank that has the most; `scratch_elems` is that of its
/// kernels for rows and columns. `None` if they do not fit 64 bits.
pub fn matrix_bytes(
    settings: &Settings,
    layouts: &GridLayout,
    cut_of: impl Fn(&ParamSpec) -> TensorCut,
    scratch_elems: impl Fn(usize, usize) -> usize,
) -> Option<u64> {
    let Some(matrices) = planned_matrices(settings, layouts, cut_of).ok()? else {
        return Some(0);
    };
    let ranks = 0..matrices.updaters().world_size();
    let elems = ranks.map(|rank| matrices.buffer_elems(rank, &scratch_elems));
    elems.max()?.checked_mul(size_of::<f32>() as u64)
}

/// Directions of matrices in host memory, if a GPU updates those of an optimizer on the host.
pub fn held_matrix_bytes(
    settings: &Settings,
    layouts: &GridLayout,
    cut_of: impl Fn(&ParamSpec) -> TensorCut,
) -> Option<u64> {
    let matrices = planned_matrices(settings, layouts, cut_of).ok()?;
    let Some(matrices) = matrices.filter(|_| settings.offload.updates_on_host()) else {
        return Some(0);
    };
    let ranks = 0..matrices.updaters().world_size();
    let elems = ranks.map(|rank| matrices.held_elems(rank));
    elems.max()?.checked_mul(size_of::<f32>() as u64)
}

/// Memory of encoded parameters and gradients, and of frozen units that are decoded.
pub fn encoded_bytes(settings: &Settings, layouts: &GridLayout, passes: &[Pass]) -> u64 {
    let units = layouts.parts().units().iter();
    let largest = units.map(|unit| unit.padded_elems).max().unwrap_or(0);
    let bucket = (settings.bucket_capacity_elems as u64).min(largest);
    let encoded = settings.encoded_bytes(layouts, bucket, largest);
    encoded.saturating_add(decoded_bytes(settings, layouts, passes))
}

/// Memory for frozen units in blocks: at stage 3 the gathered blocks of one, beside its elements,
/// which gathers count; at other stages the elements of those that a pass reads.
fn decoded_bytes(settings: &Settings, layouts: &GridLayout, passes: &[Pass]) -> u64 {
    let units = layouts.parts().units();
    let groups = settings.resolve_groups(layouts.parts()).ok();
    let in_blocks = groups.map(|groups| groups.in_blocks).unwrap_or_default();
    let of_unit = |unit: usize| {
        let (format, _) = in_blocks.get(unit).copied().flatten()?;
        let elems = units.get(unit)?.padded_elems;
        match settings.stage.shards_params() {
            true => format.bytes(elems),
            false => elems.checked_mul(settings.widths().param_bytes),
        }
    };
    let of_pass = |pass: &Pass| -> u64 {
        let read = pass.forward_reads.iter().filter_map(|&unit| of_unit(unit));
        match settings.stage.shards_params() {
            true => read.max().unwrap_or(0),
            false => read.sum(),
        }
    };
    passes.iter().map(of_pass).max().unwrap_or(0)
}

/// The copy for a checkpoint. State on NVMe is saved without one.
fn staging(settings: &Settings, layout: &Layout, saves: bool) -> Option<u64> {
    let saved = if saves && !settings.offload.uses_nvme() {
        let units = layout.units();
        let saved = &units[..settings.saved_units(units.len())];
        saved.iter().map(|unit| unit.shard_elems).sum()
    } else {
        0
    };
    let has_matrices = settings.resolve_groups(layout).ok()?.has_matrices();
    let kinds = settings.state_kinds(has_matrices).len();
    let layouts = settings.mesh.layouts(layout).ok()?;
    // Errors of all ranks, and a copy of them before they are staged.
    let errors = match saves {
        true => settings.feedback_bytes(&layouts).checked_mul(2)?,
        false => 0,
    };
    saved
        .checked_mul((kinds * size_of::<f32>()) as u64)?
        .checked_add(errors)
}

/// The gathers of a step of stage 3: the most elements at once, and all of them.
///
/// # Errors
/// A rule of tensors has no match.
pub fn gathers(
    settings: &Settings,
    layout: &Layout,
    passes: &[Pass],
) -> Result<PlannedStep, TrainError> {
    let groups = settings.resolve_groups(layout)?;
    let units: Vec<u64> = layout.units().iter().map(|u| u.padded_elems).collect();
    let micro_batch = uses(passes, &groups);
    let of = |micro_batches: &[&[Vec<usize>]]| {
        plan_step(&units, &micro_batches.concat(), &settings.prefetch)
    };
    let mut step = of(&[&micro_batch]);

    // The second micro-batch begins with what the first one keeps; later ones repeat it.
    if let Some(later) = settings.grad_accum_steps.checked_sub(2) {
        let one = step;
        step = of(&[&micro_batch, &micro_batch]);
        let elems = step.gathered_elems - one.gathered_elems;
        let more = elems.saturating_mul(later as u64);
        step.gathered_elems = step.gathered_elems.saturating_add(more);
    }
    Ok(step)
}

#[cfg(test)]
pub(crate) mod tests {

    use zero_comm::PrefetchOptions;
    use zero_optim::{Masters, Moments, OptimizerConfig, StateFormat};
    use zero_shard::ZeroStage;

    use super::*;
    use crate::fixtures::{kind_of, passes, units};
    use crate::offload::settings::Home;
    use crate::settings::SHARD_ALIGN_ELEMS;

    pub(crate) fn settings(stage: ZeroStage, offload: OffloadSettings) -> Settings {
        Settings {
            bucket_capacity_elems: 1 << 16,
            optimizer: OptimizerConfig::default().sub_group_elems(1000),
            offload,
            ..Settings::new(stage, DType::Bf16, kind_of)
        }
    }

    fn nvme() -> Home {
        Home::Nvme("/x".into())
    }

    #[test]
    fn tiers_replace_memory_by_buffers() {
        let layout = Layout::new(&units(), 2, SHARD_ALIGN_ELEMS).unwrap();
        let rank = |stage, offload: &OffloadSettings| {
            RankBytes::new(
                &settings(stage, offload.clone()),
                &layout,
                &passes(),
                7,
                true,
                |_| TensorCut::Replicated,
            )
            .unwrap()
        };

        let shard = layout.shard_elems();
        let largest = layout.units().iter().map(|u| u.shard_elems).max().unwrap();
        let none = OffloadSettings::default();
        for stage in ZeroStage::ALL {
            let held = if stage == ZeroStage::Zero {
                layout.padded_elems()
            } else {
                shard
            };
            let on_device = rank(stage, &none);
            // Host memory is the device's.
            let host = OffloadSettings {
                optimizer: Home::Host,
                ..none.clone()
            };
            assert_eq!(rank(stage, &host), on_device);
            let remainder = StateFormat::default()
                .masters(Masters::Remainder)
                .moments(Moments::Bf16);
            let small = rank(
                stage,
                &OffloadSettings {
                    format: remainder,
                    ..host
                },
            );
            assert_eq!(small.state, on_device.state - 6 * held);
            // Moments are decoded where they are updated.
            assert_eq!(small.workspace, on_device.workspace);

            let away = OffloadSettings {
                optimizer: nvme(),
                buffers: 5,
                ..none.clone()
            };
            let away = rank(stage, &away);
            let expected = RankBytes {
                state: on_device.state - 12 * held,
                transfers: 5 * 2048 * 12,
                staging: 0,
                ..on_device
            };
            assert_eq!(away, expected, "stage {stage}");
        }

        let on_device = rank(ZeroStage::Three, &none);
        let all = rank(
            ZeroStage::Three,
            &OffloadSettings {
                optimizer: nvme(),
                params: nvme(),
                ..none.clone()
            },
        );

        assert_eq!(all.state, on_device.state - 16 * shard);
        // Parameters of one unit ahead and three more, gradients of two that leave and two in
        // transfer.
        assert_eq!(
            all.transfers,
            4 * 2048 * 12 + 4 * largest * 2 + 4 * largest * 2
        );
    }

    #[test]
    fn host_of_a_gpu_holds_what_is_offloaded() {
        let layout = Layout::new(&units(), 2, SHARD_ALIGN_ELEMS).unwrap();
        let shard = layout.shard_elems();
        let host = |stage, offload, saves| {
            let whole = |_: &ParamSpec| TensorCut::Replicated;
            RankBytes::host_of_gpu(&settings(stage, offload), &layout, 100, saves, whole).unwrap()
        };
        let none = OffloadSettings::default();
        assert_eq!(
            host(ZeroStage::Two, none.clone(), false),
            RankBytes::default()
        );
        assert_eq!(host(ZeroStage::Two, none.clone(), true).total(), 12 * shard);
        let cpu = OffloadSettings {
            optimizer: Home::Host,
            activations: true,
            ..none
        };

        for stage in ZeroStage::ALL {
            let held = if stage == ZeroStage::Zero {
                layout.padded_elems()
            } else {
                shard
            };
            // State, gradients and a copy of the parameters.
            let rank = host(stage, cpu.clone(), false);
            assert_eq!(
                (rank.state, rank.activations, rank.total()),
                (16 * held, 100, 16 * held + 100)
            );
        }

        let params = host(
            ZeroStage::Three,
            OffloadSettings {
                params: Home::Host,
                ..cpu.clone()
            },
            false,
        );

        assert_eq!(params.state, 16 * shard, "the parameters themselves");
        let away = host(
            ZeroStage::Three,
            OffloadSettings {
                optimizer: nvme(),
                params: nvme(),
                ..cpu
            },
            true,
        );

        assert_eq!((away.state, away.staging), (0, 0), "nothing");
    }

    #[test]
    fn units_ahead_are_bounded() {
        let layout = Layout::new(&units(), 1, SHARD_ALIGN_ELEMS).unwrap();
        let units = layout.units().len();
        let largest = layout
            .units()
            .iter()
            .map(|u| u.padded_elems as usize)
            .max()
            .unwrap();
        let ahead = |n, elems| {
            OffloadSettings::units_ahead(
                &PrefetchOptions::default().ahead(n).ahead_elems(elems),
                &layout,
            )
        };

        assert_eq!((ahead(0, 1), ahead(1, usize::MAX), ahead(3, 1)), (0, 1, 1));
        assert_eq!(
            (
                ahead(usize::MAX, usize::MAX),
                ahead(usize::MAX, 2 * largest)
            ),
            (units, 2)
        );
    }
}
