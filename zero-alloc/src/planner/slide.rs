//! Sliding: the used ranges of a window are packed towards its low end, and its holes become one.

use super::compaction::{Cause, Compaction, Relocation};
use super::cost::CostModel;
use super::ranges::NONE;
use super::survey::{Part, Survey};

/// A window that is packed, and what that costs.
pub(super) struct Slide<'a> {
    window: &'a [Part],
    pub(super) cost_ns: f64,
}

/// The cheapest plan of its kind, where one costs less than `limit_ns`.
pub(super) fn plan<'a>(survey: &'a Survey, wanted: u64, cost: &CostModel, limit_ns: f64) -> Option<Slide<'a>> {
    let mut best: Option<Slide<'a>> = None;
    let mut limit_ns = limit_ns;
    for row in survey.rows() {
        // In the window: free bytes, used bytes, used ranges.
        let (mut first, mut free, mut used, mut ranges) = (0, 0u64, 0u64, 0u64);
        for (last, part) in row.iter().enumerate() {
            if !part.free {
                (used, ranges) = (used + part.bytes, ranges + 1);
                continue;
            }
            free += part.bytes;
            if free < wanted {
                continue;
            }
            // Leave out what need not be in the window: used ranges at its low end, and holes not needed.
            while first != last {
                let low = &row[first];
                match low.free {
                    true if free - low.bytes < wanted => break,
                    true => free -= low.bytes,
                    false => (used, ranges) = (used - low.bytes, ranges - 1),
                }
                first += 1;
            }
            // The sum is what moving costs at least: without cutting moves that overlap themselves.
            if cost.copies_ns(used, ranges) < limit_ns
                && let Some(cost_ns) = pack_ns(&row[first..=last], wanted, cost, limit_ns)
            {
                limit_ns = cost_ns;
                best = Some(Slide { window: &row[first..=last], cost_ns });
            }
        }
    }
    best
}

/// Where the ranges of a window go, and behind the last the end of it all.
fn packed(window: &[Part]) -> impl Iterator<Item = (&Part, u64)> {
    let mut end = window[0].start;
    window.iter().filter(|part| !part.free).map(move |part| {
        let to = part.place_from(end);
        end = to + part.bytes;
        (part, to)
    })
}

/// What packing a window costs, where that is less than `limit_ns` and is enough.
fn pack_ns(window: &[Part], wanted: u64, cost: &CostModel, limit_ns: f64) -> Option<f64> {
    let (mut end, mut cost_ns) = (window[0].start, 0.0);
    for (part, to) in packed(window) {
        if to != part.start {
            cost_ns += cost.move_ns(part.bytes, part.start - to);
            if cost_ns >= limit_ns {
                return None;
            }
        }
        end = to + part.bytes;
    }
    (window[window.len() - 1].end() - end >= wanted).then_some(cost_ns)
}

impl Slide<'_> {
    /// As data.
    pub(super) fn compaction(&self) -> Compaction {
        let Self { window, cost_ns } = *self;
        let mut start = window[0].start;
        let mut moves = Vec::with_capacity(window.len());
        for (part, to) in packed(window) {
            if to != part.start {
                moves.push(Relocation { range: part.range, from: part.start, to, bytes: part.bytes, hole: NONE });
            }
            start = to + part.bytes;
        }
        let bytes = window[window.len() - 1].end() - start;
        Compaction { moves, start, bytes, cost_ns, cause: Cause::Asked }
    }
}
