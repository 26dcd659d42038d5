//! A linear layer on CUDA: its matrix products.

use zero_alloc::device::AnySlice;
use zero_trainer::Grad;

use crate::cuda::matmul::{Epilogue, Matrix, Product};
use crate::ops::linear::MatrixOrder;

/// A linear layer `y = x w + bias`: x `[rows, inputs]`, y `[rows, outputs]`.
#[derive(Clone, Copy)]
pub(super) struct Linear {
    pub(super) weight: AnySlice,
    /// Empty if there is none.
    pub(super) bias: AnySlice,
    pub(super) outputs: usize,
    pub(super) order: MatrixOrder,
}

impl Linear {
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

    /// `y = x w + bias`.
    pub(super) fn forward(&self, y: AnySlice, x: AnySlice) -> Product {
        let x = Matrix::new(x, self.inputs());
        let product = Product::new(x, self.matrix(), Matrix::new(y, self.outputs));
        match self.bias.is_empty() {
            true => product,
            false => product.with(Epilogue::Bias(self.bias)),
        }
    }

    /// `dx = dy w^T`.
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
        match dw {
            Grad::Add(_) => product.onto_out(),
            Grad::Write(_) => product,
        }
    }
}
