//! Weights as a bf16 parameter and a 16-bit remainder, together exactly fp32: no separate master.
//!
//! `bits(w) = (bits(parameter) << 16) + remainder` with a signed remainder. So the parameter is `w`
//! rounded to nearest, ties away from zero (ties to even could not be inverted), and no bit is
//! lost. A NaN becomes the canonical NaN. CUDA version: cuda/adam_remainder.cu.

use half::bf16;
use multiversion::multiversion;

use super::adam::{Coefficients, element};
use super::prefetch::{blocks, prefetch};
use super::same_len;
use crate::{AdamHyper, Float, KernelError, StepScalars};

/// The parameter and remainder of `w`.
#[inline(always)]
pub fn split(w: f32) -> (bf16, i16) {
    let bits = if w.is_nan() { 0x7fc0_0000 } else { w.to_bits() };
    (
        bf16::from_bits((bits.wrapping_add(0x8000) >> 16) as u16),
        bits as u16 as i16,
    )
}

/// The weight with this parameter and remainder.
#[inline(always)]
pub fn join(param: bf16, remainder: i16) -> f32 {
    f32::from_bits((u32::from(param.to_bits()) << 16).wrapping_add(i32::from(remainder) as u32))
}

/// The slices of one Adam step in this format, of equal length.
#[derive(Debug)]
pub struct RemainderSlices<'a, G> {
    /// The parameter, updated.
    pub param: &'a mut [bf16],
    /// Its remainder, updated.
    pub remainder: &'a mut [i16],
    /// First moment, updated.
    pub first_moment: &'a mut [f32],
    /// Second moment, updated.
    pub second_moment: &'a mut [f32],
    /// Gradient, still scaled.
    pub grad: &'a [G],
}

/// One step of AdamW or Adam: the same bits as [`adam`](super::adam()) on fp32 masters, with 26
/// bytes of traffic per element instead of 28.
///
/// # Errors
/// The slices' lengths differ.
pub fn adam_remainder<G: Float>(
    slices: RemainderSlices<'_, G>,
    scalars: &StepScalars,
    hyper: &AdamHyper,
) -> Result<(), KernelError> {
    let RemainderSlices {
        param,
        remainder,
        first_moment,
        second_moment,
        grad,
    } = slices;

    same_len("adam_remainder: remainder", param.len(), remainder.len())?;
    same_len(
        "adam_remainder: first_moment",
        param.len(),
        first_moment.len(),
    )?;
    same_len(
        "adam_remainder: second_moment",
        param.len(),
        second_moment.len(),
    )?;
    same_len("adam_remainder: grad", param.len(), grad.len())?;
    if scalars.skip != 0 {
        return Ok(());
    }
    let c = Coefficients::new(scalars, hyper);

    if hyper.decoupled {
        update::<G, true>(param, remainder, first_moment, second_moment, grad, c);
    } else {
        update::<G, false>(param, remainder, first_moment, second_moment, grad, c);
    }

    Ok(())
}

#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2+lzcnt",
    "x86_64+avx2+fma+bmi1+bmi2+lzcnt"
))]
fn update<G: Float, const DECOUPLED: bool>(
    param: &mut [bf16],
    remainder: &mut [i16],
    first_moment: &mut [f32],
    second_moment: &mut [f32],
    grad: &[G],
    c: Coefficients,
) {
    let n = param.len();
    let remainder = &mut remainder[..n];
    let first_moment = &mut first_moment[..n];
    let second_moment = &mut second_moment[..n];
    let grad = &grad[..n];
    for block in blocks(n) {
        prefetch(param, &block);
        prefetch(remainder, &block);
        prefetch(first_moment, &block);
        prefetch(second_moment, &block);
        prefetch(grad, &block);
        for i in block {
            let w = join(param[i], remainder[i]);
            let (w, m, v) =
                element::<DECOUPLED>(&c, w, first_moment[i], second_moment[i], grad[i].to_f32());
            (param[i], remainder[i]) = split(w);
            first_moment[i] = m;
            second_moment[i] = v;
        }
    }
}
