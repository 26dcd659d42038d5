//! From an alignment in bytes to one in elements.

use crate::ShardError;

/// The least number of elements of which every multiple is a multiple of `align_bytes` at each of these
/// widths: with widths 2 (parameters) and 4 (moments) and 16 bytes, 8 elements.
///
/// # Errors
/// An alignment or a width of 0.
pub fn align_elems_for(align_bytes: u64, widths_bytes: &[u64]) -> Result<u64, ShardError> {
    if align_bytes == 0 || widths_bytes.contains(&0) {
        return Err(ShardError::ZeroAlignment);
    }
    // The least common multiple of divisors of `align_bytes` divides it too, so nothing overflows.
    Ok(widths_bytes.iter().fold(1, |elems, &width| {
        let needed = align_bytes / gcd(align_bytes, width);
        elems / gcd(elems, needed) * needed
    }))
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_is_aligned() {
        assert_eq!(align_elems_for(16, &[2, 4]), Ok(8));
        assert_eq!(align_elems_for(16, &[]), Ok(1));
        assert_eq!(align_elems_for(1, &[4]), Ok(1));
        assert_eq!(align_elems_for(512, &[3, 8]), Ok(512));
        for (align, widths) in [(16, vec![1, 2, 4]), (24, vec![6, 4]), (4096, vec![2, 12])] {
            let elems = align_elems_for(align, &widths).unwrap();
            assert!(widths.iter().all(|w| (elems * w).is_multiple_of(align)));
            let smaller = (1..elems).find(|e| widths.iter().all(|w| (e * w).is_multiple_of(align)));
            assert_eq!(smaller, None, "{align} {widths:?}");
        }
    }

    #[test]
    fn nothing_is_divided_by_zero() {
        assert_eq!(align_elems_for(0, &[2]), Err(ShardError::ZeroAlignment));
        assert_eq!(align_elems_for(16, &[0]), Err(ShardError::ZeroAlignment));
        assert_eq!(align_elems_for(u64::MAX, &[15, 1, 17]), Ok(u64::MAX));
    }
}
