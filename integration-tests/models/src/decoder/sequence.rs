//! Ranks that share sequences (DeepSpeed-Ulysses, arXiv 2309.14509): the exchanges around a block's
//! attention.
//!
//! A rank computes its tokens of each sequence, except for attention, which it computes for all
//! tokens and its heads. Buffers of a model that shares sequences, with `qkv` and `attended` the
//! elements of [`HeadExchange::elems`]:
//!
//! | buffer | elements | lifetime |
//! |---|---|---|
//! | `block[i].qkv` | qkv | in heads, from the exchange in forward to the backward of attention |
//! | `attended[i]` | attended, one a block, as `block[i]` | the same in heads; `block[i].attended` is in tokens |
//! | `send` | qkv | a pack to its all-to-all |
//! | `recv` | qkv | an all-to-all to its unpack; before that the queries, keys and values of the rank's tokens |

use zero_alloc::device::DeviceSlice;
use zero_trainer::ModelError;

use super::operations::{Backward, Forward, Operations};
use super::params::Flat;
use super::sequence_group::SequenceGroup;
use super::sequence_part::Exchanges;
use super::slices::ExchangeSlices;
use super::steps::Steps;
use crate::ops::sequence::HeadExchange;

/// Writes one slice from another.
type Rearrange = fn(HeadExchange, &mut [f32], &[f32]);

/// One way of an exchange: how it packs what it sends, and unpacks what it has received.
struct Way {
    pack: Rearrange,
    unpack: Rearrange,
}

const TO_HEADS: Way = Way {
    pack: HeadExchange::pack_tokens,
    unpack: HeadExchange::unpack_heads,
};

const TO_TOKENS: Way = Way {
    pack: HeadExchange::pack_heads,
    unpack: HeadExchange::unpack_tokens,
};

impl Steps<'_> {
    /// Queries, keys and values, and what the heads attend to.
    pub(super) fn attend(&mut self) -> Result<(), ModelError> {
        let block = self.activations().block;
        let Some(group) = &self.groups.sequence else {
            self.forward(Forward::Qkv, block);
            self.forward(Forward::Attention, block);
            return Ok(());
        };
        let [in_tokens, in_heads] = group.blocks(block, self.pass());
        let Exchanges { qkv, attended } = group.exchanges;

        self.forward(Forward::Qkv, in_tokens);
        self.exchange(group, qkv, TO_HEADS, [in_heads.qkv, in_tokens.qkv])?;
        self.forward(Forward::Attention, in_heads);
        self.exchange(
            group,
            attended,
            TO_TOKENS,
            [in_tokens.attended, in_heads.attended],
        )
    }

    /// The backward of attention: to `scratch.narrow`, the gradient of the first norm's output.
    pub(super) fn attend_backward(&mut self) -> Result<(), ModelError> {
        let block = self.activations().block;
        let s = self.scratch();
        let Some(group) = &self.groups.sequence else {
            for part in [Backward::Attended, Backward::Attention, Backward::Qkv] {
                self.backward(part, block, s);
            }
            return Ok(());
        };
        let [in_tokens, in_heads] = group.blocks(block, self.pass());
        let [tokens_attended, tokens_qkv] = Operations::attention_grads(s, in_tokens);
        let [heads_attended, heads_qkv] = Operations::attention_grads(s, in_heads);
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
        exchange: HeadExchange,
        way: Way,
        [to, from]: [DeviceSlice<f32>; 2],
    ) -> Result<(), ModelError> {
        let ExchangeSlices { send, recv, .. } = &group.slices;
        let [send, recv] = [*send, *recv].map(|buffer| buffer.slice(0..exchange.elems()));
        let run = |rearrange: Rearrange, to: DeviceSlice<f32>, from: DeviceSlice<f32>| {
            move |_: &Operations, _: &Flat<'_>, _: &mut [f32]| {
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
