//! Spreading: the ranges of a row are moved apart, so that each of the young ones has a pad above it and may be
//! replaced by one that is larger by so much.
//!
//! The pads share what is reserved beyond the greatest live size; what is free for another reason stays in one piece,
//! since the program is known to need it. Ranges keep their order, and those that lie nearly right stay where they are.

use super::compaction::{Cause, Compaction, Relocation};
use super::cost::CostModel;
use super::offsets::Offsets;
use super::range_snapshot::{Part, RangeSnapshot};
use super::ranges::{NONE, State};

/// A row of neighbours as it is spread.
#[derive(Clone, Copy, Default)]
struct Row<'a> {
    /// From the lowest that is free or young to the highest that is free: what lies outside stays.
    parts: &'a [Part],
    free_bytes: u64,
    young_bytes: u64,
    /// The first offset of the largest hole, and its size.
    hole: u64,
    hole_bytes: u64,
}

/// Spreads the row with the most free bytes, with a hole for `bytes` and their pad (whole granules). `None` where
/// that is not enough, or where pads would be smaller than what `bytes` miss now. `rest_bytes` are kept free in one
/// piece with that hole.
pub(super) fn plan(survey: &RangeSnapshot, bytes: u64, rest_bytes: u64, cost: &CostModel) -> Option<Compaction> {
    let row = best_row(survey)?;
    let surplus = row.free_bytes.checked_sub(bytes + rest_bytes)?;
    let share = surplus as f64 / (row.young_bytes + bytes + rest_bytes) as f64;
    let pad = |bytes: u64| (bytes as f64 * share) as u64 & !(survey.granule - 1);
    if row.hole_bytes + pad(bytes) < bytes {
        return None;
    }
    let (mut down, mut up) = (Vec::new(), Vec::new());
    let (mut start, mut cost_ns) = (0, 0.0);
    // Where the next range should lie, and where it can.
    let mut ideal = row.parts[0].start;
    let mut end = ideal;
    for part in row.parts {
        if part.free && part.start == row.hole {
            start = end;
            ideal += bytes + pad(bytes) + rest_bytes + pad(rest_bytes);
            // Alignment may have cost more than was planned.
            end = ideal.max(start + bytes + pad(bytes));
        } else if !part.free {
            let stays = part.start >= end && part.start.abs_diff(ideal) <= pad(part.bytes) / 2;
            let to = if stays { part.start } else { part.place_from(ideal.max(end)) };
            if to != part.start {
                let moves = if to < part.start { &mut down } else { &mut up };
                moves.push(Relocation { range: part.range, from: part.start, to, bytes: part.bytes, hole: NONE });
                cost_ns += cost.move_ns(part.bytes, part.start.abs_diff(to));
            }
            end = to + part.bytes;
            ideal += part.bytes + if part.young { pad(part.bytes) } else { 0 };
        }
    }
    // Each finds its place empty: those that go down from the lowest, then those that go up from the highest.
    down.extend(up.into_iter().rev());
    let cause = Cause::Spread { bytes, pad: pad(bytes) };
    let room = row.parts[row.parts.len() - 1].end();
    (end <= room).then_some(Compaction { moves: down, start, bytes: bytes + pad(bytes), cost_ns, cause })
}

fn best_row(survey: &RangeSnapshot) -> Option<Row<'_>> {
    let rows = survey.rows().filter_map(|row| {
        let first = row.iter().position(|part| part.free || part.young)?;
        let last = row.iter().rposition(|part| part.free)?;
        let parts = &row[first..=last];
        let mut row = Row { parts, ..Row::default() };
        for part in parts {
            if part.free {
                row.free_bytes += part.bytes;
                if part.bytes > row.hole_bytes {
                    (row.hole, row.hole_bytes) = (part.start, part.bytes);
                }
            } else if part.young {
                row.young_bytes += part.bytes;
            }
        }
        Some(row)
    });
    // The first of those with the most.
    rows.reduce(|best, row| if row.free_bytes > best.free_bytes { row } else { best })
}

impl Offsets {
    /// From now on, what is used now is not young.
    pub(super) fn age(&mut self) {
        let mut at = self.first();
        while at != NONE {
            let range = &mut self.ranges[at as usize];
            range.old = range.state != State::Free;
            at = range.above;
        }
    }
}
