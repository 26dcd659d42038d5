//! Matrix products of a linear layer `y = x w + bias`.
//!
//! Shapes: x `[rows, k]`, w `[k, n]` (as GPT-2's Conv1D stores it), y `[rows, n]`, all row-major.

use faer::{Accum, MatMut, MatRef, Par};
use multiversion::multiversion;
use rayon::prelude::*;

use super::rows_per_thread;

/// A row-major slice as a `[rows, cols]` matrix.
pub(super) fn mat(data: &[f32], rows: usize, cols: usize) -> MatRef<'_, f32> {
    MatRef::from_row_major_slice(data, rows, cols)
}

/// A row-major slice as a writable `[rows, cols]` matrix.
pub(super) fn mat_mut(data: &mut [f32], rows: usize, cols: usize) -> MatMut<'_, f32> {
    MatMut::from_row_major_slice_mut(data, rows, cols)
}

/// `out = alpha a b`, or `out += alpha a b`, on the calling thread.
pub(super) fn gemm(out: MatMut<'_, f32>, accum: Accum, a: MatRef<'_, f32>, b: MatRef<'_, f32>, alpha: f32) {
    faer::linalg::matmul::matmul(out, accum, a, b, alpha, Par::Seq);
}

/// `y = x w`: w `[k, n]`.
pub fn product(y: &mut [f32], x: &[f32], w: &[f32], n: usize) {
    by_rows(y, x, n, w.len() / n, |y, x, m, k| {
        gemm(mat_mut(y, m, n), Accum::Replace, mat(x, m, k), mat(w, k, n), 1.0)
    });
}

/// `y = x w^T`: w `[n, k]`.
pub fn product_transposed(y: &mut [f32], x: &[f32], w: &[f32], n: usize) {
    by_rows(y, x, n, w.len() / n, |y, x, m, k| {
        gemm(mat_mut(y, m, n), Accum::Replace, mat(x, m, k), mat(w, n, k).transpose(), 1.0);
    });
}

/// `y = x w + bias`.
pub fn forward(y: &mut [f32], x: &[f32], w: &[f32], bias: &[f32]) {
    let n = bias.len();
    by_rows(y, x, n, w.len() / n, |y, x, m, k| {
        gemm(mat_mut(y, m, n), Accum::Replace, mat(x, m, k), mat(w, k, n), 1.0);
        add_rows(y, bias);
    });
}

/// `y += x w + bias`: the projection back onto the residual stream.
pub fn forward_residual(y: &mut [f32], x: &[f32], w: &[f32], bias: &[f32]) {
    let n = bias.len();
    by_rows(y, x, n, w.len() / n, |y, x, m, k| {
        gemm(mat_mut(y, m, n), Accum::Add, mat(x, m, k), mat(w, k, n), 1.0);
        add_rows(y, bias);
    });
}

/// `dw += x^T dy`: x `[m, k]`, dy `[m, n]`, dw `[k, n]`.
pub fn add_weight_gradient(dw: &mut [f32], x: &[f32], dy: &[f32], n: usize) {
    // The threads split the rows of dw, and each sums over all m, so the order of the sums is fixed.
    let (k, m) = (dw.len() / n, dy.len() / n);
    let rows = rows_per_thread(k);
    dw.par_chunks_mut(rows * n).enumerate().for_each(|(i, dw)| {
        let part = mat(x, m, k).subcols(i * rows, dw.len() / n);
        gemm(mat_mut(dw, dw.len() / n, n), Accum::Add, part.transpose(), mat(dy, m, n), 1.0);
    });
}

/// `dw += x^T dy` and `dbias += column sums of dy`.
pub fn backward_weight(dw: &mut [f32], dbias: &mut [f32], x: &[f32], dy: &[f32]) {
    add_weight_gradient(dw, x, dy, dbias.len());
    add_column_sums(dbias, dy);
}

/// Calls `work(y, x, m, k)` on each thread's `m` rows of y `[rows, n]` and x `[rows, k]`.
fn by_rows(y: &mut [f32], x: &[f32], n: usize, k: usize, work: impl Fn(&mut [f32], &[f32], usize, usize) + Sync) {
    let rows = rows_per_thread(y.len() / n);
    (y.par_chunks_mut(rows * n), x.par_chunks(rows * k))
        .into_par_iter()
        .for_each(|(y, x)| work(y, x, y.len() / n, k));
}

/// `out[j] += sum over rows of x[i, j]`, row by row within a thread's columns.
fn add_column_sums(out: &mut [f32], x: &[f32]) {
    let n = out.len();
    let cols = n.div_ceil(rayon::current_num_threads()).next_multiple_of(16);
    out.par_chunks_mut(cols).enumerate().for_each(|(i, out)| add_column_sums_from(out, x, n, i * cols));
}

#[multiversion(targets = "simd")]
fn add_column_sums_from(out: &mut [f32], x: &[f32], n: usize, first: usize) {
    for row in x.chunks_exact(n) {
        for (o, &v) in out.iter_mut().zip(&row[first..]) {
            *o += v;
        }
    }
}

#[multiversion(targets = "simd")]
fn add_rows(y: &mut [f32], bias: &[f32]) {
    for row in y.chunks_exact_mut(bias.len()) {
        for (v, &b) in row.iter_mut().zip(bias) {
            *v += b;
        }
    }
}
