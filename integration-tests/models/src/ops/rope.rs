//! Rotary position embedding (arXiv 2104.09864), with the halves of a head as coordinates of its
//! pairs, as Hugging Face stores Llama's weights.
//!
//! Shapes: qkv `[rows, queries + 2 keys, d]`, heads of queries first and of values last; table `[seq, d]`, cosines of the d / 2 angles and then their sines.

use multiversion::multiversion;
use rayon::prelude::*;

use super::{Heads, Span, position, rows_per_thread};

/// Rotates queries and keys by the angles of their positions in their documents (`position`).
pub fn forward(qkv: &mut [f32], table: &[f32], starts: &[u32], span: Span, heads: Heads) {
    rotate(qkv, table, starts, span, heads, 1.0);
}

/// Rotates gradients of queries and keys back.
pub fn backward(dqkv: &mut [f32], table: &[f32], starts: &[u32], span: Span, heads: Heads) {
    rotate(dqkv, table, starts, span, heads, -1.0);
}

fn rotate(qkv: &mut [f32], table: &[f32], starts: &[u32], span: Span, heads: Heads, sign: f32) {
    let chunk = rows_per_thread(qkv.len() / heads.width());
    qkv.par_chunks_mut(chunk * heads.width())
        .enumerate()
        .for_each(|(i, qkv)| {
            for (row, qkv) in qkv.chunks_exact_mut(heads.width()).enumerate() {
                let position = position(i * chunk + row, span, starts);
                let angles = &table[position * heads.d..][..heads.d];
                rotate_heads(&mut qkv[..heads.turned() * heads.d], angles, sign);
            }
        });
}

#[multiversion(targets = "simd")]
fn rotate_heads(heads: &mut [f32], angles: &[f32], sign: f32) {
    let half = angles.len() / 2;
    let (cos, sin) = angles.split_at(half);
    let sin = &sin[..half];
    for head in heads.chunks_exact_mut(2 * half) {
        let (a, b) = head.split_at_mut(half);
        let b = &mut b[..half];
        for i in 0..half {
            let x = a[i];
            let y = b[i];
            let sin = sign * sin[i];
            a[i] = x * cos[i] - y * sin;
            b[i] = y * cos[i] + x * sin;
        }
    }
}
