//! Stitching: a large block made of whole free pages from several places, mapped under one range of addresses.
//!
//! Nothing that lives is moved. The pieces are taken from the space like any other range, and stay where they are;
//! only the addresses through which they are seen are new. So this is plain arithmetic too: which pages.

use super::cost::CostModel;
use super::offsets::{Offsets, RangeId};
use super::ranges::{NONE, State};

/// Free whole pages that together hold a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Stitch {
    /// First offset and size of each run of pages, in the order in which they are mapped.
    pub pieces: Vec<(u64, u64)>,
    /// Modelled time to map them.
    pub cost_ns: f64,
}

impl Stitch {
    /// Bytes of all pieces.
    pub fn bytes(&self) -> u64 {
        self.pieces.iter().map(|(_, bytes)| bytes).sum()
    }
}

/// Chooses pages for `bytes`, the longest runs first; `None` where there are not enough whole free pages.
pub(super) fn plan(space: &Offsets, bytes: u64, page: u64, cost: &CostModel) -> Option<Stitch> {
    let mut missing = bytes.checked_next_multiple_of(page)?;
    if missing > space.free_bytes() {
        return None;
    }
    let mut runs = Vec::new();
    let mut at = space.first();
    while at != NONE {
        let range = &space.ranges[at as usize];
        if range.state == State::Free {
            let start = range.start.next_multiple_of(page);
            let end = range.end() & !(page - 1);
            if start < end {
                runs.push((start, end - start));
            }
        }
        at = range.above;
    }
    runs.sort_by_key(|(start, bytes)| (std::cmp::Reverse(*bytes), *start));
    let mut pieces = Vec::new();
    for (start, bytes) in runs {
        let taken = bytes.min(missing);
        pieces.push((start, taken));
        missing -= taken;
        if missing == 0 {
            let pages = bytes_of(&pieces) / page;
            return Some(Stitch { pieces, cost_ns: pages as f64 * cost.map_page_ns });
        }
    }
    None
}

fn bytes_of(pieces: &[(u64, u64)]) -> u64 {
    pieces.iter().map(|(_, bytes)| bytes).sum()
}

impl Offsets {
    /// Takes exactly the `bytes` at `start`, where they are free, as a range that never moves.
    pub(super) fn take_at(&mut self, start: u64, bytes: u64, tag: u8) -> Option<RangeId> {
        let mut at = self.first();
        while at != NONE && self.ranges[at as usize].end() < start + bytes {
            at = self.ranges[at as usize].above;
        }
        let hole = &self.ranges[at as usize];
        if hole.state != State::Free || hole.start > start {
            return None;
        }
        self.free_bytes_taken(bytes);
        let taken = self.carve(at, start, bytes);
        let range = &mut self.ranges[taken as usize];
        range.state = State::Pinned;
        range.tag = tag;
        range.align_log2 = self.granule.trailing_zeros() as u8;
        Some(RangeId(taken))
    }
}
