//! Sliding: the used ranges of a window are packed at its low end, so that its holes become one.

use super::super::ranges::NONE;
use super::{Compaction, CostModel, Part, RangeSnapshot, Relocation, Window, remove_cheapest};

/// The window with the least cost of packing.
pub(super) fn cheapest<'a>(
    snapshot: &'a RangeSnapshot,
    wanted: u64,
    cost: &CostModel,
) -> Option<Window<'a>> {
    let mut windows = windows(snapshot, wanted, cost);
    let mut best: Option<Window<'a>> = None;
    let mut limit_ns = f64::INFINITY;
    while let Some(window) = remove_cheapest(&mut windows)
        && window.cost_ns < limit_ns
    {
        if let Some(cost_ns) = pack_ns(&window, wanted, cost, limit_ns) {
            limit_ns = cost_ns;
            best = Some(Window { cost_ns, ..window });
        }
    }
    best
}

/// For each hole that may be the last of a window, the shortest window that ends with it. The costs
/// are lower bounds: they do not count the cuts of moves that overlap themselves.
fn windows<'a>(snapshot: &'a RangeSnapshot, wanted: u64, cost: &CostModel) -> Vec<Window<'a>> {
    let mut windows = Vec::with_capacity(snapshot.holes().len());
    for row in snapshot.rows() {
        // Counts of the window: free bytes, used bytes, used ranges.
        let mut first = 0;
        let mut free = 0u64;
        let mut used = 0u64;
        let mut ranges = 0u64;
        for (last, part) in row.iter().enumerate() {
            if !part.free {
                (used, ranges) = (used + part.bytes, ranges + 1);
                continue;
            }
            free += part.bytes;
            if free < wanted {
                continue;
            }
            // Leaves out used ranges at the low end, and holes that are not needed.
            while first != last {
                let low = &row[first];
                match low.free {
                    true if free - low.bytes < wanted => break,
                    true => free -= low.bytes,
                    false => (used, ranges) = (used - low.bytes, ranges - 1),
                }
                first += 1;
            }
            windows.push(Window {
                parts: &row[first..=last],
                cost_ns: cost.copies_ns(used, ranges),
            });
        }
    }

    windows
}

/// The used ranges of a window, and their offsets once it is packed.
fn packed<'a>(window: &Window<'a>) -> impl Iterator<Item = (&'a Part, u64)> {
    let mut end = window.start();
    window
        .parts
        .iter()
        .filter(|part| !part.free)
        .map(move |part| {
            let to = part.place_from(end);
            end = to + part.bytes;
            (part, to)
        })
}

/// The cost of packing a window; `None` if it is `limit_ns` or more, or if the hole would be too
/// small.
fn pack_ns(window: &Window<'_>, wanted: u64, cost: &CostModel, limit_ns: f64) -> Option<f64> {
    let mut end = window.start();
    let mut cost_ns = 0.0;
    for (part, to) in packed(window) {
        if to != part.start {
            cost_ns += cost.move_ns(part.bytes, part.start - to);
            if cost_ns >= limit_ns {
                return None;
            }
        }
        end = to + part.bytes;
    }
    (window.end() - end >= wanted).then_some(cost_ns)
}

/// Packs a window.
pub(super) fn plan(window: &Window<'_>) -> Compaction {
    let mut start = window.start();
    let mut moves = Vec::with_capacity(window.parts.len());
    for (part, to) in packed(window) {
        if to != part.start {
            moves.push(Relocation {
                range: part.range,
                from: part.start,
                to,
                bytes: part.bytes,
                hole: NONE,
            });
        }
        start = to + part.bytes;
    }
    Compaction {
        moves,
        start,
        bytes: window.end() - start,
        cost_ns: window.cost_ns,
    }
}
