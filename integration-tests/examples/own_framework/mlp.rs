//! The framework of the examples `own_framework`: layers that run one after the other, and their
//! gradients.

use std::error::Error;

use half::bf16;
use zero_comm::CommOptions;
use zero_comm::threads::{ThreadsComm, World};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

pub(crate) const WIDTHS: [usize; 4] = [4, 8, 8, 1];
pub(crate) const LAYERS: usize = WIDTHS.len() - 1;
/// Rows of all ranks together.
pub(crate) const ROWS: usize = 16;

/// The initial value of element `i` of a parameter.
pub(crate) fn initial(i: usize) -> f32 {
    bf16::from_f32(((i * 37) % 19) as f32 / 19.0 - 0.5).to_f32()
}

/// A layer over some rows: tanh(W x + b); the last layer has no tanh.
pub(crate) fn forward(layer: usize, [weight, bias]: [&[bf16]; 2], inputs: &[f32]) -> Vec<f32> {
    let ins = WIDTHS[layer];
    let dot = |x: &[f32], w: &[bf16]| x.iter().zip(w).map(|(x, w)| x * w.to_f32()).sum::<f32>();
    let row = |x| {
        weight
            .chunks(ins)
            .zip(bias)
            .map(move |(w, b)| dot(x, w) + b.to_f32())
    };
    let sums = inputs.chunks(ins).flat_map(row);
    if layer + 1 == LAYERS {
        sums.collect()
    } else {
        sums.map(f32::tanh).collect()
    }
}

/// Returns the gradients of a layer's inputs, and those of its weight and bias.
pub(crate) fn backward(
    layer: usize,
    weight: &[bf16],
    [x, y, dy]: [&[f32]; 3],
) -> (Vec<f32>, Vec<f32>) {
    let ins = WIDTHS[layer];
    let outs = WIDTHS[layer + 1];
    let mut dx = vec![0.0; x.len()];
    let mut grads = vec![0.0; ins * outs + outs];
    for (i, (y, dy)) in y.iter().zip(dy).enumerate() {
        let row = i / outs * ins;
        let out = i % outs;
        let before_tanh = if layer + 1 == LAYERS {
            *dy
        } else {
            dy * (1.0 - y * y)
        };
        grads[ins * outs + out] += before_tanh;
        for k in 0..ins {
            grads[out * ins + k] += before_tanh * x[row + k];
            dx[row + k] += before_tanh * weight[out * ins + k].to_f32();
        }
    }
    (dx, grads)
}

/// A rank's rows of the data: four numbers, and the square of their sum.
pub(crate) fn data(rank: usize, ranks: usize) -> (Vec<f32>, Vec<f32>) {
    let rows = rank * ROWS / ranks..(rank + 1) * ROWS / ranks;
    let number = |row: usize, i: usize| ((7 * row + 3 * i) % 11) as f32 / 11.0 - 0.5;
    let x: Vec<f32> = rows
        .flat_map(|row| (0..4).map(move |i| number(row, i)))
        .collect();
    let targets = x.chunks(4).map(|x| x.iter().sum::<f32>().powi(2)).collect();
    (x, targets)
}

/// Calls `train` on a thread a rank; returns the result of the last one.
pub(crate) fn on_threads(
    ranks: usize,
    train: impl Fn(ThreadsComm) -> Result<Vec<f64>> + Sync,
) -> Result<Vec<f64>> {
    let comms = World::new(ranks, CommOptions::default())?;
    let train = &train;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = comms
            .into_iter()
            .map(|comm| scope.spawn(move || train(comm)))
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().map_err(|_| "a rank panicked")?)
            .next_back()
            .ok_or("no ranks")?
    })
}
