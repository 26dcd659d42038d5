//! An estimate of a transformer's activations, for planning; what a trainer really keeps, it measures.
//!
//! Counted as by Korthikanti et al. (arXiv 2205.05198, section 4), s tokens a row, b rows, width h, a heads;
//! a layer keeps for its backward, in elements of the computing dtype:
//!
//! ```text
//! attention   the input 1, query, key and value 3, the projection's input 1        5 sbh
//! feed-forward   the input 1, the activation's input and output 4 each             9 sbh
//! layer norms    their inputs                                                      2 sbh
//! attention matrix, unless it is recomputed tile by tile (flash attention)         1 a s s b
//! ```
//!
//! With dropout there is a byte of mask for the outputs of attention and feed-forward and for the attention
//! matrix, and the matrix a second time; at 2 bytes that is the paper's sbh (34 + 5 a s / h).

use crate::checked::{product, sum};
use crate::{ShardError, largest};

/// A decoder-only transformer whose feed-forward is four times as wide as its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TransformerShape {
    /// Blocks.
    pub layers: u64,
    /// Width of a block, h.
    pub hidden: u64,
    /// Attention heads, a.
    pub heads: u64,
    /// Size of the vocabulary.
    pub vocab: u64,
}

impl TransformerShape {
    /// The shape that has about `numel_elems` parameters in its blocks and 128 of width for each layer, as
    /// GPT-3 has (arXiv 2005.14165, table 2.1: 96 layers of width 12288); heads of 128, GPT-2's vocabulary.
    pub fn with_about(numel_elems: u64) -> Self {
        // 12 l h h = n with h = 128 l: l is the cube root of n / (12 x 128 x 128), to the nearest, which is the
        // greatest l with (l - 1/2)^3 within it.
        let size = |twice: u128| 12 * 128 * 128 * twice * twice * twice;
        let within =
            |l: u64| l < 1 << 20 && size((2 * u128::from(l)).saturating_sub(1)) <= 8 * u128::from(numel_elems);
        let layers = largest(within).max(1);
        Self { layers, hidden: 128 * layers, heads: layers, vocab: 50_257 }
    }

    /// Parameters of the blocks and the embedding, without biases, norms and positions: 12 l h h + v h.
    ///
    /// # Errors
    /// The number does not fit 64 bits.
    pub fn numel_elems(&self) -> Result<u64, ShardError> {
        let blocks = product("a transformer", &[12, self.layers, self.hidden, self.hidden])?;
        sum("a transformer", &[blocks, product("a transformer", &[self.vocab, self.hidden])?])
    }
}

/// How a model runs, as far as its activations depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ActivationOptions {
    /// Rows of a micro-batch on one rank, b.
    pub micro_batch: u64,
    /// Tokens a row, s.
    pub seq_len: u64,
    /// Bytes of an element.
    pub elem_bytes: u64,
    /// Whether blocks keep only their input and compute the rest again (arXiv 1604.06174).
    pub checkpointing: bool,
    /// Ranks that share each checkpoint (ZeRO-R's P_a, arXiv 1910.02054, section 6.1); 1 for none.
    pub checkpoint_shards: u64,
    /// Whether the attention matrix is never kept.
    pub flash_attention: bool,
    /// Whether there is dropout.
    pub dropout: bool,
}

/// Bytes of activations on one rank at the end of a forward pass and at the start of the backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ActivationBytes {
    /// Kept for the backward of all blocks.
    pub blocks_bytes: u64,
    /// Of one block computed again, where checkpointing is on.
    pub recomputed_bytes: u64,
    /// Of the head: its input, and the logits in fp32, which their gradient overwrites.
    pub head_bytes: u64,
}

impl ActivationBytes {
    /// The estimate.
    ///
    /// # Errors
    /// The sum does not fit 64 bits.
    pub fn estimate(shape: &TransformerShape, run: &ActivationOptions) -> Result<Self, ShardError> {
        const WHAT: &str = "bytes of activations";
        let mul = |factors: &[u64]| product(WHAT, factors);
        let tokens = mul(&[run.seq_len, run.micro_batch])?;
        let stream = mul(&[tokens, shape.hidden])?;
        let input = mul(&[stream, run.elem_bytes])?;
        let masks = if run.dropout { mul(&[2, stream])? } else { 0 };
        let matrix_bytes = match (run.flash_attention, run.dropout) {
            (true, _) => mul(&[shape.heads, tokens, 4])?, // a logarithm of a sum a row, fp32
            (false, dropout) => {
                let each = if dropout { sum(WHAT, &[mul(&[2, run.elem_bytes])?, 1])? } else { run.elem_bytes };
                mul(&[shape.heads, run.seq_len, tokens, each])?
            }
        };
        let block = sum(WHAT, &[mul(&[16, input])?, masks, matrix_bytes])?;
        let head_bytes = sum(WHAT, &[input, mul(&[tokens, shape.vocab, 4])?])?;
        let bytes = if run.checkpointing {
            let kept = mul(&[shape.layers, input.div_ceil(run.checkpoint_shards.max(1))])?;
            Self { blocks_bytes: kept, recomputed_bytes: block, head_bytes }
        } else {
            Self { blocks_bytes: mul(&[shape.layers, block])?, recomputed_bytes: 0, head_bytes }
        };
        sum(WHAT, &[bytes.blocks_bytes, bytes.recomputed_bytes, bytes.head_bytes])?;
        Ok(bytes)
    }

    /// All of it.
    pub fn total_bytes(&self) -> u64 {
        self.blocks_bytes + self.recomputed_bytes + self.head_bytes
    }
}
