//! Free and used ranges of an offset space.
//!
//! The space is a row of segments; every byte of a segment belongs to exactly one range, used or free.
//! Two free ranges of a segment never touch: freeing joins neighbours. Free ranges are listed by
//! [size class](super::size_class), so that finding one is a few bit operations.

use super::search::place;
use super::size_class::{CLASSES, STEPS, SizeClass};

/// Names a used range. Valid until it is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RangeId(pub(super) u32);

/// Which end of a free range is cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The lower offsets: long-lived ranges.
    Low,
    /// The higher offsets: short-lived ranges.
    High,
}

/// Which of the free ranges that fit is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pick {
    /// The smallest found within a few looks; constant time.
    Best,
    /// The one of the highest offset; time grows with the number of free ranges of that size or above, so it
    /// is for large requests, of which a space can hold only few.
    Highest,
    /// The one of the lowest offset; as above.
    Lowest,
}

pub(super) const NONE: u32 = u32::MAX;
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Free,
    Used,
    /// Used, and its address is known outside: it never moves.
    Pinned,
    /// Not a range at all: the slot is spare.
    Spare,
}

#[derive(Clone, Debug)]
pub(super) struct Range {
    pub(super) start: u64,
    pub(super) bytes: u64,
    /// Neighbours by offset, in all segments.
    pub(super) below: u32,
    pub(super) above: u32,
    /// Neighbours in the list of the size class; of a spare slot, `later` is the next spare.
    pub(super) earlier: u32,
    pub(super) later: u32,
    /// Of a free range, the class in whose list it is.
    class: SizeClass,
    pub(super) state: State,
    /// What the range was taken for, and log2 of the alignment it was asked with.
    pub(super) tag: u8,
    pub(super) align_log2: u8,
}

impl Range {
    pub(super) fn end(&self) -> u64 {
        self.start + self.bytes
    }
}

/// An offset space and who uses which part of it.
#[derive(Clone, Debug)]
pub struct Offsets {
    pub(super) granule: u64,
    pub(super) ranges: Vec<Range>,
    spare: u32,
    pub(super) granule_log2: u32,
    /// The first range of each class, and bits that say which classes have one.
    pub(super) heads: Box<[u32; CLASSES]>,
    pub(super) steps_in_use: [u32; CLASSES / STEPS],
    pub(super) levels_in_use: u64,
    /// The ranges of the lowest and the highest offset.
    pub(super) first: u32,
    pub(super) last: u32,
    free_bytes: u64,
    bytes: u64,
}

impl Offsets {
    /// An empty space whose ranges are multiples of `granule` bytes, a power of two.
    ///
    /// # Panics
    /// `granule` is not a power of two.
    pub fn new(granule: u64) -> Self {
        assert!(granule.is_power_of_two(), "granule {granule} is not a power of two");
        Self {
            granule,
            ranges: Vec::new(),
            spare: NONE,
            granule_log2: granule.trailing_zeros(),
            heads: Box::new([NONE; CLASSES]),
            steps_in_use: [0; CLASSES / STEPS],
            levels_in_use: 0,
            first: NONE,
            last: NONE,
            free_bytes: 0,
            bytes: 0,
        }
    }

    /// Makes slots for `count` ranges, used and free, so that up to so many nothing is asked of the system.
    pub fn reserve_ranges(&mut self, count: usize) {
        for _ in self.ranges.len()..count.min(NONE as usize) {
            self.ranges.push(free_range(0, 0, NONE, NONE));
        }
        for at in (0..self.ranges.len() as u32).rev() {
            if self.ranges[at as usize].bytes == 0 && self.ranges[at as usize].state == State::Free {
                self.retire(at);
            }
        }
    }

    /// The offset behind the last segment.
    pub fn end(&self) -> u64 {
        self.ranges.get(self.last as usize).map_or(0, Range::end)
    }

    /// The tag that a used range was taken with.
    pub fn tag_of(&self, id: RangeId) -> u8 {
        self.ranges[id.0 as usize].tag
    }

    /// Where a used range lies.
    pub fn start_of(&self, id: RangeId) -> u64 {
        self.ranges[id.0 as usize].start
    }

