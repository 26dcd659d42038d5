//! A linear layer on CUDA: its matrix products, and those of its adapters.

use zero_alloc::device::AnySlice;
use zero_trainer::Grad;

use super::adapter::Adapter;
use super::pass_context::{PassContext, onto_grad};
use crate::cuda::OpError;
use crate::cuda::matmul::{Epilogue, Matrix, Product};
use crate::ops::linear::MatrixOrder;

/// A linear layer `y = x w + bias`: x `[rows, inputs]`, y `[rows, outputs]`.
pub(super) struct Linear<'a> {
    pub(super) cx: &'a PassContext<'a>,
    pub(super) weight: AnySlice,
    /// Empty if there is none.
    pub(super) bias: AnySlice,
    pub(super) outputs: usize,
    pub(super) order: MatrixOrder,
    /// Those of parts of its outputs.
    pub(super) adapters: Vec<Adapter<'a>>,
}

impl Linear<'_> {
    fn inputs(&self) -> usize {
        self.weight.len() / self.outputs.max(1)
    }

    /// The matrix `[inputs, outputs]`.
    fn matrix(&self) -> Matrix {
        match self.order {
            MatrixOrder::InputsFirst => Matrix::new(self.weight, self.outputs),
            MatrixOrder::OutputsFirst => Matrix::new(self.weight, self.inputs()).t(),
        }
    }

    /// `y = x w + bias`, for [`Self::run_forward`].
    pub(super) fn forward(&self, y: AnySlice, x: AnySlice) -> Product {
        let x = Matrix::new(x, self.inputs());
        let product = Product::new(x, self.matrix(), Matrix::new(y, self.outputs));
        match self.bias.is_empty() {
            true => product,
            false => product.with(Epilogue::Bias(self.bias)),
        }
    }

    /// `dx = dy w^T`, for [`Self::run_input_gradient`].
    pub(super) fn input_gradient(&self, dx: AnySlice, dy: AnySlice) -> Product {
        let dy = Matrix::new(dy, self.outputs);
        Product::new(dy, self.matrix().t(), Matrix::new(dx, self.inputs()))
    }

    /// `dw += x^T dy` or `dw = x^T dy`.
    pub(super) fn weight_gradient(&self, dw: Grad, x: AnySlice, dy: AnySlice) -> Product {
        let out = dw.elements();
        let x = Matrix::new(x, self.inputs());
        let dy = Matrix::new(dy, self.outputs);
        // The gradient as it is stored: of w, or of its transpose.
        let product = match self.order {
            MatrixOrder::InputsFirst => Product::new(x.t(), dy, Matrix::new(out, self.outputs)),
            MatrixOrder::OutputsFirst => Product::new(dy.t(), x, Matrix::new(out, self.inputs())),
        };
        onto_grad(product, dw)
    }

    fn run(&self, product: &Product) -> Result<(), OpError> {
        self.cx.ops.matmul.run(self.cx.stream, product)
    }

    /// Enqueues `product`, which is [`Self::forward`] with any epilogue and addend, and those of
    /// the adapters.
    ///
    /// Why adapters come first: an epilogue needs all sums, and theirs are an addend of the base's.
    /// Where some outputs have no adapter, the base writes all, and the adapters add to theirs:
    /// such layers have no other epilogue than a bias.
    pub(super) fn run_forward(&self, product: &Product) -> Result<(), OpError> {
        let x = product.left.data();
        let out = product.out;
        let adapted = self.adapters.iter().map(|adapter| adapter.of.outputs.len());
        if adapted.sum::<usize>() < self.outputs {
            self.run(product)?;
            let mut adapters = self.adapters.iter();
            return adapters.try_for_each(|adapter| adapter.forward(out, Some(out), x));
        }
        for adapter in &self.adapters {
            adapter.forward(out, product.add, x)?;
        }
        self.run(&product.onto_out())
    }

    /// Enqueues what the adapters' gradients read of the outputs' gradient, before the two below.
    pub(super) fn begin_backward(&self, dy: AnySlice) -> Result<(), OpError> {
        let dy = Matrix::new(dy, self.outputs);
        let mut adapters = self.adapters.iter();
        adapters.try_for_each(|adapter| adapter.hidden_gradient(dy))
    }

    /// Enqueues `product`, which is [`Self::input_gradient`] with any epilogue, and those of the
    /// adapters.
    pub(super) fn run_input_gradient(&self, product: &Product) -> Result<(), OpError> {
        let dx = product.out.data();
        for (i, adapter) in self.adapters.iter().enumerate() {
            adapter.input_gradient(dx, i > 0)?;
        }
        match self.adapters.is_empty() {
            true => self.run(product),
            false => self.run(&product.onto_out()),
        }
    }

    /// Enqueues the gradients of the weight, unless `dw` is empty, and of the adapters.
    pub(super) fn run_weight_gradients(
        &self,
        dw: Grad,
        x: AnySlice,
        dy: AnySlice,
    ) -> Result<(), OpError> {
        if !dw.elements().is_empty() {
            self.run(&self.weight_gradient(dw, x, dy))?;
        }
        let dy = Matrix::new(dy, self.outputs);
        let mut adapters = self.adapters.iter();
        adapters.try_for_each(|adapter| adapter.weight_gradients(x, dy))
    }
}
