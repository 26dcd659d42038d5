//! Newton-Schulz iterations of a matrix ([`NewtonSchulz`](crate::NewtonSchulz)) by products in bf16
//! of another library.
//!
//! X is a copy of the matrix without gaps, in its order, so the square is `X X^T` of a wide matrix
//! and `X^T X` of a tall one. Like `torch.optim.Muon`, X, the square and the polynomial are rounded
//! to bf16 behind each product; sums are in fp32.
//!
//! | scratch | bytes |
//! |---|---|
//! | X, before and behind an iteration | 2 each of its elements |
//! | the square and the polynomial | 2 each of their elements |
//! | the statistics of X | those of [`Kernels::grad_stats`] |
//! | the workspace of products | [`MatrixProducts::workspace_bytes`] |

use std::fmt;
use std::sync::Arc;

use half::bf16;
use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{AnySlice, DType, DeviceSlice};

use super::CudaKernels;
use super::launch::{self, stats_scratch_elems};
use crate::{GradStats, KernelError, Kernels, MatrixRows, OrthogonaliseArgs};

/// Alignment of the parts of the scratch memory.
const ALIGN_BYTES: usize = 256;

/// `out = scale left right + add_scale add`, all of bf16 in rows without gaps, with sums in fp32.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct MatrixProduct {
    /// Rows and columns of the result, and the terms of a sum: m, n and k.
    pub sizes: [usize; 3],
    /// `[m, k]`, or `[k, m]` in memory if transposed.
    pub left: DeviceSlice<bf16>,
    /// `[k, n]`, or `[n, k]` in memory if transposed.
    pub right: DeviceSlice<bf16>,
    /// Whether left and right are transposed.
    pub transposed: [bool; 2],
    /// `[m, n]`; shares no memory with the others.
    pub out: DeviceSlice<bf16>,
    /// `[m, n]`.
    pub add: Option<DeviceSlice<bf16>>,
    /// The factor of the product.
    pub scale: f32,
    /// The factor of the addend.
    pub add_scale: f32,
}

/// Matrix products on GPUs, which [`Kernels::orthogonalise`] needs on CUDA
/// ([`CudaKernels::with_products`]): those of a library such as cuBLASLt. All ranks of a run must
/// have the same, with the same bits for the same shape.
///
/// # Safety
/// A product uses the memory of its arguments only on the stream, reads the factors and the addend,
/// and writes the result and the workspace.
pub unsafe trait MatrixProducts: fmt::Debug + Send + Sync {
    /// Bytes of workspace for a product.
    fn workspace_bytes(&self) -> usize;

    /// Enqueues a product. `workspace` has [`Self::workspace_bytes`], aligned to 256, and is in use
    /// until the product has run.
    ///
    /// # Errors
    /// The library failed, or has no algorithm for the product.
    fn enqueue(
        &self,
        stream: &CudaStream,
        product: &MatrixProduct,
        workspace: AnySlice,
    ) -> Result<(), KernelError>;
}

/// Elements of scratch of [`CudaKernels`] with products of `workspace_bytes` for a matrix of this
/// shape.
pub fn orthogonalise_scratch_elems(rows: usize, cols: usize, workspace_bytes: usize) -> usize {
    let bytes = Parts::new(rows, cols, workspace_bytes).map(|parts| parts.end);
    let of_elems = |bytes: usize| {
        bytes
            .checked_add(ALIGN_BYTES)
            .map(|bytes| bytes / size_of::<f32>())
    };
    match rows == 0 || cols == 0 {
        true => 0,
        false => bytes.and_then(of_elems).unwrap_or(usize::MAX),
    }
}

/// The first bytes of the parts of the scratch memory, and their end.
pub(super) struct Parts {
    firsts: [usize; 7],
    end: usize,
}

