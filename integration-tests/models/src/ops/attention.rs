//! Causal self-attention of several heads, without a T x T matrix in memory.
//!
//! Shapes: qkv `[batch, seq, heads + 2 kv_heads, d]`, queries first and values last, out
//! `[batch, seq, heads, d]`, log-sum-exp `[batch, heads, seq]`. Consecutive queries share a key and a
//! value (grouped queries, arXiv 2305.13245). Queries are processed in blocks of 64 rows, against all
//! keys from the first that the first row sees up to the diagonal; the backward pass recomputes the probabilities of a block from the log-sum-exp
//! (FlashAttention's idea, arXiv 2205.14135, with whole rows in place of its running softmax).

use std::ops::Range;

use faer::prelude::ReborrowMut;
use faer::{Accum, MatMut, MatRef};
use multiversion::multiversion;
use rayon::prelude::*;

use super::bf16::{Bf16Products, Elems, Operand};
use super::dropout::{self, Dropout};
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
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys, and of values; divides `heads`.
    pub kv_heads: usize,
    /// Elements of a head.
    pub d: usize,
    /// Keys that a query sees, itself included.
    pub window: usize,
    /// The factor of the scores.
    pub scale: f32,
    /// Computes products of operands rounded to bf16; `None` for products in fp32.
    pub products: Option<Bf16Products>,
}

/// What a batch changes of attention.
#[derive(Clone, Copy, Debug, Default)]
pub struct Masks<'a> {
    /// The first key that each query sees `[batch, seq]`, which does not fall within a sequence;
    /// empty if all are 0.
    pub starts: &'a [u32],
    /// Dropout of the probabilities: a line is a query of a head, `head * seq + query`.
    pub dropout: Option<Dropout<'a>>,
}

/// The usual factor of the scores, of heads of `d` elements.
pub fn scale_of(d: usize) -> f32 {
    1.0 / (d as f32).sqrt()
}

impl Shape {
    /// Elements of a token's queries, keys and values.
    fn row(self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.d
    }

    /// Queries that share a key.
    fn group(self) -> usize {
        self.heads / self.kv_heads
    }

    /// The heads of the query, key and value of task `b * heads + h`, among those of a token.
    fn heads_of(self, task: usize) -> [usize; 3] {
        let h = task % self.heads;
        let kv = h / self.group();
        [h, self.heads + kv, self.heads + self.kv_heads + kv]
    }

    /// Query, key and value `[seq, d]` of task `b * heads + h`.
    fn qkv(self, qkv: &[f32], task: usize) -> [Rows<'_>; 3] {
        let first = task / self.heads * self.seq * self.row();
        self.heads_of(task)
            .map(|head| self.rows(&qkv[first + head * self.d..], self.row()))
    }

    /// The rows `[seq, d]` of a head from the first element of `data` on.
    fn rows(self, data: &[f32], stride: usize) -> Rows<'_> {
        Rows {
            data,
            rows: self.seq,
            cols: self.d,
            stride,
        }
    }

    /// The keys that the rows `rows` see; `starts` of the sequence.
    fn keys(self, rows: Range<usize>, starts: &[u32]) -> Range<usize> {
        let in_window = (rows.start + 1).saturating_sub(self.window);
        let in_document = starts.get(rows.start).map_or(0, |&start| start as usize);
        in_window.max(in_document)..rows.end
    }

    /// The part of `starts` that task `b * heads + h` reads; empty if `starts` is.
    fn starts_of(self, starts: &[u32], task: usize) -> &[u32] {
        let first = task / self.heads * self.seq;
        starts.get(first..first + self.seq).unwrap_or_default()
    }

    /// Writes the factors of a query's probabilities, from the key `first` on.
    fn draw(self, factors: &mut [f32], dropout: Dropout<'_>, [task, query, first]: [usize; 3]) {
        let line = task % self.heads * self.seq + query;
        dropout.factors(factors, task / self.heads, line, first);
    }

    /// The rows of each block.
    fn blocks(self) -> impl Iterator<Item = Range<usize>> {
        let seq = self.seq;
        (0..seq)
            .step_by(BLOCK)
            .map(move |start| start..seq.min(start + BLOCK))
    }

    /// Splits `[batch * seq, heads * d]` into `[seq, d]` tiles. The tile of batch b, head h has
    /// index `b * heads + h`.
    fn tiles(self, data: &mut [f32], heads: usize) -> Vec<MatMut<'_, f32>> {
        let mut tiles = Vec::with_capacity(self.batch * heads);
        let mut rest = mat_mut(data, self.batch * self.seq, heads * self.d);
        for _ in 0..self.batch {
            let (mut rows, below) = rest.split_at_row_mut(self.seq);
            rest = below;
            for _ in 0..heads {
                let (tile, right) = rows.split_at_col_mut(self.d);
                rows = right;
                tiles.push(tile);
            }
        }
        tiles
    }
}

