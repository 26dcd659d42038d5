//! Normalisation over the last axis: layer norm, with gain and bias, and RMS norm (arXiv
//! 1910.07467), with a gain.
//!
//! Shapes: x, y `[rows, n]`; gain, bias `[n]`. The saved statistics are mean and 1/std of each row of
//! layer norm `[rows, 2]`, and 1/rms of RMS norm `[rows]`.

use multiversion::multiversion;
use rayon::prelude::*;

use super::{math, rows_per_thread};

/// The kinds of norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// `(x - mean) / sqrt(var + eps) * gain + bias`.
    Layer,
    /// `x / sqrt(mean(x^2) + eps) * gain`.
    Rms,
}

impl NormKind {
    /// Parameters of n elements each: a gain and maybe a bias.
    pub fn params(self) -> usize {
        match self {
            Self::Layer => 2,
            Self::Rms => 1,
        }
    }

    /// Statistics of a row.
    pub fn stats(self) -> usize {
        match self {
            Self::Layer => 2,
            Self::Rms => 1,
        }
    }
}

/// A norm with its parameters.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// What is computed.
    pub kind: NormKind,
    /// The factors.
    pub gain: &'a [f32],
    /// Added to the product; empty for RMS norm.
    pub bias: &'a [f32],
    /// Added to the variance or to the mean square.
    pub eps: f32,
}

impl Norm<'_> {
    /// `y` is the norm of x; `stats` is written for the backward pass.
    pub fn forward(&self, y: &mut [f32], stats: &mut [f32], x: &[f32]) {
        let n = self.gain.len();
        let rows = rows_per_thread(x.len() / n);
        (
            y.par_chunks_mut(rows * n),
            stats.par_chunks_mut(rows * self.kind.stats()),
            x.par_chunks(rows * n),
        )
            .into_par_iter()
            .for_each(|(y, stats, x)| match self.kind {
                NormKind::Layer => layer_rows(y, stats, x, self.gain, self.bias, self.eps),
                NormKind::Rms => rms_rows(y, stats, x, self.gain, self.eps),
            });
    }

    /// Adds the gradient of x to `dx`, and those of gain and bias to `dparams`, the bias's behind the
    /// gain's.
    pub fn backward(
        &self,
        dx: &mut [f32],
        dparams: [&mut [f32]; 2],
        dy: &[f32],
        x: &[f32],
        stats: &[f32],
    ) {
        let n = self.gain.len();
        let rows = rows_per_thread(x.len() / n);
        // Each thread sums its rows; the parts are added in the order of the rows.
        let parts: Vec<Vec<f32>> = (
            dx.par_chunks_mut(rows * n),
            dy.par_chunks(rows * n),
            x.par_chunks(rows * n),
            stats.par_chunks(rows * self.kind.stats()),
        )
            .into_par_iter()
            .map(|(dx, dy, x, stats)| {
                let mut part = vec![0.0; self.kind.params() * n];
                match self.kind {
                    NormKind::Layer => layer_rows_back(dx, &mut part, dy, x, stats, self.gain),
                    NormKind::Rms => rms_rows_back(dx, &mut part, dy, x, stats, self.gain),
                }
                part
            })
            .collect();

        let [dgain, dbias] = dparams;
        for part in parts {
            for (sum, v) in dgain.iter_mut().chain(dbias.iter_mut()).zip(part) {
                *sum += v;
            }
        }
    }
}

#[multiversion(targets = "simd")]
fn layer_rows(y: &mut [f32], stats: &mut [f32], x: &[f32], gain: &[f32], bias: &[f32], eps: f32) {
    let n = gain.len();
    let bias = &bias[..n];
    for ((y, stats), x) in y
        .chunks_exact_mut(n)
        .zip(stats.chunks_exact_mut(2))
        .zip(x.chunks_exact(n))
    {
        let mean = math::sum_of([x], |[x]| x) / n as f32;
        let var = math::sum_of([x], |[x]| (x - mean) * (x - mean)) / n as f32;
        let rstd = 1.0 / (var + eps).sqrt();
        stats.copy_from_slice(&[mean, rstd]);
        for i in 0..n {
            y[i] = ((x[i] - mean) * rstd).mul_add(gain[i], bias[i]);
        }
    }
}

/// With h = (x - mean) rstd and g = dy gain: dx = rstd (g - mean(g) - h mean(g h)).
#[multiversion(targets = "simd")]
fn layer_rows_back(
    dx: &mut [f32],
    part: &mut [f32],
    dy: &[f32],
    x: &[f32],
    stats: &[f32],
    gain: &[f32],
) {
    let n = gain.len();
    let (dgain, dbias) = part.split_at_mut(n);
    let dbias = &mut dbias[..n];
    let rows = dx
        .chunks_exact_mut(n)
        .zip(dy.chunks_exact(n))
        .zip(x.chunks_exact(n))
        .zip(stats.chunks_exact(2));

    for (((dx, dy), x), stats) in rows {
        let mean = stats[0];
        let rstd = stats[1];
        let mean_g = math::sum_of([dy, gain], |[dy, gain]| dy * gain) / n as f32;
        let mean_gh = math::sum_of([dy, gain, x], |[dy, gain, x]| {
            dy * gain * ((x - mean) * rstd)
        }) / n as f32;
        for i in 0..n {
            let h = (x[i] - mean) * rstd;
            dx[i] += rstd * (dy[i] * gain[i] - mean_g - h * mean_gh);
            dgain[i] += dy[i] * h;
            dbias[i] += dy[i];
        }
    }
}

/// RMS norm of the rows of x on the calling thread.
#[multiversion(targets = "simd")]
pub(super) fn rms_rows(y: &mut [f32], stats: &mut [f32], x: &[f32], gain: &[f32], eps: f32) {
    let n = gain.len();
    for ((y, stat), x) in y.chunks_exact_mut(n).zip(stats).zip(x.chunks_exact(n)) {
        let mean = math::sum_of([x], |[x]| x * x) / n as f32;
        *stat = 1.0 / (mean + eps).sqrt();
        for i in 0..n {
            y[i] = x[i] * *stat * gain[i];
        }
    }
}

/// The backward of [`rms_rows`]. With h = x / rms and g = dy gain: dx = (g - h mean(g h)) / rms.
#[multiversion(targets = "simd")]
pub(super) fn rms_rows_back(
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
