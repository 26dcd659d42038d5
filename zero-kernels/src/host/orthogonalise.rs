//! Newton-Schulz iterations of a matrix ([`NewtonSchulz`](crate::NewtonSchulz)); its products are
//! faer's.
//!
//! X has its shorter side first, `[short, long]`, stored column by column; so are the squares. All
//! products are computed in panels of [`PANEL`] columns, one thread each, whatever the number of
//! threads: faer's sums depend on the shape of a product. Of the squares, which are symmetric, a
//! panel begins at its diagonal, and the rest is copied.

use faer::{Accum, MatMut, MatRef, Par};
use multiversion::multiversion;
use zero_alloc::device::DeviceSlice;

use super::Workers;
use crate::OrthogonaliseArgs;

/// Columns of a product that a thread computes at once: whole tiles of faer's kernels (24 with
/// AVX2, 96 with AVX-512).
const PANEL: usize = 96;

/// The matrix in the arguments' memory, as X's columns.
#[derive(Clone, Copy)]
struct Columns {
    values: DeviceSlice<f32>,
    row_stride: usize,
    /// Elements of a column.
    short: usize,
    /// Whether a row of the memory is a row of X.
    is_wide: bool,
}

impl Columns {
    /// The runs of memory that hold `cols` columns from `first` on: of X's rows if it is wide, else
    /// of its columns.
    fn runs(self, first: usize, cols: usize) -> impl Iterator<Item = DeviceSlice<f32>> {
        let Self {
            values,
            row_stride,
            short,
            is_wide,
        } = self;
        let runs = if is_wide { short } else { cols };
        (0..runs).map(move |run| {
            let range = match is_wide {
                true => run * row_stride + first..run * row_stride + first + cols,
                false => (first + run) * row_stride..(first + run) * row_stride + short,
            };
            values.slice(range)
        })
    }

    /// Copies columns from `first` on to `panel`.
    ///
    /// # Safety
    /// As for [`DeviceSlice::as_host`] of these columns.
    unsafe fn read(self, first: usize, panel: &mut [f32]) {
        let cols = panel.len() / self.short;
        for (nth, run) in self.runs(first, cols).enumerate() {
            // SAFETY: the caller's promise.
            let run = unsafe { run.as_host() };
            match self.is_wide {
                true => {
                    for (x, value) in panel[nth..].iter_mut().step_by(self.short).zip(run) {
                        *x = *value;
                    }
                }
                false => panel[nth * self.short..][..self.short].copy_from_slice(run),
            }
        }
    }

    /// Writes columns from `first` on, times `scale`.
    ///
    /// # Safety
    /// As for [`DeviceSlice::as_host_mut`] of these columns.
    unsafe fn write(self, first: usize, panel: &[f32], scale: f32) {
        let cols = panel.len() / self.short;
        for (nth, run) in self.runs(first, cols).enumerate() {
            let (start, step) = match self.is_wide {
                true => (nth, self.short),
                false => (nth * self.short, 1),
            };
            // SAFETY: the caller's promise.
            let run = unsafe { run.as_host_mut() };
            for (value, x) in run.iter_mut().zip(panel[start..].iter().step_by(step)) {
                *value = scale * x;
            }
        }
    }
}

