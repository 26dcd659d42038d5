//! Compaction: which used ranges to move so that a contiguous free range of a given size appears.
//!
//! Two kinds of plan are compared by modelled cost. **Sliding** packs the used ranges of a window of
//! neighbours towards its low end, and the window's holes become one. **Evicting** empties a window by moving
//! its used ranges into holes elsewhere, which can be cheaper when a small range divides two large holes.
//! Sliding alone reaches the bound: without pinned ranges, whatever is free in a segment can be made contiguous.

use super::cost::CostModel;
use super::offsets::{NONE, Offsets, Range, RangeId, State, free_range};

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
}

impl Compaction {
    /// Bytes that move.
    pub fn moved_bytes(&self) -> u64 {
        self.moves.iter().map(|m| m.bytes).sum()
    }
}

/// How many of the cheapest windows are tried for evicting.
const EVICTION_TRIES: usize = 16;

/// The cheapest plan found that opens `bytes` at a multiple of `align`; `None` where pinned ranges, segments'
/// ends or a lack of free bytes prevent it.
pub(super) fn plan(space: &Offsets, bytes: u64, align: u64, cost: &CostModel) -> Option<Compaction> {
    let bytes = bytes.checked_next_multiple_of(space.granule)?;
    let slack = align.max(space.granule) - space.granule;
    let wanted = bytes.checked_add(slack)?;
    let evict = evict(space, wanted, cost);
    let limit = evict.as_ref().map_or(f64::INFINITY, |s| s.cost_ns);
    slide(space, wanted, cost, limit).or(evict)
}

struct Window {
    first: u32,
    last: u32,
}

/// Whether the range above `range` continues it without a gap.
fn touches(range: &Range, above: &Range) -> bool {
    range.end() == above.start
}

/// The cheapest plan of its kind below `limit_ns`.
fn slide(space: &Offsets, wanted: u64, cost: &CostModel, limit_ns: f64) -> Option<Compaction> {
    let at = |i: u32| &space.ranges[i as usize];
    let mut best: Option<Compaction> = None;
    let (mut first, mut free, mut moved_ns) = (space.first, 0u64, 0.0f64);
    let mut last = space.first;
    while last != NONE {
        let range = at(last);
        let starts_anew = range.state == State::Pinned || (range.below != NONE && !touches(at(range.below), range));
        if starts_anew {
            (first, free, moved_ns) = (last, 0, 0.0);
        }
        match range.state {
            State::Free => free += range.bytes,
            State::Used => moved_ns += cost.copy_ns(range.bytes),
            State::Pinned | State::Spare => {
                first = range.above;
                last = range.above;
                continue;
            }
        }
        if range.state == State::Free && free >= wanted {
            // Leave out what need not be in the window: used ranges at its low end, and holes not needed.
            while first != last {
                let low = at(first);
                match low.state {
                    State::Free if free - low.bytes >= wanted => free -= low.bytes,
                    State::Used => moved_ns -= cost.copy_ns(low.bytes),
                    _ => break,
                }
                first = low.above;
            }
            if moved_ns < best.as_ref().map_or(limit_ns, |b| b.cost_ns) {
                let plan = slide_window(space, &Window { first, last }, wanted, cost);
                if let Some(plan) = plan
                    && plan.cost_ns < best.as_ref().map_or(limit_ns, |b| b.cost_ns)
                {
                    best = Some(plan);
                }
            }
        }
        last = range.above;
    }
    best
}

fn slide_window(space: &Offsets, window: &Window, wanted: u64, cost: &CostModel) -> Option<Compaction> {
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
            }
            to += range.bytes;
        }
        if i == window.last {
            break;
        }
        i = range.above;
    }
    let bytes = at(window.last).end() - to;
    (bytes >= wanted).then_some(Compaction { moves, start: to, bytes, cost_ns })
}

/// The cheapest plan of its kind, among the cheapest windows.
fn evict(space: &Offsets, wanted: u64, cost: &CostModel) -> Option<Compaction> {
    let at = |i: u32| &space.ranges[i as usize];
    let mut windows: Vec<(f64, Window)> = Vec::new();
    let (mut first, mut moved_ns) = (space.first, 0.0f64);
    let mut last = space.first;
    while last != NONE {
        let range = at(last);
        if range.state == State::Pinned {
            (first, moved_ns) = (range.above, 0.0);
            last = range.above;
            continue;
        }
        if range.below != NONE && first != last && !touches(at(range.below), range) {
            (first, moved_ns) = (last, 0.0);
        }
        if range.state == State::Used {
            moved_ns += cost.copy_ns(range.bytes);
        }
        while range.end() - at(first).start >= wanted {
            windows.push((moved_ns, Window { first, last }));
            let low = at(first);
            if first == last {
                break;
            }
            if low.state == State::Used {
                moved_ns -= cost.copy_ns(low.bytes);
            }
            first = low.above;
        }
        last = range.above;
    }
    if windows.len() > EVICTION_TRIES {
        windows.select_nth_unstable_by(EVICTION_TRIES, |a, b| a.0.total_cmp(&b.0));
        windows.truncate(EVICTION_TRIES);
    }
    windows.sort_by(|a, b| a.0.total_cmp(&b.0));
    windows.iter().find_map(|(cost_ns, window)| evict_window(space, window, *cost_ns))
}

