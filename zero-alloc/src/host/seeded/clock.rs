//! Vector clocks: what is known to have happened, per stream.

/// By seat (stream of one scheduler): everything up to this time is behind. Missing entries are 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::host) struct Clock(Vec<u64>);

impl Clock {
    pub(super) fn get(&self, seat: usize) -> u64 {
        self.0.get(seat).copied().unwrap_or(0)
    }

    pub(super) fn set(&mut self, seat: usize, time: u64) {
        if self.0.len() <= seat {
            self.0.resize(seat + 1, 0);
        }
        self.0[seat] = time;
    }

    /// Learns all that `other` knows.
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
    fn joining_takes_the_later_of_each() {
        let (mut a, mut b) = (Clock::default(), Clock::default());
        a.set(0, 3);
        a.set(2, 1);
        b.set(0, 2);
        b.set(3, 7);
        a.join(&b);
        assert_eq!([a.get(0), a.get(1), a.get(2), a.get(3), a.get(9)], [3, 0, 1, 7, 0]);
    }
}
