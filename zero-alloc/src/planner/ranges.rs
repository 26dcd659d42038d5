//! An [`Offsets`] space: its ranges as two kinds of linked lists: all by offset, the free ones
//! also by size class.
//!
//! Links are slot numbers. Slot [`NONE`] is a sentinel that makes the list by offset a ring: its
//! `above` is the first range and its `below` the last; its other fields are meaningless. So no
//! link needs a check before it is followed or written.

use super::size_class::{CLASSES, STEPS, SizeClass};

/// The sentinel's slot.
pub(super) const NONE: u32 = 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Free,
    Used,
    /// The slot holds no range.
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
    /// The request's tag, and log2 of its alignment.
    pub(super) tag: u8,
    pub(super) align_log2: u8,
}

impl Range {
    /// An empty slot.
    pub(super) const SPARE: Self = Self {
        start: 0,
        bytes: 0,
        below: NONE,
        above: NONE,
        earlier: NONE,
        later: NONE,
        class: SizeClass(0),
        state: State::Spare,
        tag: 0,
        align_log2: 0,
    };

    pub(super) fn end(&self) -> u64 {
        self.start + self.bytes
    }
}

/// The id of a used range, valid until the range is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RangeId(pub(super) u32);

/// The free and used ranges of an offset space.
#[derive(Clone, Debug)]
pub(crate) struct Offsets {
    pub(super) granule: u64,
    pub(super) granule_log2: u32,
    pub(super) ranges: Vec<Range>,
    /// The first spare slot.
    pub(super) spare: u32,
    /// The first range of each class, and bits that mark the classes and powers of two that have
    /// one.
    pub(super) heads: Box<[u32; CLASSES]>,
    pub(super) steps_in_use: [u32; CLASSES / STEPS],
    pub(super) levels_in_use: u64,
    /// Bytes in no used range.
    pub(super) free_bytes: u64,
    /// Bytes of all segments.
    pub(super) bytes: u64,
}

impl Offsets {
    /// The range of the lowest offset, or [`NONE`].
    pub(super) fn first(&self) -> u32 {
        self.ranges[NONE as usize].above
    }

    /// The range of the highest offset, or [`NONE`].
    pub(super) fn last(&self) -> u32 {
        self.ranges[NONE as usize].below
    }

    #[inline]
    pub(super) fn class_of(&self, bytes: u64) -> SizeClass {
        SizeClass::holding(bytes >> self.granule_log2)
    }

    #[inline]
    pub(super) fn head(&self, class: SizeClass) -> u32 {
        self.heads[class.0 as usize % CLASSES]
    }

    /// Inserts a new free range directly above another one, or first if that is [`NONE`]; it is in
    /// no list yet.
    #[inline(always)]
    pub(super) fn insert_above(&mut self, at: u32, start: u64, bytes: u64) -> u32 {
        let above = self.ranges[at as usize].above;
        let range = Range {
            start,
            bytes,
            below: at,
            above,
            state: State::Free,
            ..Range::SPARE
        };
        if self.spare == NONE {
            self.add_slot();
        }
        let new = self.spare;
        self.spare = self.ranges[new as usize].later;
        self.ranges[new as usize] = range;
        self.ranges[at as usize].above = new;
        self.ranges[above as usize].below = new;
        new
    }

    #[cold]
    fn add_slot(&mut self) {
        self.ranges.push(Range::SPARE);
        self.retire((self.ranges.len() - 1) as u32);
    }

    /// Removes a range, which is in no list, from the order by offset; its slot becomes spare.
    #[inline]
    pub(super) fn remove(&mut self, at: u32) {
        let Range { below, above, .. } = self.ranges[at as usize];
        self.ranges[below as usize].above = above;
        self.ranges[above as usize].below = below;
        self.retire(at);
    }

    /// Makes a slot spare.
    #[inline]
    pub(super) fn retire(&mut self, at: u32) {
        let range = &mut self.ranges[at as usize];
        range.state = State::Spare;
        range.later = self.spare;
        self.spare = at;
    }

    /// Changes the extent of a free, listed range.
    #[inline(always)]
    pub(super) fn resize(&mut self, at: u32, start: u64, bytes: u64) {
        let class = self.class_of(bytes);
        let range = &mut self.ranges[at as usize];
        (range.start, range.bytes) = (start, bytes);
        if range.class != class {
            self.unlist(at);
            self.list_as(at, class);
        }
    }

    /// Lists a free range by its size.
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
        self.ranges[head as usize].earlier = at;
        let (level, step) = class.level_and_step();
        self.steps_in_use[level] |= 1 << step;
        self.levels_in_use |= 1 << level;
    }

    #[inline]
    pub(super) fn unlist(&mut self, at: u32) {
        let Range {
            class,
            earlier,
            later,
            ..
        } = self.ranges[at as usize];
        self.ranges[later as usize].earlier = earlier;
        if earlier != NONE {
            self.ranges[earlier as usize].later = later;
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
