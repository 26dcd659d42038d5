//! Vector clocks.

/// For each stream of a scheduler, the time of its last operation that is ordered before. Missing
/// entries are 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::host) struct Clock(Vec<u64>);

impl Clock {
    pub(super) fn get(&self, stream: usize) -> u64 {
        self.0.get(stream).copied().unwrap_or(0)
    }

    pub(super) fn set(&mut self, stream: usize, time: u64) {
        if self.0.len() <= stream {
            self.0.resize(stream + 1, 0);
        }
        self.0[stream] = time;
    }

    /// Raises each entry to at least that of `other`.
    pub(super) fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn join_keeps_the_later_times() {
        let mut a = Clock::default();
        let mut b = Clock::default();
        a.set(0, 3);
        a.set(2, 1);
        b.set(0, 2);
        b.set(3, 7);
        a.join(&b);
        assert_eq!(
            [a.get(0), a.get(1), a.get(2), a.get(3), a.get(9)],
            [3, 0, 1, 7, 0]
        );
    }
}
