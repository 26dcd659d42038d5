//! GELU in its tanh form, `gelu_new` of GPT-2: x σ(2u), u = √(2/π) (x + 0.044715 x³)
//! (Hendrycks and Gimpel, arXiv 1606.08415; x (1 + tanh u) / 2 = x σ(2u)).

use multiversion::multiversion;
use rayon::prelude::*;

use super::{math, rows_per_thread};

const TWO_SQRT_2_OVER_PI: f32 = std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::SQRT_2;
const CUBIC: f32 = TWO_SQRT_2_OVER_PI * 0.044_715;

/// e^(-2u)
#[inline(always)]
fn exp_minus_2u(x: f32) -> f32 {
    math::exp(x * (x * x).mul_add(-CUBIC, -TWO_SQRT_2_OVER_PI))
}

/// `x += bias` and `y = gelu(x)`: x and y `[rows, n]`, bias `[n]`.
pub fn forward(y: &mut [f32], x: &mut [f32], bias: &[f32]) {
    let n = rows_per_thread(y.len() / bias.len()) * bias.len();
    (y.par_chunks_mut(n), x.par_chunks_mut(n))
        .into_par_iter()
        .for_each(|(y, x)| forward_rows(y, x, bias));
}

/// `dy *= gelu'(x)`, elementwise: on return `dy` is the gradient of x.
pub fn backward(dy: &mut [f32], x: &[f32]) {
    let n = rows_per_thread(dy.len());
    (dy.par_chunks_mut(n), x.par_chunks(n))
        .into_par_iter()
        .for_each(|(dy, x)| backward_chunk(dy, x));
}

#[multiversion(targets = "simd")]
fn forward_rows(y: &mut [f32], x: &mut [f32], bias: &[f32]) {
    for (y, x) in y
        .chunks_exact_mut(bias.len())
        .zip(x.chunks_exact_mut(bias.len()))
    {
        for ((y, x), &b) in y.iter_mut().zip(x).zip(bias) {
            *x += b;
            *y = *x / (1.0 + exp_minus_2u(*x));
        }
    }
}

#[multiversion(targets = "simd")]
fn backward_chunk(dy: &mut [f32], x: &[f32]) {
    for (dy, &x) in dy.iter_mut().zip(x) {
        let s = 1.0 / (1.0 + exp_minus_2u(x));
        let slope = (x * x).mul_add(3.0 * CUBIC, TWO_SQRT_2_OVER_PI);
        *dy *= (x * slope).mul_add(s * (1.0 - s), s);
    }
}
