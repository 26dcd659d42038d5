//! Rotary position embedding (arXiv 2104.09864), with the halves of a head as coordinates of its
//! pairs, as Hugging Face stores Llama's weights.
//!
//! Shapes: qkv `[rows, width]`, of which the first `turned` elements are heads of queries and keys;
//! table `[seq, d]`, cosines of the d / 2 angles and then their sines.

use multiversion::multiversion;
use rayon::prelude::*;

use super::{Span, position, rows_per_thread};

/// The elements of a row of qkv.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// All: queries, keys and values.
    pub width: usize,
    /// Those of queries and keys.
    pub turned: usize,
    /// Those of a head.
    pub d: usize,
}

/// Rotates queries and keys by the angles of their positions in their documents (`position`).
pub fn forward(qkv: &mut [f32], table: &[f32], starts: &[u32], span: Span, rows: Rows) {
    rotate(qkv, table, starts, span, rows, 1.0);
}

/// Rotates gradients of queries and keys back.
pub fn backward(dqkv: &mut [f32], table: &[f32], starts: &[u32], span: Span, rows: Rows) {
    rotate(dqkv, table, starts, span, rows, -1.0);
}

fn rotate(qkv: &mut [f32], table: &[f32], starts: &[u32], span: Span, rows: Rows, sign: f32) {
    let chunk = rows_per_thread(qkv.len() / rows.width);
    qkv.par_chunks_mut(chunk * rows.width)
        .enumerate()
        .for_each(|(i, qkv)| {
            for (row, qkv) in qkv.chunks_exact_mut(rows.width).enumerate() {
                let position = position(i * chunk + row, span, starts);
                let angles = &table[position * rows.d..][..rows.d];
                rotate_heads(&mut qkv[..rows.turned], angles, sign);
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
