//! The logits and the loss.
//!
//! Forward computes only the head's norm. Backward computes the logits and their gradient, and an
//! evaluation the logits alone, some rows at a time, so that they are never all in memory.

use super::operations::Operations;
use super::params::Flat;
use super::slices::{HeadView, ScratchView};
use crate::ops::cross_entropy;
use crate::ops::linear::{Linear, MatrixOrder, Weight};

/// `out = x w^T`: x `[rows, c]`, w `[vocab, c]`.
pub(super) fn logits(out: &mut [f32], x: &[f32], p: &Flat<'_>, vocab: usize) {
    let c = x.len() / (out.len() / vocab);
    layer(p.head_weight(vocab * c), vocab).product(out, x);
}

/// The head: w `[vocab, c]`.
pub(super) fn layer(w: Weight<'_>, vocab: usize) -> Linear<'_> {
    Linear::of_matrix(w, vocab, MatrixOrder::OutputsFirst)
}

/// Returns the sum of the losses of the first `targets.len()` of `tokens` tokens after the forward.
/// Uses `s.logits` alone.
pub(super) fn losses(
    s: ScratchView<'_>,
    h: &HeadView<'_>,
    targets: &[u32],
    p: &Flat<'_>,
    [vocab, tokens]: [usize; 2],
) -> f64 {
    let c = h.out.len() / tokens;
    let rows = s.logits.len() / vocab;
    let chunks = targets.chunks(rows).zip(h.out.chunks(rows * c));
    let sums = chunks.map(|(targets, out)| {
        let part = &mut s.logits[..targets.len() * vocab];
        logits(part, &out[..targets.len() * c], p, vocab);
        cross_entropy::forward(part, targets, vocab)
    });
    sums.sum()
}

/// Computes the loss and the gradients, and returns the sum of the losses. Writes the gradient of
/// `x` to `s.dres` and adds to `grads`: the head's unit and, if tied, the embedding's. `scale` is
/// the factor of each token's loss.
#[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
pub(super) fn backward(
    ops: &Operations,
    s: ScratchView<'_>,
    h: &HeadView<'_>,
    x: &[f32],
    targets: &[u32],
    p: &Flat<'_>,
    mut grads: Vec<&mut [f32]>,
    scale: f32,
) -> f64 {
    let vocab = ops.config.vocab;
    let c = x.len() / targets.len();
    let w = p.head_weight(vocab * c);
    let mut embedding = if grads.len() > 1 { grads.pop() } else { None };
    // No gradient: all is frozen.
    let own = grads.pop().unwrap_or_default();
    let dw = match &mut embedding {
        Some(embedding) => &mut embedding[p.ranges.tokens.start..][..w.len()],
        None if own.is_empty() => &mut [][..],
        None => &mut own[p.ranges.head.start..][..w.len()],
    };

    let head = layer(w, vocab);
    let rows = s.logits.len() / vocab;
    let mut loss = 0.0;
    let chunks = targets
        .chunks(rows)
        .zip(h.out.chunks(rows * c))
        .zip(s.narrow.chunks_mut(rows * c));

    for ((targets, out), dout) in chunks {
        let logits_part = &mut s.logits[..targets.len() * vocab];
        logits(logits_part, out, p, vocab);
        loss += cross_entropy::forward_backward(logits_part, targets, vocab, scale);
        head.input_gradient(dout, logits_part);
        if !dw.is_empty() {
            head.weight_gradient([dw, &mut []], out, logits_part);
        }
    }

    s.dres.fill(0.0);
    let dnorm = ops.final_norm_grad(own, p);
    ops.final_norm_backward(s.dres, dnorm, s.narrow, x, h, p);
    loss
}
