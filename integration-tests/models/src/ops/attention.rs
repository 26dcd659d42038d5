//! Causal self-attention of several heads, without a T x T matrix in memory.
//!
//! Shapes: qkv `[batch, seq, 3, heads, d]`, out `[batch, seq, heads, d]`, log-sum-exp
//! `[batch, heads, seq]`. Queries are processed in blocks of 64 rows, against all keys up to the
//! diagonal; the backward pass recomputes the probabilities of a block from the log-sum-exp
//! (FlashAttention's idea, arXiv 2205.14135, with whole rows in place of its running softmax).

use faer::prelude::ReborrowMut;
use faer::{Accum, MatMut, MatRef};
use multiversion::multiversion;
use rayon::prelude::*;

use super::linear::{gemm, mat, mat_mut};
use super::transpose::transpose;
use super::{math, with_scratch};

const BLOCK: usize = 64;

/// The sizes of attention's operands.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Sequences.
    pub batch: usize,
    /// Tokens a sequence.
    pub seq: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a head.
    pub d: usize,
}

impl Shape {
    fn scale(self) -> f32 {
        1.0 / (self.d as f32).sqrt()
    }

    /// Query, key and value `[seq, d]` of one head.
    fn qkv(self, qkv: &[f32], b: usize, h: usize) -> [MatRef<'_, f32>; 3] {
        let c = self.heads * self.d;
        let all = mat(qkv, self.batch * self.seq, 3 * c).subrows(b * self.seq, self.seq);
        [0, 1, 2].map(|i| all.subcols(i * c + h * self.d, self.d))
    }

    /// Writes the query, key or value (`part` 0, 1, 2) of a head to `out` `[d, seq]`; task is
    /// `b * heads + h`. faer packs it for every block of rows: fast only along its columns.
    fn transposed(self, out: &mut [f32], qkv: &[f32], task: usize, part: usize) {
        let c = self.heads * self.d;
        let first = task / self.heads * self.seq * 3 * c + part * c + task % self.heads * self.d;
        transpose(out, &qkv[first..], 3 * c, self.seq);
    }

    /// Splits `[batch * seq, parts * heads * d]` into `[seq, d]` tiles. The tile of batch b, part
    /// i, head h has index `(b * parts + i) * heads + h`.
    fn tiles(self, data: &mut [f32], parts: usize) -> Vec<MatMut<'_, f32>> {
        let mut tiles = Vec::with_capacity(self.batch * parts * self.heads);
        let mut rest = mat_mut(data, self.batch * self.seq, parts * self.heads * self.d);
        for _ in 0..self.batch {
            let (mut rows, below) = rest.split_at_row_mut(self.seq);
            rest = below;
            for _ in 0..parts * self.heads {
                let (tile, right) = rows.split_at_col_mut(self.d);
                rows = right;
                tiles.push(tile);
            }
        }
        tiles
    }
}

/// `out = softmax(q k^T / sqrt(d), causal) v`; `lse` is written for the backward pass.
pub fn forward(out: &mut [f32], lse: &mut [f32], qkv: &[f32], shape: Shape) {
    let Shape { seq, heads, d, .. } = shape;
    let tiles = shape.tiles(out, 1);
    (tiles, lse.par_chunks_mut(seq))
        .into_par_iter()
        .enumerate()
        .for_each(|(task, (mut out, lse))| {
            let [q, _, v] = shape.qkv(qkv, task / heads, task % heads);
            with_scratch(seq * (d + BLOCK), |scratch| {
                let (k, probs) = scratch.split_at_mut(seq * d);
                shape.transposed(k, qkv, task, 1);
                let k = mat(k, d, seq);
                for start in (0..seq).step_by(BLOCK) {
                    let rows = BLOCK.min(seq - start);
                    let cols = start + rows;
                    let probs = &mut probs[..rows * cols];
                    gemm(
                        mat_mut(probs, rows, cols),
                        Accum::Replace,
                        q.subrows(start, rows),
                        k.subcols(0, cols),
                        shape.scale(),
                    );
                    softmax_rows(probs, &mut lse[start..cols], start);
                    let out = out.rb_mut().subrows_mut(start, rows);
                    gemm(
                        out,
                        Accum::Replace,
                        mat(probs, rows, cols),
                        v.subrows(0, cols),
                        1.0,
                    );
                }
            });
        });
}

