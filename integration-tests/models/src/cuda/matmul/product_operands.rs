//! The matrices of a product, and what is done with its sums.

use std::ops::Range;

use zero_alloc::device::{AnySlice, DType};

use super::super::error::{OpError, check_len};

/// A row-major matrix: rows of `cols` elements, `stride` elements apart.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    pub(super) data: AnySlice,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) stride: usize,
    pub(super) transposed: bool,
}

impl Matrix {
    /// All of `data` as rows of `cols` elements.
    pub fn new(data: AnySlice, cols: usize) -> Self {
        Self::with_stride(data, cols, cols)
    }

    /// Rows of `cols` elements, `stride` elements apart. Their number is `data.len() / stride`.
    pub fn with_stride(data: AnySlice, cols: usize, stride: usize) -> Self {
        Self {
            data,
            rows: data.len() / stride.max(1),
            cols,
            stride,
            transposed: false,
        }
    }

    /// Some columns of a matrix that is not transposed, without a copy.
    #[must_use]
    pub fn columns(self, range: Range<usize>) -> Self {
        Self {
            data: self.data.slice(range.start..self.data.len()),
            cols: range.len(),
            ..self
        }
    }

    /// The transposed matrix, without a copy.
    #[must_use]
    pub fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            transposed: !self.transposed,
            ..self
        }
    }

    /// All of its memory, from its first element on.
    pub fn data(&self) -> AnySlice {
        self.data
    }

    /// Rows and columns in memory.
    pub(super) fn stored(&self) -> [usize; 2] {
        if self.transposed {
            [self.cols, self.rows]
        } else {
            [self.rows, self.cols]
        }
    }
}

/// The greatest power of two, at most 32, that divides the address. Tensor cores need 16 bytes. A
/// unit's flat parameter is aligned to 32 bytes at every stage, so a product has the same algorithm
/// and bits at all stages.
pub(super) fn alignment(slice: AnySlice) -> u32 {
    1 << slice.as_ptr().addr().trailing_zeros().min(5)
}

/// The operation on the sums before they are stored.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum Epilogue {
    /// Nothing.
    None,
    /// A bias for each column.
    Bias(AnySlice),
    /// A bias for each column, then GELU; its input is stored for the backward pass.
    BiasGelu {
        bias: AnySlice,
        /// Output for GELU's input, in the shape of the result.
        input: AnySlice,
    },
    /// Multiplies by GELU's derivative at its input.
    GeluBackward {
        /// GELU's input, in the shape of the result.
        input: AnySlice,
    },
    /// Also writes the sum of each column of the right factor, in the type of the result: beside
    /// the gradient of a weight, `x^T dy`, the gradient of its bias. `n` elements, which the addend
    /// does not concern. Not every library and type supports it: see
    /// [`Matmul::supports`](super::Matmul::supports).
    BiasGradient(AnySlice),
}

impl Epilogue {
    pub(super) fn code(self) -> u32 {
        match self {
            Self::None => 1,
            Self::Bias(_) => 4,
            Self::BiasGelu { .. } => 32 | 128 | 4,
            Self::GeluBackward { .. } => 64 | 128,
            // Of the library's first factor, which is the right one here.
            Self::BiasGradient(_) => 256,
        }
    }

    pub(super) fn bias(self) -> Option<AnySlice> {
        match self {
            Self::Bias(bias) | Self::BiasGelu { bias, .. } | Self::BiasGradient(bias) => Some(bias),
            _ => None,
        }
    }

    pub(super) fn gelu_input(self) -> Option<AnySlice> {
        match self {
            Self::BiasGelu { input, .. } | Self::GeluBackward { input } => Some(input),
            _ => None,
        }
    }
}

/// `out = epilogue(scale left right + add_scale add)`.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// `[m, k]`.
    pub left: Matrix,
    /// `[k, n]`.
    pub right: Matrix,
    /// `[m, n]`, not transposed; may be of another type than the factors.
    pub out: Matrix,
    /// `[m, n]` in the layout of `out`; `out` itself to add to it.
    pub add: Option<Matrix>,
    /// The factor of the sums.
    pub scale: f32,
    /// The factor of the addend.
    pub add_scale: f32,
    /// The operation on the sums.
    pub epilogue: Epilogue,
}

impl Product {
    /// `out = left right`.
    pub fn new(left: Matrix, right: Matrix, out: Matrix) -> Self {
        Self {
            left,
            right,
            out,
            add: None,
            scale: 1.0,
            add_scale: 1.0,
            epilogue: Epilogue::None,
        }
    }

    /// The same product times `scale`.
    #[must_use]
    pub fn times(self, scale: f32) -> Self {
        Self { scale, ..self }
    }

    /// The same product, added to what `out` has.
    #[must_use]
    pub fn onto_out(self) -> Self {
        self.onto(self.out, 1.0)
    }

    /// The same product, added to `scale` times `add`.
    #[must_use]
    pub fn onto(self, add: Matrix, scale: f32) -> Self {
        Self {
            add: Some(add),
            add_scale: scale,
            ..self
        }
    }

    /// The same product with another operation on its sums.
    #[must_use]
    pub fn with(self, epilogue: Epilogue) -> Self {
        Self { epilogue, ..self }
    }

