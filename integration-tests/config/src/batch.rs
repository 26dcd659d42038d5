//! The three batch sizes; two of them determine the third.

use super::ConfigFileError;

/// The batch sizes in a configuration file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchKeys {
    /// `train_batch_size`: rows of all ranks and micro-batches of a step.
    pub train_batch_size: Option<u64>,
    /// `train_micro_batch_size_per_gpu`.
    pub micro_batch: Option<u64>,
    /// `gradient_accumulation_steps`.
    pub grad_accum: Option<u64>,
}

/// Consistent batch sizes: `train_batch_size == micro_batch * grad_accum * ranks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Rows of all ranks and micro-batches of a step.
    pub train_batch_size: u64,
    /// Rows of one micro-batch of one rank.
    pub micro_batch: u64,
    /// Micro-batches of a step.
    pub grad_accum: u64,
}

impl BatchKeys {
    /// Computes the sizes for `ranks` ranks and the flags `flag_micro` and `flag_accum`.
    ///
    /// The rules are DeepSpeed's: missing sizes are derived, and a contradiction is an error. One
    /// flag overrides its key, and the other size is derived from `train_batch_size`; two flags
    /// override `train_batch_size`. The default micro-batch is `default_micro`.
    ///
    /// # Errors
    /// Sizes that are 0 or contradict each other.
    pub fn resolve(
        &self,
        ranks: u64,
        flag_micro: Option<u64>,
        flag_accum: Option<u64>,
        default_micro: u64,
    ) -> Result<Batch, ConfigFileError> {
        let total = self.train_batch_size;
        let (micro, accum) = match (flag_micro, flag_accum) {
            (Some(_), Some(_)) => (flag_micro, flag_accum),
            (Some(_), None) if total.is_some() => (flag_micro, None),
            (None, Some(_)) if total.is_some() => (None, flag_accum),
            _ => (
                flag_micro.or(self.micro_batch),
                flag_accum.or(self.grad_accum),
            ),
        };

        let total = if flag_micro.is_some() && flag_accum.is_some() {
            None
        } else {
            total
        };

        let per_rank = |total: u64, others: u64| {
            let product = ranks.checked_mul(others).filter(|n| *n > 0);
            product
                .filter(|n| total.is_multiple_of(*n))
                .map(|n| total / n)
        };

        let contradiction = |micro: Option<u64>, accum: Option<u64>| ConfigFileError::Batch {
            train_batch_size: total.unwrap_or(0),
            micro_batch: micro,
            grad_accum: accum,
            ranks,
        };

        let wrong = || contradiction(micro, accum);
        let (micro_batch, grad_accum) = match (total, micro, accum) {
            (None, micro, accum) => (micro.unwrap_or(default_micro), accum.unwrap_or(1)),
            (Some(_), Some(micro), Some(accum)) => (micro, accum),
            (Some(total), Some(micro), None) => (micro, per_rank(total, micro).ok_or_else(wrong)?),
            (Some(total), None, accum) => {
                let accum = accum.unwrap_or(1);
                (per_rank(total, accum).ok_or_else(wrong)?, accum)
            }
        };

        let product = micro_batch
            .checked_mul(grad_accum)
            .and_then(|n| n.checked_mul(ranks));
        match product {
            Some(n) if n > 0 && total.is_none_or(|t| t == n) => Ok(Batch {
                train_batch_size: n,
                micro_batch,
                grad_accum,
            }),
            _ => Err(ConfigFileError::Batch {
                train_batch_size: total.or(product).unwrap_or(u64::MAX),
                micro_batch: Some(micro_batch),
                grad_accum: Some(grad_accum),
                ranks,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Sizes = Option<u64>;

    fn keys((train_batch_size, micro_batch, grad_accum): (Sizes, Sizes, Sizes)) -> BatchKeys {
        BatchKeys {
            train_batch_size,
            micro_batch,
            grad_accum,
        }
    }

    #[test]
    fn missing_sizes_are_derived() {
        let (no, some) = (None, Some);
        // (train, micro, accumulation) of the file; ranks; flags; expected.
        let cases = [
            ((some(32), some(4), some(2)), 4, (no, no), (32, 4, 2)),
            ((some(32), some(4), no), 4, (no, no), (32, 4, 2)),
            ((some(32), no, some(2)), 4, (no, no), (32, 4, 2)),
            ((no, some(4), some(2)), 4, (no, no), (32, 4, 2)),
            ((some(32), no, no), 4, (no, no), (32, 8, 1)),
            ((no, some(4), no), 4, (no, no), (16, 4, 1)),
            ((no, no, some(2)), 4, (no, no), (64, 8, 2)),
            ((no, no, no), 1, (no, no), (8, 8, 1)),
            ((no, no, no), 2, (some(3), some(5)), (30, 3, 5)),
            // One flag keeps train_batch_size, two override it.
            ((some(32), some(4), some(2)), 4, (some(2), no), (32, 2, 4)),
            ((some(32), some(4), some(2)), 4, (no, some(1)), (32, 8, 1)),
            (
                (some(32), some(4), some(2)),
                4,
                (some(1), some(1)),
                (4, 1, 1),
            ),
            ((no, some(4), some(2)), 4, (some(1), no), (8, 1, 2)),
            ((no, some(4), some(2)), 4, (no, some(3)), (48, 4, 3)),
        ];

        for (file, ranks, (micro, accum), (train_batch_size, micro_batch, grad_accum)) in cases {
            let got = keys(file).resolve(ranks, micro, accum, 8);
            let expected = Batch {
                train_batch_size,
                micro_batch,
                grad_accum,
            };
            assert_eq!(got.unwrap(), expected, "{file:?} {ranks} {micro:?}");
        }
    }

    #[test]
    fn contradictions_name_the_sizes() {
        let (no, some) = (None, Some);
        let cases = [
            (
                (some(30), some(4), some(2)),
                4,
                "train_batch_size 30 is not micro-batch 4 x accumulation 2 x 4 ranks",
            ),
            (
                (some(30), some(4), no),
                4,
                "train_batch_size 30 is not micro-batch 4 x accumulation any x 4 ranks",
            ),
            (
                (some(30), no, some(2)),
                4,
                "train_batch_size 30 is not micro-batch any x accumulation 2 x 4 ranks",
            ),
            (
                (some(30), no, no),
                4,
                "train_batch_size 30 is not micro-batch any x accumulation any x 4 ranks",
            ),
            (
                (some(0), no, no),
                4,
                "train_batch_size 0 is not micro-batch 0 x accumulation 1 x 4 ranks",
            ),
            ((no, some(0), no), 4, "micro-batch 0"),
            ((no, some(1), some(0)), 4, "accumulation 0"),
            ((no, some(1), no), 0, "0 ranks"),
            (
                (no, some(u64::MAX), some(2)),
                1,
                "micro-batch 18446744073709551615 x accumulation 2",
            ),
        ];

        for (file, ranks, expected) in cases {
            let error = keys(file)
                .resolve(ranks, None, None, 8)
                .unwrap_err()
                .to_string();
            assert!(error.contains(expected), "{file:?}: {error}");
        }
    }

    proptest! {
        #[test]
        fn resolved_sizes_are_consistent(
            file: (Sizes, Sizes, Sizes), ranks in 0u64..9, micro: Sizes, accum: Sizes, default_micro in 0u64..9,
        ) {
            if let Ok(batch) = keys(file).resolve(ranks, micro, accum, default_micro) {
                prop_assert_eq!(batch.train_batch_size, batch.micro_batch * batch.grad_accum * ranks);
                prop_assert!(batch.train_batch_size > 0);
                prop_assert_eq!(batch.micro_batch, micro.unwrap_or(batch.micro_batch));
                prop_assert_eq!(batch.grad_accum, accum.unwrap_or(batch.grad_accum));
            }
        }
    }
}
