//! The order of rows over epochs: a pure function of (seed, epoch).
//!
//! An epoch goes through all rows once, in a new order. Its last step has fewer rows if the rows of
//! a step do not divide it; what is missing is padding that is not trained, so the loss is still
//! the mean over the trained tokens. (The Trainer of transformers does the same on one rank; on
//! several it repeats examples.) A row's place depends on its place in the step, not on ranks.

use std::sync::Arc;

use parking_lot::Mutex;
use zero_models::random::Counter;
use zero_trainer::BatchAt;

use crate::place::{DataPosition, Pace};

/// Orders that are kept: ranks may be in two epochs at once.
const KEPT: usize = 2;

/// The order of one epoch.
type Order = (u64, u64, Arc<[u32]>);

/// The orders of the epochs of `rows` rows.
pub(crate) struct Epochs {
    rows: u64,
    /// The place at which the run's steps begin.
    from: DataPosition,
    orders: Mutex<Vec<Order>>,
}

/// The rows of a step.
pub(crate) struct StepRows {
    order: Arc<[u32]>,
    first: usize,
    count: usize,
}

impl StepRows {
    /// All rows of the step, in order.
    pub(crate) fn all(&self) -> &[u32] {
        let end = self.order.len().min(self.first + self.count);
        &self.order[self.first..end]
    }

    /// The row at a place of the step; `None` if the epoch has ended.
    pub(crate) fn get(&self, place: usize) -> Option<usize> {
        self.all().get(place).map(|&row| row as usize)
    }
}

/// The rows of a step of all ranks.
pub(crate) fn rows_of_step(at: &BatchAt) -> u64 {
    at.world_size * at.grad_accum * at.micro_batch as u64
}

impl Epochs {
    pub(crate) fn new(rows: u64) -> Self {
        Self {
            rows,
            from: DataPosition::default(),
            orders: Mutex::default(),
        }
    }

    pub(crate) fn begin_at(&mut self, from: DataPosition) {
        self.from = from;
    }

    /// The rows of step `at.step`.
    pub(crate) fn step(&self, at: &BatchAt) -> StepRows {
        let count = rows_of_step(at);
        let before = Pace::new(count, Some(self.rows)).rows_before(self.from, at.step);
        let rows = self.rows.max(1);
        StepRows {
            order: self.order(at.seed, before / rows),
            first: (before % rows) as usize,
            count: count as usize,
        }
    }

    fn order(&self, seed: u64, epoch: u64) -> Arc<[u32]> {
        let mut orders = self.orders.lock();
        if let Some((.., order)) = orders.iter().find(|one| (one.0, one.1) == (seed, epoch)) {
            return Arc::clone(order);
        }
        let order: Arc<[u32]> = shuffled(self.rows as u32, seed, epoch).into();
        if orders.len() == KEPT {
            orders.remove(0);
        }
        orders.push((seed, epoch, Arc::clone(&order)));
        order
    }
}

/// The numbers below `rows` in the order of an epoch (Fisher and Yates).
fn shuffled(rows: u32, seed: u64, epoch: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..rows).collect();
    let random = Counter::new(seed, "order of an epoch");
    for i in (1..order.len()).rev() {
        let other = random.below(i as u64 + 1, epoch, i as u64);
        order.swap(i, other as usize);
    }
    order
}

