//! A survey: the ranges of a space in flat rows, as plans that move them need them.
//!
//! A plan looks at every range several times; a list by offset would make it wait for each link.

use super::offsets::{Offsets, RangeId};
use super::ranges::{NONE, State};

/// A range that is free or may move.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) start: u64,
    pub(super) bytes: u64,
    pub(super) range: RangeId,
    pub(super) align_log2: u8,
    pub(super) free: bool,
    /// Used, and came after ranges were last aged.
    pub(super) young: bool,
}

impl Part {
    pub(super) fn end(&self) -> u64 {
        self.start + self.bytes
    }

    /// The lowest place from `start` on that suits it.
    pub(super) fn place_from(&self, start: u64) -> u64 {
        start.next_multiple_of(1 << self.align_log2)
    }
}

/// All parts by offset. Neighbours without a gap or a pinned range between them are a row: within it, any can move.
pub(super) struct RangeSnapshot {
    pub(super) granule: u64,
    parts: Vec<Part>,
    holes: Vec<Part>,
    /// Where each row ends.
    ends: Vec<usize>,
    largest_hole_bytes: u64,
}

impl RangeSnapshot {
    pub(super) fn of(space: &Offsets) -> Self {
        let mut survey = Self {
            granule: space.granule,
            parts: Vec::with_capacity(256),
            holes: Vec::with_capacity(128),
            ends: Vec::with_capacity(4),
            largest_hole_bytes: 0,
        };
        let (mut at, mut row_end) = (space.first(), 0);
        while at != NONE {
            let range = &space.ranges[at as usize];
            if range.start != row_end {
                survey.end_row();
            }
            let free = range.state == State::Free;
            let part = Part {
                start: range.start,
                bytes: range.bytes,
                range: RangeId(at),
                align_log2: range.align_log2,
                free,
                young: !free && !range.old,
            };
            match range.state {
                State::Used => survey.parts.push(part),
                State::Free => {
                    survey.parts.push(part);
                    survey.holes.push(part);
                    survey.largest_hole_bytes = survey.largest_hole_bytes.max(part.bytes);
                }
                State::Pinned | State::Spare => survey.end_row(),
            }
            (at, row_end) = (range.above, range.end());
        }
        survey.end_row();
        survey
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
        starts.zip(&self.ends).map(|(start, end)| &self.parts[start..*end])
    }
}
