//! Sum of squares and count of non-finite elements, deterministically.
//!
//! The order of the sum depends on the length alone, and suits GPUs and CPUs. *Pairwise* addition
//! adds the upper half of the values to the lower half until one value is left.
//!
//! 1. The gradient is split into strips of [`STRIP_ELEMS`] from its start. Within a strip, lane `l`
//!    of 256 sums the squares of elements `l`, `l + 256`, ... in that order in fp64 (the square of
//!    an fp32 value is exact there). Each [`NEIGHBOURS`] neighbouring lanes are then added
//!    pairwise, and their 32 sums pairwise.
//! 2. The strips of a chunk of [`CHUNK_ELEMS`] are added pairwise; missing strips are 0.
//! 3. Lane `l` of [`TOP_LANES`] sums the results of chunks `l`, `l + TOP_LANES`, ... in that order;
//!    these lanes are then added pairwise.
//!
//! Non-finite elements are counted and add 0 to the sum.

use multiversion::multiversion;

use crate::{Float, GradStats};

/// Elements of a chunk: a CPU thread processes whole chunks, a GPU block one chunk.
pub(crate) const CHUNK_ELEMS: usize = 32_768;
/// Elements of a strip: the work of one warp.
pub(crate) const STRIP_ELEMS: usize = 4096;
/// Elements that a GPU thread reads at once.
const NEIGHBOURS: usize = 8;
/// Independent sums within a strip.
const LANES: usize = 32 * NEIGHBOURS;
/// The sign bit of an fp32 value. With it cleared, bit patterns order like magnitudes.
const SIGN: u32 = 1 << 31;
/// Independent sums over chunks.
pub(crate) const TOP_LANES: usize = 256;

/// Statistics of `grad`, on this thread.
pub fn grad_stats<G: Float>(grad: &[G]) -> GradStats {
    combine(grad.chunks(CHUNK_ELEMS).map(chunk))
}

/// Combines the statistics of all chunks.
pub(crate) fn combine(chunks: impl IntoIterator<Item = GradStats>) -> GradStats {
    let mut sums = [0f64; TOP_LANES];
    let mut nonfinite = 0;
    for (i, chunk) in chunks.into_iter().enumerate() {
        sums[i % TOP_LANES] += chunk.sum_sq;
        nonfinite += chunk.nonfinite;
    }
    GradStats {
        sum_sq: add_pairwise(sums),
        nonfinite,
    }
}

/// The pairwise sum of `N` values; `N` is a power of two.
fn add_pairwise<const N: usize>(mut sums: [f64; N]) -> f64 {
    let mut half = N / 2;
    while half > 0 {
        for lane in 0..half {
            sums[lane] += sums[lane + half];
        }
        half /= 2;
    }
    sums[0]
}

/// Statistics of one chunk.
pub(crate) fn chunk<G: Float>(grad: &[G]) -> GradStats {
    let mut sums = [0f64; CHUNK_ELEMS / STRIP_ELEMS];
    let mut nonfinite = 0;
    for (sum, strip_of) in sums.iter_mut().zip(grad.chunks(STRIP_ELEMS)) {
        let strip = strip(strip_of);
        *sum = strip.sum_sq;
        nonfinite += strip.nonfinite;
    }
    GradStats {
        sum_sq: add_pairwise(sums),
        nonfinite,
    }
}

/// Statistics of one strip.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2+lzcnt",
    "x86_64+avx2+fma+bmi1+bmi2+lzcnt"
))]
fn strip<G: Float>(grad: &[G]) -> GradStats {
    let mut sums = [0f64; LANES];
    let mut nonfinite = 0;
    let (tiles, tail) = grad.as_chunks::<LANES>();
    for tile in tiles {
        let largest = tile
            .iter()
            .fold(0, |max, g| max.max(g.to_f32().to_bits() & !SIGN));
        if largest < f32::INFINITY.to_bits() {
            for lane in 0..LANES {
                let g = f64::from(tile[lane].to_f32());
                sums[lane] += g * g;
            }
        } else {
            nonfinite += add_finite(&mut sums, tile);
        }
    }

    nonfinite += add_finite(&mut sums, tail);
    let (rows, _) = sums.as_chunks::<NEIGHBOURS>();
    let mut row_sums = [0f64; LANES / NEIGHBOURS];
    row_sums
        .iter_mut()
        .zip(rows)
        .for_each(|(sum, row)| *sum = add_pairwise(*row));

    GradStats {
        sum_sq: add_pairwise(row_sums),
        nonfinite,
    }
}

/// Adds the squares of the finite elements to their lanes, and counts the others.
fn add_finite<G: Float>(sums: &mut [f64; LANES], grad: &[G]) -> u64 {
    let mut nonfinite = 0;
    for (sum, g) in sums.iter_mut().zip(grad) {
        let g = g.to_f32();
        if g.is_finite() {
            *sum += f64::from(g) * f64::from(g);
        } else {
            nonfinite += 1;
        }
    }
    nonfinite
}
