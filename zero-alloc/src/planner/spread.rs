//! Spreading: the ranges of a row are moved apart, so that each of the young ones has a pad above it and may be
//! replaced by one that is larger by so much.
//!
//! The pads share what is reserved beyond the greatest live size; what is free for another reason stays in one piece,
//! since the program is known to need it. Ranges keep their order, and those that lie nearly right stay where they are.

use super::compaction::{Cause, Compaction, Relocation};
use super::cost::CostModel;
use super::offsets::{Offsets, RangeId};
use super::ranges::{NONE, State};

/// Neighbours by offset without a gap or a pinned one between them.
#[derive(Clone, Copy, Default)]
struct Row {
    /// The lowest that is free or young.
    first: u32,
    end: u64,
    free_bytes: u64,
    young_bytes: u64,
    /// The largest free range.
    hole: u32,
    hole_bytes: u64,
}

/// Spreads the row with the most free bytes, with a hole for `bytes` and their pad. `None` where that is not enough,
/// or where pads would be smaller than what `bytes` miss now.
pub(super) fn plan(space: &Offsets, bytes: u64, peak_bytes: u64, cost: &CostModel) -> Option<Compaction> {
    let at = |i: u32| &space.ranges[i as usize];
    let bytes = bytes.checked_next_multiple_of(space.granule)?;
    let row = best_row(space)?;
    // What the program had at its peak and has not now.
    let rest = (peak_bytes + space.free_bytes()).saturating_sub(space.bytes() + bytes);
    let surplus = row.free_bytes.checked_sub(bytes + rest)?;
    let share = surplus as f64 / (row.young_bytes + bytes + rest) as f64;
    let pad = |bytes: u64| (bytes as f64 * share) as u64 & !(space.granule - 1);
    if row.hole_bytes + pad(bytes) < bytes {
        return None;
    }
    let (mut down, mut up) = (Vec::new(), Vec::new());
    let (mut start, mut cost_ns) = (0, 0.0);
    // Where the next range should lie, and where it can.
    let mut ideal = at(row.first).start;
    let mut end = ideal;
    let mut i = row.first;
    loop {
        let range = at(i);
        if i == row.hole {
            start = end;
            ideal += bytes + pad(bytes) + rest + pad(rest);
            // Alignment may have cost more than was planned.
            end = ideal.max(start + bytes + pad(bytes));
        } else if range.state == State::Used {
            let stays = range.start >= end && range.start.abs_diff(ideal) <= pad(range.bytes) / 2;
            let to = if stays { range.start } else { ideal.max(end).next_multiple_of(1 << range.align_log2) };
            if to != range.start {
                let moves = if to < range.start { &mut down } else { &mut up };
                moves.push(Relocation { range: RangeId(i), from: range.start, to, bytes: range.bytes, hole: NONE });
                cost_ns += cost.move_ns(range.bytes, range.start.abs_diff(to));
            }
            end = to + range.bytes;
            ideal += range.bytes + if range.old { 0 } else { pad(range.bytes) };
        }
        if range.end() == row.end {
            break;
        }
        i = range.above;
    }
    // Each finds its place empty: those that go down from the lowest, then those that go up from the highest.
    down.extend(up.into_iter().rev());
    let cause = Cause::Spread { bytes, pad: pad(bytes) };
    (end <= row.end).then_some(Compaction { moves: down, start, bytes: bytes + pad(bytes), cost_ns, cause })
}

fn best_row(space: &Offsets) -> Option<Row> {
    let (mut best, mut row) = (Row::default(), Row::default());
    let mut at = space.first();
    while at != NONE {
        let range = &space.ranges[at as usize];
        if range.state == State::Pinned || range.start != row.end {
            row = Row::default();
        }
        row.end = range.end();
        match range.state {
            State::Free => {
                row.free_bytes += range.bytes;
                if range.bytes > row.hole_bytes {
                    (row.hole, row.hole_bytes) = (at, range.bytes);
                }
            }
            State::Used if !range.old => row.young_bytes += range.bytes,
            _ => {}
        }
        if row.first == NONE && range.state != State::Pinned && !range.old {
            row.first = at;
        }
        // The last free range of a row ends it: what lies above that stays.
        if range.state == State::Free && row.free_bytes > best.free_bytes {
            best = row;
        }
        at = range.above;
    }
    (best.first != NONE).then_some(best)
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
