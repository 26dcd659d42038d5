//! Stands in for `libcublasLt` on machines without a GPU, beside the stand-in for `libcuda`, whose device memory is
//! host memory. The products that this workspace uses are computed by plain loops in fp32, when their turn in the
//! stream comes (`cuLaunchHostFunc`); others are refused as `CUBLAS_STATUS_NOT_SUPPORTED`.
//!
//! It promises no more than the library's documentation: what an algorithm was chosen for is checked when it runs, sums
//! whose parts may be rounded to 16 bits are, and other alignments may have another algorithm, with other bits.
//!
//! `ZERO_STANDIN_NO_GELU=1`: products with GELU are not supported, as on older libraries, so that callers' own kernels
//! are tested too. Its times mean nothing.

mod api;
mod choice;
mod product;
mod storage;

pub use api::*;
