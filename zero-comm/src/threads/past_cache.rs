//! Copies whose target does not enter the cache.
//!
//! An ordinary store to memory that is not in the cache first reads it. A result larger than the cache will not
//! be found there by its reader anyway, so writing it past the cache saves that read: a third of all memory
//! traffic of an all-gather, a quarter of a reduce-scatter's between two ranks (`benches`, `collectives`).

/// From how many bytes written by all ranks together stores go past the cache: about a large last-level cache.
pub(super) const THRESHOLD_BYTES: usize = 24 << 20;

/// Copies `len` bytes.
///
/// # Safety
/// `src` is valid for reads and `dst` for writes of `len` bytes; they do not overlap, and nothing else accesses
/// `dst` meanwhile.
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE_BYTES: usize = 64;
    let head = dst.align_offset(LINE_BYTES).min(len);
    let lines = (len - head) / LINE_BYTES;
    let tail = head + lines * LINE_BYTES;
    // SAFETY: a part of the range that the caller vouches for.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, head) };
    for line in 0..lines {
        let at = head + line * LINE_BYTES;
        let (from, to) = (src.wrapping_add(at).cast::<__m128i>(), dst.wrapping_add(at).cast::<__m128i>());
        // One line is loaded, then written whole, so that it leaves in one piece.
        let loaded = std::array::from_fn::<__m128i, 4, _>(|i| {
            // SAFETY: 16 of the bytes that the caller vouches for; no alignment is needed.
            unsafe { _mm_loadu_si128(from.wrapping_add(i)) }
        });
        for (i, value) in loaded.into_iter().enumerate() {
            // SAFETY: 16 of the bytes that the caller vouches for, aligned since `head` reaches a line.
            unsafe { _mm_stream_si128(to.wrapping_add(i), value) };
        }
    }
    // SAFETY: a part of the range that the caller vouches for.
    unsafe { std::ptr::copy_nonoverlapping(src.wrapping_add(tail), dst.wrapping_add(tail), len - tail) };
    // Such stores are weakly ordered: they come before what this thread writes next, the meeting of the ranks.
    // SAFETY: every x86-64 processor has it.
    unsafe { _mm_sfence() };
}

/// Copies `len` bytes: here, an ordinary copy.
///
/// # Safety
/// As above.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(super) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) };
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
                // SAFETY: both ranges are within their vectors of 400 bytes.
                unsafe { copy(source.as_ptr().wrapping_add(from), target.as_mut_ptr().wrapping_add(to), len) };
                assert_eq!(target[to..to + len], source[from..from + len]);
                assert!(target[..to].iter().chain(&target[to + len..]).all(|&b| b == 0xa5));
            }
        }
    }
}
