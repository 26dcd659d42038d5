//! Sliding: the used ranges of a window are packed towards its low end, and its holes become one.

use super::compaction::{Cause, Compaction, Relocation, Window, touches};
use super::cost::CostModel;
use super::offsets::{Offsets, RangeId};
use super::ranges::{NONE, State};

/// The cheapest plan of its kind.
pub(super) fn plan(space: &Offsets, wanted: u64, cost: &CostModel) -> Option<Compaction> {
    let at = |i: u32| &space.ranges[i as usize];
    let mut best: Option<Compaction> = None;
    let mut limit_ns = f64::INFINITY;
    // In the window: free bytes, used bytes, used ranges.
    let (mut first, mut free, mut used, mut ranges) = (space.first(), 0u64, 0u64, 0u64);
    let mut last = space.first();
    while last != NONE {
        let range = at(last);
        if range.below != NONE && !touches(at(range.below), range) {
            (first, free, used, ranges) = (last, 0, 0, 0);
        }
        match range.state {
            State::Free => free += range.bytes,
            State::Used => (used, ranges) = (used + range.bytes, ranges + 1),
            State::Pinned | State::Spare => {
                last = range.above;
                (first, free, used, ranges) = (last, 0, 0, 0);
                continue;
            }
        }
        if range.state == State::Free && free >= wanted {
            // Leave out what need not be in the window: used ranges at its low end, and holes not needed.
            while first != last {
                let low = at(first);
                match low.state {
                    State::Free if free - low.bytes >= wanted => free -= low.bytes,
                    State::Used => (used, ranges) = (used - low.bytes, ranges - 1),
                    _ => break,
                }
                first = low.above;
            }
            // The sum is what moving costs at least: without cutting moves that overlap themselves.
            if cost.copies_ns(used, ranges) < limit_ns
                && let Some(plan) = pack(space, &Window { first, last }, wanted, cost, limit_ns)
            {
                limit_ns = plan.cost_ns;
                best = Some(plan);
            }
        }
        last = range.above;
    }
    best
}

/// Packs a window, where that costs less than `limit_ns` and is enough.
fn pack(space: &Offsets, window: &Window, wanted: u64, cost: &CostModel, limit_ns: f64) -> Option<Compaction> {
    let at = |i: u32| &space.ranges[i as usize];
    let mut to = at(window.first).start;
    let mut moves = Vec::new();
    let mut cost_ns = 0.0;
    let mut i = window.first;
    loop {
        let range = at(i);
        if range.state == State::Used {
            to = to.next_multiple_of(1 << range.align_log2);
            if to != range.start {
                moves.push(Relocation { range: RangeId(i), from: range.start, to, bytes: range.bytes, hole: NONE });
                cost_ns += cost.move_ns(range.bytes, range.start - to);
                if cost_ns >= limit_ns {
                    return None;
                }
            }
            to += range.bytes;
        }
        if i == window.last {
            break;
        }
        i = range.above;
    }
    let bytes = at(window.last).end() - to;
    (bytes >= wanted).then_some(Compaction { moves, start: to, bytes, cost_ns, cause: Cause::Asked })
}
