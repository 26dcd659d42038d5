//! Applying the moves of a [`Compaction`] to the lists of ranges.

use super::super::ranges::{NONE, Range, State};
use super::{Compaction, Offsets, RangeId};

impl Offsets {
    /// Applies a plan that was made for the current state.
    ///
    /// # Panics
    /// The plan was made for a different state.
    pub(in super::super) fn relocate(&mut self, plan: &Compaction) {
        for m in &plan.moves {
            assert_eq!(
                self.start_of(m.range),
                m.from,
                "the plan was made for a different state"
            );
            let Range { below, above, .. } = self.ranges[m.range.0 as usize];
            let below = &self.ranges[below as usize];
            let above = &self.ranges[above as usize];
            let old_end = m.from + m.bytes;
            let end = m.to + m.bytes;
            let hole_below =
                below.state == State::Free && below.end() == m.from && below.start <= m.to;
            let hole_above =
                above.state == State::Free && above.start == old_end && above.end() >= end;
            if m.to < m.from && (end > m.from || hole_below) {
                self.slide_down(m.range.0, m.to);
            } else if m.to > m.from && (m.to < old_end || hole_above) {
                self.slide_up(m.range.0, m.to);
            } else {
                self.jump(m.range.0, m.to, m.hole);
            }
        }
    }

    /// Moves a used range down within the hole right below it.
    fn slide_down(&mut self, at: u32, to: u64) {
        let Range {
            start,
            bytes,
            below,
            ..
        } = self.ranges[at as usize];

        let hole = &self.ranges[below as usize];
        assert!(
            hole.state == State::Free && hole.end() == start && hole.start <= to,
            "no hole to slide into"
        );
        let hole_start = hole.start;
        let distance = start - to;

        if hole_start == to {
            self.unlist(below);
            self.remove(below);
        } else {
            self.resize(below, hole_start, to - hole_start);
        }

        self.ranges[at as usize].start = to;
        self.free_above(at, to + bytes, distance);
    }

    /// Moves a used range up within the hole right above it.
    fn slide_up(&mut self, at: u32, to: u64) {
        let Range {
            start,
            bytes,
            below,
            above,
            ..
        } = self.ranges[at as usize];

        let end = to + bytes;
        let distance = to - start;
        let hole = &self.ranges[above as usize];
        let hole_end = hole.end();
        assert!(
            hole.state == State::Free && hole.start == start + bytes && end <= hole_end,
            "no hole to slide into"
        );

        if hole_end == end {
            self.unlist(above);
            self.remove(above);
        } else {
            self.resize(above, end, hole_end - end);
        }

        self.ranges[at as usize].start = to;
        let lower = &self.ranges[below as usize];
        if lower.state == State::Free && lower.end() == start {
            let Range { start, bytes, .. } = *lower;
            self.resize(below, start, bytes + distance);
        } else {
            let rest = self.insert_above(below, start, distance);
            self.list(rest);
        }
    }

    /// Lists the `bytes` from `start`, directly above the range `at` and in no range yet, as free.
    fn free_above(&mut self, at: u32, start: u64, bytes: u64) {
        let above = self.ranges[at as usize].above;
        let upper = &self.ranges[above as usize];
        if upper.state == State::Free && upper.start == start + bytes {
            self.resize(above, start, bytes + upper.bytes);
        } else {
            let rest = self.insert_above(at, start, bytes);
            self.list(rest);
        }
    }

    /// Moves a used range into a hole elsewhere.
    fn jump(&mut self, at: u32, to: u64, hint: u32) {
        let bytes = self.ranges[at as usize].bytes;
        let holds = |range: &Range| {
            range.state == State::Free && range.start <= to && range.end() >= to + bytes
        };
        let mut hole = hint;

        if !self.ranges.get(hint as usize).is_some_and(holds) {
            hole = self.first();
            while hole != NONE && self.ranges[hole as usize].end() < to + bytes {
                hole = self.ranges[hole as usize].above;
            }
        }

        let range = &self.ranges[hole as usize];
        assert!(
            range.state == State::Free && range.start <= to,
            "no hole to move into"
        );
        let cut = self.carve(hole, to, bytes);
        self.swap_places(at, cut);
        // `cut` is now where `at` was; freeing it as a used range joins it with its neighbours.
        self.ranges[cut as usize].state = State::Used;
        self.free_bytes -= bytes;
        self.free(RangeId(cut));
    }

    /// Exchanges the offsets and neighbours of two ranges of the same size.
    fn swap_places(&mut self, a: u32, b: u32) {
        let start_a = self.ranges[a as usize].start;
        let start_b = self.ranges[b as usize].start;
        self.ranges[a as usize].start = start_b;
        self.ranges[b as usize].start = start_a;
        let rename = |i: u32| match i {
            i if i == a => b,
            i if i == b => a,
            i => i,
        };

        let below_a = self.ranges[a as usize].below;
        let above_a = self.ranges[a as usize].above;
        let below_b = self.ranges[b as usize].below;
        let above_b = self.ranges[b as usize].above;
        (self.ranges[a as usize].below, self.ranges[a as usize].above) =
            (rename(below_b), rename(above_b));
        (self.ranges[b as usize].below, self.ranges[b as usize].above) =
            (rename(below_a), rename(above_a));

        for i in [a, b] {
            let Range { below, above, .. } = self.ranges[i as usize];
            self.ranges[below as usize].above = i;
            self.ranges[above as usize].below = i;
        }
    }
}
