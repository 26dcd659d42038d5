//! Ranks that share sequences (DeepSpeed-Ulysses, arXiv 2309.14509): the part of a batch that each
//! has, and the exchanges around a block's attention.
//!
//! A rank computes its tokens of each sequence, except for attention, which it computes for all
//! tokens and its heads. Buffers of a model that shares sequences, with `qkv` and `attended` the
//! elements of [`Exchange::elems`]:
//!
//! | buffer | elements | lifetime |
//! |---|---|---|
//! | `block[i].qkv` | qkv | in heads, from the exchange in forward to the backward of attention |
//! | `attended[i]` | attended, one a block, as `block[i]` | the same in heads; `block[i].attended` is in tokens |
//! | `send` | qkv | a pack to its all-to-all |
//! | `recv` | qkv | an all-to-all to its unpack; before that the queries, keys and values of the rank's tokens |

use std::sync::Arc;

use zero_alloc::device::{Device, DeviceSlice};
use zero_alloc::host::HostDevice;
use zero_comm::Communicator;
use zero_trainer::{Batch, ModelError, ModelRanks};

use super::buffers::ExchangeSlices;
use super::params::Flat;
use super::steps::Steps;
use super::{Backward, Forward, HostArch};
use crate::ops::Span;
use crate::ops::sequence::Exchange;
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
    pub(crate) qkv: Exchange,
    /// Of what the heads attend to.
    pub(crate) attended: Exchange,
}

impl Exchanges {
    /// Those of a model with these heads of `d` elements. The options must be valid for it.
    pub(crate) fn new(options: &ModelOptions, [heads, kv_heads]: [usize; 2], d: usize) -> Self {
        let qkv = Exchange {
            ranks: options.sequence_ranks,
            batch: options.micro_batch,
            seq: options.seq_len,
            heads,
            kv_heads,
            d,
        };
        Self {
            qkv,
            attended: Exchange { kv_heads: 0, ..qkv },
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
        let of = |exchange: Exchange| exchange.elems() / exchange.ranks * (exchange.ranks - 1);
        of(self.qkv) + of(self.attended)
    }
}

/// The ranks that share the sequences of a model on the host.
pub(super) struct SequenceGroup {
    comm: Arc<dyn Communicator<HostDevice>>,
    exchanges: Exchanges,
    slices: ExchangeSlices,
}

impl SequenceGroup {
    pub(super) fn new(
        comm: &Arc<dyn Communicator<HostDevice>>,
        exchanges: Exchanges,
        slices: ExchangeSlices,
    ) -> Self {
        Self {
            comm: Arc::clone(comm),
            exchanges,
            slices,
        }
    }

    /// The block of pass `pass` in tokens, and in heads.
    fn blocks<A: HostArch>(&self, block: A::Block, pass: usize) -> [A::Block; 2] {
        let elems = self.exchanges.qkv.tokens_elems();
        let layer = pass.saturating_sub(1).min(self.slices.attended.len() - 1);

        let mut in_tokens = block;
        *A::attention(&mut in_tokens)[0] = self.slices.recv.slice(0..elems);
        let mut in_heads = block;
        *A::attention(&mut in_heads)[1] = self.slices.attended[layer];
        [in_tokens, in_heads]
    }
}

/// Writes one slice from another.
type Rearrange = fn(Exchange, &mut [f32], &[f32]);

/// One way of an exchange: how it packs what it sends, and unpacks what it has received.
struct Way {
    pack: Rearrange,
    unpack: Rearrange,
}

const TO_HEADS: Way = Way {
    pack: Exchange::pack_tokens,
    unpack: Exchange::unpack_heads,
};

const TO_TOKENS: Way = Way {
    pack: Exchange::pack_heads,
    unpack: Exchange::unpack_tokens,
};

impl<A: HostArch> Steps<'_, A> {
    /// Queries, keys and values, and what the heads attend to.
    pub(super) fn attend(&mut self) -> Result<(), ModelError> {
        let block = self.activations().block;
        let Some(group) = &self.model.sequence else {
            self.forward(Forward::Qkv, block);
            self.forward(Forward::Attention, block);
            return Ok(());
        };
        let [mut in_tokens, mut in_heads] = group.blocks::<A>(block, self.pass());
        let [tokens_qkv, tokens_attended] = A::attention(&mut in_tokens).map(|slice| *slice);
        let [heads_qkv, heads_attended] = A::attention(&mut in_heads).map(|slice| *slice);
        let Exchanges { qkv, attended } = group.exchanges;

        self.forward(Forward::Qkv, in_tokens);
        self.exchange(group, qkv, TO_HEADS, [heads_qkv, tokens_qkv])?;
        self.forward(Forward::Attention, in_heads);
        self.exchange(
            group,
            attended,
            TO_TOKENS,
            [tokens_attended, heads_attended],
        )
    }

    /// The backward of attention: to `scratch.narrow`, the gradient of the first norm's output.
    pub(super) fn attend_backward(&mut self) -> Result<(), ModelError> {
        let block = self.activations().block;
        let s = self.scratch();
        let Some(group) = &self.model.sequence else {
            for part in [Backward::Attended, Backward::Attention, Backward::Qkv] {
                self.backward(part, block, s);
            }
            return Ok(());
        };
        let [in_tokens, in_heads] = group.blocks::<A>(block, self.pass());
        let [tokens_attended, tokens_qkv] = A::attention_grads(s, in_tokens);
        let [heads_attended, heads_qkv] = A::attention_grads(s, in_heads);
        let Exchanges { qkv, attended } = group.exchanges;

        self.backward(Backward::Attended, in_tokens, s);
        self.exchange(group, attended, TO_HEADS, [heads_attended, tokens_attended])?;
        self.backward(Backward::Attention, in_heads, s);
        self.exchange(group, qkv, TO_TOKENS, [tokens_qkv, heads_qkv])?;
        self.backward(Backward::Qkv, in_tokens, s);
        Ok(())
    }

    /// Exchanges `from`, in tokens or in heads, for `to`, in the other.
    fn exchange(
        &mut self,
        group: &SequenceGroup,
        exchange: Exchange,
        way: Way,
        [to, from]: [DeviceSlice<f32>; 2],
    ) -> Result<(), ModelError> {
        let ExchangeSlices { send, recv, .. } = &group.slices;
        let [send, recv] = [*send, *recv].map(|buffer| buffer.slice(0..exchange.elems()));
        let run = |rearrange: Rearrange, to: DeviceSlice<f32>, from: DeviceSlice<f32>| {
            move |_: &A, _: &Flat<'_>, _: &mut [f32]| {
                // SAFETY: a buffer of the model, and the stream orders its passes.
                let from = unsafe { from.as_host() };
                // SAFETY: as above; it is another buffer.
                rearrange(exchange, unsafe { to.as_host_mut() }, from);
            }
        };
        self.add(run(way.pack, send, from));
        self.enqueue()?;
        group
            .comm
            .all_to_all(self.stream, send.erase(), recv.erase())?;
        self.add(run(way.unpack, to, recv));
        Ok(())
    }
}
