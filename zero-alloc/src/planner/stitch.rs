//! Stitching: a large block made of whole free pages from several places, mapped at contiguous
//! addresses.
//!
//! No byte moves. The pieces are allocated from the space like any other range and stay
//! where they are; only their addresses are new. So this plan is arithmetic, too: a list of pages.

use super::ranges::{NONE, Offsets, State};

/// Whole free pages that together hold a request.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Stitch {
    /// First offset and size of each run of pages, in the order in which they are mapped.
    pub pieces: Vec<(u64, u64)>,
}

impl Stitch {
    /// The sum of the bytes of all pieces.
    pub fn bytes(&self) -> u64 {
        self.pieces.iter().map(|(_, bytes)| bytes).sum()
    }
}

/// Chooses pages for `bytes`, the longest runs first; `None` if there are not enough whole free
/// pages.
pub(super) fn plan(space: &Offsets, bytes: u64, page: u64) -> Option<Stitch> {
    let wanted = bytes.checked_next_multiple_of(page)?;
    if wanted > space.free_bytes() {
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
    let mut missing = wanted;
    for (start, bytes) in runs {
        let used = bytes.min(missing);
        pieces.push((start, used));
        missing -= used;
        if missing == 0 {
            return Some(Stitch { pieces });
        }
    }

    None
}
