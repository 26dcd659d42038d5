//! Compares every operation, forward and backward, with the same formula in fp64 and a bound of
//! fp32's rounding, at random sizes.

use std::ops::{Add, Mul, Sub};

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

/// The unit roundoff of fp32.
const U: f64 = 1.0 / (1u64 << 24) as f64;

/// A value in fp64 and a bound of its distance to the same value computed in fp32. Every operation
/// adds its own rounding to the errors of its operands (Higham, Accuracy and Stability of Numerical
/// Algorithms, section 3.3).
#[derive(Clone, Copy, Debug)]
struct Bounded {
    value: f64,
    error: f64,
}

impl Bounded {
    /// A constant whose fp32 value has at most `roundings` rounding errors.
    fn constant(value: f64, roundings: f64) -> Self {
        Self { value, error: 0.0 }.rounded(roundings)
    }

    fn rounded(self, roundings: f64) -> Self {
        Self {
            error: self.error + roundings * U * (self.value.abs() + self.error),
            ..self
        }
    }

    /// The error of `math::exp` is within 3e-7.
    fn exp(self) -> Self {
        let value = self.value.exp();
        Self {
            value,
            error: value * self.error.exp_m1(),
        }
        .rounded(6.0)
    }

    fn ln(self) -> Self {
        Self {
            value: self.value.ln(),
            error: -(-self.error / self.value).ln_1p(),
        }
        .rounded(2.0)
    }

    fn sqrt(self) -> Self {
        let value = self.value.sqrt();
        Self {
            value,
            error: value - (self.value - self.error).max(0.0).sqrt(),
        }
        .rounded(1.0)
    }

    fn recip(self) -> Self {
        let size = self.value.abs();
        assert!(self.error < size, "the bound of a divisor holds zero");
        Self {
            value: 1.0 / self.value,
            error: self.error / (size * (size - self.error)),
        }
        .rounded(1.0)
    }

    /// The sum in any order.
    fn sum(terms: impl IntoIterator<Item = Self>) -> Self {
        let mut sum = Self::from(0.0);
        let mut size = 0.0;
        let mut count = 0.0;
        for term in terms {
            sum = Self {
                value: sum.value + term.value,
                error: sum.error + term.error,
            };
            size += term.value.abs() + term.error;
            count += 1.0;
        }
        Self {
            error: sum.error + count * U * size,
            ..sum
        }
    }

    fn max(values: impl IntoIterator<Item = Self>) -> Self {
        let least = Self {
            value: f64::NEG_INFINITY,
            error: 0.0,
        };
        values.into_iter().fold(least, |a, b| Self {
            value: a.value.max(b.value),
            error: a.error.max(b.error),
        })
    }
}

impl From<f32> for Bounded {
    fn from(value: f32) -> Self {
        Self {
            value: value.into(),
            error: 0.0,
        }
    }
}

impl Add for Bounded {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            value: self.value + other.value,
            error: self.error + other.error,
        }
        .rounded(1.0)
    }
}

impl Sub for Bounded {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        self + Self {
            value: -other.value,
            ..other
        }
    }
}

impl Mul for Bounded {
    type Output = Self;
    fn mul(self, other: Self) -> Self {
        let error = self.value.abs() * other.error
            + other.value.abs() * self.error
            + self.error * other.error;
        Self {
            value: self.value * other.value,
            error,
        }
        .rounded(1.0)
    }
}

fn bounded(x: &[f32]) -> Vec<Bounded> {
    x.iter().copied().map(Bounded::from).collect()
}

fn check(got: &[f32], want: &[Bounded], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (&got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want.value).abs();
        // The bound, plus the rounding of the fp64 value.
        let bound = want.error + 1e-13 * want.value.abs();
        assert!(
            error <= bound,
            "{what}, element {i}: {got}, {} expected, {error:e} off, bound {bound:e}",
            want.value
        );
    }
}

/// x `[rows, k]` by w `[k, n]`, added to `start` `[rows, n]` in any order.
fn matmul_onto(start: &[f32], x: &[Bounded], w: &[Bounded], k: usize, n: usize) -> Vec<Bounded> {
    let products = |i: usize| (0..k).map(move |l| x[i / n * k + l] * w[l * n + i % n]);
    start
        .iter()
        .enumerate()
        .map(|(i, &s)| Bounded::sum(products(i).chain([Bounded::from(s)])))
        .collect()
}

