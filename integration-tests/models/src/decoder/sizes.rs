//! Elements of the buffers of a model on the host.

use super::config::DecoderConfig;
use super::part_rows::RING;
use super::sequence_part::Exchanges;
use super::tensor_group::stats_elems;
use crate::options::ModelOptions;

/// Maximum number of logits in memory at once (64 MiB).
const LOGITS_ELEMS: usize = 16 << 20;

/// Elements of the activations, in fp32.
pub(crate) struct Sizes {
    /// Blocks.
    pub(crate) layers: usize,
    /// Blocks with separate activations.
    pub(crate) distinct: usize,
    /// The input of a block or of the head: the rank's rows of the residual stream.
    pub(crate) row: usize,
    /// Whole rows.
    pub(crate) ring: usize,
    /// Elements of a rank's part of a row; 0 if all rows are whole.
    pub(crate) part: usize,
    pub(crate) block: Vec<usize>,
    /// `out` and `stats`.
    pub(crate) head: [usize; 2],
    /// `dres`, `narrow`, `wide` and `logits`.
    pub(crate) scratch: [usize; 4],
    pub(crate) exchanges: Exchanges,
    /// The output of a norm, if all blocks share it; otherwise 0.
    pub(crate) norm: usize,
    pub(crate) stats: usize,
    pub(crate) table: usize,
}

impl Sizes {
    /// Those of a rank's part of a model. The options must be valid, so that no size overflows.
    pub(crate) fn new(config: &DecoderConfig, options: &ModelOptions) -> Self {
        let exchanges = Exchanges::new(config, options);
        let tokens = options.tokens();
        let whole = tokens * config.width;
        let row = options.rows() * config.width;
        let tensor_ranks = options.tensor_ranks;
        let vocab = config.vocab.div_ceil(tensor_ranks);
        let rows = (LOGITS_ELEMS / vocab).clamp(1, tokens);
        // Of one token, the logits of this rank and those of all.
        let gathered = match tensor_ranks {
            1 => 0,
            ranks => (ranks + 1) * vocab,
        };
        let partial = config.partial_elems(options);
        let logits = (vocab * rows).max(gathered).max(partial);
        let wide = config
            .inner
            .max(config.q_width() + exchanges.qkv.elems() / tokens);
        Self {
            layers: config.layers,
            distinct: if options.activation_checkpointing {
                1
            } else {
                config.layers
            },
            row,
            ring: match options.partition_activations {
                true => RING,
                false => config.layers + 1,
            },
            part: match options.partition_activations {
                true => row / tensor_ranks,
                false => 0,
            },
            block: block_elems(config, &exchanges, options),
            head: [whole, config.norm.stats() * options.rows()],
            scratch: [whole, whole, tokens * wide, logits],
            exchanges,
            norm: match options.sequence_parallel {
                true => whole,
                false => 0,
            },
            stats: stats_elems(tensor_ranks, rows),
            table: config.table_elems(options.seq_len),
        }
    }

    /// Bytes of all activations.
    pub(crate) fn bytes(&self) -> u64 {
        let sum = |sizes: &[usize]| sizes.iter().map(|&n| n as u128).sum::<u128>();
        let rows = self.layers as u128 + 1;
        let residual = self.ring as u128 * self.row as u128 + rows * self.part as u128;
        let blocks =
            self.distinct as u128 * (sum(&self.block) + self.exchanges.attended_elems() as u128);
        let exchange = 2 * self.exchanges.buffer_elems() as u128;
        let rest = sum(&self.head) + sum(&self.scratch) + exchange;
        let rest = rest + 2 * self.norm as u128 + self.stats as u128 + self.table as u128;
        u64::try_from(4 * (residual + blocks + rest)).unwrap_or(u64::MAX)
    }
}

/// Elements of a block's activations, in the order of [`BlockSlices`](super::slices::BlockSlices).
fn block_elems(
    config: &DecoderConfig,
    exchanges: &Exchanges,
    options: &ModelOptions,
) -> Vec<usize> {
    let tokens = options.tokens();
    let rows = options.rows();
    let own = rows * config.width;
    // Blocks share the outputs of norms if each rank has some rows of them.
    let norm = match options.sequence_parallel {
        true => 0,
        false => own,
    };
    let stats = config.norm.stats() * rows;
    let normed = tokens * config.normed_heads();
    vec![
        norm,
        stats,
        exchanges.qkv.elems(),
        normed * config.head_dim,
        normed,
        tokens * config.q_width(),
        tokens * config.heads,
        own,
        norm,
        stats,
        tokens * config.up_width(),
        tokens * config.inner,
    ]
}
