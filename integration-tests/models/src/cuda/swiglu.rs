//! Launches of swiglu.cu.
//!
//! Shapes, in the kernels' type: gate_up `[rows, 2, n]`, act `[rows, n]`.

use zero_alloc::cuda::CudaStream;
use zero_alloc::device::AnySlice;

use super::error::OpError;
use super::launch::{OpKernels, Shape, columns, size};

/// `act = silu(gate) up`.
///
/// # Errors
/// Lengths or types do not fit, or the stream failed.
pub fn forward(
    ops: &OpKernels,
    stream: &CudaStream,
    act: AnySlice,
    gate_up: AnySlice,
    n: usize,
) -> Result<(), OpError> {
    launch(ops, stream, ["SwiGLU", "forward"], act, gate_up, n)
}

/// Replaces gate and up by their gradients, and the gradient of act in `act` by act itself, with the
/// bits of [`forward`].
///
/// # Errors
/// Lengths or types do not fit, or the stream failed.
pub fn backward(
    ops: &OpKernels,
    stream: &CudaStream,
    act: AnySlice,
    gate_up: AnySlice,
    n: usize,
) -> Result<(), OpError> {
    launch(
        ops,
        stream,
        ["SwiGLU backward", "backward"],
        act,
        gate_up,
        n,
    )
}

fn launch(
    ops: &OpKernels,
    stream: &CudaStream,
    [op, pass]: [&'static str; 2],
    act: AnySlice,
    gate_up: AnySlice,
    n: usize,
) -> Result<(), OpError> {
    let rows = act.len() / n.max(1);
    let columns = columns(n, &[act, gate_up]);
    let args = [
        ops.stored("SwiGLU: act", act, rows * n)?,
        ops.stored("SwiGLU: gate and up", gate_up, 2 * rows * n)?,
        size("SwiGLU: rows", rows)?.into(),
        size("SwiGLU: width", n)?.into(),
    ];
    let shape = Shape::over((rows * n / columns) as u64);
    let entry = format!("swiglu_{pass}_{columns}");
    // SAFETY: the parameters of both kernels, whose lengths were checked.
    unsafe { ops.launch(stream, op, &entry, shape, args) }
}
