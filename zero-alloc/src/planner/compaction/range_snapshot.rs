//! A snapshot of a space's ranges in flat arrays, from which plans are made.
//!
//! A plan visits every range several times, and following a linked list would wait for memory at
//! each link.

use super::super::ranges::{NONE, State};
use super::{Offsets, RangeId};

/// A range that is free or may move.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) start: u64,
    pub(super) bytes: u64,
    pub(super) range: RangeId,
    pub(super) align_log2: u8,
    pub(super) free: bool,
}

impl Part {
    pub(super) fn end(&self) -> u64 {
        self.start + self.bytes
    }

    /// The lowest offset from `start` on that has the range's alignment.
    pub(super) fn place_from(&self, start: u64) -> u64 {
        start.next_multiple_of(1 << self.align_log2)
    }
}

/// All parts by offset. A row is a run of neighbours without a gap or a pinned range between them.
pub(super) struct RangeSnapshot {
    pub(super) granule: u64,
    parts: Vec<Part>,
    holes: Vec<Part>,
    /// The index after the last part of each row.
    ends: Vec<usize>,
    largest_hole_bytes: u64,
}

impl RangeSnapshot {
    pub(super) fn of(space: &Offsets) -> Self {
        let mut snapshot = Self {
            granule: space.granule,
            parts: Vec::with_capacity(256),
            holes: Vec::with_capacity(128),
            ends: Vec::with_capacity(4),
            largest_hole_bytes: 0,
        };

        let mut at = space.first();
        let mut row_end = 0;
        while at != NONE {
            let range = &space.ranges[at as usize];
            if range.start != row_end {
                snapshot.end_row();
            }
            let part = Part {
                start: range.start,
                bytes: range.bytes,
                range: RangeId(at),
                align_log2: range.align_log2,
                free: range.state == State::Free,
            };
            match range.state {
                State::Used => snapshot.parts.push(part),
                State::Free => {
                    snapshot.parts.push(part);
                    snapshot.holes.push(part);
                    snapshot.largest_hole_bytes = snapshot.largest_hole_bytes.max(part.bytes);
                }
                State::Pinned | State::Spare => snapshot.end_row(),
            }
            (at, row_end) = (range.above, range.end());
        }

        snapshot.end_row();
        snapshot
    }

    pub(super) fn largest_hole_bytes(&self) -> u64 {
        self.largest_hole_bytes
    }

    /// The free parts, by offset.
    pub(super) fn holes(&self) -> &[Part] {
        &self.holes
    }

    fn end_row(&mut self) {
        if self.ends.last().copied().unwrap_or(0) < self.parts.len() {
            self.ends.push(self.parts.len());
        }
    }

    /// The rows, by offset.
    pub(super) fn rows(&self) -> impl Iterator<Item = &[Part]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts
            .zip(&self.ends)
            .map(|(start, end)| &self.parts[start..*end])
    }
}
