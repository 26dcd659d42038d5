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

use zero_alloc::device::{AnySlice, Device, DeviceSlice};
use zero_alloc::host::{HostDevice, HostStream};
use zero_comm::Communicator;
use zero_trainer::{Batch, ModelError, ModelRanks};

use super::buffers::{Activations, ExchangeSlices};
use super::params::Flat;
use super::{Backward, Decoder, Forward, HostArch};
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

/// One way of an exchange: `from`, in tokens or in heads, to `to`, in the other.
#[derive(Clone, Copy)]
struct Way {
    exchange: Exchange,
    from: DeviceSlice<f32>,
    to: DeviceSlice<f32>,
}

/// A pack or an unpack: writes a slice from another.
type Rearrange = fn(Exchange, &mut [f32], &[f32]);

impl Way {
    /// Runs `rearrange`, as an operation of the model's stream.
    fn run(self, rearrange: Rearrange, to: DeviceSlice<f32>, from: DeviceSlice<f32>) {
        // SAFETY: the buffers are the model's, and the stream orders its passes.
        let from = unsafe { from.as_host() };
        // SAFETY: as above; it is another buffer than `from`.
        let to = unsafe { to.as_host_mut() };
        rearrange(self.exchange, to, from);
    }
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

    /// The part of `send` or `recv` that a way uses.
    fn segments(&self, buffer: DeviceSlice<f32>, way: Way) -> DeviceSlice<f32> {
        buffer.slice(0..way.exchange.elems())
    }

    fn all_to_all(&self, stream: &HostStream, way: Way) -> Result<(), ModelError> {
        let [send, recv] = [self.slices.send, self.slices.recv].map(|b| self.segments(b, way));
        Ok(self.comm.all_to_all(stream, send.erase(), recv.erase())?)
    }
}

