//! Elements and bytes of the buffers of a model on CUDA.

use zero_alloc::device::DType;

use super::batch::Layout;
use super::block::partial_elems;
use super::checkpoints::RING;
use crate::cuda::{attention, column_sums, cross_entropy, matmul, norm, rope};
use crate::decoder::config::DecoderConfig;
use crate::decoder::part_rows;
use crate::decoder::sequence_part::Exchanges;
use crate::decoder::tensor_group::stats_elems;
use crate::ops::mlp::Mlp;
use crate::options::{GpuBytes, ModelOptions};

/// Buffers that share a block start at multiples of this many bytes.
pub(super) const ALIGN_BYTES: usize = 256;
/// Maximum bytes of logits in memory at once. The number of parts depends on the model and the
/// batch alone: the gradient of the head's matrix is a sum over parts, so with the memory of the
/// device its bits would depend on the card.
const LOGITS_BYTES: usize = 256 << 20;
/// Minimum elements of the gradient of the head's input that are computed at once: a tile of 128 x
/// 256 for each of the 132 multiprocessors of an H100 or H200. Fewer would leave some idle.
const FILLING_ELEMS: usize = 132 * TILE_ROWS * 256;
/// Rows of a tile.
const TILE_ROWS: usize = 128;

/// Elements and bytes of the allocations. M is the number of tokens.
pub(super) struct Sizes {
    /// Of the rank's rows of the residual stream.
    pub(super) row: usize,
    /// `[M, C]`.
    pub(super) whole: usize,
    pub(super) narrow: usize,
    pub(super) wide: usize,
    /// `[batch, heads, seq]`.
    pub(super) heads: usize,
    pub(super) head_stats: usize,
    pub(super) logits: usize,
    pub(super) partials: usize,
    pub(super) sums: usize,
    /// Of the scratch memory of adapters.
    pub(super) dropped: usize,
    pub(super) low_rank: usize,
    pub(super) table: usize,
    /// Inputs of blocks and of the head, and those of them on the device.
    pub(super) rows: usize,
    pub(super) ring: usize,
    /// Elements of a row that a rank keeps.
    pub(super) part: usize,
    pub(super) stats: usize,
    pub(super) part_bytes: usize,
    /// Blocks with separate activations.
    pub(super) blocks: usize,
    pub(super) block: [(usize, DType); 10],
    pub(super) exchanges: Exchanges,
    /// Of `send`, `recv` and `attended`; 0 without other ranks.
    pub(super) exchange_bytes: usize,
    pub(super) row_bytes: usize,
    pub(super) block_bytes: usize,
    pub(super) head_bytes: usize,
    pub(super) scratch_bytes: usize,
    pub(super) batch_bytes: usize,
    pub(super) matmul_bytes: usize,
}

