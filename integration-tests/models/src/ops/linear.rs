//! Linear layers and their matrix products.
//!
//! Matrices are row-major.
//!
//! faer reads the second operand of a row-major product down its columns: one cache line an element
//! if it is the transpose of a tensor. So weight gradients, and attention, transpose that operand
//! first. Products in bf16 ([`super::bf16`]) pack both operands and transpose nothing.

use faer::prelude::ReborrowMut;
use faer::{Accum, MatMut, MatRef, Par};
use half::bf16;
use multiversion::multiversion;
use rayon::prelude::*;

use super::bf16::{Bf16Products, Elems, Operand};
use super::transpose::transpose;
use super::{rows_per_thread, with_scratch};

/// A row-major slice as a `[rows, cols]` matrix.
pub(super) fn mat(data: &[f32], rows: usize, cols: usize) -> MatRef<'_, f32> {
    MatRef::from_row_major_slice(data, rows, cols)
}

/// A row-major slice as a writable `[rows, cols]` matrix.
pub(super) fn mat_mut(data: &mut [f32], rows: usize, cols: usize) -> MatMut<'_, f32> {
    MatMut::from_row_major_slice_mut(data, rows, cols)
}

/// `out = alpha a b`, or `out += alpha a b`, on the calling thread.
pub(super) fn gemm(
    out: MatMut<'_, f32>,
    accum: Accum,
    a: MatRef<'_, f32>,
    b: MatRef<'_, f32>,
    alpha: f32,
) {
    faer::linalg::matmul::matmul(out, accum, a, b, alpha, Par::Seq);
}

/// Columns of a product that are computed at once: whole tiles of faer's kernels (24 with AVX2, 96
/// with AVX-512). Over all columns its chunks for the level-2 cache would end within a tile. Level
/// 2 also holds the panel of `w`.
const PANEL: usize = 96;

/// `y = x w`, or `y += x w`, on the calling thread.
fn panels(mut y: MatMut<'_, f32>, accum: Accum, x: MatRef<'_, f32>, w: MatRef<'_, f32>) {
    let n = w.ncols();
    for first in (0..n).step_by(PANEL) {
        let cols = PANEL.min(n - first);
        let panel = y.rb_mut().subcols_mut(first, cols);
        gemm(panel, accum, x, w.subcols(first, cols), 1.0);
    }
}

/// Some columns of a row-major matrix.
#[derive(Clone, Copy, Debug)]
pub(super) struct Columns {
    /// The first.
    pub(super) first: usize,
    /// Their number.
    pub(super) len: usize,
    /// Elements of a row.
    pub(super) width: usize,
}

impl Columns {
    /// All of a matrix whose rows have `width` elements.
    pub(super) fn all(width: usize) -> Self {
        Self {
            first: 0,
            len: width,
            width,
        }
    }

    fn rows(self, elems: &[f32]) -> usize {
        elems.len() / self.width
    }

    fn mat(self, elems: &[f32]) -> MatRef<'_, f32> {
        let all = mat(elems, self.rows(elems), self.width);
        all.subcols(self.first, self.len)
    }

    fn mat_mut(self, elems: &mut [f32]) -> MatMut<'_, f32> {
        let rows = self.rows(elems);
        mat_mut(elems, rows, self.width).subcols_mut(self.first, self.len)
    }

    /// As an operand whose lines are the rows.
    fn by_rows(self, elems: &[f32]) -> Operand<'_> {
        let shape = [self.rows(elems), self.len];
        Operand::rows(Elems::F32(&elems[self.first..]), shape, self.width)
    }

    /// As an operand whose lines are the columns.
    fn by_columns(self, elems: &[f32]) -> Operand<'_> {
        let shape = [self.rows(elems), self.len];
        Operand::columns(Elems::F32(&elems[self.first..]), shape, self.width)
    }
}

/// The order of the elements of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixOrder {
    /// `[inputs, outputs]`, as GPT-2's Conv1D stores it.
    InputsFirst,
    /// `[outputs, inputs]`, as torch.nn.Linear stores it.
    OutputsFirst,
}

