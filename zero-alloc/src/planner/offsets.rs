//! Free and used ranges of an offset space.
//!
//! The space is a row of segments; every byte of a segment belongs to exactly one range, used or free.
//! Two free ranges of a segment never touch: freeing joins neighbours. Free ranges are listed by
//! [size class](super::size_class), so that finding one is a few bit operations.

use super::size_class::{LEVELS, STEPS, SizeClass};

/// Names a used range. Valid until it is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RangeId(u32);

/// Which end of a free range is cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The lower offsets: long-lived ranges.
    Low,
    /// The higher offsets: short-lived ranges.
    High,
}

const NONE: u32 = u32::MAX;
/// How many ranges of a class are looked at before the next class is taken.
const LOOKS: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Used,
    /// Not a range at all: the slot is spare.
    Spare,
}

#[derive(Clone, Debug)]
struct Range {
    start: u64,
    bytes: u64,
    /// Neighbours in the segment, by offset.
    below: u32,
    above: u32,
    /// Neighbours in the list of the size class; of a spare slot, `later` is the next spare.
    earlier: u32,
    later: u32,
    state: State,
}

/// An offset space and who uses which part of it.
#[derive(Clone, Debug)]
pub struct Offsets {
    granule: u64,
    ranges: Vec<Range>,
    spare: u32,
    heads: Vec<[u32; STEPS]>,
    steps_in_use: [u32; LEVELS],
    levels_in_use: u64,
    end: u64,
    free_bytes: u64,
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
            heads: vec![[NONE; STEPS]; LEVELS],
            steps_in_use: [0; LEVELS],
            levels_in_use: 0,
            end: 0,
            free_bytes: 0,
        }
    }

    /// The bytes of a used range, in whole granules.
    pub fn bytes_of(&self, id: RangeId) -> u64 {
        self.ranges[id.0 as usize].bytes
    }

    /// Bytes in no used range.
    pub fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// Adds a free segment of `bytes` (rounded down to granules) behind the others and gives its first offset.
    /// Ranges never reach from one segment into another.
    pub fn add_segment(&mut self, bytes: u64) -> u64 {
        let bytes = bytes & !(self.granule - 1);
        // A gap keeps offsets of different segments apart, even one-past-the-end ones.
        let start = self.end;
        self.end += bytes + self.granule;
        if bytes > 0 {
            let range = self.slot(Range {
                start,
                bytes,
                below: NONE,
                above: NONE,
                earlier: NONE,
                later: NONE,
                state: State::Free,
            });
            self.free_bytes += bytes;
            self.list(range);
        }
        start
    }

    /// Takes away the segment that starts at `start` where all of it is free; says whether it was.
    pub fn remove_segment(&mut self, start: u64, bytes: u64) -> bool {
        let bytes = bytes & !(self.granule - 1);
        let class = SizeClass::holding(bytes / self.granule);
        let mut at = self.heads[class.level][class.step];
        while at != NONE {
            let range = &self.ranges[at as usize];
            if range.start == start && range.bytes == bytes {
                self.unlist(at);
                self.retire(at);
                self.free_bytes -= bytes;
                return true;
            }
            at = range.later;
        }
        false
    }

    /// Takes `bytes` (rounded up to granules, not 0) at a multiple of `align` (a power of two), from the
    /// smallest free range found that holds it; `None` where there is none.
    pub fn take(&mut self, bytes: u64, align: u64, side: Side) -> Option<(RangeId, u64)> {
        let align = align.max(self.granule);
        let bytes = bytes.max(1).checked_next_multiple_of(self.granule)?;
        let at = self.find(bytes, align, side)?;
        self.unlist(at);
        let range = &self.ranges[at as usize];
        let start = place(range, bytes, align, side)?;
        self.free_bytes -= bytes;
        let (head, tail) = (start - range.start, range.start + range.bytes - start - bytes);
        if head > 0 {
            let rest = self.split_below(at, head);
            self.list(rest);
        }
        if tail > 0 {
            let rest = self.split_above(at, tail);
            self.list(rest);
        }
        self.ranges[at as usize].state = State::Used;
        Some((RangeId(at), start))
    }

    /// Gives a range back; says which bytes were freed.
    ///
    /// # Panics
    /// `id` names no used range.
    pub fn give(&mut self, id: RangeId) -> (u64, u64) {
        let at = id.0;
        let range = &self.ranges[at as usize];
        assert_eq!(range.state, State::Used, "{id:?} is not in use");
        let (start, bytes, below, above) = (range.start, range.bytes, range.below, range.above);
        self.free_bytes += bytes;
        self.ranges[at as usize].state = State::Free;
        if below != NONE && self.ranges[below as usize].state == State::Free {
            self.unlist(below);
            let joined = &self.ranges[below as usize];
            let (joined_start, joined_bytes, joined_below) = (joined.start, joined.bytes, joined.below);
            let range = &mut self.ranges[at as usize];
            range.start = joined_start;
            range.bytes += joined_bytes;
            range.below = joined_below;
            if joined_below != NONE {
                self.ranges[joined_below as usize].above = at;
            }
            self.retire(below);
        }
        if above != NONE && self.ranges[above as usize].state == State::Free {
            self.unlist(above);
            let joined = &self.ranges[above as usize];
            let (joined_bytes, joined_above) = (joined.bytes, joined.above);
            let range = &mut self.ranges[at as usize];
            range.bytes += joined_bytes;
            range.above = joined_above;
            if joined_above != NONE {
                self.ranges[joined_above as usize].below = at;
            }
            self.retire(above);
        }
        self.list(at);
        (start, bytes)
    }

    /// The largest free range.
    pub fn largest_free_bytes(&self) -> u64 {
        let Some(level) = self.levels_in_use.checked_ilog2().map(|l| l as usize) else { return 0 };
        let Some(step) = self.steps_in_use[level].checked_ilog2().map(|s| s as usize) else { return 0 };
        let mut largest = 0;
        let mut at = self.heads[level][step];
        while at != NONE {
            largest = largest.max(self.ranges[at as usize].bytes);
            at = self.ranges[at as usize].later;
        }
        largest
    }

    /// Best of the first few that fit in the size's own class, else the head of the next class that has any.
    fn find(&self, bytes: u64, align: u64, side: Side) -> Option<u32> {
        let own = SizeClass::holding(bytes / self.granule);
        let mut best = NONE;
        let mut best_bytes = u64::MAX;
        let mut at = self.heads[own.level][own.step];
        for _ in 0..LOOKS {
            if at == NONE {
                break;
            }
            let range = &self.ranges[at as usize];
            if range.bytes < best_bytes && place(range, bytes, align, side).is_some() {
                (best, best_bytes) = (at, range.bytes);
            }
            at = range.later;
        }
        if best != NONE {
            return Some(best);
        }
        let sure = SizeClass::fitting((bytes + (align - self.granule)) / self.granule)?;
        // Between the own class and the one where all fit lie, for large alignments, some where some may.
        let mut class = own;
        while let Some(next) = self.next_in_use(class, 1) {
            if next >= sure {
                return Some(self.heads[next.level][next.step]);
            }
            class = next;
            if let Some(at) = self.first_that_fits(class, bytes, align, side, LOOKS) {
                return Some(at);
            }
        }
        // Nothing for sure: then every range of the own class is worth a look.
        self.first_that_fits(own, bytes, align, side, usize::MAX)
    }

    fn first_that_fits(&self, class: SizeClass, bytes: u64, align: u64, side: Side, looks: usize) -> Option<u32> {
        let mut at = self.heads[class.level][class.step];
        for _ in 0..looks {
            if at == NONE {
                break;
            }
            let range = &self.ranges[at as usize];
            if place(range, bytes, align, side).is_some() {
                return Some(at);
            }
            at = range.later;
        }
        None
    }

    /// The first class with a free range, `skip` steps or more above `class`.
    fn next_in_use(&self, class: SizeClass, skip: usize) -> Option<SizeClass> {
        let first = class.step + skip;
        let here = if first < STEPS { self.steps_in_use[class.level] & (u32::MAX << first) } else { 0 };
        if here != 0 {
            return Some(SizeClass { level: class.level, step: here.trailing_zeros() as usize });
        }
        let above = class.level + 1;
        let levels = if above < 64 { self.levels_in_use & (u64::MAX << above) } else { 0 };
        if levels == 0 {
            return None;
        }
        let level = levels.trailing_zeros() as usize;
        Some(SizeClass { level, step: self.steps_in_use[level].trailing_zeros() as usize })
    }

    fn slot(&mut self, range: Range) -> u32 {
        if self.spare == NONE {
            self.ranges.push(range);
            return (self.ranges.len() - 1) as u32;
        }
        let at = self.spare;
        self.spare = self.ranges[at as usize].later;
        self.ranges[at as usize] = range;
        at
    }

    fn retire(&mut self, at: u32) {
        let range = &mut self.ranges[at as usize];
        range.state = State::Spare;
        range.later = self.spare;
        self.spare = at;
    }

    /// Cuts `bytes` off the low end of a range; they become a free range, not listed yet.
    fn split_below(&mut self, at: u32, bytes: u64) -> u32 {
        let Range { start, below, .. } = self.ranges[at as usize];
        let rest =
            self.slot(Range { start, bytes, below, above: at, earlier: NONE, later: NONE, state: State::Free });
        if below != NONE {
            self.ranges[below as usize].above = rest;
        }
        let range = &mut self.ranges[at as usize];
        range.below = rest;
        range.start += bytes;
        range.bytes -= bytes;
        rest
    }

    /// Cuts `bytes` off the high end of a range; they become a free range, not listed yet.
    fn split_above(&mut self, at: u32, bytes: u64) -> u32 {
        let range = &mut self.ranges[at as usize];
        range.bytes -= bytes;
        let (start, above) = (range.start + range.bytes, range.above);
        let rest =
            self.slot(Range { start, bytes, below: at, above, earlier: NONE, later: NONE, state: State::Free });
        if above != NONE {
            self.ranges[above as usize].below = rest;
        }
        self.ranges[at as usize].above = rest;
        rest
    }

    fn list(&mut self, at: u32) {
        let class = SizeClass::holding(self.ranges[at as usize].bytes / self.granule);
        let head = self.heads[class.level][class.step];
        self.ranges[at as usize].earlier = NONE;
        self.ranges[at as usize].later = head;
        if head != NONE {
            self.ranges[head as usize].earlier = at;
        }
        self.heads[class.level][class.step] = at;
        self.steps_in_use[class.level] |= 1 << class.step;
        self.levels_in_use |= 1 << class.level;
    }

    fn unlist(&mut self, at: u32) {
        let Range { bytes, earlier, later, .. } = self.ranges[at as usize];
        if later != NONE {
            self.ranges[later as usize].earlier = earlier;
        }
        if earlier != NONE {
            self.ranges[earlier as usize].later = later;
            return;
        }
        let class = SizeClass::holding(bytes / self.granule);
        self.heads[class.level][class.step] = later;
        if later == NONE {
            self.steps_in_use[class.level] &= !(1 << class.step);
            if self.steps_in_use[class.level] == 0 {
                self.levels_in_use &= !(1 << class.level);
            }
        }
    }
}

/// Where in a free range `bytes` would lie.
fn place(range: &Range, bytes: u64, align: u64, side: Side) -> Option<u64> {
    let end = range.start + range.bytes;
    let start = match side {
        Side::Low => range.start.checked_next_multiple_of(align)?,
        Side::High => end.checked_sub(bytes)? & !(align - 1),
    };
    (start >= range.start && start.checked_add(bytes)? <= end).then_some(start)
}
