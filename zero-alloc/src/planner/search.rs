//! Finding a free range that holds a request.

use super::ranges::{NONE, Offsets, Range};
use super::size_class::{STEPS, SizeClass};

/// The end of a free range from which a request is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Side {
    /// The lower offsets.
    Low,
    /// The higher offsets.
    High,
}

/// The choice among the free ranges that fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Pick {
    /// The smallest of the first few of a size class; constant time.
    Best,
    /// The range with the highest offset. Its time grows with the number of free ranges of that
    /// size or above, so it is for large requests, of which a space holds only few.
    Highest,
    /// The range with the lowest offset; its time as above.
    Lowest,
}

/// The number of ranges of a class that are compared before the search goes on to the next class.
const TRIES: usize = 4;

impl Offsets {
    /// The smallest that fits among the first few of the size's own class, else the first of the
    /// next class in use.
    #[inline]
    pub(super) fn find(&self, bytes: u64, align: u64, side: Side) -> Option<u32> {
        let own = self.class_of(bytes);
        if align != self.granule {
            return self.find_aligned(own, bytes, align, side);
        }
        if let Some(at) = self.smallest(own, bytes, TRIES) {
            return Some(at);
        }
        match self.next_in_use(own) {
            Some(class) => Some(self.head(class)),
            // No larger class has a range: search all of the size's own class.
            None => self.smallest(own, bytes, usize::MAX),
        }
    }

    /// The smallest that holds `bytes` among the first `tries` of a class; of equals, the first.
    #[inline]
    fn smallest(&self, class: SizeClass, bytes: u64, tries: usize) -> Option<u32> {
        let mut best = None;
        let mut best_bytes = u64::MAX;
        let mut at = self.head(class);
        for _ in 0..tries {
            if at == NONE {
                break;
            }
            let range = &self.ranges[at as usize];
            if range.bytes >= bytes && range.bytes < best_bytes {
                (best, best_bytes) = (Some(at), range.bytes);
                if best_bytes == bytes {
                    break;
                }
            }
            at = range.later;
        }
        best
    }

    /// For alignments above the granule: the first that fits, searching from the smallest class up.
    #[cold]
    fn find_aligned(&self, own: SizeClass, bytes: u64, align: u64, side: Side) -> Option<u32> {
        let sure = SizeClass::fitting((bytes + (align - self.granule)) >> self.granule_log2)?;
        let mut next = Some(own);
        while let Some(class) = next {
            let tries = if class < sure { TRIES } else { 1 };
            if let Some(at) = self.first_that_fits(class, bytes, align, side, tries) {
                return Some(at);
            }
            next = self.next_in_use(class);
        }
        let mut next = Some(own);
        while let Some(class) = next {
            if let Some(at) = self.first_that_fits(class, bytes, align, side, usize::MAX) {
                return Some(at);
            }
            next = self.next_in_use(class);
        }
        None
    }

    fn first_that_fits(
        &self,
        class: SizeClass,
        bytes: u64,
        align: u64,
        side: Side,
        tries: usize,
    ) -> Option<u32> {
        let mut at = self.head(class);
        for _ in 0..tries {
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

    /// The range with the highest or the lowest offset among all that fit.
    pub(super) fn find_by_offset(
        &self,
        bytes: u64,
        align: u64,
        side: Side,
        pick: Pick,
    ) -> Option<u32> {
        let mut best = NONE;
        let mut best_start = 0;
        let mut next = Some(self.class_of(bytes));
        while let Some(class) = next {
            let mut at = self.head(class);
            while at != NONE {
                let range = &self.ranges[at as usize];
                let better = best == NONE || (range.start > best_start) == (pick == Pick::Highest);
                if better && place(range, bytes, align, side).is_some() {
                    (best, best_start) = (at, range.start);
                }
                at = range.later;
            }
            next = self.next_in_use(class);
        }
        (best != NONE).then_some(best)
    }

    /// The first class above `class` with a free range.
    #[inline]
    fn next_in_use(&self, class: SizeClass) -> Option<SizeClass> {
        let (level, step) = class.level_and_step();
        // All bits above `step`; shifting twice keeps 32 out.
        let here = self.steps_in_use[level] & (u32::MAX << step << 1);
        if here != 0 {
            return Some(SizeClass(
                (level * STEPS) as u16 + here.trailing_zeros() as u16,
            ));
        }
        let levels = self.levels_in_use & (u64::MAX << level << 1);
        if levels == 0 {
            return None;
        }
        let level = levels.trailing_zeros() as usize;
        Some(SizeClass(
            (level * STEPS) as u16 + self.steps_in_use[level % 64].trailing_zeros() as u16,
        ))
    }
}

/// The first offset of `bytes` cut from one end of a free range; `None` if they do not fit.
pub(super) fn place(range: &Range, bytes: u64, align: u64, side: Side) -> Option<u64> {
    let end = range.end();
    let start = match side {
        Side::Low => range.start.checked_add(align - 1)? & !(align - 1),
        Side::High => end.checked_sub(bytes)? & !(align - 1),
    };
    (start >= range.start && start.checked_add(bytes)? <= end).then_some(start)
}
