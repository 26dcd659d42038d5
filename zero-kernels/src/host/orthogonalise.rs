//! Newton-Schulz iterations of a matrix ([`NewtonSchulz`](crate::NewtonSchulz)); its products are
//! faer's.
//!
//! X has its shorter side first, `[short, long]`, and is stored column by column; so are the squares
//! `[short, short]`. All products are computed in panels of [`PANEL`] columns, each on one thread,
//! whatever the number of threads: the order of faer's sums depends on the shape of a product. The
//! squares are symmetric: a product has the rows of a panel from its diagonal on, and the others
//! are copied.

use std::ops::Range;

use faer::{Accum, MatMut, MatRef, Par};
use multiversion::multiversion;
use zero_alloc::device::DeviceSlice;

use super::Workers;
use crate::OrthogonaliseArgs;

/// Columns of a product that a thread computes at once: whole tiles of faer's kernels (24 with
/// AVX2, 96 with AVX-512).
const PANEL: usize = 96;

/// Matrices of `rows` rows, a column every `stride` elements.
#[derive(Clone, Copy)]
struct ColumnMajor {
    rows: usize,
    stride: usize,
}

impl ColumnMajor {
    /// Columns whose shorter side is `short`. Where all columns started at one place of a page, the
    /// caches would hold few of them.
    fn of(short: usize) -> Self {
        let pad = if short.is_multiple_of(256) { 16 } else { 0 };
        Self {
            rows: short,
            stride: short + pad,
        }
    }

    /// The panels, each with its first column.
    fn panels(self, matrix: &mut [f32]) -> impl Iterator<Item = (usize, &mut [f32])> {
        let firsts = (0..).step_by(PANEL);
        firsts.zip(matrix.chunks_mut(PANEL * self.stride))
    }

    fn mat(self, matrix: &[f32]) -> MatRef<'_, f32> {
        let cols = matrix.len() / self.stride;
        MatRef::from_column_major_slice_with_stride(matrix, self.rows, cols, self.stride)
    }

    fn mat_mut(self, matrix: &mut [f32]) -> MatMut<'_, f32> {
        let cols = matrix.len() / self.stride;
        MatMut::from_column_major_slice_with_stride_mut(matrix, self.rows, cols, self.stride)
    }

    /// Computes a square that is symmetric: `lower` writes the rows of a panel from its diagonal
    /// on.
    fn symmetric(
        self,
        workers: &Workers,
        square: &mut [f32],
        lower: impl Fn(Range<usize>, MatMut<'_, f32>) + Sync,
    ) {
        workers.each(self.panels(square), |(first, panel)| {
            let panel = self.mat_mut(panel);
            let cols = first..first + panel.ncols();
            lower(cols, panel.subrows_mut(first, self.rows - first));
        });
        for first in (PANEL..self.rows).step_by(PANEL) {
            let (before, panel) = square.split_at_mut(first * self.stride);
            let cols = first..self.rows.min(first + PANEL);
            for (i, column) in before.chunks_exact(self.stride).enumerate() {
                for (to, value) in panel.chunks_mut(self.stride).zip(&column[cols.clone()]) {
                    to[i] = *value;
                }
            }
        }
    }
}

/// The columns of X in the arguments' memory.
#[derive(Clone, Copy)]
struct Columns {
    args: OrthogonaliseArgs,
    layout: ColumnMajor,
}

impl Columns {
    /// Whether a row in memory is a row of X.
    fn is_wide(self) -> bool {
        self.args.rows <= self.args.cols
    }

    /// The runs of memory with the columns of a panel, each with its first element in the panel.
    fn runs(self, first: usize, cols: usize) -> impl Iterator<Item = (usize, DeviceSlice<f32>)> {
        let ColumnMajor { rows, stride } = self.layout;
        let runs = if self.is_wide() { rows } else { cols };
        (0..runs).map(move |run| {
            let (at, start, len) = match self.is_wide() {
                true => (run, run * self.args.row_stride + first, cols),
                false => (run * stride, (first + run) * self.args.row_stride, rows),
            };
            (at, self.args.values.slice(start..start + len))
        })
    }

    /// Elements of a panel from one element of a run to the next.
    fn step(self) -> usize {
        if self.is_wide() {
            self.layout.stride
        } else {
            1
        }
    }

    /// Copies columns to a panel, which starts at column `first`.
    ///
    /// # Safety
    /// As for [`DeviceSlice::as_host`] of these columns.
    unsafe fn read(self, first: usize, panel: &mut [f32]) {
        panel.fill(0.0);
        for (at, run) in self.runs(first, panel.len() / self.layout.stride) {
            // SAFETY: the caller's promise.
            let run = unsafe { run.as_host() };
            for (x, value) in panel[at..].iter_mut().step_by(self.step()).zip(run) {
                *x = *value;
            }
        }
    }

