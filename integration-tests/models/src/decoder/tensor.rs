//! Ranks of tensor parallelism on the host: what they sum and gather.
//!
//! Each rank has the *own rows* of the residual stream, of norms and of dropout: with sequence
//! parallelism 1/M of them, otherwise all. Products have all rows.
//!
//! | point | all rows are own | with sequence parallelism |
//! |---|---|---|
//! | a norm's output | | all-gather |
//! | a branch's product, the embedding | all-reduce | reduce-scatter |
//! | backward: the gradient of a branch, of the embedding's output | | all-gather |
//! | backward: the gradient of a norm's output | all-reduce | reduce-scatter |
//! | backward: the partial sums of a block | all-reduce, if there are any | all-reduce |
//!
//! Bias, dropout and residual are added to own rows after the sum. The partial sums are the gradients
//! of parameters that all ranks have, of which each rank has computed those of its heads (the norms
//! of queries and keys) or of its rows (with sequence parallelism, all norms). The head exchanges
//! [`STATISTICS`] numbers a token, in place of logits.

use std::sync::Arc;

use zero_alloc::device::{AnySlice, DeviceSlice};
use zero_alloc::host::{HostDevice, HostStream};
use zero_comm::{Communicator, ReduceOp};
use zero_trainer::ModelError;

use super::buffers::{HeadSlices, ScratchSlices};
use super::params::HEAD;
use super::steps::Steps;
use super::{Backward, Branch, Decoder, Forward, HostArch, head};
use crate::ops::cross_entropy::{self, STATISTICS, VocabPart};
use crate::ops::linear;
use crate::options::ModelOptions;
use crate::tensor::TensorRank;

/// The ranks of tensor parallelism of a model on the host.
pub(super) struct TensorGroup {
    comm: Arc<dyn Communicator<HostDevice>>,
    rank: TensorRank,
    /// Whether a rank's own rows are 1/M of all.
    divides_rows: bool,
    /// Tokens of the micro-batch.
    tokens: usize,
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
        options: &ModelOptions,
    ) -> Self {
        let own = stats.len() / (rank.ranks + 1);
        Self {
            comm: Arc::clone(comm),
            rank,
            divides_rows: options.sequence_parallel,
            tokens: options.tokens(),
            stats: stats.slice(0..own),
            all_stats: stats.slice(own..stats.len()),
            vocab,
        }
    }

    pub(super) fn part(&self) -> VocabPart {
        self.rank.vocab(self.vocab)
    }

    /// The first of this rank's own rows.
    fn first_row(&self) -> usize {
        match self.divides_rows {
            true => self.tokens / self.rank.ranks * self.rank.rank,
            false => 0,
        }
    }

    /// The own rows of `rows`.
    fn own(&self, rows: DeviceSlice<f32>) -> DeviceSlice<f32> {
        if !self.divides_rows {
            return rows;
        }
        let len = rows.len() / self.rank.ranks;
        rows.slice(self.rank.rank * len..(self.rank.rank + 1) * len)
    }

    /// Sums `values` over the ranks, in place.
    fn sum(&self, stream: &HostStream, values: DeviceSlice<f32>) -> Result<(), ModelError> {
        if values.is_empty() {
            return Ok(());
        }
        let values = values.erase();
        Ok(self
            .comm
            .all_reduce(stream, values, values, ReduceOp::Sum)?)
    }

    /// Sums `rows` over the ranks, in place; the own rows have the sums.
    fn sum_rows(&self, stream: &HostStream, rows: DeviceSlice<f32>) -> Result<(), ModelError> {
        if !self.divides_rows {
            return self.sum(stream, rows);
        }
        let own = self.own(rows).erase();
        Ok(self
            .comm
            .reduce_scatter(stream, rows.erase(), own, ReduceOp::Sum)?)
    }

    /// Gathers `rows` from the own rows of all ranks, in place.
    fn gather_rows(&self, stream: &HostStream, rows: DeviceSlice<f32>) -> Result<(), ModelError> {
        if !self.divides_rows {
            return Ok(());
        }
        let own = self.own(rows).erase();
        Ok(self.comm.all_gather(stream, own, rows.erase())?)
    }

    /// Gathers the statistics of `rows` rows.
    fn gather_stats(&self, stream: &HostStream, rows: usize) -> Result<(), ModelError> {
        let own = self.stats.slice(0..rows * STATISTICS).erase();
        let all = self.all_stats.slice(0..rows * STATISTICS * self.rank.ranks);
        Ok(self.comm.all_gather(stream, own, all.erase())?)
    }
}