/// Rows of a matrix in memory.
#[derive(Clone, Copy)]
struct Rows<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<'a> Rows<'a> {
    fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self {
            data,
            rows,
            cols,
            stride: cols,
        }
    }

    fn subrows(self, rows: Range<usize>) -> Self {
        Self {
            data: &self.data[rows.start * self.stride..],
            rows: rows.len(),
            ..self
        }
    }

    fn mat(self) -> MatRef<'a, f32> {
        MatRef::from_row_major_slice_with_stride(self.data, self.rows, self.cols, self.stride)
    }

    /// An operand of a product over the columns.
    fn over_cols(self) -> Operand<'a> {
        Operand::rows(Elems::F32(self.data), [self.rows, self.cols], self.stride)
    }

    /// An operand of a product over the rows.
    fn over_rows(self) -> Operand<'a> {
        Operand::columns(Elems::F32(self.data), [self.rows, self.cols], self.stride)
    }
}

/// A matrix `[seq, d]` with its transpose, where products read that.
struct Turned<'a> {
    rows: Rows<'a>,
    transpose: MatRef<'a, f32>,
}

impl<'a> Turned<'a> {
    /// Writes the transpose `[d, seq]` to `scratch` for products in fp32: faer packs it for every
    /// block of rows, fast only along its columns.
    fn new(rows: Rows<'a>, scratch: &'a mut [f32], shape: Shape) -> Self {
        if shape.products.is_none() {
            transpose(scratch, rows.data, rows.stride, rows.rows);
        }
        Self {
            rows,
            transpose: mat(scratch, rows.cols, rows.rows),
        }
    }
}

/// Products of a block of rows. Those in bf16 have no factor: [`Shape::scale_after`] multiplies by
/// it.
impl Shape {
    /// `out = factor x y^T`: the rows `keys` of y.
    fn scores(self, out: &mut [f32], x: Rows<'_>, y: &Turned<'_>, keys: Range<usize>, factor: f32) {
        let out = mat_mut(out, x.rows, keys.len());
        match self.products {
            None => {
                let y = y.transpose.subcols(keys.start, keys.len());
                gemm(out, Accum::Replace, x.mat(), y, factor);
            }
            Some(products) => {
                let y = y.rows.subrows(keys);
                products.product_on_thread(out, false, &x.over_cols(), &y.over_cols());
            }
        }
    }

    /// `out = factor p y`.
    fn weighted(self, out: MatMut<'_, f32>, p: Rows<'_>, y: Rows<'_>, factor: f32) {
        match self.products {
            None => gemm(out, Accum::Replace, p.mat(), y.mat(), factor),
            Some(products) => {
                products.product_on_thread(out, false, &p.over_cols(), &y.over_rows());
            }
        }
    }

    /// `out += factor p^T y`. `turned` is scratch memory of p's size.
    fn add_weighted(
        self,
        out: MatMut<'_, f32>,
        p: Rows<'_>,
        y: Rows<'_>,
        turned: &mut [f32],
        factor: f32,
    ) {
        match self.products {
            None => {
                transpose(turned, p.data, p.cols, p.rows);
                gemm(
                    out,
                    Accum::Add,
                    mat(turned, p.cols, p.rows),
                    y.mat(),
                    factor,
                );
            }
            Some(products) => {
                products.product_on_thread(out, true, &p.over_rows(), &y.over_rows());
            }
        }
    }

    /// Multiplies by the factor of the scores what products in bf16 computed without it.
    fn scale_after(self, x: &mut [f32]) {
        if self.products.is_some() {
            multiply(x, self.scale);
        }
    }
}

#[multiversion(targets = "simd")]
fn multiply(x: &mut [f32], factor: f32) {
    x.iter_mut().for_each(|x| *x *= factor);
}

