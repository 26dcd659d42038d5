//! Evicting: a window is emptied by moving its used ranges into holes elsewhere.

use super::compaction::{Cause, Compaction, Relocation};
use super::cost::CostModel;
use super::survey::{Part, Survey};

/// How many of the cheapest windows are tried.
const TRIES: usize = 16;

/// The cheapest plan of its kind among the cheapest windows.
pub(super) fn plan(survey: &Survey, wanted: u64, cost: &CostModel) -> Option<Compaction> {
    let mut windows = windows(survey, wanted, cost);
    for _ in 0..TRIES {
        let cheapest = windows.iter_mut().reduce(|a, b| if b.cost_ns < a.cost_ns { b } else { a })?;
        if cheapest.cost_ns == f64::INFINITY {
            break;
        }
        if let Some(plan) = empty(survey, cheapest) {
            return Some(plan);
        }
        cheapest.cost_ns = f64::INFINITY;
    }
    None
}

/// A window to empty, and what that costs.
#[derive(Clone, Copy)]
struct Window<'a> {
    cost_ns: f64,
    parts: &'a [Part],
}

/// For each range that may be the last of a window, the shortest window with it.
fn windows<'a>(survey: &'a Survey, wanted: u64, cost: &CostModel) -> Vec<Window<'a>> {
    let mut windows = Vec::with_capacity(survey.len());
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
                windows.push(Window { cost_ns: cost.copies_ns(used, ranges), parts: &row[first..=last] });
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
fn empty(survey: &Survey, window: &Window<'_>) -> Option<Compaction> {
    let Window { cost_ns, parts } = *window;
    let (start, end) = (parts[0].start, parts[parts.len() - 1].end());
    let below = survey.holes().partition_point(|hole| hole.start < start);
    let inside = parts.iter().filter(|part| part.free).count();
    let mut holes = [&survey.holes()[..below], &survey.holes()[below + inside..]].concat();
    // The largest first, each into the smallest hole that takes it.
    let mut leaving: Vec<&Part> = parts.iter().filter(|part| !part.free).collect();
    leaving.sort_by_key(|part| std::cmp::Reverse(part.bytes));
    let mut moves = Vec::with_capacity(leaving.len());
    for part in leaving {
        let takes = |hole: &&mut Part| part.place_from(hole.start) + part.bytes <= hole.end();
        let hole = holes.iter_mut().filter(takes).min_by_key(|hole| hole.bytes)?;
        let to = part.place_from(hole.start);
        moves.push(Relocation { range: part.range, from: part.start, to, bytes: part.bytes, hole: hole.range.0 });
        (hole.start, hole.bytes) = (to + part.bytes, hole.end() - to - part.bytes);
    }
    Some(Compaction { moves, start, bytes: end - start, cost_ns, cause: Cause::Asked })
}
