//! The functions between the two matrices of an MLP, elementwise.
//!
//! GELU is x Φ(x), Φ the normal distribution (Hendrycks and Gimpel, arXiv 1606.08415), in its tanh
//! form or by the error function; SiLU is x σ(x) (Elfwing et al., arXiv 1702.03118).

use multiversion::multiversion;
use rayon::prelude::*;

use super::{math, rows_per_thread};

/// The function of an MLP, by its name in a `config.json`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// `gelu_new`: GELU in its tanh form.
    #[default]
    GeluNew,
    /// `gelu`: by the error function.
    Gelu,
    /// `relu`: max(x, 0).
    Relu,
    /// `silu`: x σ(x).
    Silu,
}

impl Activation {
    /// The function of a name in `config.json`.
    pub(crate) fn of(name: &str) -> Option<Self> {
        Some(match name {
            "gelu_new" | "gelu_pytorch_tanh" => Self::GeluNew,
            "gelu" => Self::Gelu,
            "relu" => Self::Relu,
            "silu" | "swish" => Self::Silu,
            _ => return None,
        })
    }

    /// Its name in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::GeluNew => "gelu_new",
            Self::Gelu => "gelu",
            Self::Relu => "relu",
            Self::Silu => "silu",
        }
    }

    /// `y = f(x)`, elementwise.
    pub fn forward(self, y: &mut [f32], x: &[f32]) {
        let part = match self {
            Self::GeluNew => gelu_new_values,
            Self::Gelu => gelu_values,
            Self::Relu => relu_values,
            Self::Silu => silu_values,
        };
        let n = rows_per_thread(y.len());
        (y.par_chunks_mut(n), x.par_chunks(n))
            .into_par_iter()
            .for_each(|(y, x)| part(y, x));
    }

    /// `dy *= f'(x)`, elementwise: on return `dy` is the gradient of x.
    pub fn backward(self, dy: &mut [f32], x: &[f32]) {
        let part = match self {
            Self::GeluNew => gelu_new_slopes,
            Self::Gelu => gelu_slopes,
            Self::Relu => relu_slopes,
            Self::Silu => silu_slopes,
        };
        let n = rows_per_thread(dy.len());
        (dy.par_chunks_mut(n), x.par_chunks(n))
            .into_par_iter()
            .for_each(|(dy, x)| part(dy, x));
    }
}

/// Defines the loops of a function with this value and this slope.
macro_rules! elementwise {
    ($values:ident, $value:expr, $slopes:ident, $slope:expr) => {
        #[multiversion(targets = "simd")]
        fn $values(y: &mut [f32], x: &[f32]) {
            for (y, x) in y.iter_mut().zip(x) {
                *y = $value(*x);
            }
        }

        #[multiversion(targets = "simd")]
        fn $slopes(dy: &mut [f32], x: &[f32]) {
            for (dy, x) in dy.iter_mut().zip(x) {
                *dy *= $slope(*x);
            }
        }
    };
}

elementwise!(
    gelu_new_values,
    gelu_new_of,
    gelu_new_slopes,
    gelu_new_slope
);
elementwise!(gelu_values, gelu_of, gelu_slopes, gelu_slope);
elementwise!(relu_values, relu_of, relu_slopes, relu_slope);
elementwise!(silu_values, silu_of, silu_slopes, silu_slope);

const TWO_SQRT_2_OVER_PI: f32 = std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::SQRT_2;
const CUBIC: f32 = TWO_SQRT_2_OVER_PI * 0.044_715;

/// e^(-2u), u = √(2/π) (x + 0.044715 x³).
#[inline(always)]
fn exp_minus_2u(x: f32) -> f32 {
    math::exp(x * (x * x).mul_add(-CUBIC, -TWO_SQRT_2_OVER_PI))
}

/// x (1 + tanh u) / 2 = x σ(2u).
#[inline(always)]
fn gelu_new_of(x: f32) -> f32 {
    x / (1.0 + exp_minus_2u(x))
}

#[inline(always)]
fn gelu_new_slope(x: f32) -> f32 {
    let s = 1.0 / (1.0 + exp_minus_2u(x));
    let slope = (x * x).mul_add(3.0 * CUBIC, TWO_SQRT_2_OVER_PI);
    (x * slope).mul_add(s * (1.0 - s), s)
}

