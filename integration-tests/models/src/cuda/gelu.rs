//! Launches of gelu.cu.

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::AnySlice;
use zero_kernels::cuda::{Span, THREADS};

use super::error::OpError;
use super::launch::{OpKernels, Shape};

/// `y = gelu(x)`, elementwise.
///
/// # Errors
/// Lengths or types do not fit, or the stream failed.
pub fn forward(
    ops: &OpKernels,
    stream: &CudaStream,
    y: AnySlice,
    x: AnySlice,
) -> Result<(), OpError> {
    elementwise(ops, stream, "gelu", "gelu_forward", y, x)
}

/// `dy *= gelu'(x)`, elementwise: on return `dy` is the gradient of x.
///
/// # Errors
/// Lengths or types do not fit, or the stream failed.
pub fn backward(
    ops: &OpKernels,
    stream: &CudaStream,
    dy: AnySlice,
    x: AnySlice,
) -> Result<(), OpError> {
    elementwise(ops, stream, "gelu backward", "gelu_backward", dy, x)
}

fn elementwise(
    ops: &OpKernels,
    stream: &CudaStream,
    op: &'static str,
    entry: &str,
    y: AnySlice,
    x: AnySlice,
) -> Result<(), OpError> {
    let span = Span::of(&[x, y]);
    let args = [
        ops.stored("gelu: y", y, x.len())?,
        ops.stored("gelu: x", x, x.len())?,
        span.into(),
    ];
    // SAFETY: the parameters of both kernels, whose lengths were checked.
    unsafe {
        ops.launch(
            stream,
            op,
            entry,
            Shape::over(u64::from(span.blocks()) * u64::from(THREADS)),
            args,
        )
    }
}
