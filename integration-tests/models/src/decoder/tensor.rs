//! Ranks of tensor parallelism on the host: what a block and the head sum over them.
//!
//! | after | summed |
//! |---|---|
//! | embedding | its output |
//! | [`Forward::Mid`] | the residual stream behind attention |
//! | output | the block's output |
//! | [`Backward::Mlp`], [`Backward::Qkv`] | the gradient of a norm's output |
//! | the head's backward | the same |
//!
//! The first rank adds to a partial sum what is the same on all ranks. The head exchanges
//! [`STATISTICS`] numbers a token, in place of logits.

use std::sync::Arc;

use zero_alloc::device::{AnySlice, DeviceSlice};
use zero_alloc::host::{HostDevice, HostStream};
use zero_comm::{Communicator, ReduceOp};
use zero_trainer::ModelError;

use super::buffers::Activations;
use super::params::HEAD;
use super::{Backward, Decoder, Forward, HostArch, head};
use crate::ops::cross_entropy::{self, STATISTICS, VocabPart};
use crate::ops::linear;
use crate::tensor::TensorRank;

/// The ranks of tensor parallelism of a model on the host.
pub(super) struct TensorGroup {
    comm: Arc<dyn Communicator<HostDevice>>,
    rank: TensorRank,
    /// Of some rows of logits `[rows, STATISTICS]`: this rank's, and those of all ranks.
    stats: DeviceSlice<f32>,
    all_stats: DeviceSlice<f32>,
    /// Whole vocabulary.
    vocab: usize,
}

/// Elements of the statistics of `rows` rows of logits: this rank's, and those of all ranks.
pub(super) fn stats_elems(ranks: usize, rows: usize) -> usize {
    match ranks {
        1 => 0,
        ranks => (ranks + 1) * rows * STATISTICS,
    }
}

impl TensorGroup {
    /// `stats` has [`stats_elems`] elements.
    pub(super) fn new(
        comm: &Arc<dyn Communicator<HostDevice>>,
        rank: TensorRank,
        stats: DeviceSlice<f32>,
        vocab: usize,
    ) -> Self {
        let own = stats.len() / (rank.ranks + 1);
        Self {
            comm: Arc::clone(comm),
            rank,
            stats: stats.slice(0..own),
            all_stats: stats.slice(own..stats.len()),
            vocab,
        }
    }

    pub(super) fn part(&self) -> VocabPart {
        self.rank.vocab(self.vocab)
    }

    /// Sums `values` over the ranks, in place.
    pub(super) fn sum(
        &self,
        stream: &HostStream,
        values: DeviceSlice<f32>,
    ) -> Result<(), ModelError> {
        if values.is_empty() {
            return Ok(());
        }
        let values = values.erase();
        Ok(self
            .comm
            .all_reduce(stream, values, values, ReduceOp::Sum)?)
    }

    /// Gathers the statistics of `rows` rows.
    fn gather_stats(&self, stream: &HostStream, rows: usize) -> Result<(), ModelError> {
        let own = self.stats.slice(0..rows * STATISTICS).erase();
        let all = self.all_stats.slice(0..rows * STATISTICS * self.rank.ranks);
        Ok(self.comm.all_gather(stream, own, all.erase())?)
    }
}

impl<A: HostArch> Decoder<A> {
    /// Enqueues parts of a block's forward, and its output if `out` is set.
    pub(super) fn enqueue_forward(
        &self,
        stream: &HostStream,
        pass: usize,
        params: &[AnySlice],
        parts: &'static [Forward],
        out: Option<DeviceSlice<f32>>,
    ) -> Result<(), ModelError> {
        let arch = Arc::clone(&self.arch);
        let Activations { input, block, .. } = self.buffers.layers.of_pass(pass);
        let label = "forward block";
        self.enqueue(stream, label, pass, params, &[], move |flat, _| {
            // SAFETY: the buffer is this model's, and the stream orders its passes.
            let x = unsafe { input.as_host() };
            for &part in parts {
                arch.forward(part, block, x, &flat);
            }
            if let Some(out) = out {
                // SAFETY: as above; input and output are different buffers.
                arch.output(unsafe { out.as_host_mut() }, block, &flat);
            }
        })
    }

