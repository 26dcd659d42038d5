//! A stand-in for `libcublasLt` on machines without a GPU. It needs the stand-in for `libcuda`,
//! whose device memory is host memory. The products that this workspace uses are computed by plain
//! fp32 loops in stream order (`cuLaunchHostFunc`); other products return
//! `CUBLAS_STATUS_NOT_SUPPORTED`.
//!
//! It guarantees no more than the library's documentation: alignments and workspace are checked
//! against those that the algorithm was chosen for, partial sums that may be rounded to 16 bits are
//! rounded, and other alignments may choose another algorithm with other bits.
//!
//! With `ZERO_STANDIN_NO_GELU=1` products with GELU are not supported, as in older libraries, so
//! that tests cover the caller's GELU kernels. The stand-in's times are meaningless.

mod api;
mod choice;
mod product;
mod storage;
mod sums;

pub use api::*;