impl Sizes {
    /// Those of a rank's part of a model, with the logits of `logits_rows` tokens. The options must pass
    /// [`ModelOptions::validate`], so that no size overflows.
    pub(super) fn new(config: &DecoderConfig, options: &ModelOptions, logits_rows: usize) -> Self {
        let act = options.dtype;
        let tokens = options.tokens();
        let exchanges = Exchanges::new(config, options);
        let width = config.width;
        let whole = tokens * width;
        let row = options.rows() * width;
        let narrow = tokens * width.max(config.q_width());
        // A gradient before a dropout of the residual stream is in the same buffer.
        let before_dropout = match config.residual_dropout() {
            0.0 => 0,
            _ => width,
        };
        let qkv = exchanges.qkv.elems();
        let wide = tokens * config.inner.max(qkv / tokens).max(before_dropout);
        let heads = tokens * config.heads;
        let head_stats = options.rows() * config.norm.stats();
        let ranks = options.tensor_ranks;
        let vocab = config.vocab.div_ceil(ranks);
        let stride = cross_entropy::stride_elems(vocab);
        // Of one token, the logits of this rank and those of all.
        let gathered = if ranks == 1 {
            0
        } else {
            stride + ranks * vocab
        };
        let logits_rows = logits_rows.clamp(1, tokens);
        let logits = (stride * logits_rows).max(gathered);
        let stats = stats_elems(ranks, logits_rows);
        let partials = partials(config, options);
        let sums = partial_elems(config, options);
        let [dropped, low_rank] = of_adapters(config, tokens);
        let rows = config.layers + 1;
        let scratch = [
            (2 * whole + narrow + wide + logits + dropped + low_rank, act),
            (heads + tokens + partials + sums + stats, DType::F32),
        ];
        let ring = match (options.offload_activations, options.partition_activations) {
            (true, _) => RING.min(rows),
            (false, true) => part_rows::RING.min(rows),
            (false, false) => rows,
        };
        let part = match options.partition_activations {
            true => row / ranks,
            false => row,
        };
        let blocks = if options.activation_checkpointing {
            1
        } else {
            config.layers
        };
        let exchange_bytes = match exchanges.buffer_elems() {
            0 => 0,
            elems => {
                let all = 2 * elems + blocks * exchanges.attended_elems();
                bytes(&[(all, act)], 2 + blocks)
            }
        };
        let block = block_elems(config, options, qkv);
        let matrix = width * config.qkv_width().max(config.up_width());
        Self {
            row,
            whole,
            narrow,
            wide,
            heads,
            head_stats,
            logits,
            partials,
            sums,
            dropped,
            low_rank,
            table: config.table_elems(options.seq_len),
            rows,
            ring,
            part,
            stats,
            part_bytes: part * act.size_bytes(),
            blocks,
            exchanges,
            exchange_bytes,
            row_bytes: row * act.size_bytes(),
            block_bytes: bytes(&block, block.iter().filter(|(elems, _)| *elems > 0).count()),
            head_bytes: bytes(&[(whole, act), (head_stats, DType::F32)], 2),
            scratch_bytes: bytes(&scratch, 10 + if low_rank > 0 { 2 } else { 0 }),
            batch_bytes: Layout::new(options, config.drops()).bytes(),
            matmul_bytes: matmul::workspace_bytes(matrix as u64) as usize,
            block,
        }
    }
}

/// Whether the activations of an MLP are kept from forward to backward: GELU's, unless it is recomputed.
pub(super) fn keeps_act(config: &DecoderConfig, options: &ModelOptions) -> bool {
    let recomputes = options.activation_checkpointing || options.recompute_gelu;
    config.mlp != Mlp::SwiGlu && !recomputes
}

/// Elements of a block's activations, in the order of [`BlockSlices`](super::slices::BlockSlices).
fn block_elems(config: &DecoderConfig, options: &ModelOptions, qkv: usize) -> [(usize, DType); 10] {
    let dtype = options.dtype;
    let tokens = options.tokens();
    let stats = (config.norm.stats() * options.rows(), DType::F32);
    let normed = tokens * config.normed_heads();
    let act = match keeps_act(config, options) {
        true => tokens * config.inner,
        false => 0,
    };
    [
        stats,
        (qkv, dtype),
        (normed * config.head_dim, dtype),
        (normed, DType::F32),
        (tokens * config.q_width(), dtype),
        (tokens * config.heads, DType::F32),
        (options.rows() * config.width, dtype),
        stats,
        (tokens * config.up_width(), dtype),
        (act, dtype),
    ]
}

/// Elements of `dropped` and of `low_rank`, for any of the layers that have adapters.
fn of_adapters(config: &DecoderConfig, tokens: usize) -> [usize; 2] {
    let Some(lora) = &config.lora else {
        return [0; 2];
    };
    let all = config.adapters(0).into_iter().zip(config.linears());
    let all = all.filter(|(adapters, _)| !adapters.is_empty());
    let [inputs, count] = all.fold([0; 2], |[inputs, count], (adapters, linear)| {
        [inputs.max(linear.inputs), count.max(adapters.len())]
    });
    let dropped = match lora.dropout {
        0.0 => 0,
        _ => tokens * inputs,
    };
    [dropped, (1 + count) * tokens * lora.r]
}

