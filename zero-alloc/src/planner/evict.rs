//! Evicting: a window is emptied by moving its used ranges into holes elsewhere.

use super::compaction::{Compaction, Relocation, Window, touches};
use super::cost::CostModel;
use super::offsets::{Offsets, RangeId};
use super::ranges::{NONE, State};

/// How many of the cheapest windows are tried.
const TRIES: usize = 16;

/// The cheapest plan of its kind among the cheapest windows, where one costs less than `limit_ns`.
pub(super) fn plan(space: &Offsets, wanted: u64, cost: &CostModel, limit_ns: f64) -> Option<Compaction> {
    let at = |i: u32| &space.ranges[i as usize];
    let mut windows: Vec<(f64, Window)> = Vec::new();
    let mut holes: Vec<Hole> = Vec::new();
    // In the window: used bytes, used ranges.
    let (mut first, mut used, mut ranges) = (space.first(), 0u64, 0u64);
    let mut last = space.first();
    while last != NONE {
        let range = at(last);
        if range.below != NONE && !touches(at(range.below), range) {
            (first, used, ranges) = (last, 0, 0);
        }
        match range.state {
            State::Used => (used, ranges) = (used + range.bytes, ranges + 1),
            State::Free => holes.push(Hole { bytes: range.bytes, start: range.start, index: last }),
            State::Pinned | State::Spare => {
                last = range.above;
                (first, used, ranges) = (last, 0, 0);
                continue;
            }
        }
        while range.end() - at(first).start >= wanted {
            let moved_ns = cost.copies_ns(used, ranges);
            if moved_ns < limit_ns {
                windows.push((moved_ns, Window { first, last }));
            }
            let low = at(first);
            if first == last {
                break;
            }
            if low.state == State::Used {
                (used, ranges) = (used - low.bytes, ranges - 1);
            }
            first = low.above;
        }
        last = range.above;
    }
    if windows.len() > TRIES {
        windows.select_nth_unstable_by(TRIES, |a, b| a.0.total_cmp(&b.0));
        windows.truncate(TRIES);
    }
    windows.sort_by(|a, b| a.0.total_cmp(&b.0));
    windows.iter().find_map(|(cost_ns, window)| empty(space, window, &holes, *cost_ns))
}

#[derive(Clone, Copy)]
struct Hole {
    bytes: u64,
    start: u64,
    index: u32,
}

/// Moves everything out of a window, where there are holes for it.
fn empty(space: &Offsets, window: &Window, holes: &[Hole], cost_ns: f64) -> Option<Compaction> {
    let at = |i: u32| &space.ranges[i as usize];
    let (start, end) = (at(window.first).start, at(window.last).end());
    let outside = |hole: &&Hole| hole.start < start || hole.start >= end;
    let largest = holes.iter().filter(outside).map(|hole| hole.bytes).max()?;
    let mut leaving: Vec<u32> = Vec::new();
    let mut i = window.first;
    loop {
        let range = at(i);
        if range.state == State::Used {
            if range.bytes > largest {
                return None;
            }
            leaving.push(i);
        }
        if i == window.last {
            break;
        }
        i = range.above;
    }
    let mut holes: Vec<Hole> = holes.iter().filter(outside).copied().collect();
    // The largest first, each into the smallest hole that takes it.
    leaving.sort_by_key(|i| std::cmp::Reverse(at(*i).bytes));
    let mut moves = Vec::with_capacity(leaving.len());
    for i in leaving {
        let range = at(i);
        let place = |hole: &Hole| {
            let to = hole.start.next_multiple_of(1 << range.align_log2);
            (to + range.bytes <= hole.start + hole.bytes).then_some(to)
        };
        let (hole, to) = holes
            .iter_mut()
            .filter_map(|hole| place(hole).map(|to| (hole, to)))
            .min_by_key(|(hole, _)| (hole.bytes, hole.start))?;
        moves.push(Relocation { range: RangeId(i), from: range.start, to, bytes: range.bytes, hole: hole.index });
        hole.bytes -= to + range.bytes - hole.start;
        hole.start = to + range.bytes;
    }
    Some(Compaction { moves, start, bytes: end - start, cost_ns })
}
