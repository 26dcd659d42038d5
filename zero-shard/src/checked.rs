//! Products and sums with an error on overflow of 64 bits.

use crate::ShardError;

pub(crate) fn product(what: &str, factors: &[u64]) -> Result<u64, ShardError> {
    if factors.contains(&0) {
        return Ok(0);
    }
    fold(what, 1, factors, u64::checked_mul)
}

pub(crate) fn sum(what: &str, terms: &[u64]) -> Result<u64, ShardError> {
    fold(what, 0, terms, u64::checked_add)
}

fn fold(
    what: &str,
    first: u64,
    numbers: &[u64],
    op: fn(u64, u64) -> Option<u64>,
) -> Result<u64, ShardError> {
    let result = numbers.iter().try_fold(first, |a, &b| op(a, b));
    result.ok_or_else(|| ShardError::TooLarge { what: what.into() })
}
