//! The kernel of AVX512-BF16.

use std::arch::x86_64::*;

use super::{PANEL, TILE, Tile};

/// Rows of accumulators: 8 x 2 of the 32 registers, more than the latency of the instruction needs.
const ROWS: usize = 8;

/// Whether this CPU, and its operating system, have the instructions of this kernel and of packing.
pub(super) fn is_available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512bf16")
}

/// Computes, or adds to, a block `[32, 32]` with rows `stride` elements apart.
///
/// # Safety
/// The block is writable, and nothing else accesses it.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn multiply(
    block: *mut f32,
    stride: usize,
    accumulate: bool,
    left: &[Tile],
    right: &[Tile],
) {
    for first in (0..PANEL).step_by(ROWS) {
        let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
        let place = |i: usize, j: usize| block.wrapping_add((first + i) * stride + j * TILE);
        if accumulate {
            for (i, sums) in sums.iter_mut().enumerate() {
                for (j, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: a part of the block.
                    *sum = unsafe { _mm512_loadu_ps(place(i, j)) };
                }
            }
        }

        for (left, right) in left.chunks_exact(2).zip(right.chunks_exact(2)) {
            let rows = &left[first / TILE].0[first % TILE..][..ROWS];
            for pair in 0..TILE {
                let columns = [bf16_pairs(&right[0].0[pair]), bf16_pairs(&right[1].0[pair])];
                for (sums, row) in sums.iter_mut().zip(rows) {
                    let x = bf16_pairs(&[row[pair]; TILE]);
                    for (sum, column) in sums.iter_mut().zip(columns) {
                        *sum = _mm512_dpbf16_ps(*sum, x, column);
                    }
                }
            }
        }

        for (i, sums) in sums.iter().enumerate() {
            for (j, &sum) in sums.iter().enumerate() {
                // SAFETY: a part of the block.
                unsafe { _mm512_storeu_ps(place(i, j), sum) };
            }
        }
    }
}

/// 16 pairs of bf16.
#[inline]
#[target_feature(enable = "avx512f")]
fn bf16_pairs(pairs: &[u32; TILE]) -> __m512bh {
    // SAFETY: both are 512 bits, of which every pattern is valid.
    unsafe { std::mem::transmute::<[u32; TILE], __m512bh>(*pairs) }
}