    /// Whether the result shares memory with what the product reads.
    pub(super) fn reads_its_result(&self) -> bool {
        let read = match self.epilogue {
            Epilogue::Bias(read) | Epilogue::GeluBackward { input: read } => Some(read),
            Epilogue::BiasGelu { bias, .. } => Some(bias),
            Epilogue::None | Epilogue::BiasGradient(_) => None,
        };
        let range = |slice: AnySlice| {
            let start = slice.as_ptr().addr();
            start..start.saturating_add(slice.len_bytes())
        };
        let out = range(self.out.data);
        let read = [
            Some(self.left.data),
            Some(self.right.data),
            self.add.map(|add| add.data),
            read,
        ];
        read.into_iter()
            .flatten()
            .map(range)
            .any(|read| read.start < out.end && out.start < read.end)
    }

    /// The label in timelines: one for each kind of product.
    pub(super) fn label(&self) -> &'static str {
        match (
            self.epilogue,
            self.add.is_some(),
            self.left.data.dtype() == self.out.data.dtype(),
        ) {
            (Epilogue::Bias(_), false, _) => "matmul + bias",
            (Epilogue::Bias(_), true, _) => "matmul + bias + residual",
            (Epilogue::BiasGelu { .. }, ..) => "matmul + bias, GELU",
            (Epilogue::GeluBackward { .. }, ..) => "matmul, GELU backward",
            (Epilogue::BiasGradient(_), ..) => "matmul + bias gradient",
            (Epilogue::None, true, false) => "matmul onto fp32",
            (Epilogue::None, ..) => "matmul",
        }
    }
}

/// All that determines the choice of an algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) sizes: [usize; 3],
    pub(super) strides: [usize; 4],
    pub(super) transposed: [bool; 2],
    pub(super) dtypes: [DType; 2],
    /// Of the factors, the addend and the result in the library's order.
    pub(super) alignments: [u32; 4],
    /// Alignments of the bias and of GELU's input, which the choice depends on too.
    pub(super) operand_alignments: [Option<u32>; 2],
    pub(super) adds: bool,
    pub(super) epilogue: u32,
}

impl Key {
    /// The product in a user's terms.
    pub(super) fn text(&self) -> String {
        let ([m, n, k], [from, to]) = (self.sizes, self.dtypes);
        format!("[{m}, {k}] x [{k}, {n}], {from} to {to}")
    }
}

/// Compares the sizes and types of a product's matrices.
pub(super) fn check(product: &Product) -> Result<Key, OpError> {
    let Product {
        left,
        right,
        out,
        add,
        epilogue,
        ..
    } = product;

    let m = left.rows;
    let n = right.cols;
    let k = left.cols;
    check_len("matmul: rows of the right factor", right.rows, k)?;
    check_len("matmul: rows of the result", out.rows, m)?;
    check_len("matmul: columns of the result", out.cols, n)?;
    check_len(
        "matmul: a transposed result",
        usize::from(out.transposed),
        0,
    )?;

    for (what, matrix) in [
        ("matmul: left", Some(left)),
        ("matmul: right", Some(right)),
        ("matmul: result", Some(out)),
        ("matmul: addend", add.as_ref()),
    ] {
        let Some(matrix) = matrix else { continue };
        let [rows, cols] = matrix.stored();
        let needs = rows
            .saturating_sub(1)
            .saturating_mul(matrix.stride)
            .saturating_add(cols);
        if matrix.stride < cols || matrix.data.len() < needs {
            return Err(OpError::Length {
                what,
                expected: needs,
                got: matrix.data.len(),
            });
        }
    }

    let same = |what, expected: DType, got: DType| {
        if expected == got {
            Ok(())
        } else {
            Err(OpError::DType {
                what,
                expected,
                got,
            })
        }
    };

    same("matmul: right", left.data.dtype(), right.data.dtype())?;
    if let Some(add) = add {
        check_len("matmul: rows of the addend", add.rows, m)?;
        check_len("matmul: columns of the addend", add.cols, n)?;
        check_len(
            "matmul: a transposed addend",
            usize::from(add.transposed),
            0,
        )?;
        same("matmul: addend", out.data.dtype(), add.data.dtype())?;
    }

    if let Some(bias) = epilogue.bias() {
        check_len("matmul: bias", bias.len(), n)?;
        same("matmul: bias", out.data.dtype(), bias.dtype())?;
    }

    if let Some(input) = epilogue.gelu_input() {
        check_len("matmul: GELU's input", input.len(), m * n)?;
        same("matmul: GELU's input", out.data.dtype(), input.dtype())?;
    }

    let c = add.as_ref().unwrap_or(out);
    Ok(Key {
        sizes: [m, n, k],
        strides: [left.stride, right.stride, c.stride, out.stride],
        transposed: [left.transposed, right.transposed],
        dtypes: [left.data.dtype(), out.data.dtype()],
        alignments: [right, left, c, out].map(|m| alignment(m.data)),
        operand_alignments: [epilogue.bias(), epilogue.gelu_input()]
            .map(|slice| slice.map(alignment)),
        adds: add.is_some(),
        epilogue: epilogue.code(),
    })
}
