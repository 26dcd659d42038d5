//! Token embedding, with positions or without.
//!
//! Shapes: tokens `[batch * seq]`, wte `[vocab, c]`, wpe `[positions, c]`, x `[batch * seq, c]`. A
//! token [`IGNORED`] is not in this rank's part of the vocabulary: its row of wte is 0.

use rayon::prelude::*;
use zero_trainer::IGNORED;

use super::{Span, position, rows_per_thread};

/// The tokens of a batch, and their places.
#[derive(Clone, Copy, Debug)]
pub struct BatchTokens<'a> {
    /// `[batch * seq]`.
    pub tokens: &'a [u32],
    /// The place in its sequence of the first token of each token's document; empty if all are 0.
    pub starts: &'a [u32],
    /// The tokens of each sequence.
    pub span: Span,
}

/// `x = wte[token] + wpe[position]`, the position of a token in its document. Tokens were checked
/// against the vocabulary when the data was opened.
pub fn forward<T: Copy + Sync + Into<f32>>(
    x: &mut [f32],
    rows: BatchTokens<'_>,
    wte: &[T],
    wpe: &[T],
    c: usize,
) {
    let BatchTokens {
        tokens,
        starts,
        span,
    } = rows;
    let rows = rows_per_thread(tokens.len());
    x.par_chunks_mut(rows * c)
        .enumerate()
        .for_each(|(chunk, x)| {
            for (i, x) in x.chunks_exact_mut(c).enumerate() {
                let row = chunk * rows + i;
                let position = position(row, span, starts) * c;
                if tokens[row] == IGNORED {
                    widen(x, &wpe[position..position + c]);
                    continue;
                }
                let token = tokens[row] as usize * c;
                for ((x, &e), &p) in x
                    .iter_mut()
                    .zip(&wte[token..token + c])
                    .zip(&wpe[position..position + c])
                {
                    *x = e.into() + p.into();
                }
            }
        });
}

/// `dwpe[position] += dx`, in the order of the rows.
pub fn backward_positions(dwpe: &mut [f32], rows: BatchTokens<'_>, dx: &[f32], c: usize) {
    for (row, dx) in dx.chunks_exact(c).enumerate() {
        let position = position(row, rows.span, rows.starts) * c;
        for (sum, &d) in dwpe[position..position + c].iter_mut().zip(dx) {
            *sum += d;
        }
    }
}

/// `x[i] = wte[token]`. Tokens were checked against the vocabulary when the data was opened.
pub fn forward_tokens<T: Copy + Sync + Into<f32>>(
    x: &mut [f32],
    tokens: &[u32],
    wte: &[T],
    c: usize,
) {
    let rows = rows_per_thread(tokens.len());
    (x.par_chunks_mut(rows * c), tokens.par_chunks(rows))
        .into_par_iter()
        .for_each(|(x, tokens)| {
            for (x, &token) in x.chunks_exact_mut(c).zip(tokens) {
                match token {
                    IGNORED => x.fill(0.0),
                    token => widen(x, &wte[token as usize * c..][..c]),
                }
            }
        });
}

fn widen<T: Copy + Into<f32>>(x: &mut [f32], elems: &[T]) {
    for (x, &elem) in x.iter_mut().zip(elems) {
        *x = elem.into();
    }
}

/// `dwte[token] += dx`, in the order of the rows, but not for the token `padding`.
pub fn backward_tokens(
    dwte: &mut [f32],
    tokens: &[u32],
    dx: &[f32],
    c: usize,
    padding: Option<u32>,
) {
    for (&token, dx) in tokens.iter().zip(dx.chunks_exact(c)) {
        if token == IGNORED || Some(token) == padding {
            continue;
        }
        let sums = &mut dwte[token as usize * c..][..c];
        for (sum, &d) in sums.iter_mut().zip(dx) {
            *sum += d;
        }
    }
}
