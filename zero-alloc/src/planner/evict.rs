//! Evicting: a window is emptied by moving its used ranges into holes elsewhere.

use super::compaction::{Cause, Compaction, Relocation, Window, touches};
use super::cost::CostModel;
use super::offsets::{Offsets, RangeId};
use super::ranges::{NONE, State};

/// How many of the cheapest windows are tried.
const TRIES: usize = 16;

/// The cheapest plan of its kind among the cheapest windows, where one costs less than `limit_ns`.
pub(super) fn plan(space: &Offsets, wanted: u64, cost: &CostModel, limit_ns: f64) -> Option<Compaction> {
    let at = |i: u32| &space.ranges[i as usize];
    let mut windows: Vec<Candidate> = Vec::with_capacity(4 * TRIES);
    let mut holes: Vec<Hole> = Vec::with_capacity(4 * TRIES);
    // In the window: used bytes, used ranges; and how many holes lie below it.
    let (mut first, mut used, mut ranges, mut below) = (space.first(), 0u64, 0u64, 0);
    let mut last = space.first();
    while last != NONE {
        let range = at(last);
        if range.below != NONE && !touches(at(range.below), range) {
            (first, used, ranges, below) = (last, 0, 0, holes.len());
        }
        match range.state {
            State::Used => (used, ranges) = (used + range.bytes, ranges + 1),
            State::Free => holes.push(Hole { bytes: range.bytes, start: range.start, index: last }),
            State::Pinned | State::Spare => {
                last = range.above;
                (first, used, ranges, below) = (last, 0, 0, holes.len());
                continue;
            }
        }
        while range.end() - at(first).start >= wanted {
            let moved_ns = cost.copies_ns(used, ranges);
            if moved_ns < limit_ns {
                let holes = below..holes.len();
                windows.push(Candidate { cost_ns: moved_ns, window: Window { first, last }, holes });
            }
            let low = at(first);
            if first == last {
                break;
            }
            match low.state {
                State::Free => below += 1,
                _ => (used, ranges) = (used - low.bytes, ranges - 1),
            }
            first = low.above;
        }
        last = range.above;
    }
    if windows.len() > TRIES {
        windows.select_nth_unstable_by(TRIES, |a, b| a.cost_ns.total_cmp(&b.cost_ns));
        windows.truncate(TRIES);
    }
    windows.sort_by(|a, b| a.cost_ns.total_cmp(&b.cost_ns));
    let mut outside = Vec::with_capacity(holes.len());
    windows.iter().find_map(|candidate| {
        outside.clear();
        outside.extend_from_slice(&holes[..candidate.holes.start]);
        outside.extend_from_slice(&holes[candidate.holes.end..]);
        empty(space, candidate, &mut outside)
    })
}

struct Candidate {
    cost_ns: f64,
    window: Window,
    /// Which of the holes lie in it.
    holes: std::ops::Range<usize>,
}

#[derive(Clone, Copy)]
struct Hole {
    bytes: u64,
    start: u64,
    index: u32,
}

/// Moves everything out of a window, where there are holes for it.
fn empty(space: &Offsets, candidate: &Candidate, holes: &mut [Hole]) -> Option<Compaction> {
    let at = |i: u32| &space.ranges[i as usize];
    let Candidate { cost_ns, window, .. } = candidate;
    let (start, end) = (at(window.first).start, at(window.last).end());
    let largest = holes.iter().map(|hole| hole.bytes).max()?;
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
    Some(Compaction { moves, start, bytes: end - start, cost_ns: *cost_ns, cause: Cause::Asked })
}
