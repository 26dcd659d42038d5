//! Linear layers and their matrix products.
//!
//! Matrices are row-major.
//!
//! faer reads the second operand of a row-major product down its columns: one cache line an element
//! if it is the transpose of a tensor. So weight gradients, and attention, transpose that operand
//! first. Products in bf16 ([`super::bf16`]) pack both operands and transpose nothing.

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

/// `y = x w`, or `y += x w`, for all rows of y `[m, n]`, x `[m, k]` and w `[k, n]`, on the calling
/// thread.
fn panels(y: &mut [f32], accum: Accum, x: MatRef<'_, f32>, w: MatRef<'_, f32>) {
    let n = w.ncols();
    for first in (0..n).step_by(PANEL) {
        let cols = PANEL.min(n - first);
        let panel = mat_mut(y, x.nrows(), n).subcols_mut(first, cols);
        gemm(panel, accum, x, w.subcols(first, cols), 1.0);
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
        match self.weight {
            Weight::F32(w) => by_rows(y, x, self.outputs, self.inputs(), |y, x| {
                panels(y, Accum::Replace, x, self.matrix(w));
                if !self.bias.is_empty() {
                    add_rows(y, self.bias);
                }
            }),
            Weight::Bf16(w, products) => {
                let is_biased = !self.bias.is_empty();
                if is_biased {
                    y.par_chunks_mut(self.outputs)
                        .for_each(|y| y.copy_from_slice(self.bias));
                }
                self.product_bf16(y, is_biased, x, w, products);
            }
        }
    }

    /// `y = x w`.
    pub fn product(&self, y: &mut [f32], x: &[f32]) {
        match self.weight {
            Weight::F32(w) => by_rows(y, x, self.outputs, self.inputs(), |y, x| {
                panels(y, Accum::Replace, x, self.matrix(w));
            }),
            Weight::Bf16(w, products) => self.product_bf16(y, false, x, w, products),
        }
    }

    /// `y = x w`, or `y += x w`.
    fn product_bf16(
        &self,
        y: &mut [f32],
        accumulate: bool,
        x: &[f32],
        w: &'a [bf16],
        products: Bf16Products,
    ) {
        let n = self.outputs;
        let k = self.inputs();
        let m = y.len() / n;
        let x = Operand::rows(Elems::F32(x), [m, k], k);
        let w = self.operand(w, MatrixOrder::InputsFirst);
        products.product(mat_mut(y, m, n), accumulate, &x, &w);
    }

    /// `y = residual + bias + x w`: the projection back onto the residual stream.
    pub fn forward_residual(&self, y: &mut [f32], residual: &[f32], x: &[f32]) {
        let n = self.outputs;
        let k = self.inputs();
        let rows = rows_per_thread(y.len() / n);
        let start = |y: &mut [f32], residual: &[f32]| match self.bias.is_empty() {
            true => y.copy_from_slice(residual),
            false => sum_with_bias(y, residual, self.bias),
        };
        let parts = (y.par_chunks_mut(rows * n), residual.par_chunks(rows * n));
        match self.weight {
            Weight::F32(w) => (parts.0, parts.1, x.par_chunks(rows * k))
                .into_par_iter()
                .for_each(|(y, residual, x)| {
                    start(y, residual);
                    panels(y, Accum::Add, mat(x, y.len() / n, k), self.matrix(w));
                }),
            Weight::Bf16(w, products) => {
                parts
                    .into_par_iter()
                    .for_each(|(y, residual)| start(y, residual));
                self.product_bf16(y, true, x, w, products);
            }
        }
    }

    /// `dx = dy w^T`.
    pub fn input_gradient(&self, dx: &mut [f32], dy: &[f32]) {
        let n = self.outputs;
        let k = self.inputs();
        match self.weight {
            Weight::F32(w) => by_rows(dx, dy, k, n, |dx, dy| {
                panels(dx, Accum::Replace, dy, self.matrix(w).transpose());
            }),
            Weight::Bf16(w, products) => {
                let m = dx.len() / k;
                let dy = Operand::rows(Elems::F32(dy), [m, n], n);
                let w = self.operand(w, MatrixOrder::OutputsFirst);
                products.product(mat_mut(dx, m, k), false, &dy, &w);
            }
        }
    }

    /// Adds the gradients of the matrix and, if there is one, of the bias.
    pub fn weight_gradient(&self, grads: [&mut [f32]; 2], x: &[f32], dy: &[f32]) {
        let [dw, dbias] = grads;
        let (rows, cols, n) = match self.order {
            MatrixOrder::InputsFirst => (x, dy, self.outputs),
            MatrixOrder::OutputsFirst => (dy, x, self.inputs()),
        };
        match self.weight {
            Weight::F32(_) => add_weight_gradient(dw, rows, cols, n),
            Weight::Bf16(_, products) => {
                let k = dw.len() / n;
                let m = cols.len() / n;
                let rows = Operand::columns(Elems::F32(rows), [m, k], k);
                let cols = Operand::columns(Elems::F32(cols), [m, n], n);
                products.product(mat_mut(dw, k, n), true, &rows, &cols);
            }
        }
        if !dbias.is_empty() {
            add_column_sums(dbias, dy);
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

/// `dw += x^T dy`: x `[m, k]`, dy `[m, n]`, dw `[k, n]`.
fn add_weight_gradient(dw: &mut [f32], x: &[f32], dy: &[f32], n: usize) {
    // The threads split the rows of dw, and each sums over all m, so the order of the sums is
    // fixed.
    let k = dw.len() / n;
    let m = dy.len() / n;
    let rows = rows_per_thread(k);
    dw.par_chunks_mut(rows * n).enumerate().for_each(|(i, dw)| {
        for (block, dw) in dw.chunks_mut(COLUMNS * n).enumerate() {
            let cols = dw.len() / n;
            let first = i * rows + block * COLUMNS;
            with_scratch(cols * DEPTH.min(m), |scratch| {
                for (x, dy) in x.chunks(DEPTH * k).zip(dy.chunks(DEPTH * n)) {
                    // faer would read x with a stride of k, from as many cache lines as it has
                    // rows.
                    let depth = dy.len() / n;
                    let transposed = &mut scratch[..cols * depth];
                    transpose(transposed, &x[first..], k, depth);
                    panels(
                        dw,
                        Accum::Add,
                        mat(transposed, cols, depth),
                        mat(dy, depth, n),
                    );
                }
            });
        }
    });
}

/// Calls `work(y, x)` on each thread's rows of y `[rows, n]` and x `[rows, k]`.
fn by_rows(
    y: &mut [f32],
    x: &[f32],
    n: usize,
    k: usize,
    work: impl Fn(&mut [f32], MatRef<'_, f32>) + Sync,
) {
    let rows = rows_per_thread(y.len() / n);
    (y.par_chunks_mut(rows * n), x.par_chunks(rows * k))
        .into_par_iter()
        .for_each(|(y, x)| work(y, mat(x, y.len() / n, k)));
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
