//! Compaction: which used ranges to move so that a contiguous free range of a given size appears.
//!
//! (Where the same kind of request misses again and again, [`regrowth`](super::regrowth) may spread ranges instead.)
//! Two kinds of plan are compared by modelled cost. **Sliding** packs the used ranges of a window of
//! neighbours towards its low end, and the window's holes become one. **Evicting** empties a window by moving
//! its used ranges into holes elsewhere, which can be cheaper when a small range divides two large holes.
//! Sliding alone reaches the bound: without pinned ranges, whatever is free in a segment can be made contiguous.

use super::cost::CostModel;
use super::evict;
use super::offsets::RangeId;
use super::range_snapshot::{Part, RangeSnapshot};
use super::slide;

/// One used range moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relocation {
    /// Which; it keeps its name.
    pub range: RangeId,
    /// Its first offset before.
    pub from: u64,
    /// Its first offset after.
    pub to: u64,
    /// How many bytes.
    pub bytes: u64,
    /// The free range that takes it, where it is known; only a hint.
    pub(super) hole: u32,
}

impl Relocation {
    /// The copies to make, one after the other: (from, to, bytes), none of which overlaps itself.
    pub fn copies(&self) -> impl Iterator<Item = (u64, u64, u64)> + use<> {
        let Self { from, to, bytes, .. } = *self;
        let distance = from.abs_diff(to).max(1);
        let pieces = bytes.div_ceil(distance);
        (0..pieces).map(move |i| {
            // Down from the low end, up from the high end: a piece never lands on one that is still to go.
            let piece = if to < from { i } else { pieces - 1 - i };
            let at = piece * distance;
            (from + at, to + at, distance.min(bytes - at))
        })
    }
}

/// Moves, to be made in this order, after which `bytes` from `start` are free.
#[derive(Clone, Debug, PartialEq)]
pub struct Compaction {
    /// What moves.
    pub moves: Vec<Relocation>,
    /// The free range that appears.
    pub start: u64,
    /// Its size.
    pub bytes: u64,
    /// Modelled time to copy.
    pub cost_ns: f64,
    /// Why it was made.
    pub(super) cause: Cause,
}

/// Why a plan was made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Cause {
    /// It was asked for.
    Asked,
    /// A request did not fit.
    Miss,
    /// A request of `bytes` nearly fitted, perhaps not the first; spreading would have moved `price` bytes.
    NearMiss { bytes: u64, price: f64, again: bool },
    /// Ranges are spread for a request of `bytes`, with a pad.
    Spread { bytes: u64, pad: u64 },
}

impl Cause {
    /// What filling holes elsewhere costs, as a multiple of what the copies cost. Where requests nearly fit again and
    /// again, the next will want those holes; benches/traces/README.md says how 8 was found.
    fn price_of_holes(self) -> f64 {
        if matches!(self, Self::NearMiss { again: true, .. }) { 8.0 } else { 1.0 }
    }
}

impl Compaction {
    /// Bytes that move.
    pub fn moved_bytes(&self) -> u64 {
        self.moves.iter().map(|m| m.bytes).sum()
    }
}

/// The cheapest plan found that opens `bytes` at a multiple of `align`; `None` where pinned ranges, segments'
/// ends or a lack of free bytes prevent it.
pub(super) fn plan(
    survey: &RangeSnapshot,
    bytes: u64,
    align: u64,
    cause: Cause,
    cost: &CostModel,
) -> Option<Compaction> {
    let bytes = bytes.checked_next_multiple_of(survey.granule)?;
    let wanted = bytes.checked_add(align.max(survey.granule) - survey.granule)?;
    let slide = slide::cheapest(survey, wanted, cost);
    let limit_ns = slide.as_ref().map_or(f64::INFINITY, |slide| slide.cost_ns / cause.price_of_holes());
    let plan = evict::plan(survey, wanted, cost, limit_ns).or_else(|| Some(slide::plan(&slide?)))?;
    Some(Compaction { cause, ..plan })
}

/// Neighbours in a row, and what moving the used ones costs.
pub(super) struct Window<'a> {
    pub(super) parts: &'a [Part],
    pub(super) cost_ns: f64,
}

impl Window<'_> {
    pub(super) fn start(&self) -> u64 {
        self.parts[0].start
    }

    pub(super) fn end(&self) -> u64 {
        self.parts[self.parts.len() - 1].end()
    }
}

/// Takes the cheapest out, of equals the lowest.
pub(super) fn take_cheapest<'a>(windows: &mut Vec<Window<'a>>) -> Option<Window<'a>> {
    let cheaper = |a: (usize, f64), b: (usize, f64)| if b.1 < a.1 { b } else { a };
    let (cheapest, _) = windows.iter().map(|window| window.cost_ns).enumerate().reduce(cheaper)?;
    Some(windows.remove(cheapest))
}
