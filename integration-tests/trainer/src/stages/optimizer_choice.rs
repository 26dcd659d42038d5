//! Which optimizer a rank has. It is chosen here once, when the stage is made:
//!
//! | optimizer | sums over ranks |
//! |---|---|
//! | on the device ([`DeviceOptimizer`]) | on the device |
//! | on the host, which is the device ([`OffloadedOptimizer`]) | on the device, in place |
//! | on the host of a GPU, or gradients on NVMe ([`OffloadedOptimizer`]) | leave the device unit by unit |

use std::ops::Range;

use zero_alloc::device::{AnySlice, Device};
use zero_optim::Segment;
use zero_shard::UnitLayout;

use crate::error::TrainError;
use crate::offload::offloaded_optimizer::OffloadedOptimizer;
use crate::rank::Rank;
use crate::stages::device_optimizer::DeviceOptimizer;
use crate::stages::optimizer::Optimizer;

/// Makes the optimizer of a rank. `params` are the device's parameters that the rank updates, if it
/// has them.
pub(crate) fn build<D: Device>(
    rank: &Rank<D>,
    params: Option<Vec<AnySlice>>,
) -> Result<Box<dyn Optimizer<D>>, TrainError> {
    let segments = segments(rank);
    Ok(match params {
        Some(params) if !rank.settings.offload.updates_on_host() => {
            Box::new(DeviceOptimizer::new(rank, segments, params)?)
        }
        params => Box::new(OffloadedOptimizer::new(rank, segments, params)?),
    })
}

/// The parts of the units that this rank updates: its shards, parts of them, or at stage 0 all of
/// each unit.
fn segments<D: Device>(rank: &Rank<D>) -> Vec<Segment> {
    let mut end = 0;
    let segment = |(unit, placed): (usize, &UnitLayout)| {
        let held = rank.held(unit);
        let within = |range: Range<u64>| {
            (range.start - held.start) as usize..(range.end - held.start) as usize
        };
        let own = within(rank.saves(unit));
        let start = end;
        end += (held.end - held.start) as usize;
        let segment = Segment::whole(&placed.name, start..end, own);
        let segment = segment.with_counted(within(rank.counted(unit)));
        match rank.is_in_blocks(unit) {
            // The optimizer has no memory of its parameters.
            true => segment.with_padding(end - start),
            false => segment,
        }
    };
    rank.layout
        .units()
        .iter()
        .enumerate()
        .map(segment)
        .collect()
}
