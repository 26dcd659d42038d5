//! Copies whose target does not enter the cache.
//!
//! An ordinary store to memory that is not in the cache first reads it. A result larger than the cache will not
//! be found there by its reader anyway, so writing it past the cache saves that read: a third of all memory
//! traffic of an all-gather, a quarter of a reduce-scatter's between two ranks (`benches`, `collectives`).

/// From how many bytes written by all ranks together stores go past the cache: about a large last-level cache.
pub(super) const THRESHOLD_BYTES: usize = 24 << 20;

/// Copies `from` to `to`, of the same length.
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) fn copy(from: &[u8], to: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE_BYTES: usize = 64;
    let head = to.as_ptr().align_offset(LINE_BYTES).min(to.len()).min(from.len());
    let (from_head, from) = from.split_at(head);
    let (to_head, to) = to.split_at_mut(head);
    to_head.copy_from_slice(from_head);
    let (from, from_tail) = from.as_chunks::<LINE_BYTES>();
    let (to, to_tail) = to.as_chunks_mut::<LINE_BYTES>();
    for (from, to) in from.iter().zip(to) {
        let (from, to) = (from.as_ptr().cast::<__m128i>(), to.as_mut_ptr().cast::<__m128i>());
        // One line is loaded, then written whole, so that it leaves in one piece.
        let loaded = std::array::from_fn::<__m128i, 4, _>(|i| {
            // SAFETY: 16 of the 64 bytes of `from`; no alignment is needed.
            unsafe { _mm_loadu_si128(from.wrapping_add(i)) }
        });
        for (i, value) in loaded.into_iter().enumerate() {
            // SAFETY: 16 of the 64 bytes of `to`, aligned since `head` reaches the start of a line.
            unsafe { _mm_stream_si128(to.wrapping_add(i), value) };
        }
    }
    to_tail.copy_from_slice(from_tail);
    // Such stores are weakly ordered: they come before what this thread writes next, the meeting of the ranks.
    // SAFETY: every x86-64 processor has it.
    unsafe { _mm_sfence() };
}

/// Copies `from` to `to`, of the same length: here, an ordinary copy.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(super) fn copy(from: &[u8], to: &mut [u8]) {
    to.copy_from_slice(from);
}

#[cfg(test)]
mod tests {
    use super::copy;

    #[test]
    fn any_offset_and_length_is_copied_and_nothing_beside_it() {
        let source: Vec<u8> = (0..400).map(|i| (i * 7 % 251) as u8).collect();
        for len in (0..200).step_by(if cfg!(miri) { 37 } else { 1 }) {
            for (from, to) in [(0, 0), (3, 0), (0, 5), (17, 63), (64, 64)] {
                let mut target = vec![0xa5u8; 400];
                copy(&source[from..from + len], &mut target[to..to + len]);
                assert_eq!(target[to..to + len], source[from..from + len]);
                assert!(target[..to].iter().chain(&target[to + len..]).all(|&b| b == 0xa5));
            }
        }
    }
}
