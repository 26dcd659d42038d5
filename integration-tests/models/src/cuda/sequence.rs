//! Launches of sequence.cu: the copies before and after an all-to-all between ranks that share
//! sequences. Shapes as in [`ops::sequence`](crate::ops::sequence), in the kernels' type.

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::AnySlice;

use super::error::OpError;
use super::launch::{OpKernels, Shape, columns, size};
use crate::ops::sequence::HeadExchange;

/// The kernel's output and its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackStep {
    /// Segments of tokens.
    PackTokens,
    /// Heads of segments.
    UnpackHeads,
    /// Segments of heads.
    PackHeads,
    /// Tokens of segments: sums the copies of a head of keys.
    UnpackTokens,
}

impl PackStep {
    /// All steps.
    pub const ALL: [Self; 4] = [
        Self::PackTokens,
        Self::UnpackHeads,
        Self::PackHeads,
        Self::UnpackTokens,
    ];

    fn entry(self) -> &'static str {
        match self {
            Self::PackTokens => "pack_tokens",
            Self::UnpackHeads => "unpack_heads",
            Self::PackHeads => "pack_heads",
            Self::UnpackTokens => "unpack_tokens",
        }
    }
}

/// Writes `out` from `x`.
///
/// # Errors
/// Lengths or types do not fit, or the stream failed.
pub fn run(
    ops: &OpKernels,
    stream: &CudaStream,
    step: PackStep,
    out: AnySlice,
    x: AnySlice,
    exchange: HeadExchange,
) -> Result<(), OpError> {
    let HeadExchange {
        ranks,
        batch,
        seq,
        heads,
        kv_heads,
        d,
    } = exchange;
    let elems = exchange.elems();
    let tokens = exchange.tokens_elems();
    let [out_elems, x_elems] = match step {
        PackStep::PackTokens => [elems, tokens],
        PackStep::UnpackHeads | PackStep::PackHeads => [elems, elems],
        PackStep::UnpackTokens => [tokens, elems],
    };
    let columns = columns(d, &[out, x]);
    let args = [
        ops.stored("exchange: output", out, out_elems)?,
        ops.stored("exchange: input", x, x_elems)?,
        size("exchange: ranks", ranks)?.into(),
        size("exchange: batch", batch)?.into(),
        size("exchange: seq", seq)?.into(),
        size("exchange: heads", heads)?.into(),
        size("exchange: heads of keys", kv_heads)?.into(),
        size("exchange: head dimension", d)?.into(),
    ];
    let shape = Shape::over((out_elems / columns) as u64);
    let entry = format!("{}_{columns}", step.entry());
    // SAFETY: the parameters of all four kernels, whose lengths were checked.
    unsafe { ops.launch(stream, "exchange", &entry, shape, args) }
}