    /// The bytes of a used range, in whole granules.
    pub fn bytes_of(&self, id: RangeId) -> u64 {
        self.ranges[id.0 as usize].bytes
    }

    /// Bytes of all segments.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes in no used range.
    pub fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// Free bytes at the end of the last segment.
    pub fn free_tail_bytes(&self) -> u64 {
        self.ranges.get(self.last as usize).map_or(0, |r| if r.state == State::Free { r.bytes } else { 0 })
    }

    /// Adds a free segment of `bytes` (rounded down to granules, not 0) behind the others and gives its first
    /// offset. Ranges never reach from one segment into another.
    pub fn add_segment(&mut self, bytes: u64) -> u64 {
        // A gap keeps segments apart.
        let start = if self.last == NONE { 0 } else { self.end() + self.granule };
        self.append(start, bytes & !(self.granule - 1));
        start
    }

    /// Makes the last segment longer by `bytes` (rounded down to granules); the new bytes are free.
    pub fn extend(&mut self, bytes: u64) {
        let bytes = bytes & !(self.granule - 1);
        let last = self.last;
        if bytes == 0 {
        } else if last != NONE && self.ranges[last as usize].state == State::Free {
            self.unlist(last);
            self.ranges[last as usize].bytes += bytes;
            self.list(last);
            self.free_bytes += bytes;
            self.bytes += bytes;
        } else {
            self.append(self.end(), bytes);
        }
    }

    fn append(&mut self, start: u64, bytes: u64) {
        let below = self.last;
        let range = self.slot(free_range(start, bytes, below, NONE));
        if below == NONE {
            self.first = range;
        } else {
            self.ranges[below as usize].above = range;
        }
        self.last = range;
        self.free_bytes += bytes;
        self.bytes += bytes;
        self.list(range);
    }

    /// Cuts free bytes off the end of the last segment, whole multiples of `unit`; says how many.
    pub fn trim(&mut self, unit: u64) -> u64 {
        let bytes = self.free_tail_bytes();
        let cut = self.end() - (self.end() - bytes).next_multiple_of(unit.max(self.granule)).min(self.end());
        if cut == 0 {
            return 0;
        }
        let last = self.last;
        self.unlist(last);
        if cut == bytes {
            self.unlink(last);
            self.retire(last);
        } else {
            self.ranges[last as usize].bytes -= cut;
            self.list(last);
        }
        self.free_bytes -= cut;
        self.bytes -= cut;
        cut
    }

    /// Takes away the segment of `bytes` at `start` where all of it is free; says whether it was.
    pub fn remove_segment(&mut self, start: u64, bytes: u64) -> bool {
        let bytes = bytes & !(self.granule - 1);
        let mut at = self.head(self.class_of(bytes));
        while at != NONE {
            let range = &self.ranges[at as usize];
            if range.start == start && range.bytes == bytes {
                self.unlist(at);
                self.unlink(at);
                self.retire(at);
                self.free_bytes -= bytes;
                self.bytes -= bytes;
                return true;
            }
            at = range.later;
        }
        false
    }

    /// Takes `bytes` (rounded up to granules, not 0) at a multiple of `align` (a power of two), from the
    /// smallest free range found that holds it; `None` where there is none. `tag` is the caller's own.
    pub fn take(&mut self, bytes: u64, align: u64, side: Side, pick: Pick, tag: u8) -> Option<(RangeId, u64)> {
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
        range.state = State::Used;
        range.tag = tag;
        range.align_log2 = align.trailing_zeros() as u8;
        Some((RangeId(used), start))
    }

    /// Cuts `bytes` at `start` out of a free range; what is left of it stays listed. The cut is in no list.
    pub(super) fn carve(&mut self, at: u32, start: u64, bytes: u64) -> u32 {
        let range = &self.ranges[at as usize];
        let (head, tail) = (start - range.start, range.end() - start - bytes);
        match (head, tail) {
            (0, 0) => {
                self.unlist(at);
                at
            }
            (0, _) => {
                self.resize(at, start + bytes, tail);
                self.insert_below(at, free_range(start, bytes, NONE, NONE))
            }
            (_, 0) => {
                self.resize(at, start - head, head);
                self.insert_above(at, free_range(start, bytes, NONE, NONE))
            }
            _ => {
                self.resize(at, start - head, head);
                let cut = self.insert_above(at, free_range(start, bytes, NONE, NONE));
                let rest = self.insert_above(cut, free_range(start + bytes, tail, NONE, NONE));
                self.list(rest);
                cut
            }
        }
    }

