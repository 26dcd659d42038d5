//! The place of a step in the data.
//!
//! A run's steps go through the rows of the data from a [`DataPosition`], which a checkpoint keeps. A run
//! that resumes with other ranks, micro-batches or accumulation begins at a new place, behind the
//! rows that its checkpoint has seen: so each row is trained once an epoch, whatever a step's size
//! was.

use serde::{Deserialize, Serialize};

/// A step, and the rows of all epochs that the steps before it trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataPosition {
    /// The step.
    pub step: u64,
    /// The rows before it.
    pub rows: u64,
}

impl DataPosition {
    /// Whether it is the start of a run.
    pub fn is_start(&self) -> bool {
        *self == Self::default()
    }
}

/// The rows of a step of all ranks, and of an epoch, whose last step may have fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    step: u64,
    /// `None`: a stream of rows without epochs.
    epoch: Option<u64>,
}

impl Pace {
    /// Steps of `rows_of_step` rows, and epochs if there are any.
    pub fn new(rows_of_step: u64, rows_of_epoch: Option<u64>) -> Self {
        Self {
            step: rows_of_step.max(1),
            epoch: rows_of_epoch.map(|rows| rows.max(1)),
        }
    }

    /// The rows of a step.
    pub fn rows_of_step(self) -> u64 {
        self.step
    }

    /// The steps of an epoch, if there are epochs.
    pub fn steps_of_epoch(self) -> Option<u64> {
        self.epoch.map(|rows| rows.div_ceil(self.step))
    }

    /// The rows before `step` of a run that began at `from`.
    pub fn rows_before(self, from: DataPosition, step: u64) -> u64 {
        let steps = step.saturating_sub(from.step);
        let Some(epoch) = self.epoch else {
            return from.rows.saturating_add(steps.saturating_mul(self.step));
        };
        let end = end_of_epoch(from.rows, epoch);
        let to_end = (end - from.rows).div_ceil(self.step);
        if steps < to_end {
            return from.rows + steps * self.step;
        }
        let later = steps - to_end;
        let of_epoch = epoch.div_ceil(self.step);
        let epochs = (later / of_epoch).saturating_mul(epoch);
        end.saturating_add(epochs)
            .saturating_add(later % of_epoch * self.step)
    }

    /// The first step behind `rows` rows.
    pub fn step_behind(self, from: DataPosition, rows: u64) -> u64 {
        let Some(left) = rows.checked_sub(from.rows) else {
            return from.step;
        };
        let Some(epoch) = self.epoch else {
            return from.step + left.div_ceil(self.step);
        };
        let end = end_of_epoch(from.rows, epoch);
        let Some(later) = rows.checked_sub(end) else {
            return from.step + left.div_ceil(self.step);
        };
        let to_end = (end - from.rows).div_ceil(self.step);
        let epochs = later / epoch * epoch.div_ceil(self.step);
        from.step + to_end + epochs + (later % epoch).div_ceil(self.step)
    }

    /// The number of rows, or of another row size's `rows`, that are as far in the data as `rows`
    /// of
    /// `earlier`: as many epochs, and the same part of one.
    pub fn as_far_as(self, earlier: Self, rows: u64) -> u64 {
        let (Some(old), Some(new)) = (earlier.epoch, self.epoch) else {
            // A stream becomes epochs: they begin.
            return if earlier.epoch == self.epoch { rows } else { 0 };
        };
        let part = u128::from(rows % old) * u128::from(new) / u128::from(old);
        (rows / old * new).saturating_add(part as u64)
    }
}

/// The rows at the end of the epoch in which the row behind `rows` rows is.
fn end_of_epoch(rows: u64, epoch: u64) -> u64 {
    (rows / epoch + 1).saturating_mul(epoch)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The steps of a run, one by one.
        #[test]
        fn places_are_those_of_single_steps(
            epoch in proptest::option::of(1_u64..40), rows_of_step in 1_u64..20, step in 0_u64..50, rows in 0_u64..120,
        ) {
            let pace = Pace::new(rows_of_step, epoch);
            let from = DataPosition { step, rows };
            let mut seen = rows;
            for at in step..step + 60 {
                prop_assert_eq!(pace.rows_before(from, at), seen);
                prop_assert_eq!(pace.step_behind(from, seen), at);
                let next = match epoch {
                    None => seen + rows_of_step,
                    Some(epoch) => (seen + rows_of_step).min(end_of_epoch(seen, epoch)),
                };
                // Rows within the step.
                prop_assert_eq!(pace.step_behind(from, next - 1), at + u64::from(next - 1 > seen));
                seen = next;
            }
        }
    }

    #[test]
    fn other_rows_are_as_far() {
        let ten = Pace::new(4, Some(10));
        let five = Pace::new(3, Some(5));
        assert_eq!(five.as_far_as(ten, 26), 13);
        assert_eq!(ten.as_far_as(five, 13), 26);
        assert_eq!(ten.as_far_as(ten, 26), 26);
        let stream = Pace::new(4, None);
        assert_eq!(stream.as_far_as(stream, 26), 26);
        assert_eq!(ten.as_far_as(stream, 26), 0);
    }
}