    /// Enqueues a block's forward, with its output if `out` is set.
    pub(super) fn cut_forward(
        &self,
        group: &TensorGroup,
        stream: &HostStream,
        pass: usize,
        params: &[AnySlice],
        out: Option<DeviceSlice<f32>>,
    ) -> Result<(), ModelError> {
        let block = self.buffers.layers.of_pass(pass).block;
        let [to_mid @ .., _] = &Forward::ALL;
        let [_, _, _, mlp @ ..] = &Forward::ALL;
        self.enqueue_forward(stream, pass, params, to_mid, None)?;
        group.sum(stream, A::mid(block))?;
        self.enqueue_forward(stream, pass, params, mlp, out)?;
        out.map_or(Ok(()), |out| group.sum(stream, out))
    }

    /// Enqueues parts of a block's backward.
    pub(super) fn enqueue_backward(
        &self,
        stream: &HostStream,
        pass: usize,
        params: &[AnySlice],
        grads: &[DeviceSlice<f32>],
        parts: &'static [Backward],
    ) -> Result<(), ModelError> {
        let Activations { input, block, .. } = self.buffers.layers.of_pass(pass);
        let scratch = self.buffers.scratch;
        let arch = Arc::clone(&self.arch);
        let label = "backward block";
        self.enqueue(stream, label, pass, params, grads, move |flat, grads| {
            // SAFETY: the buffer is this model's, and the stream orders its passes.
            let x = unsafe { input.as_host() };
            for grad in grads {
                for &part in parts {
                    arch.backward(part, scratch.view(), block, x, &flat, grad);
                }
            }
        })
    }

    /// Enqueues a block's backward.
    pub(super) fn cut_backward(
        &self,
        group: &TensorGroup,
        stream: &HostStream,
        pass: usize,
        params: &[AnySlice],
        grads: &[DeviceSlice<f32>],
    ) -> Result<(), ModelError> {
        let [mlp @ .., _, _, _, _] = &Backward::ALL;
        let [_, to_qkv @ .., _] = &Backward::ALL;
        self.enqueue_backward(stream, pass, params, grads, mlp)?;
        self.sum_narrow(group, stream, pass)?;
        self.enqueue_backward(stream, pass, params, grads, to_qkv)?;
        self.cut_backward_of_input(group, stream, pass, params, grads)
    }

    /// Enqueues the end of a block's backward, after [`Backward::Qkv`].
    pub(super) fn cut_backward_of_input(
        &self,
        group: &TensorGroup,
        stream: &HostStream,
        pass: usize,
        params: &[AnySlice],
        grads: &[DeviceSlice<f32>],
    ) -> Result<(), ModelError> {
        let [_, _, _, _, input @ ..] = &Backward::ALL;
        self.sum_narrow(group, stream, pass)?;
        let partial = self.arch.partial_elems();
        group.sum(stream, self.buffers.scratch.logits.slice(0..partial))?;
        self.enqueue_backward(stream, pass, params, grads, input)
    }

    /// Sums the gradient of a norm's output.
    pub(super) fn sum_narrow(
        &self,
        group: &TensorGroup,
        stream: &HostStream,
        pass: usize,
    ) -> Result<(), ModelError> {
        let row = self.buffers.layers.of_pass(pass).input.len();
        group.sum(stream, self.buffers.scratch.narrow.slice(0..row))
    }

    /// Enqueues the head's backward.
    pub(super) fn cut_backward_of_head(
        &self,
        group: &TensorGroup,
        stream: &HostStream,
        params: &[AnySlice],
        grads: &[DeviceSlice<f32>],
        loss_scale: DeviceSlice<f64>,
    ) -> Result<(), ModelError> {
        let arch = Arc::clone(&self.arch);
        let pass = self.passes.len() - 1;
        let input = self.buffers.layers.of_pass(pass).input;
        let scratch = self.buffers.scratch;
        let head = self.buffers.head;
        let tokens = self.options.tokens();
        self.cut_losses(group, stream, params, tokens, Some((grads, loss_scale)))?;
        group.sum(stream, scratch.narrow.slice(0..input.len()))?;
        let label = "backward head";
        self.enqueue(
            stream,
            label,
            pass,
            params,
            grads,
            move |flat, mut grads| {
                // SAFETY: the buffer is this model's, and the stream orders its passes.
                let x = unsafe { input.as_host() };
                let s = scratch.view();
                s.dres.fill(0.0);
                if let Some(own) = grads.first_mut() {
                    arch.final_norm_backward(
                        s.dres,
                        own,
                        &s.narrow[..x.len()],
                        x,
                        &head.view(),
                        &flat,
                    );
                }
            },
        )
    }