/// Elements of the workspace of a block's sums over rows.
fn partials(config: &DecoderConfig, options: &ModelOptions) -> usize {
    let tokens = options.tokens();
    let columns = |has: bool, n: usize| match has {
        true => column_sums::workspace_elems(tokens, n),
        false => 0,
    };
    let of_heads = match config.qk_norm {
        true => rope::workspace_elems(tokens, config.qkv_heads()),
        false => 0,
    };
    let attention = match (config.biases.qkv, options.sequence_ranks) {
        (false, _) => 0,
        (true, 1) => {
            let width = config.qkv_width();
            attention::workspace_elems(options.micro_batch, options.seq_len, width)
        }
        (true, _) => columns(true, config.qkv_width()),
    };
    norm::workspace_elems(config.norm, tokens, config.width)
        .max(of_heads)
        .max(attention)
        .max(columns(
            config.biases.output || config.biases.mlp,
            config.width,
        ))
        .max(columns(config.biases.mlp, config.up_width()))
}

/// The bytes that a model requests. The options must pass [`ModelOptions::validate`].
pub(crate) fn gpu_bytes(config: &DecoderConfig, options: &ModelOptions) -> GpuBytes {
    let config = &config.cut(options.tensor_ranks);
    let vocab = config.vocab.div_ceil(options.tensor_ranks);
    let rows = logits_rows(vocab, config.width, options);
    let sizes = Sizes::new(config, options, rows);
    let sum = |parts: &[(usize, usize)]| {
        let sum = parts
            .iter()
            .map(|&(count, bytes)| count as u128 * bytes as u128)
            .sum::<u128>();
        u64::try_from(sum).unwrap_or(u64::MAX)
    };

    let Sizes {
        rows,
        ring,
        blocks,
        row_bytes,
        part_bytes,
        block_bytes,
        head_bytes,
        scratch_bytes,
        exchange_bytes,
        batch_bytes,
        matmul_bytes,
        table,
        ..
    } = sizes;

    // Parts of rows on the device.
    let kept = match options.partition_activations && !options.offload_activations {
        true => rows,
        false => 0,
    };
    GpuBytes {
        activations: sum(&[
            (ring, row_bytes),
            (kept, part_bytes + ALIGN_BYTES),
            (blocks, block_bytes),
            (1, head_bytes),
            (1, scratch_bytes),
            (1, exchange_bytes),
        ]),
        workspace: sum(&[
            (1, size_of::<f64>()),
            (1, batch_bytes),
            (1, matmul_bytes),
            (table, size_of::<f32>()),
        ]),
        host: match options.offload_activations {
            true => sum(&[(rows - ring, part_bytes)]),
            false => 0,
        },
    }
}

/// The tokens whose logits are in memory at once: as many as fit [`LOGITS_BYTES`] or
/// [`FILLING_ELEMS`] in parts of about equal size. It does not depend on the device, and so the
/// bits of the gradient do not.
pub(super) fn logits_rows(vocab: usize, width: usize, options: &ModelOptions) -> usize {
    let tokens = options.tokens();
    let fit = LOGITS_BYTES / (cross_entropy::stride_elems(vocab) * options.dtype.size_bytes());
    let parts = tokens.div_ceil(fit.max(FILLING_ELEMS.div_ceil(width)));
    tokens
        .div_ceil(parts)
        .next_multiple_of(TILE_ROWS)
        .min(tokens)
}

/// Bytes of a block with these contents, including the alignment of its `parts` parts.
fn bytes(contents: &[(usize, DType)], parts: usize) -> usize {
    contents
        .iter()
        .map(|(elems, dtype)| elems * dtype.size_bytes())
        .sum::<usize>()
        + parts * ALIGN_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelConfig;

    #[test]
    fn logits_are_capped_where_rows_fill_the_device() {
        let rows = |preset: &str, micro_batch, seq_len| {
            let options = ModelOptions::new(micro_batch, seq_len, DType::Bf16);
            let config = ModelConfig::preset(preset).unwrap();
            logits_rows(config.vocab_size(), config.hidden(), &options)
        };

        // Four parts of 206 MB. At width 768, 256 MiB are less than a tile for each multiprocessor:
        // six parts of 554 MB.
        assert_eq!(
            (rows("gpt2-1.5b", 8, 1024), rows("gpt2-124m", 32, 1024)),
            (2048, 5504)
        );
        assert_eq!(
            (rows("gpt2-1.5b", 1, 1024), rows("nano", 3, 33)),
            (1024, 99),
            "all at once"
        );
    }
}
