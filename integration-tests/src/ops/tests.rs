//! Every operation, forward and backward, against a plain one in fp64 at random sizes.

use proptest::prelude::*;

use super::attention::Shape;
use super::{Threads, attention, cross_entropy, embedding, gelu, layer_norm, linear};

/// Reproducible values in -1..1.
fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|v| f64::from(*v)).collect()
}

fn close(got: &[f32], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let norm = want.iter().map(|w| w * w).sum::<f64>().sqrt().max(1e-3);
    let diff = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum::<f64>().sqrt();
    assert!(diff / norm < 5e-6, "{what}: relative error {:e}", diff / norm);
}

/// The gradient of `f` at `x` by central differences, in fp64.
fn numeric(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let h = 1e-5;
    let mut at = x.to_vec();
    let slope = |i: usize| {
        let x = at[i];
        at[i] = x + h;
        let up = f(&at);
        at[i] = x - h;
        let down = f(&at);
        at[i] = x;
        (up - down) / (2.0 * h)
    };
    (0..x.len()).map(slope).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn matmul(x: &[f64], w: &[f64], k: usize, n: usize) -> Vec<f64> {
    let rows = x.chunks(k).flat_map(|row| (0..n).map(move |j| (0..k).map(|i| row[i] * w[i * n + j]).sum()));
    rows.collect()
}

fn layer_norm_64(x: &[f64], gain: &[f64], bias: &[f64]) -> Vec<f64> {
    let n = gain.len();
    let row = |x: &[f64]| {
        let mean = x.iter().sum::<f64>() / n as f64;
        let var = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n as f64;
        (0..n).map(|i| (x[i] - mean) / (var + 1e-5).sqrt() * gain[i] + bias[i]).collect::<Vec<_>>()
    };
    x.chunks(n).flat_map(row).collect()
}

fn gelu_64(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

fn attention_64(qkv: &[f64], s: Shape) -> Vec<f64> {
    let c = s.heads * s.d;
    let mut out = vec![0.0; s.batch * s.seq * c];
    for b in 0..s.batch {
        for h in 0..s.heads {
            let at = |part: usize, t: usize, i: usize| qkv[(b * s.seq + t) * 3 * c + part * c + h * s.d + i];
            for t in 0..s.seq {
                let score = |u| (0..s.d).map(|i| at(0, t, i) * at(1, u, i)).sum::<f64>() / (s.d as f64).sqrt();
                let weights: Vec<f64> = (0..=t).map(|u| f64::exp(score(u))).collect();
                let sum: f64 = weights.iter().sum();
                for i in 0..s.d {
                    out[(b * s.seq + t) * c + h * s.d + i] = (0..=t).map(|u| weights[u] / sum * at(2, u, i)).sum();
                }
            }
        }
    }
    out
}

fn cross_entropy_64(logits: &[f64], targets: &[u32], vocab: usize) -> f64 {
    let row = |(row, t): (&[f64], &u32)| row.iter().map(|x| x.exp()).sum::<f64>().ln() - row[*t as usize];
    logits.chunks(vocab).zip(targets).map(row).sum()
}

fn on(threads: usize, work: impl FnOnce() + Send) {
    Threads::new(threads).expect("threads").run(work);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn linear_layers(m in 1usize..20, k in 1usize..40, n in 1usize..40, threads in 1usize..4, seed in any::<u64>()) {
        let (x, w, bias, dy) = (values(m * k, seed), values(k * n, seed ^ 1), values(n, seed ^ 2), values(m * n, seed ^ 3));
        on(threads, || {
            let product = matmul(&wide(&x), &wide(&w), k, n);
            let want: Vec<f64> = product.iter().enumerate().map(|(i, v)| v + f64::from(bias[i % n])).collect();
            let mut y = vec![f32::NAN; m * n];
            linear::forward(&mut y, &x, &w, &bias);
            close(&y, &want, "forward");
            let mut residual = dy.clone();
            linear::forward_residual(&mut residual, &x, &w, &bias);
            close(&residual, &want.iter().zip(&dy).map(|(a, b)| a + f64::from(*b)).collect::<Vec<_>>(), "residual");

            let transposed: Vec<f64> = (0..k * n).map(|i| f64::from(w[i % k * n + i / k])).collect();
            let mut dx = vec![f32::NAN; m * k];
            linear::product_transposed(&mut dx, &dy, &w, k);
            close(&dx, &matmul(&wide(&dy), &transposed, n, k), "gradient of the input");

            let xt: Vec<f64> = (0..k * m).map(|i| f64::from(x[i % m * k + i / m])).collect();
            let (mut dw, mut dbias) = (vec![1.0; k * n], vec![1.0; n]);
            linear::backward_weight(&mut dw, &mut dbias, &x, &dy);
            close(&dw, &matmul(&xt, &wide(&dy), m, n).iter().map(|v| v + 1.0).collect::<Vec<_>>(), "weight");
            let sums: Vec<f64> = (0..n).map(|j| 1.0 + (0..m).map(|i| f64::from(dy[i * n + j])).sum::<f64>()).collect();
            close(&dbias, &sums, "bias");
        });
    }

    #[test]
    fn layer_norms(m in 1usize..8, n in 2usize..40, threads in 1usize..4, seed in any::<u64>()) {
        let (x, gain, bias, dy) = (values(m * n, seed), values(n, seed ^ 1), values(n, seed ^ 2), values(m * n, seed ^ 3));
        on(threads, || {
            let (mut y, mut stats) = (vec![f32::NAN; m * n], vec![f32::NAN; 2 * m]);
            layer_norm::forward(&mut y, &mut stats, &x, &gain, &bias, 1e-5);
            let (x64, gain64, bias64, dy64) = (wide(&x), wide(&gain), wide(&bias), wide(&dy));
            // Rows of two elements may have a small variance: 1/std then magnifies what fp32 has lost.
            if stats.chunks(2).any(|s| s[1] > 20.0) {
                return;
            }
            close(&y, &layer_norm_64(&x64, &gain64, &bias64), "forward");
            let (mut dx, mut dgain, mut dbias) = (vec![0.0; m * n], vec![0.0; n], vec![0.0; n]);
            layer_norm::backward(&mut dx, &mut dgain, &mut dbias, &dy, &x, &stats, &gain);
            let slopes = [
                numeric(&x64, |x| dot(&layer_norm_64(x, &gain64, &bias64), &dy64)),
                numeric(&gain64, |gain| dot(&layer_norm_64(&x64, gain, &bias64), &dy64)),
                numeric(&bias64, |bias| dot(&layer_norm_64(&x64, &gain64, bias), &dy64)),
            ];
            for (got, want) in [dx, dgain, dbias].iter().zip(&slopes) {
                let norm = want.iter().map(|w| w * w).sum::<f64>().sqrt().max(1e-2);
                let diff = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum::<f64>().sqrt();
                assert!(diff / norm < 1e-4, "gradient: relative error {:e}", diff / norm);
            }
        });
    }

    #[test]
    fn gelus(n in 1usize..200, threads in 1usize..4, seed in any::<u64>()) {
        let x: Vec<f32> = values(n, seed).iter().map(|v| v * 6.0).collect();
        let dy = values(n, seed ^ 1);
        on(threads, || {
            let mut y = vec![f32::NAN; n];
            gelu::forward(&mut y, &x);
            close(&y, &wide(&x).into_iter().map(gelu_64).collect::<Vec<_>>(), "forward");
            let mut dx = dy.clone();
            gelu::backward(&mut dx, &x);
            let h = 1e-5;
            let slope = |(x, dy): (f64, &f32)| f64::from(*dy) * (gelu_64(x + h) - gelu_64(x - h)) / (2.0 * h);
            close(&dx, &wide(&x).into_iter().zip(&dy).map(slope).collect::<Vec<_>>(), "backward");
        });
    }

    #[test]
    fn attentions(
        batch in 1usize..3,
        seq in prop_oneof![1usize..12, 62usize..67],
        heads in 1usize..4,
        d in 1usize..9,
        threads in 1usize..4,
        seed in any::<u64>(),
    ) {
        let shape = Shape { batch, seq, heads, d };
        let elems = batch * seq * heads * d;
        let (qkv, dout) = (values(3 * elems, seed), values(elems, seed ^ 1));
        on(threads, || {
            let (mut out, mut lse) = (vec![f32::NAN; elems], vec![f32::NAN; batch * heads * seq]);
            attention::forward(&mut out, &mut lse, &qkv, shape);
            let qkv64 = wide(&qkv);
            close(&out, &attention_64(&qkv64, shape), "forward");
            let mut dqkv = vec![f32::NAN; 3 * elems];
            attention::backward(&mut dqkv, &dout, &qkv, &out, &lse, shape);
            // Along a random direction, not each axis: one difference a case.
            let along = wide(&values(3 * elems, seed ^ 2));
            let h = 1e-5;
            let at = |sign: f64| {
                let moved: Vec<f64> = qkv64.iter().zip(&along).map(|(x, a)| x + sign * h * a).collect();
                dot(&attention_64(&moved, shape), &wide(&dout))
            };
            let want = (at(1.0) - at(-1.0)) / (2.0 * h);
            let got = dot(&wide(&dqkv), &along);
            let size = dot(&wide(&dqkv), &wide(&dqkv)).sqrt() * dot(&along, &along).sqrt();
            assert!((got - want).abs() < 1e-5 * size.max(1e-3), "gradient along a direction: {got} and {want}");
        });
    }

    #[test]
    fn cross_entropies(rows in 1usize..12, vocab in 1usize..60, threads in 1usize..4, seed in any::<u64>()) {
        let logits: Vec<f32> = values(rows * vocab, seed).iter().map(|v| v * 10.0).collect();
        let targets: Vec<u32> = (0..rows).map(|i| ((seed >> i) % vocab as u64) as u32).collect();
        on(threads, || {
            let mut grad = logits.clone();
            let loss = cross_entropy::forward_backward(&mut grad, &targets, vocab, 0.5);
            let want = cross_entropy_64(&wide(&logits), &targets, vocab);
            assert!((loss - want).abs() < 1e-5 * want.max(1.0), "loss {loss}, {want} expected");
            let slopes = numeric(&wide(&logits), |x| 0.5 * cross_entropy_64(x, &targets, vocab));
            close(&grad, &slopes, "gradient");
        });
    }

    #[test]
    fn embeddings(batch in 1usize..4, seq in 1usize..9, c in 1usize..20, threads in 1usize..4, seed in any::<u64>()) {
        let (vocab, rows) = (7, batch * seq);
        let tokens: Vec<u32> = (0..rows).map(|i| ((seed >> i) % vocab as u64) as u32).collect();
        let (wte, wpe, dx) = (values(vocab * c, seed), values(seq * c, seed ^ 1), values(rows * c, seed ^ 2));
        on(threads, || {
            let mut x = vec![f32::NAN; rows * c];
            embedding::forward(&mut x, &tokens, &wte, &wpe, seq, c);
            let (mut dwte, mut dwpe) = (vec![0.0; vocab * c], vec![0.0; seq * c]);
            embedding::backward(&mut dwte, &mut dwpe, &tokens, &dx, seq, c);
            let (mut want_wte, mut want_wpe) = (vec![0.0; vocab * c], vec![0.0; seq * c]);
            for row in 0..rows {
                for j in 0..c {
                    let (e, p) = (tokens[row] as usize * c + j, row % seq * c + j);
                    assert_eq!(x[row * c + j], wte[e] + wpe[p]);
                    want_wte[e] += f64::from(dx[row * c + j]);
                    want_wpe[p] += f64::from(dx[row * c + j]);
                }
            }
            close(&dwte, &want_wte, "tokens");
            close(&dwpe, &want_wpe, "positions");
        });
    }
}
