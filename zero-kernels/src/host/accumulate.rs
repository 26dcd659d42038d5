//! Sum of gradients over micro-batches.

use multiversion::multiversion;

use super::same_len;
use crate::{Float, KernelError};

/// `acc[i] += grad[i]` in fp32.
///
/// # Errors
/// The lengths differ.
pub fn accumulate<G: Float>(grad: &[G], acc: &mut [f32]) -> Result<(), KernelError> {
    same_len("accumulate: acc", grad.len(), acc.len())?;
    run(grad, acc);
    Ok(())
}

#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2+lzcnt",
    "x86_64+avx2+fma+bmi1+bmi2+lzcnt"
))]
fn run<G: Float>(grad: &[G], acc: &mut [f32]) {
    for (a, g) in acc.iter_mut().zip(grad) {
        *a += g.to_f32();
    }
}
