//! Size classes: the list of free ranges to which a size belongs.
//!
//! As in TLSF (Masmano et al., 2004): powers of two, each cut into 32 equal steps, so a class spans
//! at most 1/32 of its sizes. Sizes are counted in granules.

/// log2 of the steps per power of two.
const STEP_BITS: u32 = 5;
/// Steps per power of two.
pub(super) const STEPS: usize = 1 << STEP_BITS;
/// The number of classes, rounded up to a power of two.
pub(super) const CLASSES: usize = 64 * STEPS;

/// The number of a class; sizes increase with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SizeClass(pub(super) u16);

/// The shift that leaves the leading one and the next [`STEP_BITS`] bits of a size.
#[inline]
const fn shift(granules: u64) -> u32 {
    63 - STEP_BITS - (granules | STEPS as u64).leading_zeros()
}

impl SizeClass {
    /// The class of a size of `granules`: the greatest whose smallest size is at most that.
    #[inline]
    pub(super) const fn holding(granules: u64) -> Self {
        let shift = shift(granules);
        // The leading one adds a power of two's worth of steps, which is what `shift` counts from.
        Self((shift << STEP_BITS) as u16 + (granules >> shift) as u16)
    }

    /// The smallest size of the class.
    #[cfg(test)]
    pub(super) const fn smallest(self) -> u64 {
        let shift = (self.0 >> STEP_BITS).saturating_sub(1);
        (self.0 as u64 - ((shift as u64) << STEP_BITS)) << shift
    }

    /// The first class all of whose ranges hold `granules`; `None` if its sizes exceed `u64::MAX`.
    #[inline]
    pub(super) const fn fitting(granules: u64) -> Option<Self> {
        match granules.checked_add((1 << shift(granules)) - 1) {
            Some(rounded_up) => Some(Self::holding(rounded_up)),
            None => None,
        }
    }

    /// The power of two, and the step in it.
    #[inline]
    pub(super) const fn level_and_step(self) -> (usize, usize) {
        (self.0 as usize / STEPS % 64, self.0 as usize % STEPS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes() -> impl Iterator<Item = u64> {
        let edges = (0..64).flat_map(|b| {
            [
                (1u64 << b).wrapping_sub(1),
                1 << b,
                (1u64 << b).wrapping_add(1),
            ]
        });
        let (small, large) = if cfg!(miri) {
            (100, 20)
        } else {
            (20_000, 5000)
        };
        (0..small)
            .chain(edges)
            .chain((0..large).map(|i| i * i * i * 997))
            .chain([u64::MAX])
    }

    #[test]
    fn a_size_is_in_its_class_and_below_the_next() {
        for size in sizes() {
            let class = SizeClass::holding(size);
            assert!((class.0 as usize) < CLASSES, "{size}: {class:?}");
            assert!(class.smallest() <= size, "{size}: {class:?}");
            if class == SizeClass::holding(u64::MAX) {
                continue;
            }
            let next = SizeClass(class.0 + 1);
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
            // At most a step is wasted.
            assert!(
                class.smallest() - size <= size >> STEP_BITS,
                "{size}: {class:?}"
            );
        }
    }
}
