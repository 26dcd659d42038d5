//! Evicting: a window is emptied by moving its used ranges into holes elsewhere.

use super::{Compaction, CostModel, Part, RangeSnapshot, Relocation, Window, remove_cheapest};

/// The number of windows that are tried, cheapest first.
const TRIES: usize = 16;

/// The first plan found for one of the cheapest windows that cost less than `limit_ns`.
pub(super) fn plan(
    snapshot: &RangeSnapshot,
    wanted: u64,
    cost: &CostModel,
    limit_ns: f64,
) -> Option<Compaction> {
    let mut windows = windows(snapshot, wanted, cost, limit_ns);
    let tries = std::iter::from_fn(|| remove_cheapest(&mut windows)).take(TRIES);
    tries.filter_map(|window| empty(snapshot, &window)).next()
}

/// For each range that may be the last of a window, windows that end with it, down to the shortest.
fn windows<'a>(
    snapshot: &'a RangeSnapshot,
    wanted: u64,
    cost: &CostModel,
    limit_ns: f64,
) -> Vec<Window<'a>> {
    let mut windows = Vec::with_capacity(64);
    for row in snapshot.rows() {
        // Counts of the window: used bytes, used ranges.
        let mut first = 0;
        let mut used = 0u64;
        let mut ranges = 0u64;
        for (last, part) in row.iter().enumerate() {
            if !part.free {
                (used, ranges) = (used + part.bytes, ranges + 1);
                if part.bytes > snapshot.largest_hole_bytes() {
                    // No hole is large enough for it, so no window contains it.
                    (first, used, ranges) = (last + 1, 0, 0);
                }
            }
            while first <= last && part.end() - row[first].start >= wanted {
                let cost_ns = cost.copies_ns(used, ranges);
                if cost_ns < limit_ns {
                    windows.push(Window {
                        parts: &row[first..=last],
                        cost_ns,
                    });
                }
                let low = &row[first];
                if !low.free {
                    (used, ranges) = (used - low.bytes, ranges - 1);
                }
                first += 1;
            }
        }
    }

    windows
}

/// Moves every used range out of a window; `None` if the holes elsewhere do not suffice.
fn empty(snapshot: &RangeSnapshot, window: &Window<'_>) -> Option<Compaction> {
    let start = window.start();
    let end = window.end();
    let below = snapshot.holes().partition_point(|hole| hole.start < start);
    let above = snapshot.holes().partition_point(|hole| hole.start < end);
    let mut holes = [&snapshot.holes()[..below], &snapshot.holes()[above..]].concat();
    // Best fit decreasing: the largest first, each into the smallest hole that holds it.
    let mut leaving: Vec<&Part> = window.parts.iter().filter(|part| !part.free).collect();
    leaving.sort_by_key(|part| std::cmp::Reverse(part.bytes));
    let mut moves = Vec::with_capacity(leaving.len());

    for part in leaving {
        let holds = |hole: &&mut Part| part.place_from(hole.start) + part.bytes <= hole.end();
        let hole = holes
            .iter_mut()
            .filter(holds)
            .min_by_key(|hole| hole.bytes)?;
        let to = part.place_from(hole.start);
        moves.push(Relocation {
            range: part.range,
            from: part.start,
            to,
            bytes: part.bytes,
            hole: hole.range.0,
        });
        (hole.start, hole.bytes) = (to + part.bytes, hole.end() - to - part.bytes);
    }

    Some(Compaction {
        moves,
        start,
        bytes: end - start,
        cost_ns: window.cost_ns,
    })
}
