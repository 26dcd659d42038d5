//! The tags of transfers, within the bound of the MPI library.
//!
//! MPI guarantees only tags up to 32,767. The bound is an attribute, `MPI_TAG_UB`: 2^19 - 1 over
//! some networks of Intel MPI, 2^21 - 1 with Cray MPICH, 2^23 - 1 or 2^31 - 1 with Open MPI. So
//! tags repeat: two collectives of a communicator whose numbers differ by a multiple of the
//! **period** have the same ones.
//!
//! Why messages are not confused: a collective begins only when the one a period before it has
//! ended on this rank. Then on every rank all messages with one tag are sent and received in the
//! order of the collectives, and MPI delivers messages of one sender and tag in order. The wait
//! adds no deadlock on a rank whose streams wait only for events that were recorded before, since
//! the collective a period before was enqueued before.

use std::collections::BTreeSet;
use std::ffi::c_int;
use std::sync::Arc;

use parking_lot::Mutex;

/// The greatest number of a communicator.
pub(super) const MAX_CONTEXT: u32 = 0xff;

/// The number of [`Phase`]s.
const PHASES: u64 = 3;

/// The phases of a collective, which are part of its tags.
#[derive(Clone, Copy, Debug)]
pub(super) enum Phase {
    Compare,
    Scatter,
    Gather,
}

/// The assignment of tags.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tags {
    /// The number of collectives of a communicator that have different tags.
    period: u64,
}

impl Tags {
    /// The least bound: a period of 1.
    pub(super) const MIN_BOUND: c_int = ((MAX_CONTEXT as c_int + 1) * PHASES as c_int) - 1;

    /// Tags of at most `bound`; `None` below [`Self::MIN_BOUND`].
    pub(super) fn within(bound: c_int) -> Option<Self> {
        let tags = u64::try_from(bound).ok()? + 1;
        let period = tags / (u64::from(MAX_CONTEXT + 1) * PHASES);
        (period > 0).then_some(Self { period })
    }

    /// The tag of a phase of collective `sequence` of communicator `context`.
    pub(super) fn of(self, context: u32, sequence: u64, phase: Phase) -> c_int {
        let collective = u64::from(context) * self.period + sequence % self.period;
        (collective * PHASES + phase as u64) as c_int
    }

    /// The last collective of the same communicator with the tags of `sequence`.
    pub(super) fn previous(self, sequence: u64) -> Option<u64> {
        sequence.checked_sub(self.period)
    }
}

/// The collectives of one rank of a communicator that were enqueued and have not ended, by number.
#[derive(Clone, Debug, Default)]
pub(super) struct Pending(Arc<Mutex<BTreeSet<u64>>>);

impl Pending {
    pub(super) fn insert(&self, sequence: u64) {
        self.0.lock().insert(sequence);
    }

    pub(super) fn remove(&self, sequence: u64) {
        self.0.lock().remove(&sequence);
    }

    pub(super) fn contains(&self, sequence: u64) -> bool {
        self.0.lock().contains(&sequence)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn tags_are_distinct_within_a_period() {
        for bound in [Tags::MIN_BOUND, 5000, 32_767, (1 << 19) - 1] {
            let tags = Tags::within(bound).unwrap();
            let mut seen = HashSet::new();
            for context in [0, 1, 100, MAX_CONTEXT] {
                for sequence in 7..7 + tags.period {
                    for phase in [Phase::Compare, Phase::Scatter, Phase::Gather] {
                        let tag = tags.of(context, sequence, phase);
                        assert!((0..=bound).contains(&tag), "tag {tag} with bound {bound}");
                        assert!(seen.insert(tag), "tag {tag} twice with bound {bound}");
                    }
                }
            }
        }
    }

    #[test]
    fn greatest_tag_is_within_every_bound() {
        for bound in [
            Tags::MIN_BOUND,
            32_767,
            (1 << 21) - 1,
            (1 << 23) - 1,
            c_int::MAX,
        ] {
            let tags = Tags::within(bound).unwrap();
            let greatest = tags.of(MAX_CONTEXT, tags.period - 1, Phase::Gather);
            assert!(
                (0..=bound).contains(&greatest),
                "tag {greatest} with bound {bound}"
            );
        }
    }

    #[test]
    fn previous_collective_has_the_same_tags() {
        let tags = Tags::within(32_767).unwrap();
        assert_eq!(tags.previous(tags.period - 1), None);
        for sequence in [tags.period, 1 << 20, u64::MAX] {
            let previous = tags.previous(sequence).unwrap();
            assert_eq!(
                tags.of(3, sequence, Phase::Scatter),
                tags.of(3, previous, Phase::Scatter)
            );
        }
    }

    #[test]
    fn bounds_below_the_least_are_refused() {
        assert!(Tags::within(Tags::MIN_BOUND - 1).is_none());
        assert!(Tags::within(-1).is_none());
    }
}
