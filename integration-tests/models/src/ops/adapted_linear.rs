//! Linear layers with low-rank adapters: `y = x w + bias`, and of some outputs `+ scale B A dropout(x)`.

use std::ops::Range;

use faer::Accum;
use rayon::prelude::*;

use super::dropout::Dropout;
use super::linear::{Columns, Linear, MatrixOrder, Weight};
use super::{rows_per_thread, with_scratch};

/// Elements of the thread's scratch memory that an adapter aims at: 8 MiB.
const SCRATCH_ELEMS: usize = 2 << 20;

/// A linear layer and its adapters, whose matrix and bias are frozen if it has adapters.
#[derive(Clone, Debug)]
pub struct AdaptedLinear<'a> {
    /// The layer alone.
    pub base: Linear<'a>,
    /// Those of parts of its outputs.
    pub adapters: Vec<Adapter<'a>>,
}

/// The gradients of a layer, to which backward adds; empty if it is frozen.
#[derive(Debug, Default)]
pub struct AdaptedGrads<'g> {
    /// Those of the matrix and of the bias.
    pub base: [&'g mut [f32]; 2],
    /// Those of A and B of each adapter.
    pub adapters: Vec<[&'g mut [f32]; 2]>,
}

impl AdaptedLinear<'_> {
    /// `y = x w + bias`, and the adapters.
    pub fn forward(&self, y: &mut [f32], x: &[f32]) {
        self.base.forward(y, x);
        self.adapt(y, x);
    }

    /// `y = x w`, and the adapters.
    pub fn product(&self, y: &mut [f32], x: &[f32]) {
        self.base.product(y, x);
        self.adapt(y, x);
    }

    /// `y = residual + bias + x w`, and the adapters.
    pub fn forward_residual(&self, y: &mut [f32], residual: &[f32], x: &[f32]) {
        self.base.forward_residual(y, residual, x);
        self.adapt(y, x);
    }

    /// Writes the gradient of x to `dx`, unless that is empty, and adds those of the parameters
    /// that are trained.
    pub fn backward(&self, grads: AdaptedGrads<'_>, dx: &mut [f32], x: &[f32], dy: &[f32]) {
        let AdaptedGrads { base, adapters } = grads;
        if !base[0].is_empty() {
            self.base.weight_gradient(base, x, dy);
        }
        if !dx.is_empty() {
            self.base.input_gradient(dx, dy);
        }
        for (adapter, grads) in self.adapters.iter().zip(adapters) {
            adapter.backward(grads, dx, x, dy, self.base.outputs);
        }
    }

    fn adapt(&self, y: &mut [f32], x: &[f32]) {
        for adapter in &self.adapters {
            adapter.forward(y, x, self.base.outputs);
        }
    }
}

/// An adapter.
#[derive(Clone, Debug)]
pub struct Adapter<'a> {
    /// A `[r, inputs]`.
    pub a: Weight<'a>,
    /// B `[outputs, r]`.
    pub b: Weight<'a>,
    /// The rank.
    pub r: usize,
    /// The outputs of the layer that it adds to.
    pub outputs: Range<usize>,
    /// The factor of what it adds.
    pub scale: f32,
    /// The dropout of its input, and the tokens of a sequence.
    pub dropout: Option<(Dropout<'a>, usize)>,
}

/// The scratch memory of some rows.
struct Scratch<'s> {
    /// The input behind its dropout, and then the gradient of that; empty without one.
    dropped: &'s mut [f32],
    /// `scale A x`, and the gradient of `A x`, `[rows, r]`.
    hidden: &'s mut [f32],
    dhidden: &'s mut [f32],
}

