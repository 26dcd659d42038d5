//! GELU in its tanh form, `gelu_new` of GPT-2: x σ(2u), u = √(2/π) (x + 0.044715 x³)
//! (Hendrycks and Gimpel, arXiv 1606.08415; x (1 + tanh u) / 2 = x σ(2u)).

use multiversion::multiversion;
use rayon::prelude::*;

use super::{math, rows_per_thread};

const TWO_SQRT_2_OVER_PI: f32 = std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::SQRT_2;
const CUBIC: f32 = 0.044_715;

/// `y = gelu(x)`, elementwise.
pub fn forward(y: &mut [f32], x: &[f32]) {
    let n = rows_per_thread(y.len());
    (y.par_chunks_mut(n), x.par_chunks(n)).into_par_iter().for_each(|(y, x)| forward_chunk(y, x));
}

/// `dy *= gelu'(x)`, elementwise: on return `dy` is the gradient of x.
pub fn backward(dy: &mut [f32], x: &[f32]) {
    let n = rows_per_thread(dy.len());
    (dy.par_chunks_mut(n), x.par_chunks(n)).into_par_iter().for_each(|(dy, x)| backward_chunk(dy, x));
}

#[inline(always)]
fn sigmoid(z: f32) -> f32 {
    1.0 / (1.0 + math::exp(-z))
}

#[multiversion(targets = "simd")]
fn forward_chunk(y: &mut [f32], x: &[f32]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = x * sigmoid(TWO_SQRT_2_OVER_PI * (x + CUBIC * x * x * x));
    }
}

#[multiversion(targets = "simd")]
fn backward_chunk(dy: &mut [f32], x: &[f32]) {
    for (dy, &x) in dy.iter_mut().zip(x) {
        let s = sigmoid(TWO_SQRT_2_OVER_PI * (x + CUBIC * x * x * x));
        let slope = TWO_SQRT_2_OVER_PI * (1.0 + 3.0 * CUBIC * x * x);
        *dy *= s + x * s * (1.0 - s) * slope;
    }
}
