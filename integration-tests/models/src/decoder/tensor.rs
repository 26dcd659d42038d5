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
//! of queries and keys) or of its rows (with sequence parallelism, all norms), and of adapters A of
//! first matrices and B of second ones. The head exchanges
//! [`STATISTICS`](crate::ops::cross_entropy::STATISTICS) numbers a token, in place of logits.

use zero_alloc::device::DeviceSlice;
use zero_trainer::ModelError;

use super::operations::{Backward, Branch, Forward, add};
use super::slices::{HeadSlices, ScratchSlices};
use super::steps::Steps;

impl Steps<'_> {
    /// The own rows of `rows`, and the first of them.
    fn own(&self, rows: DeviceSlice<f32>) -> (DeviceSlice<f32>, usize) {
        match &self.groups.tensor {
            Some(group) => (rows.slice(group.own(rows.len())), group.first_row()),
            None => (rows, 0),
        }
    }

    /// Sums rows over the ranks, after the steps so far.
    fn sum_rows(&mut self, rows: DeviceSlice<f32>) -> Result<(), ModelError> {
        let Some(group) = &self.groups.tensor else {
            return Ok(());
        };
        self.enqueue()?;
        Ok(group.sum_rows(self.stream, rows.erase())?)
    }

    /// Gathers rows from the own rows, after the steps so far.
    fn gather_rows(&mut self, rows: DeviceSlice<f32>) -> Result<(), ModelError> {
        let Some(group) = self
            .groups
            .tensor
            .as_ref()
            .filter(|group| group.divides_rows)
        else {
            return Ok(());
        };
        self.enqueue()?;
        Ok(group.gather_rows(self.stream, rows.erase())?)
    }

    /// All rows of a norm's output.
    pub(super) fn norm(&mut self, norm: Forward) -> Result<(), ModelError> {
        let mut block = self.activations().block;
        let place = match norm {
            Forward::Norm2 => &mut block.norm2,
            _ => &mut block.norm1,
        };
        let whole = *place;
        *place = self.own(whole).0;
        self.forward(norm, block);
        self.gather_rows(whole)
    }

    /// The same in backward, if the block's forward was not the last one: blocks share the whole rows
    /// of norms if each rank has some of them.
    pub(super) fn norm_again(&mut self, norm: Forward) -> Result<(), ModelError> {
        let options = &self.engine.options;
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
        if self.groups.tensor.is_none() {
            self.add(move |ops, flat, _| {
                // SAFETY: a buffer of the model, and the stream orders its passes.
                let residual = unsafe { residual.as_host() };
                // SAFETY: as above; it is another buffer.
                let out = unsafe { out.as_host_mut() };
                ops.branch(branch, out, residual, block, flat);
            });
            return Ok(());
        }
        let sums = self.scratch().narrow.slice(0..self.whole_row());
        self.add(move |ops, flat, _| {
            // SAFETY: a buffer of the model, and the stream orders its passes.
            ops.product(branch, unsafe { sums.as_host_mut() }, block, flat);
        });
        self.sum_rows(sums)?;
        let (own, first) = self.own(sums);
        self.add(move |ops, flat, _| {
            let rows = [residual, own].map(|rows| {
                // SAFETY: a buffer of the model, and the stream orders its passes.
                unsafe { rows.as_host() }
            });
            // SAFETY: as above; it is another buffer.
            let out = unsafe { out.as_host_mut() };
            ops.add_branch(branch, out, rows, first, flat);
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
        let before = self.engine.ops.before_dropout(s, &self.engine.draws);
        let (from, first) = self.own(s.dres);
        if before.as_ptr() != s.dres.as_ptr() {
            let (to, _) = self.own(before);
            self.add(move |ops, flat, _| {
                // SAFETY: a buffer of the model, and the stream orders its passes.
                let from = unsafe { from.as_host() };
                // SAFETY: as above; it is another buffer.
                let to = unsafe { to.as_host_mut() };
                ops.drop_gradient(branch, to, from, first, flat);
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
        let elems = self.engine.ops.config.partial_elems(&self.engine.options);
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
        let Some(group) = self.groups.tensor.as_ref().filter(|_| !sums.is_empty()) else {
            return Ok(());
        };
        self.enqueue()?;
        group.sum(self.stream, sums.erase())?;
        self.add(move |ops, flat, grad| {
            // SAFETY: a buffer of the model, and the stream orders its passes.
            ops.add_partial_sums(grad, unsafe { sums.as_host_mut() }, flat);
        });
        Ok(())
    }

    /// The forward of the embedding.
    pub(super) fn embed(&mut self) -> Result<(), ModelError> {
        let out = self.activations().output;
        let sums = match &self.groups.tensor {
            Some(_) => self.scratch().narrow.slice(0..self.whole_row()),
            None => out,
        };
        self.add(move |ops, flat, _| {
            // SAFETY: a buffer of the model, and the stream orders its passes.
            ops.embed(unsafe { sums.as_host_mut() }, flat);
        });
        self.sum_rows(sums)?;
        let (own, first) = self.own(sums);
        let is_out = own.as_ptr() == out.as_ptr();
        self.add(move |ops, flat, _| {
            // SAFETY: as above.
            let out = unsafe { out.as_host_mut() };
            if !is_out {
                // SAFETY: as above; it is another buffer.
                out.copy_from_slice(unsafe { own.as_host() });
            }
            ops.drop_embedding(out, first, flat);
        });
        self.enqueue()
    }

    /// The backward of the embedding.
    pub(super) fn embed_backward(&mut self) -> Result<(), ModelError> {
        let dres = self.scratch().dres;
        let (own, first) = self.own(dres);
        self.add(move |ops, flat, _| {
            // SAFETY: a buffer of the model, and the stream orders its passes.
            ops.drop_embedding(unsafe { own.as_host_mut() }, first, flat);
        });
        self.gather_rows(dres)?;
        self.add(move |ops, flat, grad| {
            // SAFETY: as above.
            ops.embed_backward(grad, unsafe { dres.as_host() }, flat);
        });
        self.enqueue()
    }

    /// The head's norm of own rows.
    fn own_head(&self) -> HeadSlices {
        let head = self.engine.buffers.head;
        HeadSlices {
            out: self.own(head.out).0,
            ..head
        }
    }

    /// The forward of the head: all rows of its norm.
    pub(super) fn final_norm(&mut self) -> Result<(), ModelError> {
        let x = self.activations().input;
        let head = self.own_head();
        self.add(move |ops, flat, _| {
            // SAFETY: a buffer of the model, and the stream orders its passes.
            ops.final_norm(&mut head.view(), unsafe { x.as_host() }, flat);
        });
        self.gather_rows(self.engine.buffers.head.out)?;
        self.enqueue()
    }

    /// The backward of the head's norm from the gradient of its output, of which each rank has a part of
    /// the sum in `scratch.narrow`.
    pub(super) fn final_norm_backward(&mut self) -> Result<(), ModelError> {
        let s = self.scratch();
        let x = self.activations().input;
        let head = self.own_head();
        let sums = s.narrow.slice(0..self.whole_row());
        self.sum_rows(sums)?;
        let [dout, dres] = [sums, s.dres].map(|rows| self.own(rows).0);
        let group = self.groups.tensor.as_ref();
        let trains = self.engine.ops.config.lora.is_none();
        let divided = group.filter(|group| group.divides_rows && trains);
        let elems = self.engine.ops.final_norm_elems();
        let partial = s.logits.slice(0..divided.map_or(0, |_| elems));

        self.add(move |ops, flat, grad| {
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
                true => ops.final_norm_grad(grad, flat),
                false => partial,
            };
            ops.final_norm_backward(dres, dnorm, dout, x, &head.view(), flat);
        });
        if let Some(group) = divided {
            self.enqueue()?;
            group.sum(self.stream, partial.erase())?;
            self.add(move |ops, flat, grad| {
                // SAFETY: as above.
                let sums = unsafe { partial.as_host() };
                add(ops.final_norm_grad(grad, flat), sums);
            });
        }
        self.enqueue()
    }
}