impl Adapter<'_> {
    fn inputs(&self) -> usize {
        self.a.len() / self.r
    }

    fn layers(&self) -> [Linear<'_>; 2] {
        let outputs = [self.r, self.outputs.len()];
        let [a, b] = [(self.a, outputs[0]), (self.b, outputs[1])];
        [a, b].map(|(w, outputs)| Linear::of_matrix(w, outputs, MatrixOrder::OutputsFirst))
    }

    /// The columns of its outputs in rows of the layer's.
    fn columns(&self, width: usize) -> Columns {
        Columns {
            first: self.outputs.start,
            len: self.outputs.len(),
            width,
        }
    }

    /// Elements of [`Scratch`] for a row.
    fn row_elems(&self) -> [usize; 3] {
        let dropped = self.dropout.map_or(0, |_| self.inputs());
        [dropped, self.r, self.r]
    }

    /// Rows that are computed at once. It does not depend on the number of threads.
    fn rows_at_once(&self) -> usize {
        (SCRATCH_ELEMS / self.row_elems().iter().sum::<usize>()).max(16)
    }

    fn with_scratch(&self, rows: usize, work: impl FnOnce(Scratch<'_>)) {
        let sizes = self.row_elems().map(|elems| rows * elems);
        with_scratch(sizes.iter().sum(), |all| {
            let (dropped, rest) = all.split_at_mut(sizes[0]);
            let (hidden, dhidden) = rest.split_at_mut(sizes[1]);
            work(Scratch {
                dropped,
                hidden,
                dhidden,
            });
        });
    }

    /// Writes `scale A x` of rows from `first` on, and returns x behind its dropout.
    fn hidden<'x>(
        &self,
        hidden: &mut [f32],
        dropped: &'x mut [f32],
        x: &'x [f32],
        first: usize,
    ) -> &'x [f32] {
        let x = match self.dropout {
            Some((dropout, seq)) => {
                dropout
                    .of_rows_from(first)
                    .of(dropped, x, seq, self.inputs());
                dropped
            }
            None => x,
        };
        let [down, _] = self.layers();
        down.product(hidden, x);
        scale(hidden, self.scale);
        x
    }

    /// Adds to the outputs y `[rows, width]` of the layer for x `[rows, inputs]`.
    fn forward(&self, y: &mut [f32], x: &[f32], width: usize) {
        let rows = self.rows_at_once();
        let [_, up] = self.layers();
        let outputs = Some(self.columns(width));
        let parts = y
            .chunks_mut(rows * width)
            .zip(x.chunks(rows * self.inputs()));
        for (i, (y, x)) in parts.enumerate() {
            self.with_scratch(y.len() / width, |s| {
                self.hidden(s.hidden, s.dropped, x, i * rows);
                up.product_of((y, outputs), Accum::Add, (s.hidden, None));
            });
        }
    }

    /// Adds the gradients of A and B, and to `dx`, unless that is empty, that of x. `dy` is that of
    /// the layer's outputs.
    fn backward(
        &self,
        [da, db]: [&mut [f32]; 2],
        dx: &mut [f32],
        x: &[f32],
        dy: &[f32],
        width: usize,
    ) {
        let rows = self.rows_at_once();
        let inputs = self.inputs();
        let [down, up] = self.layers();
        let outputs = self.columns(width);
        let mut dx = dx.chunks_mut(rows * inputs);
        let parts = x.chunks(rows * inputs).zip(dy.chunks(rows * width));
        for (i, (x, dy)) in parts.enumerate() {
            let dx = dx.next();
            self.with_scratch(dy.len() / width, |s| {
                let x = self.hidden(s.hidden, s.dropped, x, i * rows);
                up.matrix_gradient(db, s.hidden, (dy, outputs));
                let of_outputs = (dy, Some(outputs));
                up.input_gradient_of((s.dhidden, None), Accum::Replace, of_outputs);
                scale(s.dhidden, self.scale);
                down.weight_gradient([da, &mut []], x, s.dhidden);
                let Some(dx) = dx else { return };
                let Some((dropout, seq)) = self.dropout else {
                    return down.input_gradient_of((dx, None), Accum::Add, (s.dhidden, None));
                };
                down.input_gradient(s.dropped, s.dhidden);
                dropout.of_rows_from(i * rows).apply(s.dropped, seq, inputs);
                let rows = rows_per_thread(dx.len() / inputs) * inputs;
                let parts = (dx.par_chunks_mut(rows), s.dropped.par_chunks(rows));
                parts
                    .into_par_iter()
                    .for_each(|(dx, dropped)| add(dx, dropped));
            });
        }
    }
}

fn scale(x: &mut [f32], factor: f32) {
    x.iter_mut().for_each(|x| *x *= factor);
}

