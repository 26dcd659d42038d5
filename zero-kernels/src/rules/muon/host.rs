//! The element-wise phases of Muon on the host.

use half::bf16;
use multiversion::multiversion;

use super::of_rule;
use crate::check::same_len;
use crate::codec::{join, split};
use crate::error::KernelError;
use crate::float::Float;
use crate::host::cast;
use crate::host::update::{FloatSliceMut, WeightSlices, with_floats};
use crate::step::StepScalars;

/// Elements that are updated and then narrowed, while they are in the level-1 cache.
const PART_ELEMS: usize = 2048;

/// PyTorch's `lerp` with one weight of 0 to 1: from the nearer end, so that both are exact.
#[derive(Clone, Copy)]
struct Lerp {
    from_start: bool,
    coefficient: f32,
}

impl Lerp {
    fn new(weight: f32) -> Self {
        let from_start = weight < 0.5;
        let coefficient = if from_start { weight } else { weight - 1.0 };
        Self {
            from_start,
            coefficient,
        }
    }

    #[inline(always)]
    fn of(self, start: f32, end: f32) -> f32 {
        let nearer = if self.from_start { start } else { end };
        self.coefficient.mul_add(end - start, nearer)
    }
}

/// Updates the momentum, and writes the direction, on this thread.
///
/// # Errors
/// The lengths differ.
pub(super) fn direction<G: Float>(
    direction: &mut [f32],
    momentum: &mut [f32],
    grad: &[G],
    scalars: &StepScalars,
    nesterov: bool,
) -> Result<(), KernelError> {
    same_len("muon: momentum", direction.len(), momentum.len())?;
    same_len("muon: grad", direction.len(), grad.len())?;
    let [_, to_momentum, to_direction] = of_rule(scalars);
    let lerps = [Lerp::new(to_momentum), Lerp::new(to_direction)];
    directions(
        direction,
        momentum,
        grad,
        scalars.grad_scale,
        lerps,
        nesterov,
    );
    Ok(())
}

#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2+lzcnt",
    "x86_64+avx2+fma+bmi1+bmi2+lzcnt"
))]
fn directions<G: Float>(
    direction: &mut [f32],
    momentum: &mut [f32],
    grad: &[G],
    grad_scale: f32,
    [to_momentum, to_direction]: [Lerp; 2],
    nesterov: bool,
) {
    for ((u, m), g) in direction.iter_mut().zip(momentum).zip(grad) {
        let g = g.to_f32() * grad_scale;
        *m = to_momentum.of(*m, g);
        *u = if nesterov { to_direction.of(g, *m) } else { *m };
    }
}

/// Decays the weights and subtracts `lr * update`, on this thread.
///
/// # Errors
/// The lengths differ.
pub(super) fn apply(
    weights: WeightSlices<'_>,
    update: &[f32],
    scalars: &StepScalars,
    weight_decay: f32,
) -> Result<(), KernelError> {
    let [lr, ..] = of_rule(scalars);
    let keep = 1.0 - lr * weight_decay;
    match weights {
        WeightSlices::Fp32 { master, param_out } => {
            same_len("muon_apply: grad", master.len(), update.len())?;
            let Some(param) = param_out else {
                masters(master, update, keep, lr);
                return Ok(());
            };
            with_floats!(FloatSliceMut, param, param => {
                same_len("muon_apply: param_out", master.len(), param.len())?;
                let parts = master.chunks_mut(PART_ELEMS).zip(update.chunks(PART_ELEMS));
                for ((master, update), param) in parts.zip(param.chunks_mut(PART_ELEMS)) {
                    masters(master, update, keep, lr);
                    cast(master, param, 1.0)?;
                }
            });
        }
        WeightSlices::Remainder { param, remainder } => {
            same_len("muon_apply: remainder", param.len(), remainder.len())?;
            same_len("muon_apply: grad", param.len(), update.len())?;
            remainders(param, remainder, update, keep, lr);
        }
    }
    Ok(())
}

#[inline(always)]
fn applied(w: f32, update: f32, keep: f32, lr: f32) -> f32 {
    (-lr).mul_add(update, w * keep)
}

#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2+lzcnt",
    "x86_64+avx2+fma+bmi1+bmi2+lzcnt"
))]
fn masters(master: &mut [f32], update: &[f32], keep: f32, lr: f32) {
    for (w, update) in master.iter_mut().zip(update) {
        *w = applied(*w, *update, keep, lr);
    }
}

#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2+lzcnt",
    "x86_64+avx2+fma+bmi1+bmi2+lzcnt"
))]
fn remainders(param: &mut [bf16], remainder: &mut [i16], update: &[f32], keep: f32, lr: f32) {
    for ((param, remainder), update) in param.iter_mut().zip(remainder).zip(update) {
        let w = applied(join(*param, *remainder), *update, keep, lr);
        (*param, *remainder) = split(w);
    }
}
