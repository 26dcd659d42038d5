//! Division by the root of the mean square over the last axis, with gain (arXiv 1910.07467).
//!
//! Shapes: x, y `[rows, n]`; gain `[n]`; the saved statistics `[rows]` hold 1 / rms.

use multiversion::multiversion;
use rayon::prelude::*;

use super::{math, rows_per_thread};

/// `y = x / sqrt(mean(x^2) + eps) * gain`; `stats` is written for the backward pass.
pub fn forward(y: &mut [f32], stats: &mut [f32], x: &[f32], gain: &[f32], eps: f32) {
    let n = gain.len();
    let rows = rows_per_thread(x.len() / n);
    (
        y.par_chunks_mut(rows * n),
        stats.par_chunks_mut(rows),
        x.par_chunks(rows * n),
    )
        .into_par_iter()
        .for_each(|(y, stats, x)| forward_rows(y, stats, x, gain, eps));
}

/// Adds the gradients of x and gain to `dx` and `dgain`.
pub fn backward(
    dx: &mut [f32],
    dgain: &mut [f32],
    dy: &[f32],
    x: &[f32],
    stats: &[f32],
    gain: &[f32],
) {
    let n = gain.len();
    let rows = rows_per_thread(x.len() / n);
    // Each thread sums its rows; the parts are added in the order of the rows.
    let parts: Vec<Vec<f32>> = (
        dx.par_chunks_mut(rows * n),
        dy.par_chunks(rows * n),
        x.par_chunks(rows * n),
        stats.par_chunks(rows),
    )
        .into_par_iter()
        .map(|(dx, dy, x, stats)| {
            let mut part = vec![0.0; n];
            backward_rows(dx, &mut part, dy, x, stats, gain);
            part
        })
        .collect();

    add(dgain, &parts);
}

/// The norm of each head of queries and keys: the first `heads` of qkv `[rows, width]` in place,
/// with gains `[2, d]` of queries and of keys. Keeps them in `raw` `[rows, heads, d]` and `stats`
/// `[rows, heads]` for the backward pass.
pub fn forward_heads(
    qkv: &mut [f32],
    raw: &mut [f32],
    stats: &mut [f32],
    gains: &[f32],
    heads: Heads,
    eps: f32,
) {
    let rows = rows_per_thread(qkv.len() / heads.width);
    (
        qkv.par_chunks_mut(rows * heads.width),
        raw.par_chunks_mut(rows * heads.len()),
        stats.par_chunks_mut(rows * heads.count()),
    )
        .into_par_iter()
        .for_each(|(qkv, raw, stats)| {
            let rows = qkv
                .chunks_exact_mut(heads.width)
                .zip(raw.chunks_exact_mut(heads.len()))
                .zip(stats.chunks_exact_mut(heads.count()));
            for ((qkv, raw), stats) in rows {
                let normed = &mut qkv[..heads.len()];
                raw.copy_from_slice(normed);
                let [of_queries, of_keys] = heads.split(raw.len());
                let [stats_q, stats_k] = stats.split_at_mut(heads.queries).into();
                let (q_gain, k_gain) = gains.split_at(heads.d);
                forward_rows(
                    &mut normed[of_queries.clone()],
                    stats_q,
                    &raw[of_queries],
                    q_gain,
                    eps,
                );
                forward_rows(
                    &mut normed[of_keys.clone()],
                    stats_k,
                    &raw[of_keys],
                    k_gain,
                    eps,
                );
            }
        });
}

/// The backward of [`forward_heads`]: turns the gradient in `dqkv` into that of the input, and adds
/// to `dgains`.
pub fn backward_heads(
    dqkv: &mut [f32],
    dgains: &mut [f32],
    raw: &[f32],
    stats: &[f32],
    gains: &[f32],
    heads: Heads,
) {
    let rows = rows_per_thread(dqkv.len() / heads.width);
    let parts: Vec<Vec<f32>> = (
        dqkv.par_chunks_mut(rows * heads.width),
        raw.par_chunks(rows * heads.len()),
        stats.par_chunks(rows * heads.count()),
    )
        .into_par_iter()
        .map(|(dqkv, raw, stats)| {
            let mut part = vec![0.0; 2 * heads.d];
            let mut dy = vec![0.0; heads.len()];
            let rows = dqkv
                .chunks_exact_mut(heads.width)
                .zip(raw.chunks_exact(heads.len()))
                .zip(stats.chunks_exact(heads.count()));
            for ((dqkv, raw), stats) in rows {
                let dx = &mut dqkv[..heads.len()];
                dy.copy_from_slice(dx);
                dx.fill(0.0);
                let [q, k] = heads.split(raw.len());
                let (stats_q, stats_k) = stats.split_at(heads.queries);
                let (q_gain, k_gain) = gains.split_at(heads.d);
                let (dq_gain, dk_gain) = part.split_at_mut(heads.d);
                backward_rows(
                    &mut dx[q.clone()],
                    dq_gain,
                    &dy[q.clone()],
                    &raw[q],
                    stats_q,
                    q_gain,
                );
                backward_rows(
                    &mut dx[k.clone()],
                    dk_gain,
                    &dy[k.clone()],
                    &raw[k],
                    stats_k,
                    k_gain,
                );
            }
            part
        })
        .collect();

    add(dgains, &parts);
}

/// The heads of a token that have a norm.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Heads of queries.
    pub queries: usize,
    /// Heads of keys.
    pub keys: usize,
    /// Elements of a head.
    pub d: usize,
    /// Elements of a token's queries, keys and values.
    pub width: usize,
}

impl Heads {
    fn count(self) -> usize {
        self.queries + self.keys
    }

    fn len(self) -> usize {
        self.count() * self.d
    }

    /// The elements of queries and of keys.
    fn split(self, len: usize) -> [std::ops::Range<usize>; 2] {
        let end = self.queries * self.d;
        [0..end, end..len]
    }
}

fn add(sums: &mut [f32], parts: &[Vec<f32>]) {
    for part in parts {
        for (sum, v) in sums.iter_mut().zip(part) {
            *sum += v;
        }
    }
}

#[multiversion(targets = "simd")]
fn forward_rows(y: &mut [f32], stats: &mut [f32], x: &[f32], gain: &[f32], eps: f32) {
    let n = gain.len();
    for ((y, stat), x) in y.chunks_exact_mut(n).zip(stats).zip(x.chunks_exact(n)) {
        let mean = math::sum_of([x], |[x]| x * x) / n as f32;
        *stat = 1.0 / (mean + eps).sqrt();
        for i in 0..n {
            y[i] = x[i] * *stat * gain[i];
        }
    }
}

/// With h = x / rms and g = dy gain: dx = (g - h mean(g h)) / rms.
#[multiversion(targets = "simd")]
fn backward_rows(
    dx: &mut [f32],
    dgain: &mut [f32],
    dy: &[f32],
    x: &[f32],
    stats: &[f32],
    gain: &[f32],
) {
    let n = gain.len();
    let dgain = &mut dgain[..n];
    let rows = dx
        .chunks_exact_mut(n)
        .zip(dy.chunks_exact(n))
        .zip(x.chunks_exact(n))
        .zip(stats);

    for (((dx, dy), x), &stat) in rows {
        let mean = math::sum_of([dy, gain, x], |[dy, gain, x]| dy * gain * (x * stat)) / n as f32;
        for i in 0..n {
            let h = x[i] * stat;
            dx[i] += stat * (dy[i] * gain[i] - h * mean);
            dgain[i] += dy[i] * h;
        }
    }
}