fn add(y: &mut [f32], x: &[f32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
}

#[cfg(test)]
mod tests {
    use zero_trainer::BatchRows;

    use super::*;
    use crate::ops::dropout::Draws;

    const ROWS: usize = 37;
    const SEQ: usize = 37;
    const INPUTS: usize = 10;
    const WIDTH: usize = 14;
    const R: usize = 3;
    const SCALE: f32 = 0.75;

    fn values(len: usize, seed: usize) -> Vec<f32> {
        let value = |i: usize| ((i * 37 + seed * 11) % 23) as f32 / 23.0 - 0.4;
        (0..len).map(value).collect()
    }

    fn distance(a: &[f32], b: &[f32]) -> f32 {
        let pairs = a.iter().zip(b);
        pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }

    /// The adapter of outputs 4 to 11 by plain sums: y, dx, dA and dB.
    fn plain(
        [a, b, w]: [&[f32]; 3],
        x: &[f32],
        factors: &[f32],
        dy: &[f32],
        outputs: &Range<usize>,
    ) -> [Vec<f32>; 4] {
        let mut y = vec![0.0; ROWS * WIDTH];
        let mut dx = vec![0.0; ROWS * INPUTS];
        let mut da = vec![0.0; R * INPUTS];
        let mut db = vec![0.0; outputs.len() * R];
        for row in 0..ROWS {
            for o in 0..WIDTH {
                for i in 0..INPUTS {
                    let at = row * INPUTS + i;
                    y[row * WIDTH + o] += w[o * INPUTS + i] * x[at];
                    dx[at] += w[o * INPUTS + i] * dy[row * WIDTH + o];
                    let Some(of) = outputs.clone().position(|output| output == o) else {
                        continue;
                    };
                    let dropped = x[at] * factors[at];
                    for k in 0..R {
                        let [a, b] = [a[k * INPUTS + i], b[of * R + k]];
                        let dy = SCALE * dy[row * WIDTH + o];
                        y[row * WIDTH + o] += SCALE * b * a * dropped;
                        dx[at] += dy * b * a * factors[at];
                        da[k * INPUTS + i] += dy * b * dropped;
                        db[of * R + k] += dy * a * dropped;
                    }
                }
            }
        }
        [y, dx, da, db]
    }

    #[test]
    fn products_and_gradients_are_plain_sums() {
        let outputs = 4..11;
        let [w, x, dy] = [WIDTH * INPUTS, ROWS * INPUTS, ROWS * WIDTH].map(|len| values(len, len));
        let [a, b] = [values(R * INPUTS, 1), values(outputs.len() * R, 2)];
        let rows = BatchRows {
            seed: 1,
            step: 2,
            first: 0,
        };
        let draws = Draws::new(rows, 1);
        for probability in [0.0, 0.3] {
            let dropout = draws.dropout(probability, 9);
            let mut factors = vec![1.0; x.len()];
            if let Some(dropout) = dropout {
                dropout.apply(&mut factors, SEQ, INPUTS);
            }
            let adapter = Adapter {
                a: Weight::F32(&a),
                b: Weight::F32(&b),
                r: R,
                outputs: outputs.clone(),
                scale: SCALE,
                dropout: dropout.map(|dropout| (dropout, SEQ)),
            };
            let layer = AdaptedLinear {
                base: Linear::of_matrix(&w[..], WIDTH, MatrixOrder::OutputsFirst),
                adapters: vec![adapter],
            };
            let [y, dx, da, db] = plain([&a, &b, &w], &x, &factors, &dy, &outputs);

            let mut got = vec![f32::NAN; y.len()];
            layer.forward(&mut got, &x);
            assert!(distance(&got, &y) < 1e-4);
            layer.forward_residual(&mut got, &dy, &x);
            let residual: Vec<f32> = y.iter().zip(&dy).map(|(y, r)| y + r).collect();
            assert!(distance(&got, &residual) < 1e-4);

            let mut grads = [vec![0.0; da.len()], vec![0.0; db.len()]];
            let mut got = vec![f32::NAN; dx.len()];
            let [of_a, of_b] = &mut grads;
            let all = AdaptedGrads {
                adapters: vec![[of_a, of_b]],
                ..AdaptedGrads::default()
            };
            layer.backward(all, &mut got, &x, &dy);
            assert!(distance(&got, &dx) < 1e-4);
            assert!(distance(&grads[0], &da) < 1e-3 && distance(&grads[1], &db) < 1e-3);
        }
    }
}
