//! The operands of a product as they are in memory.

use half::bf16;

/// The elements of an operand.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) enum Elems<'a> {
    /// Rounded to bf16 by the product.
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

/// An operand `[len, depth]` of a product, whose sums are over `depth`.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct Operand<'a> {
    pub(super) elems: Elems<'a>,
    /// Elements from one line to the next, or, of a transposed operand, from one k to the next.
    pub(super) stride: usize,
    pub(super) len: usize,
    pub(super) depth: usize,
    /// Whether neighbours in memory are of neighbouring lines, not of one line.
    pub(super) is_transposed: bool,
}

impl<'a> Operand<'a> {
    /// The rows of a matrix: those of `elems` begin `stride` elements apart.
    pub(in crate::ops) fn rows(elems: Elems<'a>, [rows, cols]: [usize; 2], stride: usize) -> Self {
        Self {
            elems,
            stride,
            len: rows,
            depth: cols,
            is_transposed: false,
        }
    }

    /// The columns of a matrix.
    pub(in crate::ops) fn columns(
        elems: Elems<'a>,
        [rows, cols]: [usize; 2],
        stride: usize,
    ) -> Self {
        Self {
            elems,
            stride,
            len: cols,
            depth: rows,
            is_transposed: true,
        }
    }
}

/// How a tile of an operand is stored, as its instructions read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// `[line][pair]`: the rows of the product's first operand.
    Left,
    /// `[pair][line]`: the columns of the product, of its second operand.
    Right,
}