/// Φ(x) within 2.1e-7 absolute and 6e-7 relative up to |x| = 5, and e^(-x²/2).
///
/// erfc(z) = e^(-z²) t P(t), t = 1 / (1 + 0.36 z), as in Abramowitz and Stegun 7.1.26; P of degree 8
/// by iterated least squares of the relative error for z up to 6.5 (8.2e-9).
#[inline(always)]
fn normal(x: f32) -> (f32, f32) {
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let exp = math::exp(-0.5 * x * x);
    let t = 1.0 / z.mul_add(0.36, 1.0);
    let p = 0.066_848_2;
    let p = t.mul_add(p, -0.360_210_6);
    let p = t.mul_add(p, 0.664_261_7);
    let p = t.mul_add(p, -0.492_335_5);
    let p = t.mul_add(p, 0.459_960_88);
    let p = t.mul_add(p, 0.040_405_98);
    let p = t.mul_add(p, 0.218_371_93);
    let p = t.mul_add(p, 0.199_376_12);
    let p = t.mul_add(p, 0.203_321_31);
    let tail = 0.5 * exp * t * p;
    (if x < 0.0 { tail } else { 1.0 - tail }, exp)
}

#[inline(always)]
fn gelu_of(x: f32) -> f32 {
    x * normal(x).0
}

#[inline(always)]
fn gelu_slope(x: f32) -> f32 {
    const DENSITY_AT_0: f32 =
        std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::FRAC_1_SQRT_2 / 2.0;
    let (share, exp) = normal(x);
    (x * exp).mul_add(DENSITY_AT_0, share)
}

#[inline(always)]
fn relu_of(x: f32) -> f32 {
    // A NaN stays a NaN.
    if x < 0.0 { 0.0 } else { x }
}

#[inline(always)]
fn relu_slope(x: f32) -> f32 {
    if x > 0.0 { 1.0 } else { 0.0 }
}

#[inline(always)]
fn silu_of(x: f32) -> f32 {
    x / (1.0 + math::exp(-x))
}

#[inline(always)]
fn silu_slope(x: f32) -> f32 {
    let s = 1.0 / (1.0 + math::exp(-x));
    (x * s).mul_add(1.0 - s, s)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Φ by its integral from 0, Simpson's rule with steps below 1e-3.
    fn normal_in_fp64(x: f64) -> f64 {
        let steps = 2 * (x.abs() * 1000.0).ceil() as usize + 2;
        let h = x / steps as f64;
        let density = |i: usize| (-0.5 * (i as f64 * h).powi(2)).exp();
        let weight = |i: usize| match i {
            0 => 1.0,
            _ if i == steps => 1.0,
            _ if i % 2 == 1 => 4.0,
            _ => 2.0,
        };
        let sum: f64 = (0..=steps).map(|i| weight(i) * density(i)).sum();
        0.5 + sum * h / 3.0 / std::f64::consts::TAU.sqrt()
    }

    fn value(kind: Activation, x: f64) -> f64 {
        match kind {
            Activation::GeluNew => {
                let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                0.5 * x * (1.0 + u.tanh())
            }
            Activation::Gelu => x * normal_in_fp64(x),
            Activation::Relu => x.max(0.0),
            Activation::Silu => x / (1.0 + (-x).exp()),
        }
    }

    const KINDS: [Activation; 4] = [
        Activation::GeluNew,
        Activation::Gelu,
        Activation::Relu,
        Activation::Silu,
    ];

    #[test]
    fn values_and_slopes_are_those_of_fp64() {
        for kind in KINDS {
            for i in -60..=60 {
                let x = [i as f32 * 0.11 + 0.013];
                let mut y = [f32::NAN];
                kind.forward(&mut y, &x);
                let at = f64::from(x[0]);
                let error = (f64::from(y[0]) - value(kind, at)).abs();
                assert!(error < 1e-6, "{kind:?} of {at}: {error:e}");

                let mut dy = [2.0];
                kind.backward(&mut dy, &x);
                let h = 1e-4;
                let slope = (value(kind, at + h) - value(kind, at - h)) / (2.0 * h);
                let error = (f64::from(dy[0]) - 2.0 * slope).abs();
                // 1 - σ is rounded, and up to 71 times as much is its error here.
                let bound = match kind {
                    Activation::GeluNew => 1e-5,
                    _ => 3e-6,
                };
                assert!(error < bound, "{kind:?}' of {at}: {error:e}");
            }
        }
    }

    #[test]
    fn names_read_back() {
        for kind in KINDS {
            assert_eq!(Activation::of(kind.name()), Some(kind));
        }
        assert_eq!(Activation::of("tanh"), None);
    }
}