impl<A: HostArch> Steps<'_, A> {
    /// The own rows of `rows`, and the first of them.
    fn own(&self, rows: DeviceSlice<f32>) -> (DeviceSlice<f32>, usize) {
        match &self.model.tensor {
            Some(group) => (group.own(rows), group.first_row()),
            None => (rows, 0),
        }
    }

    /// Sums rows over the ranks, after the steps so far.
    fn sum_rows(&mut self, rows: DeviceSlice<f32>) -> Result<(), ModelError> {
        let Some(group) = &self.model.tensor else {
            return Ok(());
        };
        self.enqueue()?;
        group.sum_rows(self.stream, rows)
    }

    /// Gathers rows from the own rows, after the steps so far.
    fn gather_rows(&mut self, rows: DeviceSlice<f32>) -> Result<(), ModelError> {
        let Some(group) = self
            .model
            .tensor
            .as_ref()
            .filter(|group| group.divides_rows)
        else {
            return Ok(());
        };
        self.enqueue()?;
        group.gather_rows(self.stream, rows)
    }

    /// All rows of a norm's output.
    pub(super) fn norm(&mut self, norm: Forward) -> Result<(), ModelError> {
        let mut block = self.activations().block;
        let nth = usize::from(norm == Forward::Norm2);
        let whole = *A::norms(&mut block)[nth];
        *A::norms(&mut block)[nth] = self.own(whole).0;
        self.forward(norm, block);
        self.gather_rows(whole)
    }

    /// The same in backward, if the block's forward was not the last one: blocks share the whole rows
    /// of norms if each rank has some of them.
    pub(super) fn norm_again(&mut self, norm: Forward) -> Result<(), ModelError> {
        let options = &self.model.options;
        match options.sequence_parallel && !options.activation_checkpointing {
            true => self.norm(norm),
            false => Ok(()),
        }
    }

    /// The own rows of the residual stream behind a branch.
    pub(super) fn branch(
        &mut self,
        branch: Branch,
        out: DeviceSlice<f32>,
        residual: DeviceSlice<f32>,
    ) -> Result<(), ModelError> {
        let block = self.activations().block;
        if self.model.tensor.is_none() {
            self.add(move |arch, flat, _| {
                // SAFETY: a buffer of the model, and the stream orders its passes.
                let residual = unsafe { residual.as_host() };
                // SAFETY: as above; it is another buffer.
                let out = unsafe { out.as_host_mut() };
                arch.branch(branch, out, residual, block, flat);
            });
            return Ok(());
        }
        let sums = self.scratch().narrow.slice(0..self.whole_row());
        self.add(move |arch, flat, _| {
            // SAFETY: a buffer of the model, and the stream orders its passes.
            arch.product(branch, unsafe { sums.as_host_mut() }, block, flat);
        });
        self.sum_rows(sums)?;
        let (own, first) = self.own(sums);
        self.add(move |arch, flat, _| {
            let rows = [residual, own].map(|rows| {
                // SAFETY: a buffer of the model, and the stream orders its passes.
                unsafe { rows.as_host() }
            });
            // SAFETY: as above; it is another buffer.
            let out = unsafe { out.as_host_mut() };
            arch.add_branch(branch, out, rows, first, flat);
        });
        Ok(())
    }

    /// Elements of all rows of the residual stream.
    fn whole_row(&self) -> usize {
        self.scratch().dres.len()
    }

    /// All rows of the gradient that the backward of a branch reads.
    pub(super) fn gradient_of_branch(&mut self, branch: Branch) -> Result<(), ModelError> {
        let s = self.scratch();
        let before = self.model.arch.before_dropout(s, branch, &self.model.draws);
        let (from, first) = self.own(s.dres);
        if before.as_ptr() != s.dres.as_ptr() {
            let (to, _) = self.own(before);
            self.add(move |arch, flat, _| {
                // SAFETY: a buffer of the model, and the stream orders its passes.
                let from = unsafe { from.as_host() };
                // SAFETY: as above; it is another buffer.
                let to = unsafe { to.as_host_mut() };
                arch.drop_gradient(branch, to, from, first, flat);
            });
        }
        self.gather_rows(before)
    }

    /// Sums the gradient of a norm's output over the ranks, and computes the norm's backward for own
    /// rows.
    pub(super) fn norm_backward(&mut self, norm: Backward) -> Result<(), ModelError> {
        let s = self.scratch();
        let narrow = s.narrow.slice(0..self.whole_row());
        self.sum_rows(narrow)?;
        let own = ScratchSlices {
            dres: self.own(s.dres).0,
            narrow: self.own(narrow).0,
            ..s
        };
        self.backward(norm, self.activations().block, own);
        Ok(())
    }

    fn partial_sums(&self) -> DeviceSlice<f32> {
        let elems = self.model.arch.partial_elems();
        self.scratch().logits.slice(0..elems)
    }

    pub(super) fn begin_partial_sums(&mut self) {
        let sums = self.partial_sums();
        if !sums.is_empty() {
            // SAFETY: a buffer of the model, and the stream orders its passes.
            self.add(move |_, _, _| unsafe { sums.as_host_mut() }.fill(0.0));
        }
    }

    pub(super) fn end_partial_sums(&mut self) -> Result<(), ModelError> {
        let sums = self.partial_sums();
        let Some(group) = self.model.tensor.as_ref().filter(|_| !sums.is_empty()) else {
            return Ok(());
        };
        self.enqueue()?;
        group.sum(self.stream, sums)?;
        self.backward(
            Backward::PartialSums,
            self.activations().block,
            self.scratch(),
        );
        Ok(())
    }

    /// The forward of the embedding.
    pub(super) fn embed(&mut self) -> Result<(), ModelError> {
        let out = self.activations().output;
        let sums = match &self.model.tensor {
            Some(_) => self.scratch().narrow.slice(0..self.whole_row()),
            None => out,
        };
        self.add(move |arch, flat, _| {
            // SAFETY: a buffer of the model, and the stream orders its passes.
            arch.embed(unsafe { sums.as_host_mut() }, flat);
        });
        self.sum_rows(sums)?;
        let (own, first) = self.own(sums);
        let is_out = own.as_ptr() == out.as_ptr();
        self.add(move |arch, flat, _| {
            // SAFETY: as above.
            let out = unsafe { out.as_host_mut() };
            if !is_out {
                // SAFETY: as above; it is another buffer.
                out.copy_from_slice(unsafe { own.as_host() });
            }
            arch.drop_embedding(out, first, flat);
        });
        self.enqueue()
    }

    /// The backward of the embedding.
    pub(super) fn embed_backward(&mut self) -> Result<(), ModelError> {
        let dres = self.scratch().dres;
        let (own, first) = self.own(dres);
        self.add(move |arch, flat, _| {
            // SAFETY: a buffer of the model, and the stream orders its passes.
            arch.drop_embedding(unsafe { own.as_host_mut() }, first, flat);
        });
        self.gather_rows(dres)?;
        self.add(move |arch, flat, grad| {
            // SAFETY: as above.
            arch.embed_backward(grad, flat.unit(0), unsafe { dres.as_host() }, flat);
        });
        self.enqueue()
    }

    /// The head's norm of own rows.
    fn own_head(&self) -> HeadSlices {
        let head = self.model.buffers.head;
        HeadSlices {
            out: self.own(head.out).0,
            ..head
        }
    }

    /// The forward of the head: all rows of its norm.
    pub(super) fn final_norm(&mut self) -> Result<(), ModelError> {
        let x = self.activations().input;
        let head = self.own_head();
        self.add(move |arch, flat, _| {
            // SAFETY: a buffer of the model, and the stream orders its passes.
            arch.final_norm(&mut head.view(), unsafe { x.as_host() }, flat);
        });
        self.gather_rows(self.model.buffers.head.out)?;
        self.enqueue()
    }

    /// The backward of the head's norm from the gradient of its output, of which each rank has a part of
    /// the sum in `scratch.narrow`.
    fn final_norm_backward(&mut self) -> Result<(), ModelError> {
        let s = self.scratch();
        let x = self.activations().input;
        let head = self.own_head();
        let sums = s.narrow.slice(0..self.whole_row());
        self.sum_rows(sums)?;
        let [dout, dres] = [sums, s.dres].map(|rows| self.own(rows).0);
        let group = self.model.tensor.as_ref();
        let divided = group.filter(|group| group.divides_rows);
        let elems = self.model.arch.final_norm_elems();
        let partial = s.logits.slice(0..divided.map_or(0, |_| elems));

        self.add(move |arch, flat, grad| {
            let [dres, partial] = [dres, partial].map(|slice| {
                // SAFETY: distinct buffers of the model, and the stream orders its passes.
                unsafe { slice.as_host_mut() }
            });
            let [dout, x] = [dout, x].map(|slice| {
                // SAFETY: as above.
                unsafe { slice.as_host() }
            });
            dres.fill(0.0);
            partial.fill(0.0);
            let dnorm = match partial.is_empty() {
                true => arch.final_norm_grad(grad, flat),
                false => partial,
            };
            arch.final_norm_backward(dres, dnorm, dout, x, &head.view(), flat);
        });
        if let Some(group) = divided {
            self.enqueue()?;
            group.sum(self.stream, partial)?;
            self.add(move |arch, flat, grad| {
                // SAFETY: as above.
                let sums = unsafe { partial.as_host() };
                let all = arch.final_norm_grad(grad, flat).iter_mut().zip(sums);
                all.for_each(|(all, sum)| *all += sum);
            });
        }
        self.enqueue()
    }
}

impl<A: HostArch> Decoder<A> {
    /// Enqueues the head's backward.
    pub(super) fn cut_backward_of_head(
        &self,
        group: &TensorGroup,
        stream: &HostStream,
        params: &[AnySlice],
        grads: &[DeviceSlice<f32>],
        loss_scale: DeviceSlice<f64>,
    ) -> Result<(), ModelError> {
        let pass = self.passes.len() - 1;
        let tokens = self.options.tokens();
        self.cut_losses(group, stream, params, tokens, Some((grads, loss_scale)))?;
        Steps::new(self, stream, "backward head", pass, params, grads).final_norm_backward()
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
