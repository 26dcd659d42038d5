//! Launches of embedding.cu, and the token lists of its backward pass.
//!
//! Shapes: tokens `[rows]`, rows = batch x seq; wte `[vocab, n]`, wpe `[positions, n]`, x, dx
//! `[rows, n]` in the kernels' type; dwte, dwpe in fp32. A token [`IGNORED`] is in the part of the
//! vocabulary of another rank: its row of wte is 0. Tokens were checked against the vocabulary
//! when the data was opened.

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{AnySlice, DeviceSlice};

use zero_trainer::IGNORED;

use super::dropout::Dropout;
use super::error::{OpError, at_least, check_len};
use super::launch::{Arg, OpKernels, Shape, columns, size};
use super::rope::starts_arg;
use crate::ops::Span;

/// The tokens of a micro-batch on the device, and its rows grouped by token.
#[derive(Clone, Copy, Debug)]
pub struct TokenLists {
    /// The token of each row.
    pub tokens: DeviceSlice<u32>,
    /// All rows, sorted by token; the sort is stable.
    pub order: DeviceSlice<u32>,
    /// The start of each distinct token in `order`; as long as `order`.
    pub starts: DeviceSlice<u32>,
    /// One element: the number of distinct tokens.
    pub segments: DeviceSlice<u32>,
}

/// What the kernels know of the rows of a batch beside their tokens.
#[derive(Clone, Copy, Debug)]
pub struct BatchLayout {
    /// Sequences.
    pub batch: usize,
    /// The tokens of each sequence.
    pub span: Span,
    /// The place in its sequence of the first token of each token's document `[batch, span]`.
    pub documents: Option<DeviceSlice<u32>>,
    /// The dropout of the embedding.
    pub dropout: Option<Dropout>,
}

impl BatchLayout {
    fn rows(self) -> usize {
        self.batch * self.span.tokens
    }

    /// Positions up to those of the last tokens.
    fn positions(self) -> usize {
        self.span.first + self.span.tokens
    }

    /// The parameters `seq` and `first` of kernels.
    fn span_args(self) -> Result<[Arg; 2], OpError> {
        let Span { tokens, first } = self.span;
        Ok([
            size("embedding: tokens of a sequence", tokens)?.into(),
            size("embedding: first token", first)?.into(),
        ])
    }

    /// The parameters `documents`, `keys` and `dropout` of kernels.
    fn args(self) -> Result<[Arg; 3], OpError> {
        let Self { batch, .. } = self;
        if let Some(documents) = self.documents {
            check_len("embedding: documents", documents.len(), self.rows())?;
        }
        let [keys, dropout] = Dropout::args(self.dropout, batch)?;
        Ok([starts_arg(self.documents), keys, dropout])
    }
}

/// Fills the lists of [`TokenLists`] on the host and returns the number of segments. `order` and
/// `starts` are as long as `tokens`; the rest of `starts` is unchanged.
pub fn sort_tokens(tokens: &[u32], order: &mut [u32], starts: &mut [u32]) -> u32 {
    // First the number of rows of each token, then the position of its next row.
    let most = tokens.iter().filter(|token| **token != IGNORED).max();
    // The tokens of other ranks come last.
    let others = most.map_or(0, |&most| most as usize + 1);
    let place_of = |token: u32| match token {
        IGNORED => others,
        token => token as usize,
    };
    let mut places = vec![0u32; others + 1];
    tokens
        .iter()
        .for_each(|&token| places[place_of(token)] += 1);
    let mut segments = 0;
    let mut end = 0;
    for place in &mut places {
        let rows = std::mem::replace(place, end);
        if rows > 0 {
            starts[segments] = end;
            segments += 1;
        }
        end += rows;
    }
    for (row, &token) in tokens.iter().enumerate() {
        let place = &mut places[place_of(token)];
        order[*place as usize] = row as u32;
        *place += 1;
    }
    segments as u32
}