fn transposed(x: &[f32], columns: usize) -> Vec<Bounded> {
    let rows = x.len() / columns;
    (0..x.len())
        .map(|i| x[i % rows * columns + i / rows].into())
        .collect()
}

/// Mean over `n` elements.
fn mean(terms: impl IntoIterator<Item = Bounded>, n: usize) -> Bounded {
    (Bounded::sum(terms) * Bounded::from(n as f32).recip()).rounded(1.0)
}

/// Output `[seq, d]`, and gradients of query, key and value, of one head of an attention.
struct HeadOracle {
    out: Vec<Bounded>,
    gradients: [Vec<Bounded>; 3],
}

impl HeadOracle {
    /// From query, key, value and the output's gradient, `[seq, d]` each.
    fn new([q, k, v, dout]: [Vec<Bounded>; 4], d: usize) -> Self {
        let seq = q.len() / d;
        let scale = Bounded::constant(1.0 / (d as f64).sqrt(), 2.0);
        let dot =
            |a: &[Bounded], b: &[Bounded]| Bounded::sum(a.iter().zip(b).map(|(&a, &b)| a * b));
        let row = |x: &[Bounded], t: usize| x[t * d..(t + 1) * d].to_vec();
        let mut p = Vec::new();
        let mut ds = Vec::new();
        let mut out = Vec::new();

        for t in 0..seq {
            let scores: Vec<_> = (0..=t)
                .map(|u| dot(&row(&q, t), &row(&k, u)) * scale)
                .collect();
            let max = Bounded::max(scores.iter().copied());
            let exps: Vec<_> = scores.iter().map(|&s| (s - max).exp()).collect();
            let sum = Bounded::sum(exps.iter().copied());
            let forward: Vec<_> = exps.iter().map(|&e| e * sum.recip()).collect();
            out.extend((0..d).map(|i| Bounded::sum((0..=t).map(|u| forward[u] * v[u * d + i]))));
            // The backward pass recomputes the probabilities from the log-sum-exp.
            let lse = max + sum.ln();
            let backward: Vec<_> = scores.iter().map(|&s| (s - lse).exp()).collect();
            let delta = dot(&out[t * d..], &row(&dout, t));
            let slope = |u: usize| backward[u] * (dot(&row(&dout, t), &row(&v, u)) - delta) * scale;
            ds.push((0..=t).map(slope).collect::<Vec<_>>());
            p.push(backward);
        }

        let elements = || (0..seq * d).map(|e| (e / d, e % d));
        let dq = elements().map(|(t, i)| Bounded::sum((0..=t).map(|u| ds[t][u] * k[u * d + i])));
        let dk = elements().map(|(u, i)| Bounded::sum((u..seq).map(|t| ds[t][u] * q[t * d + i])));
        let dv = elements().map(|(u, i)| Bounded::sum((u..seq).map(|t| p[t][u] * dout[t * d + i])));
        Self {
            gradients: [dq.collect(), dk.collect(), dv.collect()],
            out,
        }
    }
}

fn on(threads: usize, work: impl FnOnce() + Send) {
    Threads::new(threads).expect("threads").run(work);
}

