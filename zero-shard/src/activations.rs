//! An estimate of a transformer's activations, for planning; the trainer measures the actual bytes.
//!
//! The count follows Korthikanti et al. (arXiv 2205.05198, section 4). With s tokens per row, b
//! rows, width h, feed-forward width f and a heads, a layer keeps for its backward, in elements of
//! the compute dtype:
//!
//! ```text
//! attention          input 1; query, key and value 3; input of the projection 1     5 sbh
//! feed-forward       input; input and output of the activation function             1 sbh + 2 sbf
//! layer norms        inputs                                                         2 sbh
//! attention matrix   without flash attention, which recomputes it tile by tile      1 a s s b
//! ```
//!
//! A feed-forward that recomputes the output of its activation function keeps only the input: 1 sbf
//! less.
//!
//! Dropout adds a mask, of one byte per element, for the outputs of attention and feed-forward and
//! for the attention matrix, and a second copy of the matrix; with 2 bytes per element and f = 4 h
//! the sum is the paper's sbh (34 + 5 a s / h).
//!
//! In addition there are
//!
//! - fp32 statistics: 8 bytes per token for each layer norm, 4 per token for each head of flash
//!   attention;
//! - the gradients of one block in backward: of the residual stream 1 sbh, of an input 1 sbh, and
//!   the larger of the feed-forward's sbf and query, key and value's 3 sbh;
//! - the head: input and output of its layer norm, and the logits in fp32, which their gradient
//!   overwrites.

use crate::checked::{product, sum};
use crate::{ShardError, largest};

/// A decoder-only transformer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TransformerShape {
    /// Number of blocks.
    pub layers: u64,
    /// Width of a block, h.
    pub hidden: u64,
    /// Number of attention heads, a.
    pub heads: u64,
    /// Width within the feed-forward, f; typically 4 h.
    pub inner: u64,
    /// Size of the vocabulary.
    pub vocab: u64,
}

impl TransformerShape {
    /// Returns a shape with about `numel_elems` parameters in its blocks. The width is 128 times
    /// the number of layers, as in GPT-3 (arXiv 2005.14165, table 2.1: 96 layers of width 12288);
    /// heads have width 128; the vocabulary is GPT-2's.
    pub fn with_about(numel_elems: u64) -> Self {
        // 12 l h h = n with h = 128 l: l is the cube root of n / (12 x 128 x 128), rounded to the
        // nearest integer, which is the greatest l whose (l - 1/2)^3 does not exceed that quotient.
        let size = |twice: u128| 12 * 128 * 128 * twice * twice * twice;
        let within = |l: u64| {
            l < 1 << 20
                && size((2 * u128::from(l)).saturating_sub(1)) <= 8 * u128::from(numel_elems)
        };
        let layers = largest(within).max(1);
        Self {
            layers,
            hidden: 128 * layers,
            heads: layers,
            inner: 512 * layers,
            vocab: 50_257,
        }
    }

    /// Parameters of the blocks and the embedding, without biases, norms and positions: l (4 h h +
    /// 2 h f) + v h.
    ///
    /// # Errors
    /// The number does not fit 64 bits.
    pub fn numel_elems(&self) -> Result<u64, ShardError> {
        const WHAT: &str = "a transformer";
        let attention = product(WHAT, &[4, self.layers, self.hidden, self.hidden])?;
        let feed_forward = product(WHAT, &[2, self.layers, self.hidden, self.inner])?;
        sum(
            WHAT,
            &[
                attention,
                feed_forward,
                product(WHAT, &[self.vocab, self.hidden])?,
            ],
        )
    }
}

/// The run's settings that determine its activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct ActivationOptions {
    /// Rows of a micro-batch on one rank, b.
    pub micro_batch: u64,
    /// Tokens per row, s.
    pub seq_len: u64,
    /// Bytes per element.
    pub elem_bytes: u64,
    /// Activation checkpointing: whether blocks keep only their input and recompute the rest (arXiv
    /// 1604.06174).
    pub checkpointing: bool,
    /// Number of ranks over which each checkpoint is sharded (ZeRO-R's P_a, arXiv 1910.02054,
    /// section 6.1); 1 for no sharding.
    pub checkpoint_shards: u64,
    /// Whether attention is flash attention, which never stores the attention matrix.
    pub flash_attention: bool,
    /// Whether there is dropout.
    pub dropout: bool,
    /// Whether the output of the activation function, such as GELU, is recomputed in backward.
    pub recompute_gelu: bool,
}

