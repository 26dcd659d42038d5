//! Evicting: a window is emptied by moving its used ranges into holes elsewhere.

use super::compaction::{Cause, Compaction, Relocation, Window, take_cheapest};
use super::cost::CostModel;
use super::range_snapshot::{Part, RangeSnapshot};

/// How many of the cheapest windows are tried.
const TRIES: usize = 16;

/// The cheapest plan of its kind among the cheapest windows, where one costs less than `limit_ns`.
pub(super) fn plan(survey: &RangeSnapshot, wanted: u64, cost: &CostModel, limit_ns: f64) -> Option<Compaction> {
    let mut windows = windows(survey, wanted, cost, limit_ns);
    let tries = std::iter::from_fn(|| take_cheapest(&mut windows)).take(TRIES);
    tries.filter_map(|window| empty(survey, &window)).next()
}

/// For each range that may be the last of a window, the shortest window with it.
fn windows<'a>(survey: &'a RangeSnapshot, wanted: u64, cost: &CostModel, limit_ns: f64) -> Vec<Window<'a>> {
    let mut windows = Vec::with_capacity(64);
    for row in survey.rows() {
        // In the window: used bytes, used ranges.
        let (mut first, mut used, mut ranges) = (0, 0u64, 0u64);
        for (last, part) in row.iter().enumerate() {
            if !part.free {
                (used, ranges) = (used + part.bytes, ranges + 1);
                if part.bytes > survey.largest_hole_bytes() {
                    // No hole takes it, so no window has it.
                    (first, used, ranges) = (last + 1, 0, 0);
                }
            }
            while first <= last && part.end() - row[first].start >= wanted {
                let cost_ns = cost.copies_ns(used, ranges);
                if cost_ns < limit_ns {
                    windows.push(Window { parts: &row[first..=last], cost_ns });
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

/// Moves everything out of a window, where there are holes for it.
fn empty(survey: &RangeSnapshot, window: &Window<'_>) -> Option<Compaction> {
    let (start, end) = (window.start(), window.end());
    let below = survey.holes().partition_point(|hole| hole.start < start);
    let above = survey.holes().partition_point(|hole| hole.start < end);
    let mut holes = [&survey.holes()[..below], &survey.holes()[above..]].concat();
    // The largest first, each into the smallest hole that takes it.
    let mut leaving: Vec<&Part> = window.parts.iter().filter(|part| !part.free).collect();
    leaving.sort_by_key(|part| std::cmp::Reverse(part.bytes));
    let mut moves = Vec::with_capacity(leaving.len());
    for part in leaving {
        let takes = |hole: &&mut Part| part.place_from(hole.start) + part.bytes <= hole.end();
        let hole = holes.iter_mut().filter(takes).min_by_key(|hole| hole.bytes)?;
        let to = part.place_from(hole.start);
        moves.push(Relocation { range: part.range, from: part.start, to, bytes: part.bytes, hole: hole.range.0 });
        (hole.start, hole.bytes) = (to + part.bytes, hole.end() - to - part.bytes);
    }
    Some(Compaction { moves, start, bytes: end - start, cost_ns: window.cost_ns, cause: Cause::Asked })
}
