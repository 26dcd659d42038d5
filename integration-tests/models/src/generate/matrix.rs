//! A weight matrix, held in fp32 or in bf16, and its products in fp32.

use half::bf16;
use multiversion::multiversion;
use rayon::prelude::*;
use zero_alloc::device::DType;

use crate::ops::linear::{Linear, MatrixOrder};
use crate::ops::rows_per_thread;

/// A matrix `[outputs, inputs]`, as torch.nn.Linear stores it.
pub(super) struct Matrix {
    inputs: usize,
    elems: Elems,
}

enum Elems {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl Matrix {
    /// Rounds `elems` to bf16 if `dtype` says so.
    pub(super) fn new(elems: Vec<f32>, inputs: usize, dtype: DType) -> Self {
        let elems = match dtype {
            DType::Bf16 => Elems::Bf16(elems.par_iter().map(|&x| bf16::from_f32(x)).collect()),
            _ => Elems::F32(elems),
        };
        Self { inputs, elems }
    }

    pub(super) fn outputs(&self) -> usize {
        let elems = match &self.elems {
            Elems::F32(elems) => elems.len(),
            Elems::Bf16(elems) => elems.len(),
        };
        elems / self.inputs
    }

    pub(super) fn bytes(&self) -> u64 {
        (match &self.elems {
            Elems::F32(elems) => size_of_val(&elems[..]),
            Elems::Bf16(elems) => size_of_val(&elems[..]),
        }) as u64
    }

    /// Writes row `row` to `out` `[inputs]`.
    pub(super) fn row(&self, row: usize, out: &mut [f32]) {
        let range = row * self.inputs..(row + 1) * self.inputs;
        match &self.elems {
            Elems::F32(elems) => out.copy_from_slice(&elems[range]),
            Elems::Bf16(elems) => widen(out, &elems[range]),
        }
    }

    /// `out = x w^T`: x `[rows, inputs]`, out `[rows, outputs]`.
    ///
    /// One row reads each weight once, as it is stored. For more rows, a product in fp32 takes
    /// longer than widening all weights first.
    pub(super) fn product(&self, out: &mut [f32], x: &[f32]) {
        let one_row = x.len() == self.inputs;
        let outputs = self.outputs();
        match &self.elems {
            Elems::F32(elems) if one_row => by_outputs(out, elems, x, dots_f32),
            Elems::Bf16(elems) if one_row => by_outputs(out, elems, x, dots_bf16),
            Elems::F32(elems) => layer(elems, outputs).product(out, x),
            Elems::Bf16(elems) => {
                let mut all = vec![0.0; elems.len()];
                let part = rows_per_thread(elems.len());
                (all.par_chunks_mut(part), elems.par_chunks(part))
                    .into_par_iter()
                    .for_each(|(wide, elems)| widen(wide, elems));
                layer(&all, outputs).product(out, x);
            }
        }
    }
}

fn layer(elems: &[f32], outputs: usize) -> Linear<'_> {
    Linear::of_matrix(elems, outputs, MatrixOrder::OutputsFirst)
}

/// Calls `dots` for each thread's part of the outputs of one row.
fn by_outputs<T: Sync>(out: &mut [f32], w: &[T], x: &[f32], dots: fn(&mut [f32], &[T], &[f32])) {
    let outputs = rows_per_thread(out.len());
    (out.par_chunks_mut(outputs), w.par_chunks(outputs * x.len()))
        .into_par_iter()
        .for_each(|(out, w)| dots(out, w, x));
}

/// Sums of a dot product: enough for the latency of four AVX-512 additions.
const LANES: usize = 64;

/// `out[i] = w[i] x`: each row of w is read once.
#[multiversion(targets = "simd")]
fn dots_f32(out: &mut [f32], w: &[f32], x: &[f32]) {
    for (out, row) in out.iter_mut().zip(w.chunks_exact(x.len())) {
        *out = dot(row, x, |w| w);
    }
}

/// As [`dots_f32`].
#[multiversion(targets = "simd")]
fn dots_bf16(out: &mut [f32], w: &[bf16], x: &[f32]) {
    for (out, row) in out.iter_mut().zip(w.chunks_exact(x.len())) {
        *out = dot(row, x, wide);
    }
}

#[inline(always)]
fn dot<T: Copy>(w: &[T], x: &[f32], wide: impl Fn(T) -> f32) -> f32 {
    let (w_chunks, w_rest) = w.as_chunks::<LANES>();
    let (x_chunks, x_rest) = x.as_chunks::<LANES>();
    let mut sums = [0.0_f32; LANES];
    for (w, x) in w_chunks.iter().zip(x_chunks) {
        for i in 0..LANES {
            sums[i] = wide(w[i]).mul_add(x[i], sums[i]);
        }
    }
    let rest = w_rest.iter().zip(x_rest).map(|(&w, &x)| wide(w) * x);
    sums.iter().sum::<f32>() + rest.sum::<f32>()
}

#[multiversion(targets = "simd")]
fn widen(out: &mut [f32], elems: &[bf16]) {
    for (out, &elem) in out.iter_mut().zip(elems) {
        *out = wide(elem);
    }
}

/// The same number in fp32, whose upper half bf16 is.
#[inline(always)]
fn wide(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_one_row_are_those_of_many() {
        for [outputs, inputs, rows] in [[7, 130, 3], [64, 64, 2], [33, 5, 9]] {
            let weights: Vec<f32> = (0..outputs * inputs)
                .map(|i| ((i * 37) % 19) as f32 / 16.0 - 0.5)
                .collect();
            let x: Vec<f32> = (0..rows * inputs)
                .map(|i| ((i * 11) % 13) as f32 / 8.0 - 0.75)
                .collect();
            for dtype in [DType::F32, DType::Bf16] {
                // The sums are exact, so they are equal in any order.
                let w = Matrix::new(weights.clone(), inputs, dtype);
                let mut all = vec![0.0; rows * outputs];
                w.product(&mut all, &x);
                for (x, want) in x.chunks(inputs).zip(all.chunks(outputs)) {
                    let mut one = vec![f32::NAN; outputs];
                    w.product(&mut one, x);
                    assert_eq!(one, want);
                    let plain = |o: usize| -> f32 {
                        let row = &weights[o * inputs..][..inputs];
                        row.iter().zip(x).map(|(w, x)| w * x).sum()
                    };
                    assert_eq!(one, (0..outputs).map(plain).collect::<Vec<_>>());
                }
            }
        }
    }

    #[test]
    fn bf16_is_rounded() {
        let w = Matrix::new(vec![1.0 + 1.0 / 512.0, 3.0], 1, DType::Bf16);
        let mut row = [0.0];
        w.row(0, &mut row);
        assert_eq!(row, [1.0]);
        assert_eq!((w.outputs(), w.bytes()), (2, 4));
    }
}
