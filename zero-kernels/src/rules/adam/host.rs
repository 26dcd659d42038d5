//! Adam on the host: unscale, clip, decay, moments, update and narrowing in one pass over memory.

use half::bf16;
use multiversion::multiversion;
use zero_alloc::device::DType;

use super::{AdamHyper, AdamScalars};
use crate::check::same_len;
use crate::error::KernelError;
use crate::float::Float;
use crate::host::prefetch::{blocks, prefetch};
use crate::host::workers::Workers;

/// The slices of one Adam step, of equal length.
#[derive(Debug)]
pub struct AdamSlices<'a, W, M, G, P> {
    /// Weights, updated: the fp32 masters, or the parameter itself if there are no masters.
    pub weights: &'a mut [W],
    /// First moment, updated.
    pub first_moment: &'a mut [M],
    /// Second moment, updated.
    pub second_moment: &'a mut [M],
    /// Gradient, still scaled.
    pub grad: &'a [G],
    /// The new weights in the parameter's dtype, written.
    pub param_out: Option<&'a mut [P]>,
}

impl<'a, W, M, G, P> AdamSlices<'a, W, M, G, P> {
    /// The length of all slices.
    ///
    /// # Errors
    /// A slice's length differs from the weights'.
    pub(crate) fn checked_len(&self) -> Result<usize, KernelError> {
        let n = self.weights.len();
        same_len("adam: first_moment", n, self.first_moment.len())?;
        same_len("adam: second_moment", n, self.second_moment.len())?;
        same_len("adam: grad", n, self.grad.len())?;
        same_len(
            "adam: param_out",
            n,
            self.param_out.as_ref().map_or(n, |p| p.len()),
        )?;
        Ok(n)
    }

    /// With the parameter as another output.
    pub(super) fn with_param_out<Q>(self, param_out: &'a mut [Q]) -> AdamSlices<'a, W, M, G, Q> {
        let Self {
            weights,
            first_moment,
            second_moment,
            grad,
            ..
        } = self;
        AdamSlices {
            weights,
            first_moment,
            second_moment,
            grad,
            param_out: Some(param_out),
        }
    }

    /// The first `at` elements and the rest.
    ///
    /// # Panics
    /// A slice has fewer than `at` elements.
    pub fn split_at(self, at: usize) -> (Self, Self) {
        let (weights, weights_rest) = self.weights.split_at_mut(at);
        let (first_moment, first_rest) = self.first_moment.split_at_mut(at);
        let (second_moment, second_rest) = self.second_moment.split_at_mut(at);
        let (grad, grad_rest) = self.grad.split_at(at);
        let (param_out, param_rest) = self.param_out.map(|p| p.split_at_mut(at)).unzip();

        (
            Self {
                weights,
                first_moment,
                second_moment,
                grad,
                param_out,
            },
            Self {
                weights: weights_rest,
                first_moment: first_rest,
                second_moment: second_rest,
                grad: grad_rest,
                param_out: param_rest,
            },
        )
    }
}

/// The factors of one step, in fp32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Coefficients {
    pub(crate) grad_scale: f32,
    /// 1 - lr * weight_decay.
    pub(crate) keep: f32,
    pub(crate) weight_decay: f32,
    pub(crate) one_minus_beta1: f32,
    pub(crate) beta2: f32,
    pub(crate) one_minus_beta2: f32,
    pub(crate) bias_correction2_sqrt: f32,
    /// 1 / bias_correction2_sqrt.
    pub(crate) reciprocal: f32,
    pub(crate) eps: f32,
    /// lr / (1 - beta1^t).
    pub(crate) step_size: f32,
}

impl Coefficients {
    pub(crate) fn new(scalars: &AdamScalars, hyper: &AdamHyper) -> Self {
        let weight_decay = hyper.weight_decay as f32;
        Self {
            grad_scale: scalars.grad_scale,
            keep: 1.0 - scalars.lr * weight_decay,
            weight_decay,
            one_minus_beta1: scalars.one_minus_beta1,
            beta2: scalars.beta2,
            one_minus_beta2: scalars.one_minus_beta2,
            bias_correction2_sqrt: scalars.bias_correction2_sqrt,
            reciprocal: scalars.bias_correction2_sqrt.recip(),
            eps: hyper.eps as f32,
            step_size: scalars.step_size,
        }
    }
}

/// `x / y` rounded like a division, which takes longer; `reciprocal` is 1 / y, rounded. x is a
/// square root: its remainders are exact, since none is subnormal. Source: Brisebarre, Muller,
/// Raina: Accelerating correctly rounded floating-point division when the divisor is known in
/// advance, 2004.
#[inline(always)]
fn quotient(x: f32, y: f32, reciprocal: f32) -> f32 {
    let near = x * reciprocal;
    let remainder = (-near).mul_add(y, x);
    if near.is_finite() {
        remainder.mul_add(reciprocal, near)
    } else {
        near
    }
}