/// Writes the gradient of qkv to `dqkv`.
pub fn backward(
    dqkv: &mut [f32],
    dout: &[f32],
    qkv: &[f32],
    out: &[f32],
    lse: &[f32],
    shape: Shape,
) {
    let Shape {
        batch,
        seq,
        heads,
        d,
    } = shape;

    let mut tiles: Vec<Option<MatMut<'_, f32>>> =
        shape.tiles(dqkv, 3).into_iter().map(Some).collect();
    let mut tasks = Vec::with_capacity(batch * heads);
    for task in 0..batch * heads {
        let b = task / heads;
        let h = task % heads;
        let mut take = |part: usize| tiles[(b * 3 + part) * heads + h].take();
        if let (Some(dq), Some(dk), Some(dv)) = (take(0), take(1), take(2)) {
            tasks.push((task, dq, dk, dv));
        }
    }

    tasks
        .into_par_iter()
        .for_each(|(task, mut dq, mut dk, mut dv)| {
            let b = task / heads;
            let h = task % heads;
            let [q, k, _] = shape.qkv(qkv, b, h);
            let all_dout = dout;
            let dout = mat(dout, batch * seq, heads * d)
                .subrows(b * seq, seq)
                .subcols(h * d, d);
            let lse = &lse[task * seq..][..seq];
            dk.fill(0.0);
            dv.fill(0.0);
            with_scratch(seq * (2 * d + 3 * BLOCK), |scratch| {
                let (kt, scratch) = scratch.split_at_mut(seq * d);
                let (vt, scratch) = scratch.split_at_mut(seq * d);
                let (probs, scratch) = scratch.split_at_mut(seq * BLOCK);
                let (dprobs, turned) = scratch.split_at_mut(seq * BLOCK);
                shape.transposed(kt, qkv, task, 1);
                shape.transposed(vt, qkv, task, 2);
                let kt = mat(kt, d, seq);
                let vt = mat(vt, d, seq);
                for start in (0..seq).step_by(BLOCK) {
                    let rows = BLOCK.min(seq - start);
                    let cols = start + rows;
                    let [probs, dprobs, turned] =
                        [&mut *probs, &mut *dprobs, &mut *turned].map(|x| &mut x[..rows * cols]);
                    let [q, dout] = [q, dout].map(|x| x.subrows(start, rows));
                    gemm(
                        mat_mut(probs, rows, cols),
                        Accum::Replace,
                        q,
                        kt.subcols(0, cols),
                        shape.scale(),
                    );
                    gemm(
                        mat_mut(dprobs, rows, cols),
                        Accum::Replace,
                        dout,
                        vt.subcols(0, cols),
                        1.0,
                    );
                    let first = ((b * seq + start) * heads + h) * d;
                    let outputs = [&out[first..], &all_dout[first..]];
                    softmax_backward_rows(probs, dprobs, &lse[start..cols], outputs, shape, start);
                    let dq = dq.rb_mut().subrows_mut(start, rows);
                    gemm(
                        dq,
                        Accum::Replace,
                        mat(dprobs, rows, cols),
                        k.subrows(0, cols),
                        shape.scale(),
                    );
                    transpose(turned, dprobs, cols, rows);
                    gemm(
                        dk.rb_mut().subrows_mut(0, cols),
                        Accum::Add,
                        mat(turned, cols, rows),
                        q,
                        shape.scale(),
                    );
                    transpose(turned, probs, cols, rows);
                    gemm(
                        dv.rb_mut().subrows_mut(0, cols),
                        Accum::Add,
                        mat(turned, cols, rows),
                        dout,
                        1.0,
                    );
                }
            });
        });
}

/// Converts scores to probabilities, row by row. Row i attends to columns 0..=start + i; the others
/// become 0.
#[multiversion(targets = "simd")]
fn softmax_rows(scores: &mut [f32], lse: &mut [f32], start: usize) {
    let cols = scores.len() / lse.len();
    for (i, (row, lse)) in scores.chunks_exact_mut(cols).zip(lse).enumerate() {
        let (seen, hidden) = row.split_at_mut(start + i + 1);
        let max = math::max(seen);
        let sum = math::exp_and_sum(seen, max);
        let factor = 1.0 / sum;
        for x in seen.iter_mut() {
            *x *= factor;
        }
        hidden.fill(0.0);
        *lse = max + sum.ln();
    }
}

/// Converts scores to probabilities with their log-sum-exp, and `dp` to the gradient of the scaled
/// scores: ds = p (dp - delta), delta the product of a row of the output and of its gradient;
/// `outputs`, the whole tensors from the first row's element on.
#[multiversion(targets = "simd")]
fn softmax_backward_rows(
    p: &mut [f32],
    dp: &mut [f32],
    lse: &[f32],
    outputs: [&[f32]; 2],
    shape: Shape,
    start: usize,
) {
    let cols = p.len() / lse.len();
    let rows = p
        .chunks_exact_mut(cols)
        .zip(dp.chunks_exact_mut(cols))
        .zip(lse);
    for (i, ((p, dp), &lse)) in rows.enumerate() {
        let [out, dout] = outputs.map(|x| &x[i * shape.heads * shape.d..][..shape.d]);
        let delta = math::sum_of([out, dout], |[out, dout]| out * dout);
        let seen = start + i + 1;
        for (p, dp) in p[..seen].iter_mut().zip(&mut dp[..seen]) {
            *p = math::exp(*p - lse);
            *dp = *p * (*dp - delta);
        }
        p[seen..].fill(0.0);
        dp[seen..].fill(0.0);
    }
}
