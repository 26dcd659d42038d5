//! Free and used ranges of an offset space.
//!
//! The space is a sequence of segments; every byte of a segment belongs to exactly one range, used
//! or free. Two free ranges of a segment are never adjacent: freeing joins neighbours. Free ranges
//! are listed by [size class](super::size_class), so that finding one is a few bit operations.

use super::ranges::{NONE, Offsets, Range, RangeId, State};
use super::search::{Pick, Side, place};
use super::size_class::{CLASSES, STEPS, SizeClass};

impl Offsets {
    /// An empty space whose ranges are multiples of `granule` bytes, a power of two.
    ///
    /// # Panics
    /// `granule` is not a power of two.
    pub(crate) fn new(granule: u64) -> Self {
        assert!(
            granule.is_power_of_two(),
            "granule {granule} is not a power of two"
        );
        Self {
            granule,
            granule_log2: granule.trailing_zeros(),
            ranges: vec![Range::SPARE],
            spare: NONE,
            heads: Box::new([NONE; CLASSES]),
            steps_in_use: [0; CLASSES / STEPS],
            levels_in_use: 0,
            free_bytes: 0,
            bytes: 0,
        }
    }

    /// Preallocates slots for `count` ranges, used and free.
    pub(super) fn reserve_ranges(&mut self, count: usize) {
        let made = self.ranges.len();
        self.ranges
            .resize(made.max(count.min(u32::MAX as usize)), Range::SPARE);
        for at in (made..self.ranges.len()).rev() {
            self.retire(at as u32);
        }
    }

    /// The end of the last segment.
    pub(super) fn end(&self) -> u64 {
        self.ranges[self.last() as usize].end()
    }

    /// The tag of a used range.
    pub(super) fn tag_of(&self, id: RangeId) -> u8 {
        self.ranges[id.0 as usize].tag
    }

    /// The first offset of a used range.
    pub(super) fn start_of(&self, id: RangeId) -> u64 {
        self.ranges[id.0 as usize].start
    }

    /// The bytes of a used range, in whole granules.
    pub(crate) fn bytes_of(&self, id: RangeId) -> u64 {
        self.ranges[id.0 as usize].bytes
    }

    /// Bytes of all segments.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes in no used range.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// Free bytes at the end of the last segment.
    pub(super) fn free_tail_bytes(&self) -> u64 {
        let last = &self.ranges[self.last() as usize];
        if last.state == State::Free {
            last.bytes
        } else {
            0
        }
    }

    /// Adds a free segment of `bytes` (rounded down to granules, not 0) above the others and
    /// returns its first offset. Ranges never extend from one segment into another.
    pub(crate) fn add_segment(&mut self, bytes: u64) -> u64 {
        // A gap keeps segments apart.
        let start = if self.last() == NONE {
            0
        } else {
            self.end() + self.granule
        };
        self.append(start, bytes & !(self.granule - 1));
        start
    }

    /// Extends the last segment by `bytes` (rounded down to granules); the new bytes are free.
    pub(super) fn extend(&mut self, bytes: u64) {
        let bytes = bytes & !(self.granule - 1);
        let last = self.last();
        let Range {
            start,
            bytes: last_bytes,
            state,
            ..
        } = self.ranges[last as usize];
        if bytes == 0 {
        } else if state == State::Free {
            self.resize(last, start, last_bytes + bytes);
            self.free_bytes += bytes;
            self.bytes += bytes;
        } else {
            self.append(self.end(), bytes);
        }
    }

    fn append(&mut self, start: u64, bytes: u64) {
        let range = self.insert_above(self.last(), start, bytes);
        self.free_bytes += bytes;
        self.bytes += bytes;
        self.list(range);
    }

    /// Cuts free bytes off the end of the last segment, so that it ends at a multiple of `unit`;
    /// returns their number.
    pub(super) fn trim(&mut self, unit: u64) -> u64 {
        let bytes = self.free_tail_bytes();
        let cut = self.end()
            - (self.end() - bytes)
                .next_multiple_of(unit.max(self.granule))
                .min(self.end());
        if cut == 0 {
            return 0;
        }
        let last = self.last();
        if cut == bytes {
            self.unlist(last);
            self.remove(last);
        } else {
            self.resize(last, self.ranges[last as usize].start, bytes - cut);
        }
        self.free_bytes -= cut;
        self.bytes -= cut;
        cut
    }

    /// Removes a free segment of [`Offsets::add_segment`]. Returns false, with nothing changed, if
    /// it is not one whole free range.
    pub(crate) fn remove_segment(&mut self, start: u64, bytes: u64) -> bool {
        let bytes = bytes & !(self.granule - 1);
        let mut at = self.head(self.class_of(bytes));
        while at != NONE {
            let range = &self.ranges[at as usize];
            if range.start == start && range.bytes == bytes {
                self.unlist(at);
                self.remove(at);
                self.free_bytes -= bytes;
                self.bytes -= bytes;
                return true;
            }
            at = range.later;
        }
        false
    }

