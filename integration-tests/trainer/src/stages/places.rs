//! Where backward leaves each unit's gradient: planned once, from numbers alone.
//!
//! Why fp32 scratch: passes add to it, and the sum is rounded once, when it is cast into a bucket.
//! It is as large as the largest unit, with a tied embedding two units; the memory formula does not
//! have it, so it is counted as workspace. A gradient that one pass makes in the only micro-batch
//! needs neither zeroing nor scratch nor cast, so a model may write it to the bucket, rounded in
//! the same way: blocks of GPT-2 on CUDA do. The host computes in fp32 and adds in place.
//!
//! Frozen units are not reduced, and backward ends at the first unit that trains; a frozen unit
//! above it computes its gradient in scratch, too.

use zero_alloc::device::DType;
use zero_shard::Layout;

use crate::model::Pass;
use crate::param_groups::ModelGroups;
use crate::rank::first_trained;
use crate::settings::Settings;

/// The place of a unit's gradient in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GradDestination {
    /// fp32 in this scratch slot: passes add to it, and the last one's sum is packed into buckets.
    Scratch(usize),
    /// fp32 in the storage, to which all passes of a step add: the sum is packed into buckets, or
    /// at one rank is the result.
    Storage,
    /// The dtype of communication, written by one pass: to the bucket that reduces it, at one rank
    /// to its sum.
    Written,
}

/// The place of each unit's gradient in backward, `None` if no pass has it, and the sizes of the
/// scratch slots; no other unit uses a slot between the unit's first and last pass. `writes(pass, unit)`:
/// [`Model::writes_grad`](crate::model::Model::writes_grad).
pub(crate) fn places(
    settings: &Settings,
    layout: &Layout,
    passes: &[Pass],
    groups: &ModelGroups,
    writes: &dyn Fn(usize, usize) -> bool,
) -> (Vec<Option<GradDestination>>, Vec<usize>) {
    let units = layout.units();
    let capacity_elems = settings.bucket_capacity_elems as u64;
    let fits = |unit: usize| layout.world_size() == 1 || units[unit].padded_elems <= capacity_elems;
    // At one rank an fp32 sum is the result.
    let is_result = layout.world_size() == 1
        && (settings.dtype, settings.grad_accum_steps) == (DType::F32, 1)
        && !settings.offload.updates_on_host();
    let adding = adding_passes(passes, units.len());
    // One bucket at a time is written.
    let is_written = |pass: usize, unit: usize| {
        let alone = adding[unit].count == 1 && passes[pass].grads == [unit];
        alone && settings.grad_accum_steps == 1 && fits(unit) && writes(pass, unit)
    };

    let (mut places, mut sizes, mut free) =
        (vec![None; units.len()], Vec::<usize>::new(), Vec::new());
    for pass in (first_trained(passes, groups)..passes.len()).rev() {
        for &unit in &passes[pass].grads {
            if places[unit].is_some() {
                continue;
            }
            places[unit] = Some(match groups.is_frozen(unit) {
                false if settings.sums_locally() => GradDestination::Storage,
                false if is_written(pass, unit) => GradDestination::Written,
                false if is_result => GradDestination::Storage,
                // The gradient of a frozen unit is computed, too, but has no storage.
                _ => {
                    let slot = free.pop().unwrap_or_else(|| {
                        sizes.push(0);
                        sizes.len() - 1
                    });
                    sizes[slot] = sizes[slot].max(units[unit].padded_elems as usize);
                    GradDestination::Scratch(slot)
                }
            });
        }
        let complete = passes[pass]
            .grads
            .iter()
            .filter(|unit| adding[**unit].first == pass);
        free.extend(complete.filter_map(|&unit| match places[unit] {
            Some(GradDestination::Scratch(slot)) => Some(slot),
            _ => None,
        }));
    }

    (places, sizes)
}

/// The passes that add to the gradient of a unit.
#[derive(Clone, Copy, Debug, Default)]
struct AddingPasses {
    /// The first one, after whose backward the gradient is complete.
    first: usize,
    count: usize,
}

/// The passes that add to the gradient of each of `units` units.
///
/// Why in one go: a search of all passes for each unit takes minutes in a plan of ten thousand
/// layers.
fn adding_passes(passes: &[Pass], units: usize) -> Vec<AddingPasses> {
    let mut adding = vec![AddingPasses::default(); units];
    for (at, pass) in passes.iter().enumerate().rev() {
        for (i, &unit) in pass.grads.iter().enumerate() {
            if !pass.grads[..i].contains(&unit) {
                adding[unit].first = at;
                adding[unit].count += 1;
            }
        }
    }
    adding
}
