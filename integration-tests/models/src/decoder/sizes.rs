//! Elements of the buffers of a model on the host.

use super::part_rows::RING;
use super::sequence_part::Exchanges;
use crate::ops::cross_entropy::STATISTICS;
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

/// The inputs of the sizes of a decoder's activations.
pub(crate) struct Extent {
    pub(crate) layers: usize,
    pub(crate) width: usize,
    pub(crate) vocab: usize,
    /// Statistics of a row of the head's norm.
    pub(crate) head_stats: usize,
    /// The widest row of a block's gradients that is not on the residual stream.
    pub(crate) wide: usize,
    pub(crate) exchanges: Exchanges,
    /// The most gradients of a pass, besides those of cut parameters, that ranks of tensor
    /// parallelism sum.
    pub(crate) partial: usize,
    pub(crate) table: usize,
}

impl Sizes {
    /// The options must be valid, so that no size overflows. `block` are the elements of a block.
    pub(crate) fn new(extent: &Extent, block: Vec<usize>, options: &ModelOptions) -> Self {
        let tokens = options.tokens();
        let whole = tokens * extent.width;
        let row = options.rows() * extent.width;
        let tensor_ranks = options.tensor_ranks;
        let vocab = extent.vocab.div_ceil(tensor_ranks);
        let rows = (LOGITS_ELEMS / vocab).clamp(1, tokens);
        // Of one token, the logits of this rank and those of all.
        let gathered = match tensor_ranks {
            1 => 0,
            ranks => (ranks + 1) * vocab,
        };
        let logits = (vocab * rows).max(gathered).max(extent.partial);
        Self {
            layers: extent.layers,
            distinct: if options.activation_checkpointing {
                1
            } else {
                extent.layers
            },
            row,
            ring: match options.partition_activations {
                true => RING,
                false => extent.layers + 1,
            },
            part: match options.partition_activations {
                true => row / tensor_ranks,
                false => 0,
            },
            block,
            head: [whole, extent.head_stats * options.rows()],
            scratch: [whole, whole, tokens * extent.wide, logits],
            exchanges: extent.exchanges,
            norm: match options.sequence_parallel {
                true => whole,
                false => 0,
            },
            stats: stats_elems(tensor_ranks, rows),
            table: extent.table,
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

/// Elements of the statistics of `rows` rows of logits: this rank's, and those of all ranks.
fn stats_elems(ranks: usize, rows: usize) -> usize {
    match ranks {
        1 => 0,
        ranks => (ranks + 1) * rows * STATISTICS,
    }
}