/// Returns the new weight and moments of one element.
#[inline(always)]
pub(super) fn element<const DECOUPLED: bool>(
    c: &Coefficients,
    w: f32,
    m: f32,
    v: f32,
    g: f32,
) -> (f32, f32, f32) {
    let g = g * c.grad_scale;
    let (w, g) = if DECOUPLED {
        (w * c.keep, g)
    } else {
        (w, c.weight_decay.mul_add(w, g))
    };
    let m = c.one_minus_beta1.mul_add(g - m, m);
    let v = (c.one_minus_beta2 * g).mul_add(g, v * c.beta2);
    let denominator = quotient(v.sqrt(), c.bias_correction2_sqrt, c.reciprocal) + c.eps;
    (w - (c.step_size * m) / denominator, m, v)
}

/// Updates all elements, and writes the new weights to `param_out` if `NARROW`.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2+lzcnt",
    "x86_64+avx2+fma+bmi1+bmi2+lzcnt"
))]
fn update<W: Float, M: Float, G: Float, P: Float, const NARROW: bool, const DECOUPLED: bool>(
    weights: &mut [W],
    first_moment: &mut [M],
    second_moment: &mut [M],
    grad: &[G],
    param_out: &mut [P],
    c: Coefficients,
) {
    let n = weights.len();
    let first_moment = &mut first_moment[..n];
    let second_moment = &mut second_moment[..n];
    let grad = &grad[..n];
    let param_out = &mut param_out[..if NARROW { n } else { 0 }];

    for block in blocks(n) {
        prefetch(weights, &block);
        prefetch(first_moment, &block);
        prefetch(second_moment, &block);
        prefetch(grad, &block);
        for i in block {
            let w = weights[i].to_f32();
            let m = first_moment[i].to_f32();
            let v = second_moment[i].to_f32();
            let g = grad[i].to_f32();
            let (w, m, v) = element::<DECOUPLED>(&c, w, m, v, g);
            weights[i] = W::from_f32(w);
            first_moment[i] = M::from_f32(m);
            second_moment[i] = M::from_f32(v);
            if NARROW {
                param_out[i] = P::from_f32(w);
            }
        }
    }
}

/// [`update`] for slices that are all bf16: two adjacent elements are processed as one 32-bit
/// value, whose halves widen and narrow in place, with a third fewer instructions.
///
/// Rounding needs no special case for NaN: a NaN that comes from bf16 values ends in 16 zero bits,
/// so rounding does not carry into the exponent.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2+lzcnt",
    "x86_64+avx2+fma+bmi1+bmi2+lzcnt"
))]
fn update_bf16_pairs<const DECOUPLED: bool>(
    weights: &mut [[bf16; 2]],
    first_moment: &mut [[bf16; 2]],
    second_moment: &mut [[bf16; 2]],
    grad: &[[bf16; 2]],
    c: Coefficients,
) {
    let halves = |pair: [bf16; 2]| {
        let word: u32 = bytemuck::cast(pair);
        (
            f32::from_bits(word << 16),
            f32::from_bits(word & 0xffff_0000),
        )
    };

    let round = |x: f32| x.to_bits().wrapping_add(0x7fff + ((x.to_bits() >> 16) & 1));
    let join = |a: f32, b: f32| -> [bf16; 2] {
        bytemuck::cast((round(a) >> 16) | (round(b) & 0xffff_0000))
    };
    let n = weights.len();
    let (first_moment, second_moment, grad) =
        (&mut first_moment[..n], &mut second_moment[..n], &grad[..n]);

    for block in blocks(n) {
        prefetch(weights, &block);
        prefetch(first_moment, &block);
        prefetch(second_moment, &block);
        prefetch(grad, &block);
        for i in block {
            let w = halves(weights[i]);
            let m = halves(first_moment[i]);
            let v = halves(second_moment[i]);
            let g = halves(grad[i]);
            let a = element::<DECOUPLED>(&c, w.0, m.0, v.0, g.0);
            let b = element::<DECOUPLED>(&c, w.1, m.1, v.1, g.1);
            weights[i] = join(a.0, b.0);
            first_moment[i] = join(a.1, b.1);
            second_moment[i] = join(a.2, b.2);
        }
    }
}