    /// Gives a range back; says which bytes were freed.
    ///
    /// # Panics
    /// `id` names no used range.
    pub fn give(&mut self, id: RangeId) -> (u64, u64) {
        let at = id.0;
        let range = &self.ranges[at as usize];
        assert!(matches!(range.state, State::Used | State::Pinned), "{id:?} is not in use");
        let (start, bytes, below, above) = (range.start, range.bytes, range.below, range.above);
        self.free_bytes += bytes;
        let joins_below = self.ranges.get(below as usize).is_some_and(|r| r.state == State::Free && r.end() == start);
        let joins_above =
            self.ranges.get(above as usize).is_some_and(|r| r.state == State::Free && r.start == start + bytes);
        match (joins_below, joins_above) {
            (false, false) => {
                self.ranges[at as usize].state = State::Free;
                self.list(at);
            }
            (true, false) => {
                let lower = &self.ranges[below as usize];
                let (lower_start, lower_bytes) = (lower.start, lower.bytes);
                self.unlink(at);
                self.retire(at);
                self.resize(below, lower_start, lower_bytes + bytes);
            }
            (false, true) => {
                let upper_bytes = self.ranges[above as usize].bytes;
                self.unlink(at);
                self.retire(at);
                self.resize(above, start, bytes + upper_bytes);
            }
            (true, true) => {
                let upper_bytes = self.ranges[above as usize].bytes;
                let lower = &self.ranges[below as usize];
                let (lower_start, lower_bytes) = (lower.start, lower.bytes);
                self.unlink(at);
                self.retire(at);
                self.unlist(above);
                self.unlink(above);
                self.retire(above);
                self.resize(below, lower_start, lower_bytes + bytes + upper_bytes);
            }
        }
        (start, bytes)
    }

    /// Says that a used range must stay where it is, or may move again.
    pub fn pin(&mut self, id: RangeId, pinned: bool) {
        self.ranges[id.0 as usize].state = if pinned { State::Pinned } else { State::Used };
    }

    /// The largest free range.
    pub fn largest_free_bytes(&self) -> u64 {
        let Some(level) = self.levels_in_use.checked_ilog2().map(|l| l as usize) else { return 0 };
        let Some(step) = self.steps_in_use[level].checked_ilog2().map(|s| s as usize) else { return 0 };
        let mut largest = 0;
        let mut at = self.head(SizeClass((level * STEPS + step) as u16));
        while at != NONE {
            largest = largest.max(self.ranges[at as usize].bytes);
            at = self.ranges[at as usize].later;
        }
        largest
    }

    /// Calls `visit` with every range by offset: first offset, bytes, tag of a used one, whether it is pinned.
    pub(super) fn for_each(&self, visit: &mut dyn FnMut(u64, u64, Option<u8>, bool)) {
        let mut at = self.first;
        while let Some(range) = self.ranges.get(at as usize) {
            let tag = (range.state != State::Free).then_some(range.tag);
            visit(range.start, range.bytes, tag, range.state == State::Pinned);
            at = range.above;
        }
    }

    #[inline]
    pub(super) fn class_of(&self, bytes: u64) -> SizeClass {
        SizeClass::holding(bytes >> self.granule_log2)
    }

    #[inline]
    pub(super) fn head(&self, class: SizeClass) -> u32 {
        self.heads[class.0 as usize % CLASSES]
    }

    pub(super) fn is_in_use(&self, class: SizeClass) -> bool {
        let (level, step) = class.level_and_step();
        self.levels_in_use >> level & 1 == 1 && self.steps_in_use[level] >> step & 1 == 1
    }

    pub(super) fn list_neighbours(&self, at: u32) -> (u32, u32) {
        let range = &self.ranges[at as usize];
        (range.earlier, range.later)
    }

