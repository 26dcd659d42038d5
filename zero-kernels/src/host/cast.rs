//! Conversion between dtypes with a scale.

use multiversion::multiversion;

use super::same_len;
use crate::{Float, KernelError};

/// `dst[i] = src[i] * scale`, multiplied in fp32 and rounded to nearest even.
///
/// # Errors
/// The lengths differ.
pub fn cast<S: Float, D: Float>(src: &[S], dst: &mut [D], scale: f32) -> Result<(), KernelError> {
    same_len("cast: dst", src.len(), dst.len())?;
    run(src, dst, scale);
    Ok(())
}

#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2+lzcnt",
    "x86_64+avx2+fma+bmi1+bmi2+lzcnt"
))]
pub(super) fn run<S: Float, D: Float>(src: &[S], dst: &mut [D], scale: f32) {
    for (d, s) in dst.iter_mut().zip(src) {
        *d = D::from_f32(s.to_f32() * scale);
    }
}
