//! Launches of dropout.cu, and the dropout that other kernels apply as they read or write.
//!
//! Shapes: rows `[batch * seq, n]` in the kernels' type.

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{AnySlice, DeviceSlice};

use super::error::{OpError, check_len};
use super::launch::{Arg, OpKernels, Shape, columns, size};
use crate::ops::dropout::Limits;

/// The dropout of one operation, with the factors of [`ops::dropout`](crate::ops::dropout).
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    /// The keys of the batch's sequences `[batch, 2]`.
    keys: DeviceSlice<u32>,
    limits: Limits,
    site: u32,
    first_line: u32,
    first_column: usize,
    /// The rows of the batch, of which an operation has some; `None`: it has all.
    some: Option<SomeRows>,
}

/// Some rows of all.
#[derive(Clone, Copy, Debug)]
struct SomeRows {
    first: usize,
    all: usize,
}

impl Dropout {
    /// The dropout of the operation `site` with this probability; `None` if it drops nothing. `keys`
    /// `[batch, 2]` are those of [`Draws::keys`](crate::ops::dropout::Draws::keys).
    pub fn new(keys: DeviceSlice<u32>, probability: f32, site: u32) -> Option<Self> {
        Some(Self {
            keys,
            limits: Limits::new(probability)?,
            site,
            first_line: 0,
            first_column: 0,
            some: None,
        })
    }

    /// The same dropout of lines of which the first is line `first` of the sequence.
    #[must_use]
    pub fn from_line(self, first: usize) -> Self {
        // Kernels take lines below 2^31.
        let first_line = first as u32;
        Self { first_line, ..self }
    }

    /// The same dropout of lines of which the first element is element `first`. Only
    /// [`add_residual`] follows it.
    #[must_use]
    pub fn from_column(self, first: usize) -> Self {
        Self {
            first_column: first,
            ..self
        }
    }

    /// The same dropout of rows from row `first` of the `all` rows of the batch on.
    #[must_use]
    pub fn from_row(self, first: usize, all: usize) -> Self {
        let some = Some(SomeRows { first, all });
        Self { some, ..self }
    }

    /// The parameters `keys` and `dropout` of kernels, for a batch of `batch` sequences.
    pub(super) fn args(dropout: Option<Self>, batch: usize) -> Result<[Arg; 2], OpError> {
        // A null address: nothing is dropped.
        let Some(dropout) = dropout else {
            return Ok([0u64.into(), 0u64.into()]);
        };
        let Self {
            keys,
            limits,
            site,
            first_line,
            first_column,
            ..
        } = dropout;
        check_len("dropout: first column", first_column, 0)?;
        check_len("dropout: keys", keys.len(), 2 * batch)?;
        let factor = limits.factor.to_bits();
        Ok([
            keys.into(),
            Arg::words([limits.below, factor, site, first_line]),
        ])
    }

    /// The parameters `keys`, `dropout`, `first_row` and `seq` of kernels over `rows` rows of the batch.
    pub(super) fn of_rows(dropout: Option<Self>, rows: usize) -> Result<[Arg; 4], OpError> {
        let Some(this) = dropout else {
            let [keys, dropout] = Self::args(None, 0)?;
            return Ok([keys, dropout, 0u32.into(), 1u32.into()]);
        };
        let batch = this.keys.len() / 2;
        let whole = SomeRows {
            first: 0,
            all: rows,
        };
        let SomeRows { first, all } = this.some.unwrap_or(whole);
        let seq = all / batch.max(1);
        check_len("dropout: rows", all, batch * seq)?;
        if first.saturating_add(rows) > all {
            return Err(OpError::Length {
                what: "dropout: rows behind the first",
                expected: all.saturating_sub(first),
                got: rows,
            });
        }
        let [keys, dropout] = Self::args(Some(this), batch)?;
        let [first, seq] = [
            size("dropout: first row", first)?,
            size("dropout: seq", seq)?,
        ];
        Ok([keys, dropout, first.into(), seq.into()])
    }
}

/// `y = residual + dropout(x)` for rows of `n` elements; what is `None` is left out. `y` may be `x`
/// or `residual`.
///
/// # Errors
/// Lengths or types do not fit, or the stream failed.
pub fn add_residual(
    ops: &OpKernels,
    stream: &CudaStream,
    y: AnySlice,
    x: AnySlice,
    residual: Option<AnySlice>,
    n: usize,
    dropout: Option<Dropout>,
) -> Result<(), OpError> {
    let rows = y.len() / n.max(1);
    let first = dropout.map_or(0, |dropout| dropout.first_column);
    let columns = match first % 8 {
        0 => columns(n, &[y, x, residual.unwrap_or(y)]),
        _ => 1,
    };
    let from_0 = dropout.map(|dropout| dropout.from_column(0));
    let [keys, dropout, first_row, seq] = Dropout::of_rows(from_0, rows)?;
    let residual = match residual {
        Some(residual) => ops.stored("dropout: residual", residual, rows * n)?,
        None => 0u64.into(),
    };
    let args = [
        ops.stored("dropout: y", y, rows * n)?,
        ops.stored("dropout: x", x, rows * n)?,
        residual,
        keys,
        dropout,
        size("dropout: rows", rows)?.into(),
        first_row,
        seq,
        size("dropout: width", n)?.into(),
        size("dropout: first column", first)?.into(),
    ];
    let shape = Shape::over((rows * n / columns) as u64);
    let entry = format!("dropout_add_{columns}");
    // SAFETY: the parameters of dropout_add, whose lengths were checked.
    unsafe { ops.launch(stream, "dropout", &entry, shape, args) }
}
