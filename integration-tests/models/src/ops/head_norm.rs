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
                let stats: [_; 2] = stats.split_at_mut(heads.queries).into();
                let parts = heads.split().into_iter().zip(gains.chunks_exact(heads.d));
                for ((part, gain), stats) in parts.zip(stats) {
                    rms_rows(&mut normed[part.clone()], stats, &raw[part], gain, eps);
                }
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
            let mut dgains = vec![0.0; 2 * heads.d];
            let mut dy = vec![0.0; heads.turned_elems()];
            let rows = dqkv
                .chunks_exact_mut(heads.width())
                .zip(raw.chunks_exact(heads.turned_elems()))
                .zip(stats.chunks_exact(heads.turned()));
            for ((dqkv, raw), stats) in rows {
                let dx = &mut dqkv[..heads.turned_elems()];
                dy.copy_from_slice(dx);
                dx.fill(0.0);
                let stats: [_; 2] = stats.split_at(heads.queries).into();
                let gains = gains.chunks_exact(heads.d);
                let gains = gains.zip(dgains.chunks_exact_mut(heads.d));
                for ((of, stats), (gain, dgain)) in heads.split().into_iter().zip(stats).zip(gains)
                {
                    let dx = &mut dx[of.clone()];
                    rms_rows_back(dx, dgain, &dy[of.clone()], &raw[of], stats, gain);
                }
            }
            dgains
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