/// The place of a row of this rank's micro-batch in its step.
pub(crate) fn place_in_step(at: &BatchAt, row: usize) -> usize {
    let micro_batch = at.micro_batch_index * at.world_size + at.rank;
    micro_batch as usize * at.micro_batch + row
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    const AT: BatchAt = BatchAt {
        step: 0,
        micro_batch_index: 0,
        grad_accum: 1,
        rank: 0,
        world_size: 1,
        micro_batch: 1,
        seq_len: 4,
        seed: 1,
    };

    /// The rows of a step, from all ranks and micro-batches.
    fn rows(epochs: &Epochs, at: BatchAt) -> Vec<Option<usize>> {
        let mut rows = Vec::new();
        for micro_batch_index in 0..at.grad_accum {
            for rank in 0..at.world_size {
                for row in 0..at.micro_batch {
                    let at = BatchAt {
                        micro_batch_index,
                        rank,
                        ..at
                    };
                    rows.push(epochs.step(&at).get(place_in_step(&at, row)));
                }
            }
        }
        rows
    }

    proptest! {
        #[test]
        fn each_row_is_once_in_an_epoch(
            count in 1u64..60, world_size in 1u64..4, grad_accum in 1u64..4, micro_batch in 1usize..4,
            epoch in 0u64..5, seed: u64,
        ) {
            let at = BatchAt { world_size, grad_accum, micro_batch, seed, ..AT };
            let epochs = Epochs::new(count);
            let steps = count.div_ceil(rows_of_step(&at));
            let mut all = Vec::new();
            for step in epoch * steps..(epoch + 1) * steps {
                let of_step = rows(&epochs, BatchAt { step, ..at });
                prop_assert!(of_step.iter().any(Option::is_some), "a step has a row");
                all.extend(of_step.into_iter().flatten());
            }
            all.sort_unstable();
            prop_assert_eq!(all, (0..count as usize).collect::<Vec<_>>());
        }

        /// A run that is resumed with other sizes of a step trains each row once an epoch.
        #[test]
        fn each_row_is_once_in_an_epoch_of_resumed_runs(
            count in 1_u64..60, epochs in 1_u64..4, seed: u64,
            runs in vec((1_u64..4, 1_u64..4, 1_usize..4, 0_u64..12), 1..6),
        ) {
            let mut of_rows = Epochs::new(count);
            let mut from = DataPosition::default();
            let mut step = 0;
            let mut all = Vec::new();
            let last = runs.len() - 1;
            for (run, (world_size, grad_accum, micro_batch, steps)) in runs.into_iter().enumerate() {
                let at = BatchAt { world_size, grad_accum, micro_batch, seed, ..AT };
                let pace = Pace::new(rows_of_step(&at), Some(count));
                of_rows.begin_at(from);
                let end = pace.step_behind(from, epochs * count);
                let stop = if run == last { end } else { end.min(step + steps) };
                for step in step..stop {
                    all.extend(rows(&of_rows, BatchAt { step, ..at }).into_iter().flatten());
                }
                step = stop;
                from = DataPosition { step, rows: pace.rows_before(from, step) };
            }
            prop_assert_eq!(from.rows, epochs * count);
            for epoch in all.chunks(count as usize) {
                let mut epoch = epoch.to_vec();
                epoch.sort_unstable();
                prop_assert_eq!(epoch, (0..count as usize).collect::<Vec<_>>());
            }
            prop_assert_eq!(all.len() as u64, epochs * count);
        }

        #[test]
        fn order_does_not_depend_on_ranks(count in 1u64..60, step in 0u64..100, seed: u64) {
            let of = |world_size, grad_accum, micro_batch| {
                let at = BatchAt { step, world_size, grad_accum, micro_batch, seed, ..AT };
                // Another history of calls.
                let epochs = Epochs::new(count);
                rows(&epochs, BatchAt { step: step / 2, ..at });
                rows(&epochs, at)
            };
            prop_assert_eq!(of(1, 1, 8), of(2, 2, 2));
            prop_assert_eq!(of(1, 1, 8), of(4, 1, 2));
        }
    }

    #[test]
    fn epochs_differ() {
        let orders: Vec<Vec<u32>> = (0..3).map(|epoch| shuffled(20, 7, epoch)).collect();
        assert!(orders[0] != orders[1] && orders[1] != orders[2] && orders[0] != orders[2]);
        assert_ne!(shuffled(20, 7, 0), shuffled(20, 8, 0));
    }
}
