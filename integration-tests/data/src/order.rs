//! The start of each row of a batch: a pure function of step, micro-batch and row.
//!
//! A batch does not depend on earlier ones, so a resumed run reads the same batches, and a global
//! batch has the same rows at any number of ranks.

use zero_models::random::Counter;
use zero_trainer::BatchAt;

use super::place::DataPosition;

/// The order of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Consecutive windows: row `b` of micro-batch `j` of step `s` starts at token
    /// `((s*A + j)*B*N + b)*T`, modulo the number of whole windows, if the run began at step 0.
    InOrder(DataPosition),
    /// Windows at random positions, drawn by (seed, step, micro-batch, row).
    Random,
}

impl Order {
    /// The first token of row `row` (below `at.micro_batch`) of this rank's micro-batch, in a data
    /// set of `len_tokens` tokens; the row and its last target are `start..start + T + 1`. `None`
    /// if there are not more than T tokens, or if `at` is not a position in training.
    pub(super) fn start(self, at: &BatchAt, row: usize, len_tokens: u64) -> Option<u64> {
        let seq_len = at.seq_len as u64;
        // The number of positions at which T inputs and the last target fit.
        let starts = len_tokens.checked_sub(seq_len)?;
        let valid = starts > 0
            && seq_len > 0
            && at.rank < at.world_size
            && at.micro_batch_index < at.grad_accum;
        if !valid {
            return None;
        }
        let rows = u128::from(at.world_size) * at.micro_batch as u128;
        let row = u128::from(at.rank) * at.micro_batch as u128 + row as u128;

        match self {
            Self::InOrder(from) => {
                let windows = u128::from((starts - 1) / seq_len + 1);
                let steps = at.step.saturating_sub(from.step);
                let micro_batch = u128::from(steps) * u128::from(at.grad_accum)
                    + u128::from(at.micro_batch_index);
                // Reduced after each operation, because the whole product could exceed 128 bits.
                let first = (micro_batch % windows) * (rows % windows) % windows;
                let first = first + u128::from(from.rows) % windows;
                Some(((first + row % windows) % windows) as u64 * seq_len)
            }
            Self::Random => {
                // Rows and micro-batches of a step are below 2^32, so the counter is unique.
                let low = (at.micro_batch_index << 32) ^ row as u64;
                Some(Counter::new(at.seed, "data windows").below(starts, at.step, low))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const IN_ORDER: Order = Order::InOrder(DataPosition { step: 0, rows: 0 });

    const AT: BatchAt = BatchAt {
        step: 0,
        micro_batch_index: 0,
        grad_accum: 2,
        rank: 0,
        world_size: 2,
        micro_batch: 2,
        seq_len: 32,
        seed: 1,
    };

    #[test]
    fn in_order_rows_are_consecutive() {
        let mut expected = 0;
        for step in 0..3 {
            for micro_batch_index in 0..2 {
                for rank in 0..2 {
                    for row in 0..2 {
                        let at = BatchAt {
                            step,
                            micro_batch_index,
                            rank,
                            ..AT
                        };
                        assert_eq!(IN_ORDER.start(&at, row, 10_000), Some(expected));
                        expected += 32;
                    }
                }
            }
        }
    }

    #[test]
    fn in_order_wraps_by_whole_windows() {
        // 3 windows of 32 fit in 97 tokens, 2 in 96: the last target of the third would be token
        // 96.
        let starts = |len| -> Vec<u64> {
            (0..4)
                .map(|step| BatchAt {
                    step,
                    grad_accum: 1,
                    world_size: 1,
                    micro_batch: 1,
                    ..AT
                })
                .map(|at| IN_ORDER.start(&at, 0, len).unwrap())
                .collect()
        };
        assert_eq!(starts(97), [0, 32, 64, 0]);
        assert_eq!(starts(96), [0, 32, 0, 32]);
        assert_eq!(starts(33), [0, 0, 0, 0]);
    }

    #[test]
    fn invalid_positions_have_no_start() {
        for order in [IN_ORDER, Order::Random] {
            assert_eq!(order.start(&AT, 0, 33), Some(0));
            for len in [0, 1, 31, 32] {
                assert_eq!(order.start(&AT, 0, len), None, "{len} tokens");
            }
            assert_eq!(order.start(&BatchAt { seq_len: 0, ..AT }, 0, 100), None);
            assert_eq!(order.start(&BatchAt { rank: 2, ..AT }, 0, 100), None);
            assert_eq!(
                order.start(
                    &BatchAt {
                        micro_batch_index: 2,
                        ..AT
                    },
                    0,
                    100
                ),
                None
            );
        }
    }

    #[test]
    fn random_windows_differ_by_position() {
        let start = |at: BatchAt, row| Order::Random.start(&at, row, 1 << 60).unwrap();
        let all = [
            start(AT, 0),
            start(AT, 1),
            start(BatchAt { rank: 1, ..AT }, 0),
            start(
                BatchAt {
                    micro_batch_index: 1,
                    ..AT
                },
                0,
            ),
            start(BatchAt { step: 1, ..AT }, 0),
            start(BatchAt { seed: 2, ..AT }, 0),
        ];
        let distinct: std::collections::HashSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len(), "{all:?}");
    }

    proptest! {
        #[test]
        fn in_order_matches_the_formula(
            step in 0u64..1 << 20, j in 0u64..4, rank in 0u64..4, row in 0usize..8, seq_len in 1usize..64,
            len in 1u64..100_000,
        ) {
            let at = BatchAt { step, micro_batch_index: j, grad_accum: 4, rank, world_size: 4, micro_batch: 8, seq_len, seed: 0 };
            let t = seq_len as u64;
            let windows = (0..).take_while(|w| w * t + t < len).count() as u64;
            let plain = (windows > 0).then(|| ((step * 4 + j) * 32 + rank * 8 + row as u64) % windows * t);
            prop_assert_eq!(IN_ORDER.start(&at, row, len), plain);
        }

        /// Another size of a step from step 5 on: the next window follows.
        #[test]
        fn in_order_goes_on_from_a_place(before in 1_u64..9, after in 1_usize..9, len in 20_u64..2000) {
            let alone = BatchAt { grad_accum: 1, world_size: 1, seq_len: 8, ..AT };
            let last = BatchAt { step: 4, micro_batch: before as usize, ..alone };
            let last = IN_ORDER.start(&last, before as usize - 1, len);
            let order = Order::InOrder(DataPosition { step: 5, rows: 5 * before });
            let next = order.start(&BatchAt { step: 5, micro_batch: after, ..alone }, 0, len);
            let windows = (len - 1) / 8;
            prop_assert_eq!(next, last.map(|last| (last / 8 + 1) % windows * 8));
        }

        #[test]
        fn window_always_fits(
            step: u64, j: u64, grad_accum: u64, rank: u64, world_size: u64, micro_batch: usize, row: usize,
            seq_len in 1usize..1000, len: u64, seed: u64,
        ) {
            let at = BatchAt { step, micro_batch_index: j, grad_accum, rank, world_size, micro_batch, seq_len, seed };
            for order in [IN_ORDER, Order::Random] {
                if let Some(start) = order.start(&at, row, len) {
                    prop_assert!(start + (seq_len as u64) < len, "its last target is a token");
                }
            }
        }

        #[test]
        fn rows_do_not_depend_on_world_size(step in 0u64..1000, row in 0usize..8, seed: u64) {
            for order in [IN_ORDER, Order::Random] {
                let start = |world_size: u64| {
                    let micro_batch = 8 / world_size as usize;
                    let rank = (row / micro_batch) as u64;
                    let at = BatchAt { step, rank, world_size, micro_batch, seed, ..AT };
                    order.start(&at, row % micro_batch, 50_000)
                };
                prop_assert_eq!(start(1), start(2));
                prop_assert_eq!(start(1), start(4));
            }
        }
    }
}