    pub(super) fn slot(&mut self, range: Range) -> u32 {
        let at = self.spare;
        if let Some(spare) = self.ranges.get_mut(at as usize) {
            self.spare = spare.later;
            *spare = range;
            return at;
        }
        self.ranges.push(range);
        (self.ranges.len() - 1) as u32
    }

    pub(super) fn retire(&mut self, at: u32) {
        let range = &mut self.ranges[at as usize];
        range.state = State::Spare;
        range.later = self.spare;
        self.spare = at;
    }

    /// Notes that bytes became used by other ways than [`Offsets::take`].
    pub(super) fn free_bytes_taken(&mut self, bytes: u64) {
        self.free_bytes -= bytes;
    }

    /// Takes a range out of the order by offset.
    pub(super) fn unlink(&mut self, at: u32) {
        let Range { below, above, .. } = self.ranges[at as usize];
        match self.ranges.get_mut(below as usize) {
            Some(range) => range.above = above,
            None => self.first = above,
        }
        match self.ranges.get_mut(above as usize) {
            Some(range) => range.below = below,
            None => self.last = below,
        }
    }

    /// Gives a free, listed range another extent.
    #[inline]
    pub(super) fn resize(&mut self, at: u32, start: u64, bytes: u64) {
        let class = self.class_of(bytes);
        let range = &mut self.ranges[at as usize];
        (range.start, range.bytes) = (start, bytes);
        if range.class != class {
            self.unlist(at);
            self.list_as(at, class);
        }
    }

    /// Puts a range right below another one, in no list.
    fn insert_below(&mut self, at: u32, range: Range) -> u32 {
        let below = self.ranges[at as usize].below;
        let new = self.slot(Range { below, above: at, ..range });
        self.ranges[at as usize].below = new;
        match self.ranges.get_mut(below as usize) {
            Some(range) => range.above = new,
            None => self.first = new,
        }
        new
    }

    /// Puts a range right above another one, in no list.
    pub(super) fn insert_above(&mut self, at: u32, range: Range) -> u32 {
        let above = self.ranges[at as usize].above;
        let new = self.slot(Range { below: at, above, ..range });
        self.ranges[at as usize].above = new;
        match self.ranges.get_mut(above as usize) {
            Some(range) => range.below = new,
            None => self.last = new,
        }
        new
    }

    #[inline]
    pub(super) fn list(&mut self, at: u32) {
        let class = self.class_of(self.ranges[at as usize].bytes);
        self.list_as(at, class);
    }

    #[inline]
    fn list_as(&mut self, at: u32, class: SizeClass) {
        let head = std::mem::replace(&mut self.heads[class.0 as usize % CLASSES], at);
        let range = &mut self.ranges[at as usize];
        range.class = class;
        range.earlier = NONE;
        range.later = head;
        if let Some(next) = self.ranges.get_mut(head as usize) {
            next.earlier = at;
        } else {
            let (level, step) = class.level_and_step();
            self.steps_in_use[level] |= 1 << step;
            self.levels_in_use |= 1 << level;
        }
    }

    #[inline]
    pub(super) fn unlist(&mut self, at: u32) {
        let Range { class, earlier, later, .. } = self.ranges[at as usize];
        if let Some(next) = self.ranges.get_mut(later as usize) {
            next.earlier = earlier;
        }
        if let Some(previous) = self.ranges.get_mut(earlier as usize) {
            previous.later = later;
            return;
        }
        self.heads[class.0 as usize % CLASSES] = later;
        if later == NONE {
            let (level, step) = class.level_and_step();
            self.steps_in_use[level] &= !(1 << step);
            if self.steps_in_use[level] == 0 {
                self.levels_in_use &= !(1 << level);
            }
        }
    }
}

pub(super) fn free_range(start: u64, bytes: u64, below: u32, above: u32) -> Range {
    Range {
        start,
        bytes,
        below,
        above,
        earlier: NONE,
        later: NONE,
        class: SizeClass(0),
        state: State::Free,
        tag: 0,
        align_log2: 0,
    }
}