impl ActivationOptions {
    /// Micro-batches of `micro_batch` rows of `seq_len` tokens, of `elem_bytes` an element, with
    /// flash attention and without checkpointing or dropout.
    pub fn new(micro_batch: u64, seq_len: u64, elem_bytes: u64) -> Self {
        Self {
            micro_batch,
            seq_len,
            elem_bytes,
            checkpointing: false,
            checkpoint_shards: 1,
            flash_attention: true,
            dropout: false,
            recompute_gelu: false,
        }
    }
}

setters!(ActivationOptions {
    checkpointing: bool,
    checkpoint_shards: u64,
    flash_attention: bool,
    dropout: bool,
    recompute_gelu: bool,
});

/// Bytes of activations on one rank when the backward pass begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct ActivationBytes {
    /// Activations kept for the backward of all blocks.
    pub blocks_bytes: u64,
    /// Recomputed activations of one block, without its kept input; 0 without checkpointing.
    pub recomputed_bytes: u64,
    /// Statistics of layer norms and of attention.
    pub statistics_bytes: u64,
    /// Gradients of one block's activations.
    pub backward_bytes: u64,
    /// Activations of the head.
    pub head_bytes: u64,
}

const WHAT: &str = "bytes of activations";

/// The matrix of attention weights and its dropout mask, of one block.
fn attention_matrix_bytes(
    shape: &TransformerShape,
    run: &ActivationOptions,
    tokens: u64,
) -> Result<u64, ShardError> {
    if run.flash_attention {
        return Ok(0);
    }
    let mut each = run.elem_bytes;
    if run.dropout {
        each = sum(WHAT, &[product(WHAT, &[2, run.elem_bytes])?, 1])?;
    }
    product(WHAT, &[shape.heads, run.seq_len, tokens, each])
}

impl ActivationBytes {
    /// Estimates the activations of `shape` under `run`.
    ///
    /// # Errors
    /// The sum does not fit 64 bits.
    pub fn estimate(shape: &TransformerShape, run: &ActivationOptions) -> Result<Self, ShardError> {
        let mul = |factors: &[u64]| product(WHAT, factors);
        let tokens = mul(&[run.seq_len, run.micro_batch])?;
        let input = mul(&[tokens, shape.hidden, run.elem_bytes])?;
        let inner = mul(&[tokens, shape.inner, run.elem_bytes])?;
        let masks = if run.dropout {
            mul(&[2, tokens, shape.hidden])?
        } else {
            0
        };

        let matrix = attention_matrix_bytes(shape, run, tokens)?;
        let kept_inner = if run.recompute_gelu { 1 } else { 2 };
        let block = sum(
            WHAT,
            &[mul(&[8, input])?, mul(&[kept_inner, inner])?, masks, matrix],
        )?;
        let attention = if run.flash_attention {
            mul(&[4, shape.heads, tokens])?
        } else {
            0
        };

        let statistics = sum(WHAT, &[mul(&[2, 8, tokens])?, attention])?;

        let in_memory = if run.checkpointing {
            shape.layers.min(1)
        } else {
            shape.layers
        };

        let shards = run.checkpoint_shards.max(1);
        let (blocks_bytes, recomputed_bytes) = match (run.checkpointing, shards) {
            (false, _) => (mul(&[shape.layers, block])?, 0),
            (true, 1) => (mul(&[shape.layers, input])?, block - input),
            // The sharded input of the recomputed block is gathered.
            (true, _) => (mul(&[shape.layers, input.div_ceil(shards)])?, block),
        };

        let bytes = Self {
            blocks_bytes,
            recomputed_bytes,
            statistics_bytes: sum(WHAT, &[mul(&[in_memory, statistics])?, mul(&[8, tokens])?])?,
            backward_bytes: sum(WHAT, &[mul(&[2, input])?, inner.max(mul(&[3, input])?)])?,
            head_bytes: sum(WHAT, &[mul(&[2, input])?, mul(&[tokens, shape.vocab, 4])?])?,
        };

        sum(
            WHAT,
            &[
                blocks_bytes,
                recomputed_bytes,
                bytes.statistics_bytes,
                bytes.backward_bytes,
                bytes.head_bytes,
            ],
        )?;

        Ok(bytes)
    }

    /// The sum of all parts.
    pub fn total_bytes(&self) -> u64 {
        let working = self.statistics_bytes + self.backward_bytes + self.head_bytes;
        self.blocks_bytes + self.recomputed_bytes + working
    }
}