proptest! {
    #[test]
    fn linear_layers(m in 1usize..20, k in 1usize..40, n in 1usize..40, threads in 1usize..4, seed in any::<u64>()) {
        let x = values(m * k, seed);
        let w = values(k * n, seed ^ 1);
        let bias = values(n, seed ^ 2);
        let dy = values(m * n, seed ^ 3);
        on(threads, || {
            let x64 = bounded(&x);
            let w64 = bounded(&w);
            let product = matmul_onto(&vec![0.0; m * n], &x64, &w64, k, n);
            let mut y = vec![f32::NAN; m * n];
            linear::forward(&mut y, &x, &w, &bias);
            let want: Vec<_> = product.iter().enumerate().map(|(i, &v)| v + bias[i % n].into()).collect();
            check(&y, &want, "forward");
            let mut residual = vec![f32::NAN; m * n];
            linear::forward_residual(&mut residual, &dy, &x, &w, &bias);
            let sums = matmul_onto(&dy, &x64, &w64, k, n).into_iter().enumerate();
            check(&residual, &sums.map(|(i, v)| v + bias[i % n].into()).collect::<Vec<_>>(), "residual");

            let mut dx = vec![f32::NAN; m * k];
            linear::product_transposed(&mut dx, &dy, &w, k);
            check(&dx, &matmul_onto(&vec![0.0; m * k], &bounded(&dy), &transposed(&w, n), n, k), "gradient of the input");

            let mut dw = vec![1.0; k * n];
            let mut dbias = vec![1.0; n];
            linear::backward_weight(&mut dw, &mut dbias, &x, &dy);
            check(&dw, &matmul_onto(&vec![1.0; k * n], &transposed(&x, k), &bounded(&dy), m, n), "weight");
            let column = |j| Bounded::sum((0..m).map(|i| Bounded::from(dy[i * n + j])).chain([Bounded::from(1.0)]));
            check(&dbias, &(0..n).map(column).collect::<Vec<_>>(), "bias");
        });
    }

    #[test]
    fn layer_norms(m in 1usize..8, n in 2usize..40, threads in 1usize..4, seed in any::<u64>()) {
        let x = values(m * n, seed);
        let gain = values(n, seed ^ 1);
        let bias = values(n, seed ^ 2);
        let dy = values(m * n, seed ^ 3);
        on(threads, || {
            let mut y = vec![f32::NAN; m * n];
            let mut stats = vec![f32::NAN; 2 * m];
            layer_norm::forward(&mut y, &mut stats, &x, &gain, &bias, 1e-5);
            let mut dx = vec![0.0; m * n];
            let mut dgain = vec![0.0; n];
            let mut dbias = vec![0.0; n];
            layer_norm::backward(&mut dx, &mut dgain, &mut dbias, &dy, &x, &stats, &gain);

            let mut want_y = Vec::new();
            let mut want_dx = Vec::new();
            let mut normalized = Vec::new();
            for (x, dy) in bounded(&x).chunks(n).zip(bounded(&dy).chunks(n)) {
                let average = mean(x.iter().copied(), n);
                let centred: Vec<_> = x.iter().map(|&x| x - average).collect();
                let variance = mean(centred.iter().map(|&c| c * c), n);
                let rstd = (variance + 1e-5.into()).sqrt().recip();
                let h: Vec<_> = centred.iter().map(|&c| c * rstd).collect();
                let g: Vec<_> = dy.iter().zip(&gain).map(|(&d, &gain)| d * gain.into()).collect();
                let mean_g = mean(g.iter().copied(), n);
                let mean_gh = mean(g.iter().zip(&h).map(|(&g, &h)| g * h), n);
                want_y.extend((0..n).map(|i| h[i] * gain[i].into() + bias[i].into()));
                want_dx.extend((0..n).map(|i| rstd * (g[i] - mean_g - h[i] * mean_gh)));
                normalized.extend(h);
            }
            check(&y, &want_y, "forward");
            check(&dx, &want_dx, "input");
            let column = |f: &dyn Fn(usize) -> Bounded| {
                (0..n).map(|j| Bounded::sum((0..m).map(|i| f(i * n + j)))).collect::<Vec<_>>()
            };
            check(&dgain, &column(&|i| normalized[i] * dy[i].into()), "gain");
            check(&dbias, &column(&|i| Bounded::from(dy[i])), "bias");
        });
    }

    #[test]
    fn gelus(m in 1usize..4, n in 1usize..100, threads in 1usize..4, seed in any::<u64>()) {
        let (mut x, bias): (Vec<f32>, _) = (values(m * n, seed).iter().map(|v| v * 6.0).collect(), values(n, seed ^ 2));
        let dy = values(m * n, seed ^ 1);
        on(threads, || {
            let sums: Vec<f32> = x.iter().enumerate().map(|(i, x)| x + bias[i % n]).collect();
            let mut y = vec![f32::NAN; m * n];
            gelu::forward(&mut y, &mut x, &bias);
            assert_eq!(x, sums);
            let mut dx = dy.clone();
            gelu::backward(&mut dx, &x);
            let one = Bounded::from(1.0);
            let factor = Bounded::constant((8.0 / std::f64::consts::PI).sqrt(), 3.0);
            let cubic = Bounded::constant(0.044_715, 1.0);
            let both = x.iter().zip(&dy).map(|(&x, &dy)| {
                let x = Bounded::from(x);
                let minus_u = Bounded::from(-1.0) * factor * (x + cubic * x * x * x);
                let s = (one + minus_u.exp()).recip();
                let slope = factor * (one + Bounded::constant(3.0, 1.0) * cubic * x * x);
                (x * s, (s + x * s * (one - s) * slope) * dy.into())
            });
            let (want_y, want_dx): (Vec<_>, Vec<_>) = both.unzip();
            check(&y, &want_y, "forward");
            check(&dx, &want_dx, "backward");
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
        let qkv = values(3 * elems, seed);
        let dout = values(elems, seed ^ 1);
        on(threads, || {
            let mut out = vec![f32::NAN; elems];
            let mut lse = vec![f32::NAN; batch * heads * seq];
            attention::forward(&mut out, &mut lse, &qkv, shape);
            let mut dqkv = vec![f32::NAN; 3 * elems];
            attention::backward(&mut dqkv, &dout, &qkv, &out, &lse, shape);
            for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
                // Rows of `parts * heads * d` elements: this head's [seq, d] of a part.
                let head = |x: &[f32], parts: usize, part: usize| -> Vec<f32> {
                    let start = |t| ((b * seq + t) * parts + part) * heads * d + h * d;
                    (0..seq).flat_map(|t| x[start(t)..start(t) + d].to_vec()).collect()
                };
                let [q, k, v] = [0, 1, 2].map(|part| bounded(&head(&qkv, 3, part)));
                let want = HeadOracle::new([q, k, v, bounded(&head(&dout, 1, 0))], d);
                check(&head(&out, 1, 0), &want.out, "forward");
                for (part, gradient) in want.gradients.iter().enumerate() {
                    check(&head(&dqkv, 3, part), gradient, ["query", "key", "value"][part]);
                }
            }
        });
    }

    #[test]
    fn cross_entropies(rows in 1usize..12, vocab in 1usize..60, threads in 1usize..4, seed in any::<u64>()) {
        let logits: Vec<f32> = values(rows * vocab, seed).iter().map(|v| v * 10.0).collect();
        let targets: Vec<u32> = (0..rows).map(|i| ((seed >> i) % vocab as u64) as u32).collect();
        on(threads, || {
            let mut grad = logits.clone();
            let loss = cross_entropy::forward_backward(&mut grad, &targets, vocab, 0.5);
            assert_eq!(cross_entropy::forward(&mut logits.clone(), &targets, vocab).to_bits(), loss.to_bits());
            let mut want = Vec::new();
            let mut losses = Vec::new();
            for (row, &target) in bounded(&logits).chunks(vocab).zip(&targets) {
                let max = Bounded::max(row.iter().copied());
                let exps: Vec<_> = row.iter().map(|&x| (x - max).exp()).collect();
                let sum = Bounded::sum(exps.iter().copied());
                let factor = Bounded::from(0.5) * sum.recip();
                let one_hot = |i| Bounded::from(if i == target as usize { 0.5 } else { 0.0 });
                want.extend(exps.iter().enumerate().map(|(i, &e)| e * factor - one_hot(i)));
                losses.push(sum.ln() + max - row[target as usize]);
            }
            check(&grad, &want, "gradient");
            let want = Bounded::sum(losses);
            assert!((loss - want.value).abs() <= want.error, "loss {loss}, {} expected", want.value);
        });
    }

    #[test]
    fn embeddings(batch in 1usize..4, seq in 1usize..9, c in 1usize..20, threads in 1usize..4, seed in any::<u64>()) {
        let vocab = 7;
        let rows = batch * seq;
        let tokens: Vec<u32> = (0..rows).map(|i| ((seed >> i) % vocab as u64) as u32).collect();
        let wte = values(vocab * c, seed);
        let wpe = values(seq * c, seed ^ 1);
        let dx = values(rows * c, seed ^ 2);

        on(threads, || {
            let mut x = vec![f32::NAN; rows * c];
            embedding::forward(&mut x, &tokens, &wte, &wpe, seq, c);
            let mut dwte = vec![0.0; vocab * c];
            let mut dwpe = vec![0.0; seq * c];
            embedding::backward(&mut dwte, &mut dwpe, &tokens, &dx, seq, c);
            // fp32 sums in the order of the rows are exact expectations.
            let mut want_wte = vec![0.0; vocab * c];
            let mut want_wpe = vec![0.0; seq * c];
            for row in 0..rows {
                for j in 0..c {
                    let e = tokens[row] as usize * c + j;
                    let p = row % seq * c + j;
                    assert_eq!(x[row * c + j], wte[e] + wpe[p]);
                    want_wte[e] += dx[row * c + j];
                    want_wpe[p] += dx[row * c + j];
                }
            }
            assert_eq!((dwte, dwpe), (want_wte, want_wpe));
        });
    }
}