/// One fused step of AdamW (`hyper.decoupled`) or Adam with L2 over all elements of `slices`, on
/// this thread. If `scalars.skip` is nonzero, nothing is written.
///
/// # Errors
/// The slices' lengths differ.
pub fn adam<W: Float, M: Float, G: Float, P: Float>(
    slices: AdamSlices<'_, W, M, G, P>,
    scalars: &AdamScalars,
    hyper: &AdamHyper,
) -> Result<(), KernelError> {
    slices.checked_len()?;
    if scalars.skip != 0 {
        return Ok(());
    }
    let c = Coefficients::new(scalars, hyper);

    let AdamSlices {
        weights: w,
        first_moment: m,
        second_moment: v,
        grad: g,
        param_out,
    } = slices;

    if let (None, Some(w), Some(m), Some(v), Some(g)) = (
        &param_out,
        as_bf16_mut(w),
        as_bf16_mut(m),
        as_bf16_mut(v),
        as_bf16(g),
    ) {
        adam_bf16(w, m, v, g, hyper.decoupled, c);
        return Ok(());
    }

    match (param_out, hyper.decoupled) {
        (None, true) => update::<W, M, G, P, false, true>(w, m, v, g, &mut [], c),
        (None, false) => update::<W, M, G, P, false, false>(w, m, v, g, &mut [], c),
        (Some(p), true) => update::<W, M, G, P, true, true>(w, m, v, g, p, c),
        (Some(p), false) => update::<W, M, G, P, true, false>(w, m, v, g, p, c),
    }

    Ok(())
}

impl Workers {
    /// [`adam`] over these threads.
    ///
    /// # Errors
    /// The slices' lengths differ.
    pub fn adam<W: Float, M: Float, G: Float, P: Float>(
        &self,
        slices: AdamSlices<'_, W, M, G, P>,
        scalars: &AdamScalars,
        hyper: &AdamHyper,
    ) -> Result<(), KernelError> {
        let part_elems = self.part_elems(slices.checked_len()?);
        let mut rest = Some(slices);
        let parts = std::iter::from_fn(|| {
            let slices = rest.take()?;
            if slices.weights.len() <= part_elems {
                return Some(slices);
            }
            let (part, after) = slices.split_at(part_elems);
            rest = Some(after);
            Some(part)
        });
        self.each(parts, |part| {
            let equal = adam(part, scalars, hyper);
            debug_assert!(equal.is_ok(), "the lengths were checked above");
        });
        Ok(())
    }
}

/// The slice as bf16 if `T` is bf16.
fn as_bf16<T: Float>(x: &[T]) -> Option<&[bf16]> {
    (T::DTYPE == DType::Bf16).then(|| bytemuck::cast_slice(x))
}

/// The slice as bf16 if `T` is bf16.
fn as_bf16_mut<T: Float>(x: &mut [T]) -> Option<&mut [bf16]> {
    (T::DTYPE == DType::Bf16).then(|| bytemuck::cast_slice_mut(x))
}

fn adam_bf16(
    w: &mut [bf16],
    m: &mut [bf16],
    v: &mut [bf16],
    g: &[bf16],
    decoupled: bool,
    c: Coefficients,
) {
    let ((w, w_tail), (m, m_tail)) = (w.as_chunks_mut::<2>(), m.as_chunks_mut::<2>());
    let ((v, v_tail), (g, g_tail)) = (v.as_chunks_mut::<2>(), g.as_chunks::<2>());
    if decoupled {
        update_bf16_pairs::<true>(w, m, v, g, c);
        update::<bf16, bf16, bf16, bf16, false, true>(w_tail, m_tail, v_tail, g_tail, &mut [], c);
    } else {
        update_bf16_pairs::<false>(w, m, v, g, c);
        update::<bf16, bf16, bf16, bf16, false, false>(w_tail, m_tail, v_tail, g_tail, &mut [], c);
    }
}

#[cfg(test)]
mod tests {
    use super::quotient;

    #[test]
    fn quotients_are_rounded_like_divisions() {
        let betas = [0.9, 0.95, 0.98, 0.99, 0.999, 0.9999, 0.999_999];
        let steps = [1, 2, 3, 7, 20, 100, 1000, 100_000];
        let corrections = betas
            .iter()
            .flat_map(|&beta: &f64| steps.map(|t| (1.0 - beta.powi(t)).sqrt() as f32));
        let limits = [
            1.0,
            f32::from_bits(0x3f7f_ffff),
            f32::from_bits(0x3eff_ffff),
            1e-8,
        ];

        let special = [
            0.0,
            f32::MIN_POSITIVE,
            1e-45,
            f32::MAX,
            f32::INFINITY,
            f32::NAN,
        ];

        for y in corrections.chain(limits) {
            // Squares with all exponents and, of roots between 1 and 2, a hundredth of all
            // mantissas.
            let squares = (0..0x7f80_0000)
                .step_by(1_000_003)
                .map(f32::from_bits)
                .chain(special);
            let roots = (0x3f80_0000..0x4000_0000)
                .step_by(if cfg!(miri) { 99_991 } else { 97 })
                .map(f32::from_bits);
            for x in squares.map(f32::sqrt).chain(roots) {
                let ours = quotient(x, y, y.recip());
                let exact = x / y;
                assert!(
                    ours.to_bits() == exact.to_bits() || ours.is_nan() && exact.is_nan(),
                    "{x:?} / {y:?}: {ours:?}"
                );
            }
        }
    }
}
