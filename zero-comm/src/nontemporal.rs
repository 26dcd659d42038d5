//! Non-temporal stores, which bypass the cache.
//!
//! An ordinary store to a line that is not in the cache first reads the line from memory. A result
//! larger than the cache is evicted before its reader needs it, so bypassing the cache saves that
//! read: a third of the memory traffic of an all-gather between two ranks, a quarter of a
//! reduce-scatter's (`benches`, `collectives`).

/// Stores are non-temporal if all ranks together move at least this many bytes, about the size of a
/// large last-level cache.
pub(crate) const THRESHOLD_BYTES: usize = 24 << 20;

/// The alignment of [`lines`]'s target.
pub(crate) const LINE_BYTES: usize = 64;

/// Copies `from` to `to`, of the same length.
pub(crate) fn copy(from: &[u8], to: &mut [u8]) {
    let head = to
        .as_ptr()
        .align_offset(LINE_BYTES)
        .min(to.len())
        .min(from.len());
    let (from_head, from) = from.split_at(head);
    let (to_head, to) = to.split_at_mut(head);
    to_head.copy_from_slice(from_head);
    let (from, from_tail) = from.as_chunks::<LINE_BYTES>();
    let (to, to_tail) = to.as_chunks_mut::<LINE_BYTES>();
    for (from, to) in from.iter().zip(to) {
        lines(from, to);
    }
    to_tail.copy_from_slice(from_tail);
    fence();
}

/// Copies `from` to `to`, of the same length: with non-temporal stores if `to` is aligned whole
/// lines, otherwise with ordinary stores. Call [`fence`] before another thread reads `to`.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline(always)]
pub(crate) fn lines(from: &[u8], to: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    const STORE_BYTES: usize = size_of::<__m128i>();
    if !to.as_ptr().addr().is_multiple_of(LINE_BYTES) || !to.len().is_multiple_of(LINE_BYTES) {
        return to.copy_from_slice(from);
    }
    // The stores of a line are consecutive, so that the processor combines them into one write to
    // memory.
    for (from, to) in from
        .as_chunks::<STORE_BYTES>()
        .0
        .iter()
        .zip(to.as_chunks_mut::<STORE_BYTES>().0)
    {
        // SAFETY: `from` has the `STORE_BYTES` bytes that are loaded; the load needs no alignment.
        let value = unsafe { _mm_loadu_si128(from.as_ptr().cast()) };
        // SAFETY: `to` has the `STORE_BYTES` bytes that are stored, and is aligned because the line
        // is.
        unsafe { _mm_stream_si128(to.as_mut_ptr().cast(), value) };
    }
}

/// Copies whole lines with ordinary stores.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(crate) fn lines(from: &[u8], to: &mut [u8]) {
    to.copy_from_slice(from);
}

/// Orders the stores of [`lines`] before this thread's later stores.
pub(crate) fn fence() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every x86-64 processor has this instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Prefetches the cache line at `at`, which may be any address.
#[inline(always)]
pub(crate) fn prefetch<T>(at: *const T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a hint without architectural effect, valid for any address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}

#[cfg(test)]
mod tests {
    use super::copy;

    #[test]
    fn copy_writes_exactly_its_range() {
        let source: Vec<u8> = (0..400).map(|i| (i * 7 % 251) as u8).collect();
        for len in (0..200).step_by(if cfg!(miri) { 37 } else { 1 }) {
            for (from, to) in [(0, 0), (3, 0), (0, 5), (17, 63), (64, 64)] {
                let mut target = vec![0xa5u8; 400];
                copy(&source[from..from + len], &mut target[to..to + len]);
                assert_eq!(target[to..to + len], source[from..from + len]);
                assert!(
                    target[..to]
                        .iter()
                        .chain(&target[to + len..])
                        .all(|&b| b == 0xa5)
                );
            }
        }
    }
}
