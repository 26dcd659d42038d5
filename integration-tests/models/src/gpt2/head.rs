//! The final layer norm, the logits and the loss.
//!
//! Forward computes only the layer norm. Backward computes the logits and their gradient, and an
//! evaluation the logits alone, some rows at a time, so that they are never all in memory.

use super::buffers::{HeadView, ScratchView};
use super::params::Flat;
use crate::ops::{cross_entropy, layer_norm, linear};

/// `h.out = ln_f(x)`.
pub(super) fn forward(h: &mut HeadView<'_>, x: &[f32], p: &Flat<'_>, eps: f32) {
    layer_norm::forward(
        h.out,
        h.stats,
        x,
        p.get(0, "ln_f.weight"),
        p.get(0, "ln_f.bias"),
        eps,
    );
}

/// `out = x w^T`: x `[rows, c]`, w `[vocab, c]`.
pub(super) fn logits(out: &mut [f32], x: &[f32], w: &[f32], vocab: usize) {
    linear::product_transposed(out, x, w, vocab);
}

/// Returns the sum of the losses of the first `targets.len()` tokens after [`forward`]. Uses
/// `s.logits` alone.
pub(super) fn losses(s: ScratchView<'_>, h: &HeadView<'_>, targets: &[u32], p: &Flat<'_>) -> f64 {
    let w = p.head_weight();
    let c = p.get(0, "ln_f.weight").len();
    let vocab = w.len() / c;
    let rows = s.logits.len() / vocab;
    let chunks = targets.chunks(rows).zip(h.out.chunks(rows * c));
    let sums = chunks.map(|(targets, out)| {
        let part = &mut s.logits[..targets.len() * vocab];
        logits(part, &out[..targets.len() * c], w, vocab);
        cross_entropy::forward(part, targets, vocab)
    });
    sums.sum()
}

/// Computes the loss and the gradients, and returns the sum of the losses. Writes the gradient of
/// `x` to `s.dres` and adds to `grads`: the head's unit and, if tied, the embedding's. `scale` is
/// the factor of each token's loss.
pub(super) fn backward(
    s: ScratchView<'_>,
    h: &HeadView<'_>,
    x: &[f32],
    targets: &[u32],
    p: &Flat<'_>,
    mut grads: Vec<&mut [f32]>,
    scale: f32,
) -> f64 {
    let w = p.head_weight();
    let c = x.len() / targets.len();
    let vocab = w.len() / c;
    let embedding = if grads.len() > 1 { grads.pop() } else { None };
    let Some(own) = grads.pop() else { return 0.0 };

    let (dgain, dbias, dw) = match embedding {
        Some(embedding) => {
            let [dgain, dbias] = p.unit(0).split_mut(own);
            let [dw] = p.unit(1).split_mut(embedding);
            (dgain, dbias, dw)
        }
        None => p.unit(0).split_mut::<3>(own).into(),
    };

    let rows = s.logits.len() / vocab;
    let mut loss = 0.0;
    let chunks = targets
        .chunks(rows)
        .zip(h.out.chunks(rows * c))
        .zip(s.narrow.chunks_mut(rows * c));

    for ((targets, out), dout) in chunks {
        let logits_part = &mut s.logits[..targets.len() * vocab];
        logits(logits_part, out, w, vocab);
        loss += cross_entropy::forward_backward(logits_part, targets, vocab, scale);
        linear::product(dout, logits_part, w, c);
        linear::add_weight_gradient(dw, logits_part, out, c);
    }

    s.dres.fill(0.0);
    layer_norm::backward(
        s.dres,
        dgain,
        dbias,
        s.narrow,
        x,
        h.stats,
        p.get(0, "ln_f.weight"),
    );

    loss
}
