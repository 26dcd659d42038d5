//! Cross entropy of logits, loss and gradient in one pass.

use multiversion::multiversion;
use rayon::prelude::*;
use zero_trainer::IGNORED;

use super::{math, rows_per_thread};

/// Returns the sum over trained rows of `-log softmax(logits)[target]` in nats, and turns `logits`
/// `[rows, vocab]` into their gradient times `scale`, which is 0 for rows whose target is
/// [`IGNORED`].
pub fn forward_backward(logits: &mut [f32], targets: &[u32], vocab: usize, scale: f32) -> f64 {
    let rows = rows_per_thread(targets.len());
    let parts: Vec<f64> = (
        logits.par_chunks_mut(rows * vocab),
        targets.par_chunks(rows),
    )
        .into_par_iter()
        .map(|(logits, targets)| rows_of(logits, targets, vocab, scale))
        .collect();
    parts.iter().sum()
}

/// Returns the sum of [`forward_backward`], with the same bits, without a gradient. Overwrites
/// `logits`.
pub fn forward(logits: &mut [f32], targets: &[u32], vocab: usize) -> f64 {
    let rows = rows_per_thread(targets.len());
    let parts: Vec<f64> = (
        logits.par_chunks_mut(rows * vocab),
        targets.par_chunks(rows),
    )
        .into_par_iter()
        .map(|(logits, targets)| losses_of(logits, targets, vocab))
        .collect();
    parts.iter().sum()
}

#[multiversion(targets = "simd")]
fn losses_of(logits: &mut [f32], targets: &[u32], vocab: usize) -> f64 {
    let mut loss = 0.0f64;
    for (row, &target) in logits.chunks_exact_mut(vocab).zip(targets) {
        if target == IGNORED {
            continue;
        }
        loss += exponentials(row, target).0;
    }
    loss
}

/// Replaces `row` by `e^(x - max)`. Returns the loss of `target` and the sum of the new elements.
#[inline(always)]
fn exponentials(row: &mut [f32], target: u32) -> (f64, f32) {
    let max = math::max(row);
    let at_target = row[target as usize];
    let sum = math::exp_and_sum(row, max);
    (
        f64::from(sum).ln() + f64::from(max) - f64::from(at_target),
        sum,
    )
}

#[multiversion(targets = "simd")]
fn rows_of(logits: &mut [f32], targets: &[u32], vocab: usize, scale: f32) -> f64 {
    let mut loss = 0.0f64;
    for (row, &target) in logits.chunks_exact_mut(vocab).zip(targets) {
        if target == IGNORED {
            row.fill(0.0);
            continue;
        }
        let (of_row, sum) = exponentials(row, target);
        loss += of_row;
        let factor = scale / sum;
        for x in row.iter_mut() {
            *x *= factor;
        }
        row[target as usize] -= scale;
    }
    loss
}
