//! Compaction: chooses used ranges to move so that a contiguous free range of a given size appears.
//!
//! Two kinds of plan are compared by modelled cost. **Sliding** packs the used ranges of a window
//! of neighbours at its low end, so that the window's holes become one. **Evicting** empties a
//! window by moving its used ranges into holes elsewhere, which can be cheaper when a small range
//! divides two large holes. Sliding alone reaches the bound: without pinned ranges, all free bytes
//! of a segment can be made contiguous.
//!
//! [Stitching](Stitch) moves nothing: it maps free pages from several places under new addresses.

mod cost;
mod evict;
mod range_snapshot;
mod relocate;
mod slide;
mod stitch;

pub use cost::CostModel;
pub use stitch::Stitch;

use self::range_snapshot::{Part, RangeSnapshot};
use super::offsets::{Offsets, RangeId};

pub(super) use stitch::plan as plan_stitch;

/// The move of one used range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relocation {
    /// The range; its id stays valid.
    pub range: RangeId,
    /// Its first offset before.
    pub from: u64,
    /// Its first offset after.
    pub to: u64,
    /// Its size.
    pub bytes: u64,
    /// A hint: the slot of the free range that holds the target, or `NONE`.
    hole: u32,
}

impl Relocation {
    /// The copies to make in this order: (from, to, bytes). No copy overlaps itself.
    pub fn copies(&self) -> impl Iterator<Item = (u64, u64, u64)> + use<> {
        let Self {
            from, to, bytes, ..
        } = *self;
        let distance = from.abs_diff(to).max(1);
        let pieces = bytes.div_ceil(distance);
        (0..pieces).map(move |i| {
            // Downward moves start at the low end, upward moves at the high end, so that no copy
            // overwrites a piece that is still to be copied.
            let piece = if to < from { i } else { pieces - 1 - i };
            let at = piece * distance;
            (from + at, to + at, distance.min(bytes - at))
        })
    }
}

/// Moves to be made in this order, after which `bytes` from `start` are free.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Compaction {
    /// The moves.
    pub moves: Vec<Relocation>,
    /// The first offset of the free range that appears.
    pub start: u64,
    /// Its size.
    pub bytes: u64,
    /// Modelled time to copy.
    pub cost_ns: f64,
}

impl Compaction {
    /// The sum of the bytes of all moves.
    pub fn moved_bytes(&self) -> u64 {
        self.moves.iter().map(|m| m.bytes).sum()
    }
}

/// The cheapest plan found that opens `bytes` at a multiple of `align`; `None` if pinned ranges,
/// the ends of segments or a lack of free bytes prevent it.
pub(super) fn plan(
    space: &Offsets,
    bytes: u64,
    align: u64,
    cost: &CostModel,
) -> Option<Compaction> {
    plan_in(&RangeSnapshot::of(space), bytes, align, cost)
}

fn plan_in(
    snapshot: &RangeSnapshot,
    bytes: u64,
    align: u64,
    cost: &CostModel,
) -> Option<Compaction> {
    let bytes = bytes.checked_next_multiple_of(snapshot.granule)?;
    let wanted = bytes.checked_add(align.max(snapshot.granule) - snapshot.granule)?;
    let slide = slide::cheapest(snapshot, wanted, cost);
    let limit_ns = slide.as_ref().map_or(f64::INFINITY, |slide| slide.cost_ns);
    evict::plan(snapshot, wanted, cost, limit_ns).or_else(|| Some(slide::plan(&slide?)))
}

/// The size of the largest contiguous free range that compaction could make.
pub(super) fn largest_reachable(space: &Offsets, cost: &CostModel) -> u64 {
    let snapshot = RangeSnapshot::of(space);
    let granule = snapshot.granule;
    let mut reached = space.largest_free_bytes();
    let mut beyond = space.free_bytes() + granule;
    while beyond - reached > granule {
        let middle = reached + (beyond - reached) / 2 / granule * granule;
        match plan_in(&snapshot, middle.max(granule), 1, cost) {
            Some(plan) => reached = plan.bytes.max(middle),
            None => beyond = middle,
        }
    }
    reached
}

/// A row of neighbours, and the cost of moving the used ones.
struct Window<'a> {
    parts: &'a [Part],
    cost_ns: f64,
}

impl Window<'_> {
    fn start(&self) -> u64 {
        self.parts[0].start
    }

    fn end(&self) -> u64 {
        self.parts[self.parts.len() - 1].end()
    }
}

/// Removes and returns the cheapest window; of equals, the lowest.
fn remove_cheapest<'a>(windows: &mut Vec<Window<'a>>) -> Option<Window<'a>> {
    let cheaper = |a: (usize, f64), b: (usize, f64)| if b.1 < a.1 { b } else { a };
    let (cheapest, _) = windows
        .iter()
        .map(|window| window.cost_ns)
        .enumerate()
        .reduce(cheaper)?;
    Some(windows.remove(cheapest))
}