/// `x = dropout(wte[token] + wpe[position])`; without `wpe`, `dropout(wte[token])`.
///
/// # Errors
/// Lengths or types do not fit, or the stream failed.
pub fn forward(
    ops: &OpKernels,
    stream: &CudaStream,
    x: AnySlice,
    tokens: DeviceSlice<u32>,
    wte: AnySlice,
    wpe: Option<AnySlice>,
    of: BatchLayout,
) -> Result<(), OpError> {
    let rows = tokens.len();
    let n = x.len() / rows.max(1);
    check_len("embedding: tokens", rows, of.rows())?;
    let [seq, first] = of.span_args()?;
    let [documents, keys, dropout] = of.args()?;
    let columns = columns(n, &[x, wte, wpe.unwrap_or(wte)]);
    let positions = match wpe {
        Some(wpe) => {
            at_least("embedding: wpe", wpe.len(), of.positions() * n)?;
            ops.stored("embedding: wpe", wpe, wpe.len())?
        }
        None => 0u64.into(),
    };
    let args = [
        ops.stored("embedding: x", x, rows * n)?,
        tokens.into(),
        ops.stored("embedding: wte", wte, wte.len())?,
        positions,
        documents,
        keys,
        dropout,
        size("embedding: rows", rows)?.into(),
        seq,
        first,
        size("embedding: width", n)?.into(),
    ];

    let shape = Shape::over((rows * n / columns) as u64);
    // SAFETY: the parameters of embedding_forward; lengths were checked here, tokens when the data
    // was opened.
    unsafe {
        ops.launch(
            stream,
            "embedding",
            &format!("embedding_forward_{columns}"),
            shape,
            args,
        )
    }
}

/// `dwte[token] += dropout(dx)`, except for the token `padding`, in an order that depends only on the
/// tokens.
///
/// # Errors
/// Lengths or types do not fit, or the stream failed.
pub fn backward_tokens(
    ops: &OpKernels,
    stream: &CudaStream,
    dwte: DeviceSlice<f32>,
    lists: &TokenLists,
    dx: AnySlice,
    padding: Option<u32>,
    of: BatchLayout,
) -> Result<(), OpError> {
    let rows = lists.tokens.len();
    let n = dx.len() / rows.max(1);
    let [_, keys, dropout] = of.args()?;
    let [seq, _] = of.span_args()?;
    check_len("embedding: tokens", rows, of.rows())?;
    let columns = columns(n, &[dx]);
    check_len("embedding: order", lists.order.len(), rows)?;
    check_len("embedding: starts", lists.starts.len(), rows)?;
    check_len("embedding: segments", lists.segments.len(), 1)?;
    check_len("embedding: dwte", dwte.len() % n.max(1), 0)?;
    let rows32 = size("embedding: rows", rows)?;

    let args = [
        dwte.into(),
        lists.tokens.into(),
        lists.order.into(),
        lists.starts.into(),
        lists.segments.into(),
        ops.stored("embedding: dx", dx, rows * n)?,
        keys,
        dropout,
        rows32.into(),
        seq,
        size("embedding: width", n)?.into(),
        padding.unwrap_or(u32::MAX).into(),
    ];

    let shape = Shape {
        grid: [rows32.max(1), n.div_ceil(32 * columns).max(1) as u32, 1],
        block: 256,
        shared_bytes: 0,
    };

    let entry = format!("embedding_tokens_{columns}");
    // SAFETY: the parameters of embedding_tokens; lengths were checked, and `sort_tokens` filled
    // the lists.
    unsafe { ops.launch(stream, "embedding backward", &entry, shape, args) }
}

/// `dwpe[position] += dropout(dx)`, in the order of the rows.
///
/// # Errors
/// Lengths or types do not fit, or the stream failed.
pub fn backward_positions(
    ops: &OpKernels,
    stream: &CudaStream,
    dwpe: DeviceSlice<f32>,
    dx: AnySlice,
    of: BatchLayout,
) -> Result<(), OpError> {
    let rows = of.rows();
    let n = dx.len() / rows.max(1);
    let [seq, first] = of.span_args()?;
    let [documents, keys, dropout] = of.args()?;
    let columns = columns(n, &[dx]);
    at_least("embedding: dwpe", dwpe.len(), of.positions() * n)?;
    let args = [
        dwpe.into(),
        ops.stored("embedding: dx", dx, rows * n)?,
        documents,
        keys,
        dropout,
        size("embedding: batch", of.batch)?.into(),
        seq,
        first,
        size("embedding: width", n)?.into(),
    ];

    let shape = Shape::over((of.positions() * n / columns) as u64);
    let entry = format!("embedding_positions_{columns}");
    // SAFETY: the parameters of embedding_positions, whose lengths were checked.
    unsafe { ops.launch(stream, "embedding backward", &entry, shape, args) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_sorted_by_token() {
        let tokens = [7, 2, 7, 0, 2, 7];
        let mut order = [99; 6];
        let mut starts = [99; 6];
        assert_eq!(sort_tokens(&tokens, &mut order, &mut starts), 3);
        assert_eq!(order, [3, 1, 4, 0, 2, 5]);
        assert_eq!(starts[..3], [0, 1, 3]);
        assert_eq!(sort_tokens(&[], &mut [], &mut []), 0);
    }
}
