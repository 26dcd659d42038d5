//! Adam on weights that are a bf16 parameter and a 16-bit remainder, together exactly fp32: no
//! separate master. The format is [`Codec::Remainders`](crate::Codec::Remainders).

use half::bf16;
use multiversion::multiversion;

use super::host::{Coefficients, element};
use super::{AdamHyper, AdamScalars};
use crate::check::same_len;
use crate::codec::{join, split};
use crate::error::KernelError;
use crate::float::Float;
use crate::host::prefetch::{blocks, prefetch};

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
    scalars: &AdamScalars,
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