/// The elements of a matrix.
#[derive(Clone, Copy, Debug)]
pub enum Weight<'a> {
    /// Products are in fp32.
    F32(&'a [f32]),
    /// Products round their other operand, and both operands of a weight gradient, to bf16.
    Bf16(&'a [bf16], Bf16Products),
}

impl Weight<'_> {
    /// Its elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(elems) => elems.len(),
            Self::Bf16(elems, _) => elems.len(),
        }
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<'a> From<&'a [f32]> for Weight<'a> {
    fn from(elems: &'a [f32]) -> Self {
        Self::F32(elems)
    }
}

/// A linear layer `y = x w + bias`: x `[rows, inputs]`, y `[rows, outputs]`.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    /// The matrix, of `inputs * outputs` elements.
    pub weight: Weight<'a>,
    /// Empty if there is none.
    pub bias: &'a [f32],
    /// Elements of a row of y.
    pub outputs: usize,
    /// The order of the matrix.
    pub order: MatrixOrder,
}

impl<'a> Linear<'a> {
    /// Without a bias.
    pub fn of_matrix(weight: impl Into<Weight<'a>>, outputs: usize, order: MatrixOrder) -> Self {
        Self {
            weight: weight.into(),
            bias: &[],
            outputs,
            order,
        }
    }

    /// Elements of a row of x.
    pub fn inputs(&self) -> usize {
        self.weight.len() / self.outputs
    }

