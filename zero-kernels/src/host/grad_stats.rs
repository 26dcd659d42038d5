//! Sum of squares and count of non-finite elements, deterministically.
//!
//! The order of the sum depends on the length alone, and suits a GPU as well as a CPU:
//!
//! 1. The gradient is cut into chunks of [`CHUNK_ELEMS`] from its start. Within a chunk, lane `l` of [`LANES`]
//!    sums the squares of elements `l`, `l + LANES`, ... in that order in fp64 (the square of an fp32 value is
//!    exact there); the lanes are then added pairwise, upper half to lower half.
//! 2. Lane `l` of [`TOP_LANES`] sums the results of chunks `l`, `l + TOP_LANES`, ... in that order; these lanes are
//!    then added pairwise in the same way.
//!
//! A non-finite element counts and adds 0.

use multiversion::multiversion;

use crate::{Float, GradStats};

/// Elements of a chunk: the grain of threads.
pub(crate) const CHUNK_ELEMS: usize = 4096;
/// Independent sums within a chunk.
pub(crate) const LANES: usize = 16;
/// Independent sums over chunks.
pub(crate) const TOP_LANES: usize = 256;

/// Statistics of `grad`, on this thread.
pub fn grad_stats<G: Float>(grad: &[G]) -> GradStats {
    combine(grad.chunks(CHUNK_ELEMS).map(chunk))
}

/// Puts the statistics of all chunks together.
pub(crate) fn combine(chunks: impl IntoIterator<Item = GradStats>) -> GradStats {
    let (mut sums, mut nonfinite) = ([0f64; TOP_LANES], 0);
    for (i, chunk) in chunks.into_iter().enumerate() {
        sums[i % TOP_LANES] += chunk.sum_sq;
        nonfinite += chunk.nonfinite;
    }
    GradStats { sum_sq: add_pairwise(&mut sums), nonfinite }
}

/// The sum of a power of two of values, upper half to lower half.
fn add_pairwise(sums: &mut [f64]) -> f64 {
    let mut half = sums.len() / 2;
    while half > 0 {
        for lane in 0..half {
            sums[lane] += sums[lane + half];
        }
        half /= 2;
    }
    sums[0]
}

/// Statistics of one chunk.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2+lzcnt",
    "x86_64+avx2+fma+bmi1+bmi2+lzcnt"
))]
pub(crate) fn chunk<G: Float>(grad: &[G]) -> GradStats {
    let (mut sums, mut bad) = ([0f64; LANES], [0u32; LANES]);
    let (blocks, tail) = grad.as_chunks::<LANES>();
    for block in blocks {
        for lane in 0..LANES {
            let (square, is_bad) = element(block[lane]);
            sums[lane] += square;
            bad[lane] += is_bad;
        }
    }
    for (lane, &g) in tail.iter().enumerate() {
        let (square, is_bad) = element(g);
        sums[lane] += square;
        bad[lane] += is_bad;
    }
    GradStats { sum_sq: add_pairwise(&mut sums), nonfinite: bad.iter().map(|&b| u64::from(b)).sum() }
}

#[inline(always)]
fn element<G: Float>(g: G) -> (f64, u32) {
    let g = g.to_f32();
    let finite = g.is_finite();
    let g = f64::from(if finite { g } else { 0.0 });
    (g * g, u32::from(!finite))
}
