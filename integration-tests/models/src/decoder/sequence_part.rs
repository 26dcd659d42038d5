//! Ranks that share sequences: the part of a batch that each has, and the sizes of their exchanges.

use zero_alloc::device::Device;
use zero_trainer::{Batch, ModelError, ModelRanks};

use super::config::DecoderConfig;
use crate::ops::Span;
use crate::ops::sequence::HeadExchange;
use crate::options::ModelOptions;

/// The place of a rank among those that share its sequences: with T tokens and S ranks, rank s has
/// tokens [s T / S, (s + 1) T / S).
#[derive(Clone, Copy, Debug)]
pub(crate) struct SequencePart {
    ranks: usize,
    rank: usize,
}

impl SequencePart {
    /// The place of this rank.
    ///
    /// # Errors
    /// The options are for another number of ranks.
    pub(crate) fn new<D: Device>(
        options: &ModelOptions,
        ranks: &ModelRanks<D>,
    ) -> Result<Self, ModelError> {
        let group = ranks.sequence.as_ref();
        let [count, rank] = group.map_or([1, 0], |comm| [comm.world_size(), comm.rank()]);
        if count != options.sequence_ranks {
            return Err(ModelError::from(format!(
                "the options of the model are for {} ranks a sequence, and it shares its sequences with {count}: set ModelOptions::sequence_ranks to the ranks of ModelRanks::sequence",
                options.sequence_ranks
            )));
        }
        Ok(Self { ranks: count, rank })
    }

    /// This rank's tokens of sequences of `seq`.
    pub(crate) fn span(self, seq: usize) -> Span {
        let tokens = seq / self.ranks;
        Span {
            tokens,
            first: self.rank * tokens,
        }
    }

    /// The first of this rank's lines of attention's dropout, of `heads` heads of `seq` queries.
    pub(crate) fn first_line(self, heads: usize, seq: usize) -> usize {
        heads / self.ranks * self.rank * seq
    }

    /// This rank's tokens of `batch`; `None` if it has all.
    pub(crate) fn batch(self, batch: &Batch, seq: usize) -> Option<Batch> {
        if self.ranks == 1 {
            return None;
        }
        let Span { tokens, first } = self.span(seq);
        let of = |all: &[u32]| -> Vec<u32> {
            let rows = all.chunks_exact(seq);
            rows.flat_map(|row| row[first..first + tokens].iter().copied())
                .collect()
        };
        let mut own = batch.clone();
        own.inputs = of(&batch.inputs);
        own.targets = of(&batch.targets);
        own.starts = of(&batch.starts);
        Some(own)
    }

    /// The index among this rank's tokens of token `token` of the whole batch.
    ///
    /// # Errors
    /// Another rank has it, or there is no such token.
    pub(crate) fn token(self, token: usize, options: &ModelOptions) -> Result<usize, ModelError> {
        let seq = options.seq_len;
        let Span { tokens, first } = self.span(seq);
        let sequence = token / seq;
        let own = (token % seq).wrapping_sub(first);
        if sequence >= options.micro_batch || own >= tokens {
            let all = options.micro_batch * seq;
            return Err(ModelError::from(format!(
                "the logits of token {token} of {all}, which rank {} of {} of a sequence does not have",
                self.rank, self.ranks
            )));
        }
        Ok(sequence * tokens + own)
    }
}

/// The exchanges around attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exchanges {
    /// Of queries, keys and values.
    pub(crate) qkv: HeadExchange,
    /// Of what the heads attend to.
    pub(crate) attended: HeadExchange,
}

impl Exchanges {
    /// Those of blocks of this configuration. The options must be valid for it.
    pub(crate) fn new(config: &DecoderConfig, options: &ModelOptions) -> Self {
        let qkv = HeadExchange {
            ranks: options.sequence_ranks,
            batch: options.micro_batch,
            seq: options.seq_len,
            heads: config.heads,
            kv_heads: config.kv_heads,
            d: config.head_dim,
        };
        Self {
            qkv,
            attended: HeadExchange { kv_heads: 0, ..qkv },
        }
    }

    /// Elements of `send`, and of `recv`; 0 without other ranks.
    pub(crate) fn buffer_elems(&self) -> usize {
        self.if_shared(self.qkv.elems())
    }

    /// Elements of `attended` of a block; 0 without other ranks.
    pub(crate) fn attended_elems(&self) -> usize {
        self.if_shared(self.attended.elems())
    }

    fn if_shared(&self, elems: usize) -> usize {
        if self.qkv.ranks == 1 { 0 } else { elems }
    }

    /// Elements that a rank sends to others in the exchanges of a forward, or of a backward.
    pub(crate) fn sent_elems(&self) -> usize {
        let of = |exchange: HeadExchange| exchange.elems() / exchange.ranks * (exchange.ranks - 1);
        of(self.qkv) + of(self.attended)
    }
}
