//! Ranks of tensor parallelism on GPUs: the host's `decoder/tensor.rs` in the type of the activations, on
//! the stream of the passes.

use std::ops::Range;

use zero_alloc::device::AnySlice;

use super::pass_context::PassContext;
use crate::cuda::dropout::Dropout;
use crate::cuda::{OpError, SumOut, column_sums};
use crate::decoder::tensor_group::TensorGroup;

impl PassContext<'_> {
    /// Whether norms have some rows of all, so that their gradients are partial sums.
    pub(crate) fn divides_rows(&self) -> bool {
        self.tensor.is_some_and(|tensor| tensor.divides_rows)
    }

    /// The own rows of `rows`.
    pub(crate) fn own(&self, rows: AnySlice) -> AnySlice {
        let own = |tensor: &TensorGroup<_>| rows.slice(tensor.own(rows.len()));
        self.tensor.map_or(rows, own)
    }

    /// Gathers `rows` from the own rows of all ranks, in place.
    pub(crate) fn gather_rows(&self, rows: AnySlice) -> Result<(), OpError> {
        match self.tensor {
            Some(tensor) => Ok(tensor.gather_rows(self.stream, rows)?),
            None => Ok(()),
        }
    }

    /// Sums `rows` over the ranks, in place; the own rows have the sums.
    pub(crate) fn sum_rows(&self, rows: AnySlice) -> Result<(), OpError> {
        match self.tensor {
            Some(tensor) => Ok(tensor.sum_rows(self.stream, rows)?),
            None => Ok(()),
        }
    }

    /// The place of all rows of this rank's part of a sum whose own rows go to `own`: the same slice, or
    /// with sequence parallelism a buffer of all rows.
    pub(crate) fn before_sum(&self, own: AnySlice) -> AnySlice {
        match self.divides_rows() {
            true => self.s.narrow.slice(0..self.s.dres.len()),
            false => own,
        }
    }

    /// Sums what [`Self::before_sum`] has, to `own`.
    pub(crate) fn sum_to(&self, own: AnySlice) -> Result<(), OpError> {
        match self.tensor.filter(|tensor| tensor.divides_rows) {
            Some(tensor) => Ok(tensor.reduce_scatter(self.stream, self.before_sum(own), own)?),
            None => self.sum(own),
        }
    }

    /// The dropout of the own rows, of one of all rows.
    pub(crate) fn of_own_rows(&self, dropout: Option<Dropout>) -> Option<Dropout> {
        let dropout = dropout?;
        Some(match self.tensor.filter(|tensor| tensor.divides_rows) {
            Some(tensor) => dropout.from_row(tensor.first_row(), tensor.tokens),
            None => dropout,
        })
    }

    /// The place of a partial sum, to be added to `out` by [`Self::finish_sums`]: elements of
    /// [`ScratchSlices::sums`](super::slices::ScratchSlices::sums).
    pub(crate) fn partial(&self, range: Range<usize>) -> SumOut {
        SumOut::Write(self.s.sums.slice(range).erase())
    }

    /// Sums the first `len` partial sums over the ranks.
    pub(crate) fn sum_partials(&self, len: usize) -> Result<(), OpError> {
        match len {
            0 => Ok(()),
            len => self.sum(self.s.sums.slice(0..len).erase()),
        }
    }

    /// Adds partial sums to gradients, or writes them there: `range` has those of `outs`.
    pub(crate) fn finish_sums(&self, outs: &[SumOut], range: Range<usize>) -> Result<(), OpError> {
        let sums = self.s.sums.slice(range);
        column_sums::sum_partials(&self.ops.kernels, self.stream, outs, sums, 1)
    }
}
