//! An adapter on CUDA: `scale B A dropout(x)`, as on the host (`ops/adapted_linear.rs`), by matrix
//! products with few rows or columns.

use zero_alloc::device::AnySlice;
use zero_trainer::Grad;

use super::pass_context::{PassContext, onto_grad};
use crate::cuda::OpError;
use crate::cuda::dropout::{self, Dropout};
use crate::cuda::matmul::{Matrix, Product};
use crate::decoder::config::DecoderConfig;
use crate::decoder::params::AdapterRanges;
use crate::lora::LoraConfig;

/// An adapter of some outputs of a linear layer.
pub(super) struct Adapter<'a> {
    cx: &'a PassContext<'a>,
    pub(super) of: &'a AdapterRanges,
    /// `[r, inputs]`.
    a: Matrix,
    /// `[outputs, r]`.
    b: Matrix,
    inputs: usize,
    r: usize,
    scale: f32,
    dropout: Option<Dropout>,
    /// `scale A dropout(x)` `[M, r]`, and its gradient times `scale`.
    hidden: Matrix,
    dhidden: Matrix,
}

impl<'a> Adapter<'a> {
    /// Those of a linear layer.
    pub(super) fn of_layer(
        cx: &'a PassContext<'a>,
        lora: &LoraConfig,
        ranges: &'a [AdapterRanges],
    ) -> Vec<Self> {
        let r = lora.r;
        let tokens = cx.s.losses.len();
        let hidden = |i: usize| {
            let range = i * tokens * r..(i + 1) * tokens * r;
            Matrix::new(cx.s.low_rank.slice(range), r)
        };
        let adapter = |(i, of): (usize, &'a AdapterRanges)| {
            let [a, b] = [&of.a, &of.b].map(|range| cx.p.params[1].slice(range.clone()));
            let inputs = a.len() / r;
            let site = DecoderConfig::adapter_site(cx.layer, of.place);
            let column = of.first_input(r, cx.tensor_rank());
            let dropout = cx.dropout(lora.dropout, site);
            Self {
                cx,
                of,
                a: Matrix::new(a, inputs),
                b: Matrix::new(b, r),
                inputs,
                r,
                scale: lora.scale(),
                dropout: dropout.map(|dropout| dropout.from_column(column)),
                hidden: hidden(0),
                dhidden: hidden(1 + i),
            }
        };
        ranges.iter().enumerate().map(adapter).collect()
    }

    fn run(&self, product: &Product) -> Result<(), OpError> {
        self.cx.ops.matmul.run(self.cx.stream, product)
    }

    /// The columns of its outputs.
    pub(super) fn columns(&self, outputs: Matrix) -> Matrix {
        outputs.columns(self.of.outputs.clone())
    }

    /// `y = residual + dropout(x)` `[M, inputs]`; what is `None` is left out.
    fn drop(&self, y: AnySlice, x: AnySlice, residual: Option<AnySlice>) -> Result<(), OpError> {
        let PassContext { ops, stream, .. } = *self.cx;
        let kernels = &ops.kernels;
        dropout::add_residual(kernels, stream, y, x, residual, self.inputs, self.dropout)
    }

    /// Computes `hidden` of x `[M, inputs]`, and returns x behind its dropout.
    fn hide(&self, x: AnySlice) -> Result<Matrix, OpError> {
        let x = match self.dropout {
            Some(_) => {
                let dropped = self.cx.s.dropped.slice(0..x.len());
                self.drop(dropped, x, None)?;
                dropped
            }
            None => x,
        };
        let x = Matrix::new(x, self.inputs);
        let product = Product::new(x, self.a.t(), self.hidden);
        self.run(&product.times(self.scale))?;
        Ok(x)
    }

    /// Writes its part of the layer's outputs `[M, width]` of x to its columns of `y`, added to
    /// those of `add`.
    pub(super) fn forward(
        &self,
        y: Matrix,
        add: Option<Matrix>,
        x: AnySlice,
    ) -> Result<(), OpError> {
        self.hide(x)?;
        let product = Product::new(self.hidden, self.b.t(), self.columns(y));
        self.run(&Product {
            add: add.map(|add| self.columns(add)),
            ..product
        })
    }

    /// Computes the gradient of the result of A, which the other gradients read, from that of the
    /// layer's outputs.
    pub(super) fn hidden_gradient(&self, dy: Matrix) -> Result<(), OpError> {
        let product = Product::new(self.columns(dy), self.b, self.dhidden);
        self.run(&product.times(self.scale))
    }

    /// Writes the gradient of x to `dx` `[M, inputs]`, or adds it there.
    pub(super) fn input_gradient(&self, dx: AnySlice, adds: bool) -> Result<(), OpError> {
        let of = |dx| Product::new(self.dhidden, self.a, Matrix::new(dx, self.inputs));
        match (self.dropout, adds) {
            (None, false) => self.run(&of(dx)),
            (None, true) => self.run(&of(dx).onto_out()),
            (Some(_), _) => {
                let dropped = self.cx.s.dropped.slice(0..dx.len());
                self.run(&of(dropped))?;
                self.drop(dx, dropped, adds.then_some(dx))
            }
        }
    }

    /// Computes the gradients of A and B.
    pub(super) fn weight_gradients(&self, x: AnySlice, dy: Matrix) -> Result<(), OpError> {
        let x = self.hide(x)?;
        let [da, db] = self.places();
        let out = |grad: Grad, cols| Matrix::new(grad.elements(), cols);
        let product = Product::new(self.columns(dy).t(), self.hidden, out(db, self.r));
        self.run(&onto_grad(product, db))?;
        let product = Product::new(self.dhidden.t(), x, out(da, self.inputs));
        self.run(&onto_grad(product, da))
    }

    /// The places of the gradients of A and B: the gradients themselves, or partial sums.
    fn places(&self) -> [Grad; 2] {
        let [a, b] = &self.of.partial;
        [(&self.of.a, a), (&self.of.b, b)].map(|(range, partial)| match partial.is_empty() {
            true => self.cx.p.grads[0].slice(range.clone()),
            false => Grad::Write(self.cx.s.sums.slice(partial.clone()).erase()),
        })
    }

    /// Adds the partial sums over the ranks to the gradients, or writes them there.
    pub(super) fn finish_sums(&self) -> Result<(), OpError> {
        let of = self.of;
        for (range, partial) in [&of.a, &of.b].into_iter().zip(&of.partial) {
            if !partial.is_empty() {
                let grad = self.cx.p.grads[0].slice(range.clone());
                self.cx.finish_sums(&[grad.into()], partial.clone())?;
            }
        }
        Ok(())
    }
}
