//! Cross entropy of logits, loss and gradient in one pass.
//!
//! With tensor parallelism each rank has the logits of a part of the vocabulary. Ranks then exchange
//! [`STATISTICS`] numbers a row between [`part_statistics`] and [`part_gradient`].

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

/// Numbers of a row that ranks exchange: the maximum of its logits, the sum of `e^(x - maximum)`, and
/// the logit of the target (of the ranks, one has it: the others have minus infinity).
pub const STATISTICS: usize = 3;

/// A rank's part of the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VocabPart {
    /// The first token.
    pub first: usize,
    /// Tokens.
    pub len: usize,
}

impl VocabPart {
    /// The place of a token in this part, or [`IGNORED`].
    pub fn local(self, token: u32) -> u32 {
        let place = (token as usize).wrapping_sub(self.first);
        if place < self.len {
            place as u32
        } else {
            IGNORED
        }
    }
}

/// Writes the statistics `[rows, STATISTICS]` of rows of logits `[rows, part.len]`, and turns these
/// into `e^(x - maximum)`. Rows whose target is [`IGNORED`] have any.
pub fn part_statistics(stats: &mut [f32], logits: &mut [f32], targets: &[u32], part: VocabPart) {
    let rows = rows_per_thread(targets.len());
    let parts = (
        stats.par_chunks_mut(rows * STATISTICS),
        logits.par_chunks_mut(rows * part.len),
        targets.par_chunks(rows),
    );
    parts.into_par_iter().for_each(|(stats, logits, targets)| {
        let rows = stats.as_chunks_mut::<STATISTICS>().0.iter_mut();
        let rows = rows.zip(logits.chunks_exact_mut(part.len));
        for ((stats, row), &target) in rows.zip(targets) {
            let max = math::max(row);
            let at_target = match part.local(target) {
                IGNORED => f32::NEG_INFINITY,
                place => row[place as usize],
            };
            *stats = [max, math::exp_and_sum(row, max), at_target];
        }
    });
}

/// Returns the sum of the losses of the trained rows, and turns the exponentials of
/// [`part_statistics`] into the gradient of the logits times `scale`. `stats` has those of all ranks
/// `[ranks, rows, STATISTICS]`; this is the rank-th part.
pub fn part_gradient(
    logits: &mut [f32],
    stats: &[f32],
    rank: usize,
    targets: &[u32],
    part: VocabPart,
    scale: f32,
) -> f64 {
    let of_rank = targets.len() * STATISTICS;
    let rows = rows_per_thread(targets.len());
    let losses: Vec<f64> = logits
        .par_chunks_mut(rows * part.len)
        .zip(targets.par_chunks(rows))
        .enumerate()
        .map(|(chunk, (logits, targets))| {
            let mut loss = 0.0;
            let logits = logits.chunks_exact_mut(part.len);
            for (i, (row, &target)) in logits.zip(targets).enumerate() {
                if target == IGNORED {
                    row.fill(0.0);
                    continue;
                }
                let at = (chunk * rows + i) * STATISTICS;
                let of_ranks = || stats.chunks_exact(of_rank).map(|stats| &stats[at..]);
                let max = of_ranks()
                    .map(|stats| stats[0])
                    .fold(f32::NEG_INFINITY, f32::max);
                let sum: f32 = of_ranks()
                    .map(|stats| stats[1] * (stats[0] - max).exp())
                    .sum();
                let at_target = of_ranks()
                    .map(|stats| stats[2])
                    .fold(f32::NEG_INFINITY, f32::max);
                loss += f64::from(sum).ln() + f64::from(max) - f64::from(at_target);
                let own = stats[rank * of_rank + at];
                let factor = scale * (own - max).exp() / sum;
                row.iter_mut().for_each(|x| *x *= factor);
                if let Some(at_target) = row.get_mut(part.local(target) as usize) {
                    *at_target -= scale;
                }
            }
            loss
        })
        .collect();
    losses.iter().sum()
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