    /// The matrix `[inputs, outputs]` of `weight`.
    fn matrix(&self, weight: &'a [f32]) -> MatRef<'a, f32> {
        match self.order {
            MatrixOrder::InputsFirst => mat(weight, self.inputs(), self.outputs),
            MatrixOrder::OutputsFirst => mat(weight, self.outputs, self.inputs()).transpose(),
        }
    }

    /// The matrix of `weight` as an operand of products that sum over its inputs or over its
    /// outputs.
    fn operand(&self, weight: &'a [bf16], sums_over: MatrixOrder) -> Operand<'a> {
        let elems = Elems::Bf16(weight);
        let [inputs, outputs] = [self.inputs(), self.outputs];
        let shape = match self.order {
            MatrixOrder::InputsFirst => [inputs, outputs],
            MatrixOrder::OutputsFirst => [outputs, inputs],
        };
        match self.order == sums_over {
            true => Operand::columns(elems, shape, shape[1]),
            false => Operand::rows(elems, shape, shape[1]),
        }
    }

    /// `y = x w + bias`.
    pub fn forward(&self, y: &mut [f32], x: &[f32]) {
        if self.bias.is_empty() {
            return self.product(y, x);
        }
        y.par_chunks_mut(self.outputs)
            .for_each(|y| y.copy_from_slice(self.bias));
        self.product_of((y, None), Accum::Add, (x, None));
    }

    /// `y = x w`.
    pub fn product(&self, y: &mut [f32], x: &[f32]) {
        self.product_of((y, None), Accum::Replace, (x, None));
    }

    /// `y = residual + bias + x w`: the projection back onto the residual stream.
    pub fn forward_residual(&self, y: &mut [f32], residual: &[f32], x: &[f32]) {
        let len = rows_per_thread(y.len() / self.outputs) * self.outputs;
        let parts = (y.par_chunks_mut(len), residual.par_chunks(len)).into_par_iter();
        parts.for_each(|(y, residual)| match self.bias.is_empty() {
            true => y.copy_from_slice(residual),
            false => sum_with_bias(y, residual, self.bias),
        });
        self.product_of((y, None), Accum::Add, (x, None));
    }

    /// `dx = dy w^T`.
    pub fn input_gradient(&self, dx: &mut [f32], dy: &[f32]) {
        self.input_gradient_of((dx, None), Accum::Replace, (dy, None));
    }

    /// `y = x w`, or `y += x w`, of all columns, or of those given.
    pub(super) fn product_of(
        &self,
        (y, to): (&mut [f32], Option<Columns>),
        accum: Accum,
        (x, from): (&[f32], Option<Columns>),
    ) {
        let to = to.unwrap_or(Columns::all(self.outputs));
        let from = from.unwrap_or(Columns::all(self.inputs()));
        self.multiply((y, to), accum, (x, from), MatrixOrder::InputsFirst);
    }

    /// `dx = dy w^T`, or `dx += dy w^T`, of all columns, or of those given.
    pub(super) fn input_gradient_of(
        &self,
        (dx, to): (&mut [f32], Option<Columns>),
        accum: Accum,
        (dy, from): (&[f32], Option<Columns>),
    ) {
        let to = to.unwrap_or(Columns::all(self.inputs()));
        let from = from.unwrap_or(Columns::all(self.outputs));
        self.multiply((dx, to), accum, (dy, from), MatrixOrder::OutputsFirst);
    }

    /// The product with the matrix, whose sums are over its inputs, or over its outputs.
    fn multiply(
        &self,
        (y, to): (&mut [f32], Columns),
        accum: Accum,
        (x, from): (&[f32], Columns),
        sums_over: MatrixOrder,
    ) {
        match self.weight {
            Weight::F32(w) => {
                let w = match sums_over {
                    MatrixOrder::InputsFirst => self.matrix(w),
                    MatrixOrder::OutputsFirst => self.matrix(w).transpose(),
                };
                let rows = rows_per_thread(to.rows(y));
                let y = y.par_chunks_mut(rows * to.width);
                let parts = (y, x.par_chunks(rows * from.width)).into_par_iter();
                parts.for_each(|(y, x)| panels(to.mat_mut(y), accum, from.mat(x), w));
            }
            Weight::Bf16(w, products) => {
                let w = self.operand(w, sums_over);
                let is_added = matches!(accum, Accum::Add);
                products.product(to.mat_mut(y), is_added, &from.by_rows(x), &w);
            }
        }
    }

    /// Adds the gradients of the matrix and, if there is one, of the bias.
    pub fn weight_gradient(&self, grads: [&mut [f32]; 2], x: &[f32], dy: &[f32]) {
        let [dw, dbias] = grads;
        self.matrix_gradient(dw, x, (dy, Columns::all(self.outputs)));
        if !dbias.is_empty() {
            add_column_sums(dbias, dy);
        }
    }

    /// Adds the gradient of the matrix; the outputs are some columns of `dy`.
    pub(super) fn matrix_gradient(&self, dw: &mut [f32], x: &[f32], dy: (&[f32], Columns)) {
        let x = (x, Columns::all(self.inputs()));
        let [(rows, of_rows), (cols, of_cols)] = match self.order {
            MatrixOrder::InputsFirst => [x, dy],
            MatrixOrder::OutputsFirst => [dy, x],
        };
        match self.weight {
            Weight::F32(_) => add_weight_gradient(dw, (rows, of_rows), (cols, of_cols)),
            Weight::Bf16(_, products) => {
                let out = mat_mut(dw, of_rows.len, of_cols.len);
                let operands = [of_rows.by_columns(rows), of_cols.by_columns(cols)];
                products.product(out, true, &operands[0], &operands[1]);
            }
        }
    }
}

/// `y = x w`: w `[k, n]`. `products` round both to bf16.
pub fn product(y: &mut [f32], x: &[f32], w: &[f32], n: usize, products: Option<Bf16Products>) {
    let Some(products) = products else {
        return Linear::of_matrix(w, n, MatrixOrder::InputsFirst).product(y, x);
    };
    let m = y.len() / n;
    let k = w.len() / n;
    let x = Operand::rows(Elems::F32(x), [m, k], k);
    let w = Operand::columns(Elems::F32(w), [k, n], n);
    products.product(mat_mut(y, m, n), false, &x, &w);
}

/// `y = residual + (sum + bias)`; without a bias if that is empty.
pub(crate) fn add_residual(y: &mut [f32], residual: &[f32], sum: &[f32], bias: &[f32], n: usize) {
    let rows = rows_per_thread(y.len() / n);
    (
        y.par_chunks_mut(rows * n),
        residual.par_chunks(rows * n),
        sum.par_chunks(rows * n),
    )
        .into_par_iter()
        .for_each(|(y, residual, sum)| {
            y.copy_from_slice(sum);
            if !bias.is_empty() {
                add_rows(y, bias);
            }
            for (y, residual) in y.iter_mut().zip(residual) {
                *y += residual;
            }
        });
}

/// Rows of x, and columns, that [`add_weight_gradient`] transposes at once.
const DEPTH: usize = 512;
const COLUMNS: usize = 256;

/// `dw += x^T dy`: dw `[k, n]`, of k columns of x and n of dy.
fn add_weight_gradient(
    dw: &mut [f32],
    (x, of_x): (&[f32], Columns),
    (dy, of_dy): (&[f32], Columns),
) {
    // The threads split the rows of dw, and each sums over all m, so the order of the sums is
    // fixed.
    let n = of_dy.len;
    let m = of_dy.rows(dy);
    let rows = rows_per_thread(of_x.len);
    dw.par_chunks_mut(rows * n).enumerate().for_each(|(i, dw)| {
        for (block, dw) in dw.chunks_mut(COLUMNS * n).enumerate() {
            let cols = dw.len() / n;
            let first = of_x.first + i * rows + block * COLUMNS;
            with_scratch(cols * DEPTH.min(m), |scratch| {
                let parts = x
                    .chunks(DEPTH * of_x.width)
                    .zip(dy.chunks(DEPTH * of_dy.width));
                for (x, dy) in parts {
                    // faer would read x with a stride of k, from as many cache lines as it has
                    // rows.
                    let depth = of_dy.rows(dy);
                    let transposed = &mut scratch[..cols * depth];
                    transpose(transposed, &x[first..], of_x.width, depth);
                    let transposed = mat(transposed, cols, depth);
                    panels(mat_mut(dw, cols, n), Accum::Add, transposed, of_dy.mat(dy));
                }
            });
        }
    });
}

/// `out[j] += sum over rows of x[i, j]`, row by row within a thread's columns.
fn add_column_sums(out: &mut [f32], x: &[f32]) {
    let n = out.len();
    let cols = n
        .div_ceil(rayon::current_num_threads())
        .next_multiple_of(16);
    out.par_chunks_mut(cols)
        .enumerate()
        .for_each(|(i, out)| add_column_sums_from(out, x, n, i * cols));
}

/// Adds the sums of four rows at a time, which loads and stores `out` less often.
#[multiversion(targets = "simd")]
fn add_column_sums_from(out: &mut [f32], x: &[f32], n: usize, first: usize) {
    let cols = out.len();
    let mut fours = x.chunks_exact(4 * n);
    for rows in &mut fours {
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| &rows[i * n + first..][..cols]);
        for j in 0..cols {
            out[j] += (a[j] + b[j]) + (c[j] + d[j]);
        }
    }
    for row in fours.remainder().chunks_exact(n) {
        for (o, &v) in out.iter_mut().zip(&row[first..]) {
            *o += v;
        }
    }
}

/// `y += bias`.
#[multiversion(targets = "simd")]
pub(crate) fn add_rows(y: &mut [f32], bias: &[f32]) {
    for row in y.chunks_exact_mut(bias.len()) {
        for (v, &b) in row.iter_mut().zip(bias) {
            *v += b;
        }
    }
}

/// `y = x + bias`.
#[multiversion(targets = "simd")]
fn sum_with_bias(y: &mut [f32], x: &[f32], bias: &[f32]) {
    for (y, x) in y
        .chunks_exact_mut(bias.len())
        .zip(x.chunks_exact(bias.len()))
    {
        for ((y, &x), &b) in y.iter_mut().zip(x).zip(bias) {
            *y = x + b;
        }
    }
}
