//! Layer normalisation over the last axis, with gain and bias.
//!
//! Shapes: x, y `[rows, n]`; gain, bias `[n]`; the saved statistics `[rows, 2]` hold mean and
//! 1/std.

use multiversion::multiversion;
use rayon::prelude::*;

use super::{math, rows_per_thread};

/// `y = (x - mean) / sqrt(var + eps) * gain + bias`; `stats` is written for the backward pass.
pub fn forward(y: &mut [f32], stats: &mut [f32], x: &[f32], gain: &[f32], bias: &[f32], eps: f32) {
    let n = gain.len();
    let rows = rows_per_thread(x.len() / n);
    (
        y.par_chunks_mut(rows * n),
        stats.par_chunks_mut(rows * 2),
        x.par_chunks(rows * n),
    )
        .into_par_iter()
        .for_each(|(y, stats, x)| forward_rows(y, stats, x, gain, bias, eps));
}

/// Adds the gradients of x, gain and bias to `dx`, `dgain` and `dbias`.
pub fn backward(
    dx: &mut [f32],
    dgain: &mut [f32],
    dbias: &mut [f32],
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
        stats.par_chunks(rows * 2),
    )
        .into_par_iter()
        .map(|(dx, dy, x, stats)| {
            let mut part = vec![0.0; 2 * n];
            backward_rows(dx, &mut part, dy, x, stats, gain);
            part
        })
        .collect();

    for part in parts {
        for (sum, v) in dgain.iter_mut().chain(dbias.iter_mut()).zip(part) {
            *sum += v;
        }
    }
}

#[multiversion(targets = "simd")]
fn forward_rows(y: &mut [f32], stats: &mut [f32], x: &[f32], gain: &[f32], bias: &[f32], eps: f32) {
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
fn backward_rows(
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