struct Hole {
    bytes: u64,
    start: u64,
    index: u32,
}

fn evict_window(space: &Offsets, window: &Window, cost_ns: f64) -> Option<Compaction> {
    let at = |i: u32| &space.ranges[i as usize];
    let (start, end) = (at(window.first).start, at(window.last).end());
    let mut leaving: Vec<u32> = Vec::new();
    let mut holes: Vec<Hole> = Vec::new();
    let mut i = space.first;
    while i != NONE {
        let range = at(i);
        let inside = range.start >= start && range.end() <= end;
        match range.state {
            State::Used if inside => leaving.push(i),
            State::Free if !inside => holes.push(Hole { bytes: range.bytes, start: range.start, index: i }),
            _ => {}
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
    Some(Compaction { moves, start, bytes: end - start, cost_ns })
}

impl Offsets {
    /// Makes the moves of a plan that was made for this very state.
    ///
    /// # Panics
    /// The plan was made for another state.
    pub(super) fn relocate(&mut self, plan: &Compaction) {
        for m in &plan.moves {
            assert_eq!(self.start_of(m.range), m.from, "the plan is of another state");
            if m.to < m.from && m.to + m.bytes > m.from
                || self
                    .ranges
                    .get(self.ranges[m.range.0 as usize].below as usize)
                    .is_some_and(|b| b.state == State::Free && b.end() == m.from && b.start <= m.to && m.to < m.from)
            {
                self.slide_down(m.range.0, m.to);
            } else {
                self.jump(m.range.0, m.to, m.hole);
            }
        }
    }

    /// Moves a used range down within the hole right below it.
    fn slide_down(&mut self, at: u32, to: u64) {
        let Range { start, bytes, below, .. } = self.ranges[at as usize];
        let hole = &self.ranges[below as usize];
        assert!(hole.state == State::Free && hole.end() == start && hole.start <= to, "no hole to slide into");
        let (hole_start, distance) = (hole.start, start - to);
        if hole_start == to {
            self.unlist(below);
            self.unlink(below);
            self.retire(below);
        } else {
            self.resize(below, hole_start, to - hole_start);
        }
        self.ranges[at as usize].start = to;
        self.free_above(at, to + bytes, distance);
    }

    /// Makes the `bytes` from `start`, right above the range `at` and in no range, free.
    fn free_above(&mut self, at: u32, start: u64, bytes: u64) {
        let above = self.ranges[at as usize].above;
        match self.ranges.get(above as usize) {
            Some(range) if range.state == State::Free && range.start == start + bytes => {
                let upper_bytes = range.bytes;
                self.resize(above, start, bytes + upper_bytes);
            }
            _ => {
                let rest = self.insert_above(at, free_range(start, bytes, NONE, NONE));
                self.list(rest);
            }
        }
    }

    /// Moves a used range into a hole elsewhere.
    fn jump(&mut self, at: u32, to: u64, hint: u32) {
        let bytes = self.ranges[at as usize].bytes;
        let takes = |range: &Range| range.state == State::Free && range.start <= to && range.end() >= to + bytes;
        let mut hole = hint;
        if !self.ranges.get(hint as usize).is_some_and(takes) {
            hole = self.first;
            while hole != NONE && self.ranges[hole as usize].end() < to + bytes {
                hole = self.ranges[hole as usize].above;
            }
        }
        let range = &self.ranges[hole as usize];
        assert!(range.state == State::Free && range.start <= to, "no hole to move into");
        let cut = self.carve(hole, to, bytes);
        self.swap_places(at, cut);
        // `cut` now lies where `at` was; as a used range it can be freed, which joins neighbours.
        self.ranges[cut as usize].state = State::Used;
        self.free_bytes_taken(bytes);
        self.give(RangeId(cut));
    }

    /// Exchanges the offsets and neighbours of two ranges of the same size.
    fn swap_places(&mut self, a: u32, b: u32) {
        let (start_a, start_b) = (self.ranges[a as usize].start, self.ranges[b as usize].start);
        self.ranges[a as usize].start = start_b;
        self.ranges[b as usize].start = start_a;
        let rename = |i: u32| match i {
            i if i == a => b,
            i if i == b => a,
            i => i,
        };
        let (below_a, above_a) = (self.ranges[a as usize].below, self.ranges[a as usize].above);
        let (below_b, above_b) = (self.ranges[b as usize].below, self.ranges[b as usize].above);
        (self.ranges[a as usize].below, self.ranges[a as usize].above) = (rename(below_b), rename(above_b));
        (self.ranges[b as usize].below, self.ranges[b as usize].above) = (rename(below_a), rename(above_a));
        for i in [a, b] {
            let Range { below, above, .. } = self.ranges[i as usize];
            match self.ranges.get_mut(below as usize) {
                Some(range) => range.above = i,
                None => self.first = i,
            }
            match self.ranges.get_mut(above as usize) {
                Some(range) => range.below = i,
                None => self.last = i,
            }
        }
    }
}
