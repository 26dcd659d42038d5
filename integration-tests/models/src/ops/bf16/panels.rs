//! Packing of operands into tiles by AVX-512.

use std::arch::x86_64::*;
use std::ops::Range;

use half::bf16;

use super::operand::{Elems, Form, Operand};
use super::{DEPTH, PANEL, TILE, Tile};

type Vectors = [__m512i; TILE];

/// Packs lines from `line` on, those of a panel, and `depth` of them into `panel`: for each 32 of k
/// two tiles. Lines and elements that the operand does not have are 0.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) fn pack_panel(
    panel: &mut [Tile],
    operand: &Operand<'_>,
    line: usize,
    depth: Range<usize>,
    form: Form,
) {
    let lines = line..operand.len.min(line + PANEL);
    let is_stored_so = operand.is_transposed == (form == Form::Right);
    for (step, pair) in panel.chunks_exact_mut(2).enumerate() {
        let first = depth.start + step * DEPTH;
        let k = first..depth.end.min(first + DEPTH);
        for (half, tile) in pair.iter_mut().enumerate() {
            let first = (line + half * TILE).min(lines.end);
            let lines = first..lines.end.min(first + TILE);
            let vectors = match (operand.elems, operand.is_transposed) {
                (Elems::F32(elems), false) => lines_of_f32(elems, operand.stride, lines, k.clone()),
                (Elems::F32(elems), true) => pairs_of_f32(elems, operand.stride, lines, k.clone()),
                (Elems::Bf16(elems), false) => {
                    lines_of_bf16(elems, operand.stride, lines, k.clone())
                }
                (Elems::Bf16(elems), true) => {
                    pairs_of_bf16(elems, operand.stride, lines, k.clone())
                }
            };
            let vectors = match is_stored_so {
                true => vectors,
                false => transposed(vectors),
            };
            for (row, vector) in tile.0.iter_mut().zip(vectors) {
                // SAFETY: the row has 16 elements of 32 bits.
                unsafe { _mm512_storeu_si512(row.as_mut_ptr().cast(), vector) };
            }
        }
    }
}

/// Elements of a line between a load and what is requested of memory at the same time: two tiles.
const AHEAD: usize = 2 * DEPTH;

/// A vector of up to 16 elements from `at` on, and zeros.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_f32(elems: &[f32], at: usize, count: usize, ahead: usize) -> __m512 {
    let part = &elems[at..at + count];
    _mm_prefetch::<_MM_HINT_T0>(elems.as_ptr().wrapping_add(at + ahead).cast());
    let mask = (1u32 << count) - 1;
    // SAFETY: reads the elements of the mask, which are those of `part`.
    unsafe { _mm512_maskz_loadu_ps(mask as u16, part.as_ptr()) }
}

/// A vector of up to 32 elements from `at` on, and zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load_bf16(elems: &[bf16], at: usize, count: usize, ahead: usize) -> __m512i {
    let part = &elems[at..at + count];
    _mm_prefetch::<_MM_HINT_T0>(elems.as_ptr().wrapping_add(at + ahead).cast());
    let mask = (1u64 << count) - 1;
    // SAFETY: reads the elements of the mask, which are those of `part`.
    unsafe { _mm512_maskz_loadu_epi16(mask as u32, part.as_ptr().cast()) }
}

/// `low` and then `high`, rounded to bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn rounded(low: __m512, high: __m512) -> __m512i {
    let both = _mm512_cvtne2ps_pbh(high, low);
    // SAFETY: both are 512 bits, of which every pattern is valid.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(both) }
}

/// Pairs of the elements of two rows of 16, one row in each half of `rows`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn interleaved(rows: __m512i) -> __m512i {
    let mut order = [0u16; 2 * TILE];
    for (i, pair) in order.chunks_exact_mut(2).enumerate() {
        pair[0] = i as u16;
        pair[1] = (TILE + i) as u16;
    }
    // SAFETY: the array has 512 bits.
    let order = unsafe { _mm512_loadu_si512(order.as_ptr().cast()) };
    _mm512_permutexvar_epi16(order, rows)
}

