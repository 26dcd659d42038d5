//! Cross entropy of logits, loss and gradient in one pass.

use multiversion::multiversion;
use rayon::prelude::*;

use super::{math, rows_per_thread};

/// Returns the sum over rows of `-log softmax(logits)[target]` in nats, and turns `logits` `[rows, vocab]`
/// into their gradient times `scale`.
pub fn forward_backward(logits: &mut [f32], targets: &[u32], vocab: usize, scale: f32) -> f64 {
    let rows = rows_per_thread(targets.len());
    let parts: Vec<f64> = (logits.par_chunks_mut(rows * vocab), targets.par_chunks(rows))
        .into_par_iter()
        .map(|(logits, targets)| rows_of(logits, targets, vocab, scale))
        .collect();
    parts.iter().sum()
}

#[multiversion(targets = "simd")]
fn rows_of(logits: &mut [f32], targets: &[u32], vocab: usize, scale: f32) -> f64 {
    let mut loss = 0.0f64;
    for (row, &target) in logits.chunks_exact_mut(vocab).zip(targets) {
        let max = math::max(row);
        let at_target = row[target as usize];
        for x in row.iter_mut() {
            *x = math::exp(*x - max);
        }
        let sum = math::sum_by(vocab, |i| row[i]);
        loss += f64::from(sum).ln() + f64::from(max) - f64::from(at_target);
        let factor = scale / sum;
        for x in row.iter_mut() {
            *x *= factor;
        }
        row[target as usize] -= scale;
    }
    loss
}
