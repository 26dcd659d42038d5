//! The keys and values of the tokens so far, and attention of the next token to them.

use multiversion::multiversion;
use rayon::prelude::*;

use crate::ops::math;

/// Below this number of multiplications, waking the threads takes longer than it saves.
const WORTH_THREADS: usize = 1 << 17;

/// Keys and values of a layer, each `[kv_heads, context, d]` in fp32.
pub(super) struct Cache {
    keys: Vec<f32>,
    values: Vec<f32>,
    shape: Shape,
}

/// The sizes of a layer's attention.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    /// Most tokens.
    pub(super) context: usize,
    /// Heads of queries.
    pub(super) heads: usize,
    /// Heads of keys, and of values.
    pub(super) kv_heads: usize,
    /// Elements of a head.
    pub(super) d: usize,
    /// Keys that a query sees, itself included.
    pub(super) window: usize,
    /// The factor of the scores.
    pub(super) scale: f32,
}

impl Cache {
    pub(super) fn new(shape: Shape) -> Self {
        let elems = shape.kv_heads * shape.context * shape.d;
        Self {
            keys: vec![0.0; elems],
            values: vec![0.0; elems],
            shape,
        }
    }

    pub(super) fn shape(&self) -> Shape {
        self.shape
    }

    /// Keeps keys and values of the tokens from `first`: qkv `[tokens, heads + 2 kv_heads, d]`.
    pub(super) fn keep(&mut self, first: usize, qkv: &[f32]) {
        let Shape {
            context,
            heads,
            kv_heads,
            d,
            ..
        } = self.shape;
        let rows = qkv.chunks_exact((heads + 2 * kv_heads) * d);
        for (position, row) in (first..).zip(rows) {
            let (keys, values) = row[heads * d..].split_at(kv_heads * d);
            for head in 0..kv_heads {
                let to = (head * context + position) * d;
                let from = head * d..(head + 1) * d;
                self.keys[to..to + d].copy_from_slice(&keys[from.clone()]);
                self.values[to..to + d].copy_from_slice(&values[from]);
            }
        }
    }

    /// Attention of the queries `[heads, d]` of the last of `tokens` tokens, whose key is kept:
    /// out `[heads, d]`.
    pub(super) fn attend(&self, out: &mut [f32], queries: &[f32], tokens: usize) {
        let Shape {
            context,
            heads,
            kv_heads,
            d,
            window,
            scale,
        } = self.shape;
        let seen = tokens.saturating_sub(window)..tokens;
        let width = heads / kv_heads * d;
        let work = heads * d * seen.len();
        let chunk = if work < WORTH_THREADS { kv_heads } else { 1 };

        out.par_chunks_mut(chunk * width)
            .zip(queries.par_chunks(chunk * width))
            .enumerate()
            .for_each(|(i, (out, queries))| {
                let parts = out.chunks_mut(width).zip(queries.chunks(width));
                for (head, (out, queries)) in (i * chunk..).zip(parts) {
                    let range = (head * context + seen.start) * d..(head * context + seen.end) * d;
                    let keys = &self.keys[range.clone()];
                    attend(out, queries, [keys, &self.values[range]], d, scale);
                }
            });
    }
}

/// Attention of queries `[group, d]` to keys and values, both `[seen, d]`.
#[multiversion(targets = "simd")]
fn attend(out: &mut [f32], queries: &[f32], kv: [&[f32]; 2], d: usize, scale: f32) {
    let [keys, values] = kv;
    let mut scores = vec![0.0; keys.len() / d];
    for (out, query) in out.chunks_exact_mut(d).zip(queries.chunks_exact(d)) {
        for (score, key) in scores.iter_mut().zip(keys.chunks_exact(d)) {
            *score = scale * math::sum_of([query, key], |[q, k]| q * k);
        }
        let greatest = math::max(&scores);
        let sum = math::exp_and_sum(&mut scores, greatest);
        out.fill(0.0);
        for (score, value) in scores.iter().zip(values.chunks_exact(d)) {
            let share = score / sum;
            for (out, v) in out.iter_mut().zip(value) {
                *out += share * v;
            }
        }
    }
}