/// `[line][pair]` of an operand that is not transposed.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn lines_of_f32(elems: &[f32], stride: usize, lines: Range<usize>, k: Range<usize>) -> Vectors {
    let mut vectors = [_mm512_setzero_si512(); TILE];
    let low = k.len().min(TILE);
    let high = k.len() - low;
    for (vector, line) in vectors.iter_mut().zip(lines) {
        let at = line * stride + k.start;
        *vector = rounded(
            load_f32(elems, at, low, AHEAD),
            load_f32(elems, at + low, high, AHEAD),
        );
    }
    vectors
}

/// As [`lines_of_f32`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn lines_of_bf16(elems: &[bf16], stride: usize, lines: Range<usize>, k: Range<usize>) -> Vectors {
    let mut vectors = [_mm512_setzero_si512(); TILE];
    for (vector, line) in vectors.iter_mut().zip(lines) {
        *vector = load_bf16(elems, line * stride + k.start, k.len(), AHEAD);
    }
    vectors
}

/// `[pair][line]` of a transposed operand.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn pairs_of_f32(elems: &[f32], stride: usize, lines: Range<usize>, k: Range<usize>) -> Vectors {
    let mut vectors = [_mm512_setzero_si512(); TILE];
    let count = lines.len();
    let ahead = DEPTH * stride;
    for (vector, first) in vectors.iter_mut().zip(k.clone().step_by(2)) {
        let at = first * stride + lines.start;
        let odd = match first + 1 < k.end {
            true => load_f32(elems, at + stride, count, ahead),
            false => _mm512_setzero_ps(),
        };
        *vector = interleaved(rounded(load_f32(elems, at, count, ahead), odd));
    }
    vectors
}

/// As [`pairs_of_f32`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn pairs_of_bf16(elems: &[bf16], stride: usize, lines: Range<usize>, k: Range<usize>) -> Vectors {
    let mut vectors = [_mm512_setzero_si512(); TILE];
    let count = lines.len();
    let ahead = DEPTH * stride;
    for (vector, first) in vectors.iter_mut().zip(k.clone().step_by(2)) {
        let at = first * stride + lines.start;
        let even = load_bf16(elems, at, count, ahead);
        let odd = match first + 1 < k.end {
            true => load_bf16(elems, at + stride, count, ahead),
            false => _mm512_setzero_si512(),
        };
        let rows = _mm512_inserti64x4::<1>(even, _mm512_castsi512_si256(odd));
        *vector = interleaved(rows);
    }
    vectors
}

/// The transpose of 16 x 16 elements of 32 bits: of 2 x 2 elements, of 4 x 4, and then of the 4 x 4
/// tiles of these.
#[inline]
#[target_feature(enable = "avx512f")]
fn transposed(r: Vectors) -> Vectors {
    let mut t = r;
    for i in (0..TILE).step_by(2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    // `u[4 g + c]` has, in each 128 bits b, column 4 b + c of rows 4 g..4 g + 4.
    let mut u = r;
    for g in (0..TILE).step_by(4) {
        u[g] = _mm512_unpacklo_epi64(t[g], t[g + 2]);
        u[g + 1] = _mm512_unpackhi_epi64(t[g], t[g + 2]);
        u[g + 2] = _mm512_unpacklo_epi64(t[g + 1], t[g + 3]);
        u[g + 3] = _mm512_unpackhi_epi64(t[g + 1], t[g + 3]);
    }
    let mut out = r;
    for c in 0..4 {
        let low_01 = _mm512_shuffle_i32x4::<0b10_00_10_00>(u[c], u[4 + c]);
        let low_23 = _mm512_shuffle_i32x4::<0b10_00_10_00>(u[8 + c], u[12 + c]);
        let high_01 = _mm512_shuffle_i32x4::<0b11_01_11_01>(u[c], u[4 + c]);
        let high_23 = _mm512_shuffle_i32x4::<0b11_01_11_01>(u[8 + c], u[12 + c]);
        out[c] = _mm512_shuffle_i32x4::<0b10_00_10_00>(low_01, low_23);
        out[4 + c] = _mm512_shuffle_i32x4::<0b10_00_10_00>(high_01, high_23);
        out[8 + c] = _mm512_shuffle_i32x4::<0b11_01_11_01>(low_01, low_23);
        out[12 + c] = _mm512_shuffle_i32x4::<0b11_01_11_01>(high_01, high_23);
    }
    out
}