    /// Enqueues the logits of this rank's token `token`, gathers them, and returns those of the whole
    /// vocabulary.
    pub(super) fn cut_token_logits(
        &self,
        group: &TensorGroup,
        stream: &HostStream,
        params: &[AnySlice],
        token: usize,
    ) -> Result<AnySlice, ModelError> {
        let head = self.buffers.head;
        let logits = self.buffers.scratch.logits;
        let part = group.part();
        let tokens = self.options.tokens();
        let len = group.vocab.div_ceil(group.rank.ranks);
        let own = logits.slice(0..len);
        let all = logits.slice(len..len * (group.rank.ranks + 1));
        let pass = self.passes.len() - 1;
        self.enqueue(stream, "token logits", pass, params, &[], move |flat, _| {
            let h = head.view();
            let c = h.out.len() / tokens;
            let out = &h.out[token * c..(token + 1) * c];
            // SAFETY: the buffer is this model's, and the stream orders its passes.
            let own = unsafe { own.as_host_mut() };
            head::logits(&mut own[..part.len], out, &flat, part.len);
        })?;
        group.comm.all_gather(stream, own.erase(), all.erase())?;
        // Only the last ranks' parts are shorter than the others: nothing is between the tokens.
        Ok(all.slice(0..group.vocab).erase())
    }

    /// Enqueues the sum of the losses of the first `tokens` tokens after a forward, or their loss and
    /// gradients.
    pub(super) fn cut_losses(
        &self,
        group: &TensorGroup,
        stream: &HostStream,
        params: &[AnySlice],
        tokens: usize,
        gradients: Option<(&[DeviceSlice<f32>], DeviceSlice<f64>)>,
    ) -> Result<(), ModelError> {
        let pass = self.passes.len() - 1;
        let head = self.buffers.head;
        let loss = self.buffers.loss;
        let scratch = self.buffers.scratch;
        let part = group.part();
        let width = head.out.len() / self.options.tokens();
        let chunk = group.stats.len() / STATISTICS;
        let is_first = group.rank.is_first();
        let TensorRank { rank, ranks } = group.rank;
        let stats = group.stats;
        let all_stats = group.all_stats;

        for start in (0..tokens).step_by(chunk) {
            let end = tokens.min(start + chunk);
            let rows = end - start;
            let label = "logits";
            self.enqueue(stream, label, pass, params, &[], move |flat, _| {
                let logits = &mut scratch.view().logits[..rows * part.len];
                let out = &head.view().out[start * width..end * width];
                head::logits(logits, out, &flat, part.len);
                // SAFETY: the buffer is this model's, and the stream orders its passes.
                let stats = unsafe { stats.as_host_mut() };
                let targets = &flat.batch.targets[start..end];
                let stats = &mut stats[..rows * STATISTICS];
                cross_entropy::part_statistics(stats, logits, targets, part);
            })?;
            group.gather_stats(stream, rows)?;

            let grads = gradients.map_or(&[][..], |(grads, _)| grads);
            let loss_scale = gradients.map(|(_, scale)| scale);
            let label = "losses";
            self.enqueue(
                stream,
                label,
                pass,
                params,
                grads,
                move |flat, mut grads| {
                    let s = scratch.view();
                    let logits = &mut s.logits[..rows * part.len];
                    let out = &head.view().out[start * width..end * width];
                    // SAFETY: as above.
                    let stats = unsafe { all_stats.as_host() };
                    let stats = &stats[..rows * STATISTICS * ranks];
                    let targets = &flat.batch.targets[start..end];
                    let divisor = loss_scale.map_or(1.0, |_| flat.batch.divisor);
                    let scale = loss_scale.map_or(0.0, |scale| {
                        // SAFETY: checked to be host memory; its maker promised ordered accesses.
                        let scale = unsafe { scale.as_host() };
                        scale[0] as f32 / flat.batch.divisor as f32
                    });
                    let sum =
                        cross_entropy::part_gradient(logits, stats, rank, targets, part, scale);
                    if is_first {
                        // SAFETY: as above.
                        let loss = unsafe { loss.as_host_mut() };
                        loss[0] += sum / divisor;
                    }
                    let Some(matrix) = grads.pop() else { return };
                    let dw = match grads.is_empty() {
                        true => &mut matrix[flat.unit(0).range(HEAD)],
                        false => matrix,
                    };
                    let w = flat.head_weight(part.len * width);
                    linear::product(&mut s.narrow[start * width..end * width], logits, w, width);
                    linear::add_weight_gradient(&mut dw[..w.len()], logits, out, width);
                },
            )?;
        }
        Ok(())
    }
}