/// `out = softmax(scale q k^T, causal) v`; `lse` is written for the backward pass.
pub fn forward(out: &mut [f32], lse: &mut [f32], qkv: &[f32], masks: Masks<'_>, shape: Shape) {
    let Shape { seq, heads, d, .. } = shape;
    let tiles = shape.tiles(out, heads);
    (tiles, lse.par_chunks_mut(seq))
        .into_par_iter()
        .enumerate()
        .for_each(|(task, (mut out, lse))| {
            let [q, k, v] = shape.qkv(qkv, task);
            let starts = shape.starts_of(masks.starts, task);
            with_scratch(seq * (d + BLOCK + 1), |scratch| {
                let (kt, scratch) = scratch.split_at_mut(seq * d);
                let (factors, probs) = scratch.split_at_mut(seq);
                let k = Turned::new(k, kt, shape);
                for rows in shape.blocks() {
                    let keys = shape.keys(rows.clone(), starts);
                    let probs = &mut probs[..rows.len() * keys.len()];
                    let q = q.subrows(rows.clone());
                    shape.scores(probs, q, &k, keys.clone(), shape.scale);
                    shape.scale_after(probs);
                    let seen = Seen::new(shape, &rows, &keys, starts);
                    softmax_rows(probs, &mut lse[rows.clone()], seen);
                    if let Some(dropout) = masks.dropout {
                        for (row, probs) in rows.clone().zip(probs.chunks_exact_mut(keys.len())) {
                            let factors = &mut factors[..keys.len()];
                            shape.draw(factors, dropout, [task, row, keys.start]);
                            dropout::multiply(probs, factors);
                        }
                    }
                    let out = out.rb_mut().subrows_mut(rows.start, rows.len());
                    let probs = Rows::new(probs, rows.len(), keys.len());
                    shape.weighted(out, probs, v.subrows(keys), 1.0);
                }
            });
        });
}

/// Writes the gradient of qkv to `dqkv`. Dropped probabilities are drawn again.
pub fn backward(
    dqkv: &mut [f32],
    dout: &[f32],
    qkv: &[f32],
    out: &[f32],
    lse: &[f32],
    masks: Masks<'_>,
    shape: Shape,
) {
    let Shape {
        heads, kv_heads, ..
    } = shape;

    // A task computes the queries that share a key and a value, in order, and sums their gradients.
    let group = shape.group();
    let mut tasks = Vec::with_capacity(shape.batch * kv_heads);
    let mut tiles = shape.tiles(dqkv, heads + 2 * kv_heads).into_iter();
    for _ in 0..shape.batch {
        let dq: Vec<_> = tiles.by_ref().take(heads).collect();
        let dk: Vec<_> = tiles.by_ref().take(kv_heads).collect();
        let dv: Vec<_> = tiles.by_ref().take(kv_heads).collect();
        let mut dq = dq.into_iter();
        for (dk, dv) in dk.into_iter().zip(dv) {
            tasks.push((dq.by_ref().take(group).collect::<Vec<_>>(), dk, dv));
        }
    }

    tasks
        .into_par_iter()
        .enumerate()
        .for_each(|(index, (dqs, mut dk, mut dv))| {
            dk.fill(0.0);
            dv.fill(0.0);
            for (i, dq) in dqs.into_iter().enumerate() {
                let head = Head {
                    dout,
                    qkv,
                    out,
                    lse,
                    masks,
                    shape,
                    task: index * group + i,
                };
                head.backward(dq, dk.rb_mut(), dv.rb_mut());
            }
        });
}

/// One head of queries in the backward pass.
struct Head<'a> {
    dout: &'a [f32],
    qkv: &'a [f32],
    out: &'a [f32],
    lse: &'a [f32],
    masks: Masks<'a>,
    shape: Shape,
    task: usize,
}