impl<A: HostArch> Decoder<A> {
    /// Enqueues a block's forward, with its output if `out` is set.
    pub(super) fn shared_forward(
        &self,
        group: &SequenceGroup,
        stream: &HostStream,
        pass: usize,
        params: &[AnySlice],
        out: Option<DeviceSlice<f32>>,
    ) -> Result<(), ModelError> {
        let Activations { input, block, .. } = self.buffers.layers.of_pass(pass);
        let [mut in_tokens, mut in_heads] = group.blocks::<A>(block, pass);
        let [tokens_qkv, tokens_attended] = A::attention(&mut in_tokens).map(|slice| *slice);
        let [heads_qkv, heads_attended] = A::attention(&mut in_heads).map(|slice| *slice);
        let there = Way {
            exchange: group.exchanges.qkv,
            from: tokens_qkv,
            to: heads_qkv,
        };
        let back = Way {
            exchange: group.exchanges.attended,
            from: heads_attended,
            to: tokens_attended,
        };

        let part = |parts: &'static [Forward], block: A::Block, out: Option<DeviceSlice<f32>>| {
            let arch = Arc::clone(&self.arch);
            move |flat: Flat<'_>, _: Vec<&mut [f32]>| {
                // SAFETY: the buffer is this model's, and the stream orders its passes.
                let x = unsafe { input.as_host() };
                for &part in parts {
                    arch.forward(part, block, x, &flat);
                }
                if let Some(out) = out {
                    // SAFETY: as above; input and output are different buffers.
                    arch.output(unsafe { out.as_host_mut() }, block, &flat);
                }
            }
        };
        let [qkv, attention, rest @ ..] = &Forward::ALL;
        // Ranks of tensor parallelism sum between the last two parts.
        let (mid, mlp) = rest.split_at(1);
        let (after, out_after) = match &self.tensor {
            Some(_) => (mid, None),
            None => (&rest[..], out),
        };
        self.around_attention(
            group,
            stream,
            "forward block",
            pass,
            params,
            &[],
            [there, back],
            part(std::slice::from_ref(qkv), in_tokens, None),
            part(std::slice::from_ref(attention), in_heads, None),
            part(after, in_tokens, out_after),
        )?;
        let Some(tensor) = &self.tensor else {
            return Ok(());
        };
        tensor.sum(stream, A::mid(block))?;
        self.enqueue_forward(stream, pass, params, mlp, out)?;
        out.map_or(Ok(()), |out| tensor.sum(stream, out))
    }

    /// Enqueues a block's backward.
    pub(super) fn shared_backward(
        &self,
        group: &SequenceGroup,
        stream: &HostStream,
        pass: usize,
        params: &[AnySlice],
        grads: &[DeviceSlice<f32>],
    ) -> Result<(), ModelError> {
        let Activations { input, block, .. } = self.buffers.layers.of_pass(pass);
        let scratch = self.buffers.scratch;
        let [in_tokens, in_heads] = group.blocks::<A>(block, pass);
        let [tokens_attended, tokens_qkv] = A::attention_grads(scratch, in_tokens);
        let [heads_attended, heads_qkv] = A::attention_grads(scratch, in_heads);
        let there = Way {
            exchange: group.exchanges.attended,
            from: tokens_attended,
            to: heads_attended,
        };
        let back = Way {
            exchange: group.exchanges.qkv,
            from: heads_qkv,
            to: tokens_qkv,
        };

        let part = |parts: &'static [Backward], block: A::Block| {
            let arch = Arc::clone(&self.arch);
            move |flat: Flat<'_>, grads: Vec<&mut [f32]>| {
                // SAFETY: the buffer is this model's, and the stream orders its passes.
                let x = unsafe { input.as_host() };
                for grad in grads {
                    for &part in parts {
                        arch.backward(part, scratch.view(), block, x, &flat, grad);
                    }
                }
            }
        };
        let [mlp, mid, attention, qkv, _] = &Backward::ALL;
        let [mlp_and_mid @ .., _, _, _] = &Backward::ALL;
        let [_, _, _, qkv_and_input @ ..] = &Backward::ALL;
        let (before, after) = match &self.tensor {
            Some(_) => (std::slice::from_ref(mid), std::slice::from_ref(qkv)),
            None => (&mlp_and_mid[..], &qkv_and_input[..]),
        };
        if let Some(tensor) = &self.tensor {
            let mlp = std::slice::from_ref(mlp);
            self.enqueue_backward(stream, pass, params, grads, mlp)?;
            self.sum_narrow(tensor, stream, pass)?;
        }
        self.around_attention(
            group,
            stream,
            "backward block",
            pass,
            params,
            grads,
            [there, back],
            part(before, in_tokens),
            part(std::slice::from_ref(attention), in_heads),
            part(after, in_tokens),
        )?;
        match &self.tensor {
            Some(tensor) => self.cut_backward_of_input(tensor, stream, pass, params, grads),
            None => Ok(()),
        }
    }

    /// Enqueues `before` in tokens, the way there, `attention` in heads, the way back, and `after`
    /// in tokens.
    #[expect(clippy::too_many_arguments, reason = "the operands of one pass")]
    fn around_attention(
        &self,
        group: &SequenceGroup,
        stream: &HostStream,
        label: &'static str,
        pass: usize,
        params: &[AnySlice],
        grads: &[DeviceSlice<f32>],
        [there, back]: [Way; 2],
        before: impl FnOnce(Flat<'_>, Vec<&mut [f32]>) + Send + 'static,
        attention: impl FnOnce(Flat<'_>, Vec<&mut [f32]>) + Send + 'static,
        after: impl FnOnce(Flat<'_>, Vec<&mut [f32]>) + Send + 'static,
    ) -> Result<(), ModelError> {
        let ExchangeSlices { send, recv, .. } = group.slices;
        let sent = |way| group.segments(send, way);
        let received = |way| group.segments(recv, way);

        let segments = sent(there);
        self.enqueue(stream, label, pass, params, grads, move |flat, grads| {
            before(flat, grads);
            there.run(Exchange::pack_tokens, segments, there.from);
        })?;
        group.all_to_all(stream, there)?;

        let segments = [received(there), sent(back)];
        self.enqueue(stream, label, pass, params, grads, move |flat, grads| {
            there.run(Exchange::unpack_heads, there.to, segments[0]);
            attention(flat, grads);
            back.run(Exchange::pack_heads, segments[1], back.from);
        })?;
        group.all_to_all(stream, back)?;

        let segments = received(back);
        self.enqueue(stream, label, pass, params, grads, move |flat, grads| {
            back.run(Exchange::unpack_tokens, back.to, segments);
            after(flat, grads);
        })
    }
}
