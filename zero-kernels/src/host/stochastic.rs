//! Stochastic rounding to bf16: up or down with the probability of the distance, so that small updates are not
//! lost on average although no fp32 master is kept.
//!
//! The random bits are keyed by (seed, step, element): see [`crate::random`]. Kernel twins: cuda/adam_stochastic.cu and
//! cuda/cast_stochastic.cu.

use half::bf16;
use multiversion::multiversion;

use super::adam::{Coefficients, element};
use super::same_len;
use crate::{AdamHyper, Float, KernelError, StepScalars, random};

/// What the rounding of a range is keyed by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundingKey {
    /// [`random::key`] of seed and step.
    pub key: u64,
    /// The number of the range's first element in the whole model.
    pub first_element: u64,
}

/// Rounds `x` to one of its neighbours in bf16, up (in magnitude) where the low 16 bits of `random` say so. An
/// infinity stays, a NaN stays NaN.
#[inline(always)]
pub fn round_stochastic(x: f32, random: u32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(random & 0xffff) >> 16;
    bf16::from_bits(if x.is_nan() { (bits >> 16) | 0x40 } else { rounded } as u16)
}

/// `dst[i] = src[i] * scale`, rounded stochastically.
///
/// # Errors
/// The lengths differ.
pub fn cast_stochastic(src: &[f32], dst: &mut [bf16], scale: f32, key: RoundingKey) -> Result<(), KernelError> {
    same_len("cast_stochastic: dst", src.len(), dst.len())?;
    cast(src, dst, scale, key);
    Ok(())
}

#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2+lzcnt",
    "x86_64+avx2+fma+bmi1+bmi2+lzcnt"
))]
fn cast(src: &[f32], dst: &mut [bf16], scale: f32, key: RoundingKey) {
    for (i, (d, s)) in dst.iter_mut().zip(src).enumerate() {
        *d = round_stochastic(s * scale, random::bits(key.key, key.first_element.wrapping_add(i as u64)));
    }
}

/// The slices of one step on bf16 weights without masters; all have one length.
#[derive(Debug)]
pub struct StochasticSlices<'a, G> {
    /// Weights, which are the parameter, updated.
    pub weights: &'a mut [bf16],
    /// First moment, updated.
    pub first_moment: &'a mut [f32],
    /// Second moment, updated.
    pub second_moment: &'a mut [f32],
    /// Gradient, as it travelled: scaled.
    pub grad: &'a [G],
}

/// One step of AdamW or Adam as [`adam`](super::adam()), the new weights rounded stochastically.
///
/// # Errors
/// The slices' lengths differ.
pub fn adam_stochastic<G: Float>(
    slices: StochasticSlices<'_, G>,
    scalars: &StepScalars,
    hyper: &AdamHyper,
    key: RoundingKey,
) -> Result<(), KernelError> {
    let StochasticSlices { weights, first_moment, second_moment, grad } = slices;
    same_len("adam_stochastic: first_moment", weights.len(), first_moment.len())?;
    same_len("adam_stochastic: second_moment", weights.len(), second_moment.len())?;
    same_len("adam_stochastic: grad", weights.len(), grad.len())?;
    if scalars.skip != 0 {
        return Ok(());
    }
    let c = Coefficients::new(scalars, hyper);
    if hyper.decoupled {
        update::<G, true>(weights, first_moment, second_moment, grad, c, key);
    } else {
        update::<G, false>(weights, first_moment, second_moment, grad, c, key);
    }
    Ok(())
}

#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2+lzcnt",
    "x86_64+avx2+fma+bmi1+bmi2+lzcnt"
))]
fn update<G: Float, const DECOUPLED: bool>(
    weights: &mut [bf16],
    first_moment: &mut [f32],
    second_moment: &mut [f32],
    grad: &[G],
    c: Coefficients,
    key: RoundingKey,
) {
    let n = weights.len();
    let (first_moment, second_moment, grad) = (&mut first_moment[..n], &mut second_moment[..n], &grad[..n]);
    for i in 0..n {
        let w = Float::to_f32(weights[i]);
        let (w, m, v) = element::<DECOUPLED>(&c, w, first_moment[i], second_moment[i], grad[i].to_f32());
        weights[i] = round_stochastic(w, random::bits(key.key, key.first_element.wrapping_add(i as u64)));
        first_moment[i] = m;
        second_moment[i] = v;
    }
}