    /// Writes the columns of a panel, times the scale.
    ///
    /// # Safety
    /// As for [`DeviceSlice::as_host_mut`] of these columns.
    unsafe fn write(self, first: usize, panel: &[f32]) {
        for (at, run) in self.runs(first, panel.len() / self.layout.stride) {
            // SAFETY: the caller's promise.
            let run = unsafe { run.as_host_mut() };
            for (value, x) in run.iter_mut().zip(panel[at..].iter().step_by(self.step())) {
                *value = self.args.scale * x;
            }
        }
    }
}

/// Elements of scratch of [`HostKernels`](super::HostKernels) for a matrix of this shape: X and two
/// squares.
pub fn orthogonalise_scratch_elems(rows: usize, cols: usize) -> usize {
    let ColumnMajor {
        rows: short,
        stride,
    } = ColumnMajor::of(rows.min(cols));
    let columns = short.saturating_mul(2).saturating_add(rows.max(cols));
    if short == 0 {
        0
    } else {
        columns.saturating_mul(stride)
    }
}

/// Runs the operation over the threads of `workers`.
///
/// # Safety
/// As for [`DeviceSlice::as_host_mut`] of the scratch and of the elements of the matrix.
pub(super) unsafe fn orthogonalise(workers: &Workers, args: &OrthogonaliseArgs) {
    let OrthogonaliseArgs {
        rows,
        cols,
        scratch,
        rule,
        ..
    } = *args;
    if rows == 0 || cols == 0 {
        return;
    }
    let layout = ColumnMajor::of(rows.min(cols));
    let columns = Columns {
        args: *args,
        layout,
    };
    // SAFETY: the caller's promise.
    let scratch = unsafe { scratch.as_host_mut() };
    let (x, squares) = scratch.split_at_mut(layout.stride * rows.max(cols));
    let (gram, squares) = squares.split_at_mut(layout.stride * layout.rows);
    let polynomial = &mut squares[..layout.stride * layout.rows];

    workers.each(layout.panels(x), |(first, panel)| {
        // SAFETY: the caller's promise.
        unsafe { columns.read(first, panel) }
    });
    let stats = workers.grad_stats(x);
    if stats.nonfinite > 0 {
        x.fill(f32::NAN);
    } else {
        let norm = stats.sum_sq.sqrt().max(rule.eps);
        workers.each(layout.panels(x), |(_, panel)| divide(panel, norm));
        for _ in 0..rule.steps {
            iterate(workers, layout, [x, gram, polynomial], rule.coefficients);
        }
    }

    workers.each(layout.panels(x), |(first, panel)| {
        // SAFETY: the caller's promise; panels are different columns.
        unsafe { columns.write(first, panel) }
    });
}

/// Divides in fp64: an fp32 norm may be 0 or infinite.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2+lzcnt",
    "x86_64+avx2+fma+bmi1+bmi2+lzcnt"
))]
fn divide(values: &mut [f32], norm: f64) {
    for value in values {
        *value = (f64::from(*value) / norm) as f32;
    }
}

/// One iteration: `gram = X X^T`, `polynomial = b gram + c gram gram`, `X = a X + polynomial X`.
fn iterate(
    workers: &Workers,
    layout: ColumnMajor,
    [x, gram, polynomial]: [&mut [f32]; 3],
    coefficients: [f64; 3],
) {
    let [a, b, c] = coefficients.map(|coefficient| coefficient as f32);

    let whole = layout.mat(x);
    layout.symmetric(workers, gram, |cols, panel| {
        let lower = whole.subrows(cols.start, panel.nrows());
        let own = whole.subrows(cols.start, cols.len());
        multiply(panel, Accum::Replace, lower, own.transpose(), 1.0);
    });

    let whole = layout.mat(gram);
    layout.symmetric(workers, polynomial, |cols, mut panel| {
        let lower = whole.subrows(cols.start, panel.nrows());
        let own = whole.subcols(cols.start, cols.len());
        let of_gram = lower.subcols(cols.start, cols.len());
        for (to, from) in panel.as_mut().col_iter_mut().zip(of_gram.col_iter()) {
            for (to, from) in to.iter_mut().zip(from.iter()) {
                *to = b * from;
            }
        }
        multiply(panel, Accum::Add, lower, own, c);
    });

    let polynomial = layout.mat(polynomial);
    workers.each(layout.panels(x), |(_, panel)| {
        let before = panel.to_vec();
        panel.iter_mut().for_each(|x| *x *= a);
        let panel = layout.mat_mut(panel);
        multiply(panel, Accum::Add, polynomial, layout.mat(&before), 1.0);
    });
}

/// `out = alpha lhs rhs`, or `out += alpha lhs rhs`, on this thread.
fn multiply(
    out: MatMut<'_, f32>,
    accum: Accum,
    lhs: MatRef<'_, f32>,
    rhs: MatRef<'_, f32>,
    alpha: f32,
) {
    faer::linalg::matmul::matmul(out, accum, lhs, rhs, alpha, Par::Seq);
}