impl Parts {
    /// `None` if they overflow.
    pub(super) fn new(rows: usize, cols: usize, workspace_bytes: usize) -> Option<Self> {
        let elems = rows.checked_mul(cols)?;
        let short = rows.min(cols);
        let x = elems.checked_mul(size_of::<bf16>())?;
        let square = short.checked_mul(short)?.checked_mul(size_of::<bf16>())?;
        let sums = stats_scratch_elems(&[elems]).checked_mul(size_of::<f64>())?;
        let sizes = [
            x,
            x,
            square,
            square,
            sums,
            size_of::<GradStats>(),
            workspace_bytes,
        ];
        let mut end = 0_usize;
        let mut firsts = [0; 7];
        for (first, size) in firsts.iter_mut().zip(sizes) {
            *first = end;
            end = end.checked_add(size.checked_next_multiple_of(ALIGN_BYTES)?)?;
        }
        Some(Self { firsts, end })
    }
}

impl CudaKernels {
    /// Enqueues the operation; the arguments are checked.
    pub(super) fn newton_schulz(
        &self,
        stream: &CudaStream,
        args: &OrthogonaliseArgs,
        products: &Arc<dyn MatrixProducts>,
        Parts { firsts, .. }: Parts,
    ) -> Result<(), KernelError> {
        let OrthogonaliseArgs {
            rows,
            cols,
            row_stride,
            rule,
            ..
        } = *args;
        let elems = rows * cols;
        let short = rows.min(cols);
        let workspace_bytes = products.workspace_bytes();
        let scratch = args.scratch.erase().bytes();
        let to_align = scratch.as_ptr().addr().wrapping_neg() % ALIGN_BYTES;
        let part = |nth: usize, len: usize, dtype: DType| {
            let at = scratch.as_ptr().wrapping_add(to_align + firsts[nth]);
            // SAFETY: a part of the scratch memory, whose maker promised validity and ordered
            // accesses; aligned to any element.
            unsafe { AnySlice::from_raw_parts(at, len, dtype, scratch.device()) }
        };
        let of_x = |nth| part(nth, elems, DType::Bf16);
        let square = |nth| part(nth, short * short, DType::Bf16).typed::<bf16>();
        let [gram, polynomial] = [square(2)?, square(3)?];
        let sums = part(4, stats_scratch_elems(&[elems]), DType::F64);
        let stats = part(5, size_of::<GradStats>(), DType::U8).as_ptr();
        // SAFETY: as above.
        let stats = unsafe { DeviceSlice::from_raw_parts(stats.cast(), 1, scratch.device()) };
        let workspace = part(6, workspace_bytes, DType::U8);

        let matrix = MatrixRows {
            data: args.values.erase(),
            stride: row_stride,
        };
        let copy = |nth| MatrixRows {
            data: of_x(nth),
            stride: cols,
        };
        self.cast_rows(stream, matrix, copy(0), [rows, cols], 1.0)?;
        self.grad_stats(stream, &[of_x(0)], sums.typed()?, stats)?;
        let to_norm_1 = launch::normalise(of_x(0).typed()?, stats, rule.eps);
        self.enqueue(stream, "normalise", to_norm_1)?;

        let [a, b, c] = rule.coefficients.map(|coefficient| coefficient as f32);
        let wide = rows <= cols;
        let long = rows.max(cols);
        let product = MatrixProduct {
            sizes: [short; 3],
            left: gram,
            right: gram,
            transposed: [false; 2],
            out: polynomial,
            add: None,
            scale: 1.0,
            add_scale: 1.0,
        };
        let mut now = 0;
        for _ in 0..rule.steps {
            let [x, next] = [of_x(now).typed()?, of_x(1 - now).typed()?];
            let of_gram = MatrixProduct {
                sizes: [short, short, long],
                left: x,
                right: x,
                transposed: [!wide, wide],
                out: gram,
                ..product
            };
            let of_polynomial = MatrixProduct {
                add: Some(gram),
                scale: c,
                add_scale: b,
                ..product
            };
            let [left, right] = match wide {
                true => [polynomial, x],
                false => [x, polynomial],
            };
            let of_next = MatrixProduct {
                sizes: [rows, cols, short],
                left,
                right,
                out: next,
                add: Some(x),
                add_scale: a,
                ..product
            };
            for product in [of_gram, of_polynomial, of_next] {
                products.enqueue(stream, &product, workspace)?;
            }
            now = 1 - now;
        }
        self.cast_rows(stream, copy(now), matrix, [rows, cols], args.scale)
    }
}
