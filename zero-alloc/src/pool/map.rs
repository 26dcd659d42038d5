//! A map of a pool's memory: the purpose of each part, and the holes.

use std::collections::BTreeMap;

use super::state::LANE_TAG;
use super::{Pool, Purpose};
use crate::device::Device;

/// One contiguous part of a pool's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryRange {
    /// Its first offset.
    pub start: u64,
    /// Its size.
    pub bytes: u64,
    /// The purpose that holds it; `None` if it is free.
    pub purpose: Option<Purpose>,
}

/// A pool's memory at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryMap {
    /// The parts by offset; adjacent parts of the same kind are joined.
    pub spans: Vec<MemoryRange>,
}

const LETTERS: [char; Purpose::COUNT] = ['P', 'G', 'O', 'B', 'A', 'W'];

impl<D: Device> Pool<D> {
    /// The current map.
    pub fn map(&self) -> MemoryMap {
        let (lanes, state) = self.lock();
        let mut of_lanes = BTreeMap::new();
        for lane in &lanes {
            lane.for_each_range(|start, bytes, tag| {
                of_lanes.insert(start, (bytes, tag));
            });
        }
        let mut map = MemoryMap::default();
        state.planner.for_each_range(|start, bytes, tag| {
            if tag != Some(LANE_TAG) {
                return map.push(start, bytes, tag);
            }
            for (start, (bytes, tag)) in of_lanes.range(start..start + bytes) {
                map.push(*start, *bytes, *tag);
            }
        });
        map
    }
}

impl MemoryMap {
    fn push(&mut self, start: u64, bytes: u64, tag: Option<u8>) {
        let purpose = tag.and_then(|tag| Purpose::ALL.get(tag as usize).copied());
        match self.spans.last_mut() {
            Some(last) if last.purpose == purpose && last.start + last.bytes == start => {
                last.bytes += bytes;
            }
            _ => self.spans.push(MemoryRange {
                start,
                bytes,
                purpose,
            }),
        }
    }

    /// The end of the last part.
    pub fn end(&self) -> u64 {
        self.spans.last().map_or(0, |span| span.start + span.bytes)
    }

    /// One line of `width` characters: the first letter of the purpose that fills most of each
    /// column, `.` if most is free.
    pub fn text(&self, width: usize) -> String {
        let end = self.end().max(1);
        let width = width.max(1);
        let mut line = String::with_capacity(width);
        for column in 0..width as u64 {
            let edge = |column: u64| (u128::from(end) * u128::from(column) / width as u128) as u64;
            let from = edge(column);
            let to = edge(column + 1).max(edge(column) + 1);
            let mut held = [0u64; Purpose::COUNT + 1];
            for span in &self.spans {
                let overlap = (span.start + span.bytes)
                    .min(to)
                    .saturating_sub(span.start.max(from));
                held[span
                    .purpose
                    .map_or(Purpose::COUNT, |purpose| purpose as usize)] += overlap;
            }
            let most = (0..held.len())
                .max_by_key(|kind| (held[*kind], std::cmp::Reverse(*kind)))
                .unwrap_or(Purpose::COUNT);
            line.push(
                LETTERS
                    .get(most)
                    .copied()
                    .filter(|_| held[most] > 0)
                    .unwrap_or('.'),
            );
        }

        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_shows_the_largest_purpose() {
        let span = |start, bytes, purpose| MemoryRange {
            start,
            bytes,
            purpose,
        };
        let spans = vec![
            span(0, 50, Some(Purpose::Params)),
            span(50, 25, None),
            span(75, 20, Some(Purpose::Activations)),
            span(95, 5, None),
        ];
        let map = MemoryMap { spans };
        assert_eq!(map.text(8), "PPPP..AA");
        assert_eq!(map.text(2), "P.");
        assert_eq!(MemoryMap::default().text(3), "...");
    }
}
