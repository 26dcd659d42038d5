//! SwiGLU (arXiv 2002.05202): `act = silu(gate) up`, silu(x) = x σ(x).
//!
//! Shapes: gate_up `[rows, 2, n]`, act `[rows, n]`.

use multiversion::multiversion;
use rayon::prelude::*;

use super::{math, rows_per_thread};

/// `act = silu(gate) up`.
pub fn forward(act: &mut [f32], gate_up: &[f32], n: usize) {
    let rows = rows_per_thread(act.len() / n);
    (
        act.par_chunks_mut(rows * n),
        gate_up.par_chunks(rows * 2 * n),
    )
        .into_par_iter()
        .for_each(|(act, gate_up)| forward_rows(act, gate_up, n));
}

/// Replaces gate and up by their gradients.
pub fn backward(gate_up: &mut [f32], dact: &[f32], n: usize) {
    let rows = rows_per_thread(dact.len() / n);
    (
        gate_up.par_chunks_mut(rows * 2 * n),
        dact.par_chunks(rows * n),
    )
        .into_par_iter()
        .for_each(|(gate_up, dact)| backward_rows(gate_up, dact, n));
}

#[multiversion(targets = "simd")]
fn forward_rows(act: &mut [f32], gate_up: &[f32], n: usize) {
    for (act, gate_up) in act.chunks_exact_mut(n).zip(gate_up.chunks_exact(2 * n)) {
        let (gate, up) = gate_up.split_at(n);
        for ((act, &gate), &up) in act.iter_mut().zip(gate).zip(up) {
            *act = gate / (1.0 + math::exp(-gate)) * up;
        }
    }
}

#[multiversion(targets = "simd")]
fn backward_rows(gate_up: &mut [f32], dact: &[f32], n: usize) {
    for (gate_up, dact) in gate_up.chunks_exact_mut(2 * n).zip(dact.chunks_exact(n)) {
        let (gate, up) = gate_up.split_at_mut(n);
        for ((gate, up), &dact) in gate.iter_mut().zip(up).zip(dact) {
            let sigmoid = 1.0 / (1.0 + math::exp(-*gate));
            let silu = *gate * sigmoid;
            let slope = silu.mul_add(1.0 - sigmoid, sigmoid);
            *gate = dact * *up * slope;
            *up = dact * silu;
        }
    }
}
