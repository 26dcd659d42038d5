//! Size classes: which list of free ranges a size belongs to.
//!
//! As in TLSF (Masmano et al., 2004): powers of two, each cut into 32 equal steps, so a class spans at most
//! 1/32 of its sizes. Sizes are counted in granules.

/// log2 of the steps per power of two.
const STEP_BITS: u32 = 5;
/// Steps per power of two.
pub(super) const STEPS: usize = 1 << STEP_BITS;
/// Powers of two that a `u64` can have above the linear part, and the linear part.
pub(super) const LEVELS: usize = 64 - STEP_BITS as usize + 1;

/// A class: a level (power of two) and a step in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SizeClass {
    pub(super) level: usize,
    pub(super) step: usize,
}

impl SizeClass {
    /// The class that holds `granules`: the greatest whose smallest size is at most that.
    pub(super) const fn holding(granules: u64) -> Self {
        if granules < STEPS as u64 {
            return Self { level: 0, step: granules as usize };
        }
        let log2 = 63 - granules.leading_zeros();
        let step = (granules >> (log2 - STEP_BITS)) as usize & (STEPS - 1);
        Self { level: (log2 - STEP_BITS) as usize + 1, step }
    }

    /// The smallest size of the class.
    #[cfg(test)]
    pub(super) const fn smallest(self) -> u64 {
        if self.level == 0 {
            return self.step as u64;
        }
        ((STEPS + self.step) as u64) << (self.level - 1)
    }

    /// The first class all of whose ranges hold `granules`; none above `u64::MAX`.
    pub(super) const fn fitting(granules: u64) -> Option<Self> {
        if granules < STEPS as u64 {
            return Some(Self::holding(granules));
        }
        let log2 = 63 - granules.leading_zeros();
        let below_a_step = (1u64 << (log2 - STEP_BITS)) - 1;
        match granules.checked_add(below_a_step) {
            Some(rounded_up) => Some(Self::holding(rounded_up)),
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes() -> impl Iterator<Item = u64> {
        let edges = (0..64).flat_map(|b| [(1u64 << b).wrapping_sub(1), 1 << b, (1u64 << b).wrapping_add(1)]);
        (0..20_000).chain(edges).chain((0..5000).map(|i| i * i * i * 997)).chain([u64::MAX])
    }

    #[test]
    fn a_size_lies_in_its_class_and_not_in_the_next() {
        for size in sizes() {
            let class = SizeClass::holding(size);
            assert!(class.level < LEVELS && class.step < STEPS, "{size}: {class:?}");
            assert!(class.smallest() <= size, "{size}: {class:?}");
            let next = match class {
                SizeClass { level, step } if step + 1 < STEPS => SizeClass { level, step: step + 1 },
                SizeClass { level, .. } if level + 1 < LEVELS => SizeClass { level: level + 1, step: 0 },
                _ => continue,
            };
            assert!(size < next.smallest(), "{size}: {class:?} {next:?}");
        }
    }

    #[test]
    fn every_range_of_the_fitting_class_fits() {
        for size in sizes() {
            let Some(class) = SizeClass::fitting(size) else {
                assert!(size > u64::MAX - (u64::MAX >> STEP_BITS));
                continue;
            };
            assert!(class.smallest() >= size, "{size}: {class:?}");
            // And at most a step is wasted.
            assert!(class.smallest() - size <= size >> STEP_BITS, "{size}: {class:?}");
        }
    }
}