    /// Allocates `bytes` (rounded up to granules, at least one) at a multiple of `align` (a power
    /// of two); returns the range and its first offset, or `None` if no free range holds it. `tag`
    /// has no meaning here.
    #[inline]
    pub(crate) fn allocate(
        &mut self,
        bytes: u64,
        align: u64,
        side: Side,
        pick: Pick,
        tag: u8,
    ) -> Option<(RangeId, u64)> {
        let align = align.max(self.granule);
        let bytes = bytes.max(1).checked_add(self.granule - 1)? & !(self.granule - 1);
        let at = match pick {
            Pick::Best => self.find(bytes, align, side)?,
            Pick::Highest | Pick::Lowest => self.find_by_offset(bytes, align, side, pick)?,
        };
        let start = place(&self.ranges[at as usize], bytes, align, side)?;
        self.free_bytes -= bytes;
        let used = self.carve(at, start, bytes);
        let range = &mut self.ranges[used as usize];
        (range.state, range.tag, range.align_log2) =
            (State::Used, tag, align.trailing_zeros() as u8);
        Some((RangeId(used), start))
    }

    /// Allocates the `bytes` at `start`, whole granules; `None` if they are not all free.
    pub(super) fn allocate_at(&mut self, start: u64, bytes: u64, tag: u8) -> Option<RangeId> {
        let mut at = self.first();
        while at != NONE && self.ranges[at as usize].end() < start + bytes {
            at = self.ranges[at as usize].above;
        }
        let hole = &self.ranges[at as usize];
        if hole.state != State::Free || hole.start > start {
            return None;
        }
        self.free_bytes -= bytes;
        let used = self.carve(at, start, bytes);
        let range = &mut self.ranges[used as usize];
        (range.state, range.tag, range.align_log2) =
            (State::Used, tag, self.granule.trailing_zeros() as u8);
        Some(RangeId(used))
    }

    /// Cuts `bytes` at `start` out of a free range, whose rest stays listed. Returns the cut, which
    /// is in no list.
    #[inline(always)]
    pub(super) fn carve(&mut self, at: u32, start: u64, bytes: u64) -> u32 {
        let range = &self.ranges[at as usize];
        let head = start - range.start;
        let tail = range.end() - start - bytes;
        match (head, tail) {
            (0, 0) => {
                self.unlist(at);
                at
            }
            (0, _) => {
                self.resize(at, start + bytes, tail);
                self.insert_above(self.ranges[at as usize].below, start, bytes)
            }
            (_, 0) => {
                self.resize(at, start - head, head);
                self.insert_above(at, start, bytes)
            }
            _ => {
                self.resize(at, start - head, head);
                let cut = self.insert_above(at, start, bytes);
                let rest = self.insert_above(cut, start + bytes, tail);
                self.list(rest);
                cut
            }
        }
    }

    /// Frees a range; returns its first offset and its size.
    ///
    /// # Panics
    /// `id` is not in use.
    #[inline]
    pub(crate) fn free(&mut self, id: RangeId) -> (u64, u64) {
        let at = id.0;
        let range = &self.ranges[at as usize];
        assert!(range.state == State::Used, "{id:?} is not in use");
        let start = range.start;
        let bytes = range.bytes;
        let below = range.below;
        let above = range.above;
        self.free_bytes += bytes;
        let lower = &self.ranges[below as usize];
        let upper = &self.ranges[above as usize];
        let lower_start = lower.start;
        let lower_bytes = lower.bytes;
        let upper_bytes = upper.bytes;
        let joins_below = lower.state == State::Free && lower.end() == start;
        let joins_above = upper.state == State::Free && upper.start == start + bytes;

        match (joins_below, joins_above) {
            (false, false) => {
                self.ranges[at as usize].state = State::Free;
                self.list(at);
            }
            (true, false) => {
                self.remove(at);
                self.resize(below, lower_start, lower_bytes + bytes);
            }
            (false, true) => {
                self.remove(at);
                self.resize(above, start, bytes + upper_bytes);
            }
            (true, true) => {
                self.remove(at);
                self.unlist(above);
                self.remove(above);
                self.resize(below, lower_start, lower_bytes + bytes + upper_bytes);
            }
        }

        (start, bytes)
    }

    /// The largest free range.
    pub(super) fn largest_free_bytes(&self) -> u64 {
        let Some(level) = self.levels_in_use.checked_ilog2().map(|l| l as usize) else {
            return 0;
        };
        let Some(step) = self.steps_in_use[level].checked_ilog2().map(|s| s as usize) else {
            return 0;
        };
        let mut largest = 0;
        let mut at = self.head(SizeClass((level * STEPS + step) as u16));
        while at != NONE {
            largest = largest.max(self.ranges[at as usize].bytes);
            at = self.ranges[at as usize].later;
        }
        largest
    }

    /// Calls `visit` with every range in order of offset: first offset, bytes, the tag if it is
    /// used.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(u64, u64, Option<u8>)) {
        let mut at = self.first();
        while at != NONE {
            let range = &self.ranges[at as usize];
            let tag = (range.state != State::Free).then_some(range.tag);
            visit(range.start, range.bytes, tag);
            at = range.above;
        }
    }
}
