//! Checks of the invariants of [`Offsets`].

use super::ranges::{NONE, Offsets, State};
use super::size_class::{CLASSES, STEPS, SizeClass};

impl Offsets {
    /// Checks that:
    /// 1. ranges are in order by offset, do not overlap, and know their neighbours;
    /// 2. starts and sizes are multiples of the granule, sizes are above 0, starts keep their
    ///    alignment;
    /// 3. no two free ranges are adjacent;
    /// 4. each free range is in the list of its class, and no other range is in a list;
    /// 5. the bits of non-empty lists, the sum of free bytes and the sum of all bytes are right.
    ///
    /// # Errors
    /// The first violated invariant.
    pub(crate) fn check_invariants(&self) -> Result<(), String> {
        let mut free_bytes = 0;
        let mut bytes = 0;
        let mut free_ranges = 0;
        let mut at = self.first();
        let mut below = NONE;

        while at != NONE {
            let range = &self.ranges[at as usize];
            self.check_range(at, below)?;
            if range.state == State::Free {
                free_bytes += range.bytes;
                free_ranges += 1;
            }
            bytes += range.bytes;
            below = at;
            at = range.above;
        }

        if below != self.last() {
            return Err(format!(
                "the last range is {below}, expected {}",
                self.last()
            ));
        }

        if free_bytes != self.free_bytes() || bytes != self.bytes() {
            return Err(format!(
                "{free_bytes} of {bytes} bytes are free, expected {} of {}",
                self.free_bytes(),
                self.bytes()
            ));
        }

        let listed = self.check_lists()?;
        if listed != free_ranges {
            return Err(format!(
                "{listed} ranges are listed, {free_ranges} are free"
            ));
        }

        Ok(())
    }

    /// Checks one range; `below` is the range before it in the order of offsets.
    fn check_range(&self, at: u32, below: u32) -> Result<(), String> {
        let range = &self.ranges[at as usize];
        let fail = |what: &str| Err(format!("range {at} {range:?}: {what}"));
        if range.below != below {
            return fail("wrong lower neighbour");
        }
        if range.bytes == 0 || (range.start | range.bytes) & (self.granule - 1) != 0 {
            return fail("not a positive multiple of the granule");
        }

        if below != NONE {
            let lower = &self.ranges[below as usize];
            let both_free = lower.state == State::Free && range.state == State::Free;
            if lower.end() > range.start {
                return fail("overlaps the range below");
            }
            if both_free && lower.end() == range.start {
                return fail("two free ranges are adjacent");
            }
        }

        match range.state {
            State::Free => Ok(()),
            State::Spare => fail("a spare slot is linked among the ranges"),
            State::Used => {
                if range.start & ((1 << range.align_log2) - 1) != 0 {
                    return fail("not aligned");
                }
                Ok(())
            }
        }
    }

    fn check_lists(&self) -> Result<usize, String> {
        let bit = |level: usize| u64::from(self.steps_in_use[level] != 0) << level;
        if (0..CLASSES / STEPS).map(bit).sum::<u64>() != self.levels_in_use {
            return Err("the bits of the levels are wrong".to_owned());
        }
        let mut listed = 0;
        // An empty level is compared as a whole: there are many, and Miri is slow.
        let levels = self.heads.chunks(STEPS).zip(&self.steps_in_use);
        let in_use = levels
            .enumerate()
            .filter(|(_, (heads, steps))| **steps != 0 || **heads != [NONE; STEPS]);
        for class in in_use
            .flat_map(|(level, _)| level * STEPS..(level + 1) * STEPS)
            .map(|i| SizeClass(i as u16))
        {
            let mut at = self.head(class);
            let mut earlier = NONE;
            let (level, step) = class.level_and_step();
            let in_use = self.steps_in_use[level] >> step & 1 == 1;
            if in_use != (at != NONE) {
                return Err(format!("the bit of {class:?} is wrong"));
            }
            while at != NONE {
                let range = &self.ranges[at as usize];
                if range.state != State::Free || class != self.class_of(range.bytes) {
                    return Err(format!("range {at} {range:?} is in the list of {class:?}"));
                }
                if range.earlier != earlier {
                    return Err(format!("range {at} {range:?}: wrong neighbour in its list"));
                }
                listed += 1;
                earlier = at;
                at = range.later;
            }
        }

        Ok(listed)
    }
}