/// Runs the operation over the threads of `workers`.
///
/// # Safety
/// As for [`DeviceSlice::as_host_mut`] of the scratch and of the elements of the matrix.
pub(super) unsafe fn orthogonalise(workers: &Workers, args: &OrthogonaliseArgs) {
    let OrthogonaliseArgs {
        values,
        rows,
        cols,
        row_stride,
        scratch,
        rule,
        scale,
    } = *args;
    if rows == 0 || cols == 0 {
        return;
    }
    let short = rows.min(cols);
    let columns = Columns {
        values,
        row_stride,
        short,
        is_wide: rows <= cols,
    };
    // SAFETY: the caller's promise.
    let scratch = unsafe { scratch.as_host_mut() };
    let (x, squares) = scratch.split_at_mut(rows * cols);
    let (gram, squares) = squares.split_at_mut(short * short);
    let polynomial = &mut squares[..short * short];

    workers.each(panels(x, short), |(first, panel)| {
        // SAFETY: the caller's promise.
        unsafe { columns.read(first, panel) }
    });
    let stats = workers.grad_stats(x);
    if stats.nonfinite > 0 {
        x.fill(f32::NAN);
    } else {
        let norm = stats.sum_sq.sqrt().max(rule.eps);
        workers.each(panels(x, short), |(_, panel)| divide(panel, norm));
        for _ in 0..rule.steps {
            iterate(workers, x, gram, polynomial, rule.coefficients);
        }
    }

    workers.each(panels(x, short), |(first, panel)| {
        // SAFETY: the caller's promise; panels are different columns.
        unsafe { columns.write(first, panel, scale) }
    });
}

/// A matrix with columns of `rows` elements in panels, each with its first column.
fn panels(matrix: &mut [f32], rows: usize) -> impl Iterator<Item = (usize, &mut [f32])> {
    let firsts = (0..).step_by(PANEL);
    firsts.zip(matrix.chunks_mut(PANEL * rows))
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

/// One iteration on X `[short, long]`: `gram = X X^T`, `polynomial = b gram + c gram gram`,
/// `X = a X + polynomial X`.
fn iterate(
    workers: &Workers,
    x: &mut [f32],
    gram: &mut [f32],
    polynomial: &mut [f32],
    [a, b, c]: [f64; 3],
) {
    let short = gram.len().isqrt();
    let [a, b, c] = [a as f32, b as f32, c as f32];

    symmetric(workers, gram, |first, mut panel| {
        let x = MatRef::from_column_major_slice(&*x, short, x.len() / short);
        let cols = x.subrows(first, panel.ncols());
        multiply(
            panel.as_mut(),
            Accum::Replace,
            x.subrows(first, short - first),
            cols.transpose(),
            1.0,
        );
    });
    let gram = MatRef::from_column_major_slice(&*gram, short, short);
    symmetric(workers, polynomial, |first, mut panel| {
        let cols = gram.subcols(first, panel.ncols());
        for j in 0..cols.ncols() {
            for i in first..short {
                panel[(i - first, j)] = b * cols[(i, j)];
            }
        }
        multiply(
            panel.as_mut(),
            Accum::Add,
            gram.subrows(first, short - first),
            cols,
            c,
        );
    });

    let polynomial = MatRef::from_column_major_slice(&*polynomial, short, short);
    workers.each(panels(x, short), |(_, panel)| {
        let before = panel.to_vec();
        panel.iter_mut().for_each(|x| *x *= a);
        let cols = panel.len() / short;
        multiply(
            MatMut::from_column_major_slice_mut(panel, short, cols),
            Accum::Add,
            polynomial,
            MatRef::from_column_major_slice(&before, short, cols),
            1.0,
        );
    });
}

/// Computes a symmetric matrix: `lower` writes the rows of a panel from its diagonal on; the rows
/// above are copied.
fn symmetric(workers: &Workers, matrix: &mut [f32], lower: impl Fn(usize, MatMut<'_, f32>) + Sync) {
    let rows = matrix.len().isqrt();
    workers.each(panels(matrix, rows), |(first, panel)| {
        let cols = panel.len() / rows;
        let panel = MatMut::from_column_major_slice_mut(panel, rows, cols);
        lower(first, panel.subrows_mut(first, rows - first));
    });
    for first in (PANEL..rows).step_by(PANEL) {
        let (before, panel) = matrix.split_at_mut(first * rows);
        let cols = PANEL.min(rows - first);
        for (i, of_row) in before.chunks_exact(rows).enumerate() {
            for (j, value) in of_row[first..first + cols].iter().enumerate() {
                panel[j * rows + i] = *value;
            }
        }
    }
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
