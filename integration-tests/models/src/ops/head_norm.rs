//! RMS norm of each head of queries and keys.

use std::ops::Range;

use rayon::prelude::*;

use super::norm::{rms_rows, rms_rows_back};
use super::{Heads, rows_per_thread};

/// The norm of each head of queries and keys: the first `heads` of qkv `[rows, width]` in place,
/// with gains `[2, d]` of queries and of keys. Keeps them in `raw` `[rows, heads, d]` and `stats`
/// `[rows, heads]` for the backward pass.
pub fn forward(
    qkv: &mut [f32],
    raw: &mut [f32],
    stats: &mut [f32],
    gains: &[f32],
    heads: Heads,
    eps: f32,
) {
    let rows = rows_per_thread(qkv.len() / heads.width());
    (
        qkv.par_chunks_mut(rows * heads.width()),
        raw.par_chunks_mut(rows * heads.turned_elems()),
        stats.par_chunks_mut(rows * heads.turned()),
    )
        .into_par_iter()
        .for_each(|(qkv, raw, stats)| {
            let rows = qkv
                .chunks_exact_mut(heads.width())
                .zip(raw.chunks_exact_mut(heads.turned_elems()))
                .zip(stats.chunks_exact_mut(heads.turned()));
            for ((qkv, raw), stats) in rows {
                let normed = &mut qkv[..heads.turned_elems()];
                raw.copy_from_slice(normed);
                let [of_queries, of_keys] = heads.split();
                let [stats_q, stats_k] = stats.split_at_mut(heads.queries).into();
                let (q_gain, k_gain) = gains.split_at(heads.d);
                rms_rows(
                    &mut normed[of_queries.clone()],
                    stats_q,
                    &raw[of_queries],
                    q_gain,
                    eps,
                );
                rms_rows(
                    &mut normed[of_keys.clone()],
                    stats_k,
                    &raw[of_keys],
                    k_gain,
                    eps,
                );
            }
        });
}

/// The backward of [`forward`]: turns the gradient in `dqkv` into that of the input, and adds
/// to `dgains`.
pub fn backward(
    dqkv: &mut [f32],
    dgains: &mut [f32],
    raw: &[f32],
    stats: &[f32],
    gains: &[f32],
    heads: Heads,
) {
    let rows = rows_per_thread(dqkv.len() / heads.width());
    let parts: Vec<Vec<f32>> = (
        dqkv.par_chunks_mut(rows * heads.width()),
        raw.par_chunks(rows * heads.turned_elems()),
        stats.par_chunks(rows * heads.turned()),
    )
        .into_par_iter()
        .map(|(dqkv, raw, stats)| {
            let mut part = vec![0.0; 2 * heads.d];
            let mut dy = vec![0.0; heads.turned_elems()];
            let rows = dqkv
                .chunks_exact_mut(heads.width())
                .zip(raw.chunks_exact(heads.turned_elems()))
                .zip(stats.chunks_exact(heads.turned()));
            for ((dqkv, raw), stats) in rows {
                let dx = &mut dqkv[..heads.turned_elems()];
                dy.copy_from_slice(dx);
                dx.fill(0.0);
                let [q, k] = heads.split();
                let (stats_q, stats_k) = stats.split_at(heads.queries);
                let (q_gain, k_gain) = gains.split_at(heads.d);
                let (dq_gain, dk_gain) = part.split_at_mut(heads.d);
                rms_rows_back(
                    &mut dx[q.clone()],
                    dq_gain,
                    &dy[q.clone()],
                    &raw[q],
                    stats_q,
                    q_gain,
                );
                rms_rows_back(
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

impl Heads {
    /// Elements of queries and keys.
    fn turned_elems(&self) -> usize {
        self.turned() * self.d
    }

    /// The elements of queries and of keys.
    fn split(&self) -> [Range<usize>; 2] {
        let end = self.queries * self.d;
        [0..end, end..self.turned_elems()]
    }
}

fn add(sums: &mut [f32], parts: &[Vec<f32>]) {
    for part in parts {
        for (sum, v) in sums.iter_mut().zip(part) {
            *sum += v;
        }
    }
}