impl Head<'_> {
    /// Writes `dq`, and adds to `dk` and `dv`.
    fn backward(&self, mut dq: MatMut<'_, f32>, mut dk: MatMut<'_, f32>, mut dv: MatMut<'_, f32>) {
        let shape = self.shape;
        let Shape { seq, heads, d, .. } = shape;
        let b = self.task / heads;
        let h = self.task % heads;
        let [q, k, v] = shape.qkv(self.qkv, self.task);
        let dout = shape.rows(&self.dout[(b * seq * heads + h) * d..], heads * d);
        let lse = &self.lse[self.task * seq..][..seq];
        let starts = shape.starts_of(self.masks.starts, self.task);

        with_scratch(seq * (2 * d + 3 * BLOCK), |scratch| {
            let (kt, scratch) = scratch.split_at_mut(seq * d);
            let (vt, scratch) = scratch.split_at_mut(seq * d);
            let (probs, scratch) = scratch.split_at_mut(seq * BLOCK);
            let (dprobs, turned) = scratch.split_at_mut(seq * BLOCK);
            let k = Turned::new(k, kt, shape);
            let v = Turned::new(v, vt, shape);

            for block in shape.blocks() {
                let keys = shape.keys(block.clone(), starts);
                let rows = block.len();
                let cols = keys.len();
                let [probs, dprobs, turned] =
                    [&mut *probs, &mut *dprobs, &mut *turned].map(|x| &mut x[..rows * cols]);
                let [q, dout] = [q, dout].map(|x| x.subrows(block.clone()));
                shape.scores(probs, q, &k, keys.clone(), shape.scale);
                shape.scale_after(probs);
                shape.scores(dprobs, dout, &v, keys.clone(), 1.0);

                let first = ((b * seq + block.start) * heads + h) * d;
                let outputs = [&self.out[first..], &self.dout[first..]];
                let seen = Seen::new(shape, &block, &keys, starts);
                // `turned` is free until the products below.
                if let Some(dropout) = self.masks.dropout {
                    for (row, factors) in block.clone().zip(turned.chunks_exact_mut(cols)) {
                        shape.draw(factors, dropout, [self.task, row, keys.start]);
                    }
                    dropout::multiply(dprobs, turned);
                }
                softmax_backward_rows(probs, dprobs, &lse[block.clone()], outputs, shape, seen);
                if self.masks.dropout.is_some() {
                    dropout::multiply(probs, turned);
                }
                shape.scale_after(dprobs);
                let [probs, dprobs] = [&*probs, &*dprobs].map(|x| Rows::new(x, rows, cols));
                let dq = dq.rb_mut().subrows_mut(block.start, rows);
                shape.weighted(dq, dprobs, k.rows.subrows(keys.clone()), shape.scale);
                let dk = dk.rb_mut().subrows_mut(keys.start, cols);
                shape.add_weighted(dk, dprobs, q, turned, shape.scale);
                let dv = dv.rb_mut().subrows_mut(keys.start, cols);
                shape.add_weighted(dv, probs, dout, turned, 1.0);
            }
        });
    }
}

/// The columns of a block's scores that each of its rows sees.
#[derive(Clone, Copy)]
struct Seen<'a> {
    /// Columns of the block's first row, itself included.
    first: usize,
    window: usize,
    /// The key of the first column.
    first_key: usize,
    /// The first key of each row's document; empty if all are 0.
    starts: &'a [u32],
}

impl<'a> Seen<'a> {
    fn new(shape: Shape, rows: &Range<usize>, keys: &Range<usize>, starts: &'a [u32]) -> Self {
        Self {
            first: rows.start + 1 - keys.start,
            window: shape.window,
            first_key: keys.start,
            starts: starts.get(rows.clone()).unwrap_or_default(),
        }
    }

    /// The columns that row `i` of the block sees.
    #[inline(always)]
    fn by(self, i: usize) -> Range<usize> {
        let end = self.first + i;
        let in_window = end.saturating_sub(self.window);
        let start = self.starts.get(i).map_or(0, |&start| start as usize);
        in_window.max(start.saturating_sub(self.first_key))..end
    }
}

/// Converts scores to probabilities, row by row. The columns that a row does not see become 0.
#[multiversion(targets = "simd")]
fn softmax_rows(scores: &mut [f32], lse: &mut [f32], seen: Seen<'_>) {
    let cols = scores.len() / lse.len();
    for (i, (row, lse)) in scores.chunks_exact_mut(cols).zip(lse).enumerate() {
        let seen = seen.by(i);
        row[..seen.start].fill(0.0);
        row[seen.end..].fill(0.0);
        let row = &mut row[seen];
        let max = math::max(row);
        let sum = math::exp_and_sum(row, max);
        let factor = 1.0 / sum;
        for x in row.iter_mut() {
            *x *= factor;
        }
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
    seen: Seen<'_>,
) {
    let cols = p.len() / lse.len();
    let rows = p
        .chunks_exact_mut(cols)
        .zip(dp.chunks_exact_mut(cols))
        .zip(lse);
    for (i, ((p, dp), &lse)) in rows.enumerate() {
        let [out, dout] = outputs.map(|x| &x[i * shape.heads * shape.d..][..shape.d]);
        let delta = math::sum_of([out, dout], |[out, dout]| out * dout);
        let seen = seen.by(i);
        for x in [&mut *p, &mut *dp] {
            x[..seen.start].fill(0.0);
            x[seen.end..].fill(0.0);
        }
        for (p, dp) in p[seen.clone()].iter_mut().zip(&mut dp[seen]) {
            *p = math::exp(*p - lse);
            *dp = *p * (*dp - delta);
        }
    }
}
