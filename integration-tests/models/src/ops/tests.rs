//! Compares every operation, forward and backward, with the same formula in fp64 and a bound of
//! fp32's rounding, at random sizes.

use std::ops::{Add, Mul, Sub};

use proptest::prelude::*;

use super::activation::Activation;
use super::attention::{Masks, Shape};
use super::cross_entropy::{STATISTICS, VocabPart};
use super::dropout::Draws;
use super::linear::{Linear, MatrixOrder, Weight};
use super::norm::{Norm, NormKind};
use super::{Heads, Span, Threads, attention, cross_entropy, embedding, head_norm, rope, swiglu};
use zero_trainer::{BatchRows, IGNORED};

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

/// The same, with a bias `[n]` on each row.
fn matmul_onto_biased(
    start: &[f32],
    bias: &[f32],
    x: &[Bounded],
    w: &[Bounded],
    k: usize,
) -> Vec<Bounded> {
    let n = bias.len();
    let products = |i: usize| (0..k).map(move |l| x[i / n * k + l] * w[l * n + i % n]);
    let onto = |i: usize| [start[i], bias[i % n]].map(Bounded::from);
    (0..start.len())
        .map(|i| Bounded::sum(products(i).chain(onto(i))))
        .collect()
}

fn transposed(x: &[f32], columns: usize) -> Vec<f32> {
    let rows = x.len() / columns;
    (0..x.len())
        .map(|i| x[i % rows * columns + i / rows])
        .collect()
}

/// Mean over `n` elements.
fn mean(terms: impl IntoIterator<Item = Bounded>, n: usize) -> Bounded {
    (Bounded::sum(terms) * Bounded::from(n as f32).recip()).rounded(1.0)
}

/// The starts of random documents in the rows of a batch; empty for every other seed.
fn documents(batch: usize, seq: usize, seed: u64) -> Vec<u32> {
    if seed.is_multiple_of(2) {
        return Vec::new();
    }
    let begins = values(batch * seq, seed ^ 99);
    let mut starts = Vec::with_capacity(batch * seq);
    for (row, begins) in begins.into_iter().enumerate() {
        let at = (row % seq) as u32;
        let start = match starts.last() {
            Some(&start) if at > 0 && begins < 0.6 => start,
            _ => at,
        };
        starts.push(start);
    }
    starts
}

/// Output `[seq, d]`, and gradients of query, key and value, of one head of an attention.
struct HeadOracle {
    out: Vec<Bounded>,
    gradients: [Vec<Bounded>; 3],
}

impl HeadOracle {
    /// From query, key, value and the output's gradient, `[seq, d]` each, the first key that each
    /// query sees, and the factors of the probabilities `[seq, seq]`.
    fn new(
        [q, k, v, dout]: [Vec<Bounded>; 4],
        [d, seq]: [usize; 2],
        scale: f32,
        first: impl Fn(usize) -> usize,
        factors: &[f32],
    ) -> Self {
        let factor = |t: usize, u: usize| Bounded::from(factors[t * seq + u]);
        let seen = |t: usize| first(t)..t + 1;
        let sees = |t: usize, u: usize| seen(t).contains(&u);
        let scale = Bounded::from(scale);
        let dot =
            |a: &[Bounded], b: &[Bounded]| Bounded::sum(a.iter().zip(b).map(|(&a, &b)| a * b));
        let row = |x: &[Bounded], t: usize| x[t * d..(t + 1) * d].to_vec();
        let mut p = Vec::new();
        let mut ds = Vec::new();
        let mut out = Vec::new();

        for t in 0..seq {
            let scores: Vec<_> = seen(t)
                .map(|u| dot(&row(&q, t), &row(&k, u)) * scale)
                .collect();
            let max = Bounded::max(scores.iter().copied());
            let exps: Vec<_> = scores.iter().map(|&s| (s - max).exp()).collect();
            let sum = Bounded::sum(exps.iter().copied());
            let forward = exps.iter().map(|&e| e * sum.recip());
            let kept = seen(t).zip(forward).map(|(u, p)| (u, p * factor(t, u)));
            let forward: Vec<_> = kept.collect();
            out.extend(
                (0..d).map(|i| Bounded::sum(forward.iter().map(|&(u, p)| p * v[u * d + i]))),
            );
            // The backward pass recomputes the probabilities from the log-sum-exp.
            let lse = max + sum.ln();
            let mut backward = vec![Bounded::from(0.0); seq];
            let mut slopes = backward.clone();
            let delta = dot(&out[t * d..], &row(&dout, t));
            for (u, &score) in seen(t).zip(&scores) {
                let p = (score - lse).exp();
                let dp = dot(&row(&dout, t), &row(&v, u)) * factor(t, u);
                slopes[u] = p * (dp - delta) * scale;
                backward[u] = p * factor(t, u);
            }
            ds.push(slopes);
            p.push(backward);
        }

        let elements = || (0..seq * d).map(|e| (e / d, e % d));
        let dq = elements().map(|(t, i)| Bounded::sum(seen(t).map(|u| ds[t][u] * k[u * d + i])));
        let seeing = |u: usize| (u..seq).filter(move |&t| sees(t, u));
        let dk = elements().map(|(u, i)| Bounded::sum(seeing(u).map(|t| ds[t][u] * q[t * d + i])));
        let dv =
            elements().map(|(u, i)| Bounded::sum(seeing(u).map(|t| p[t][u] * dout[t * d + i])));
        Self {
            gradients: [dq.collect(), dk.collect(), dv.collect()],
            out,
        }
    }
}

/// Output and gradients of an RMS norm of rows `[rows, n]`.
struct RmsOracle {
    y: Vec<Bounded>,
    dx: Vec<Bounded>,
    dgain: Vec<Bounded>,
}

impl RmsOracle {
    fn new(x: &[f32], gain: &[f32], dy: &[f32]) -> Self {
        let n = gain.len();
        let gain = bounded(gain);
        let mut y = Vec::new();
        let mut dx = Vec::new();
        let mut terms = vec![Vec::new(); n];
        for (x, dy) in bounded(x).chunks(n).zip(bounded(dy).chunks(n)) {
            let square = mean(x.iter().map(|&x| x * x), n);
            let stat = (square + 1e-5.into()).sqrt().recip();
            let h: Vec<_> = x.iter().map(|&x| x * stat).collect();
            let g: Vec<_> = dy.iter().zip(&gain).map(|(&dy, &gain)| dy * gain).collect();
            let mean_gh = mean(g.iter().zip(&h).map(|(&g, &h)| g * h), n);
            y.extend((0..n).map(|i| h[i] * gain[i]));
            dx.extend((0..n).map(|i| stat * (g[i] - h[i] * mean_gh)));
            for (i, terms) in terms.iter_mut().enumerate() {
                terms.push(dy[i] * h[i]);
            }
        }
        Self {
            y,
            dx,
            dgain: terms.into_iter().map(Bounded::sum).collect(),
        }
    }
}

fn on(threads: usize, work: impl FnOnce() + Send) {
    Threads::new(threads).expect("threads").run(work);
}

/// Asserts that three ranks, each with a part of the vocabulary, have the loss and the gradient of
/// all logits.
fn parts_have_the_whole(logits: &[f32], targets: &[u32], vocab: usize, loss: f64, grad: &[f32]) {
    let rows = targets.len();
    let each = vocab.div_ceil(3);
    let parts: Vec<_> = (0..vocab)
        .step_by(each)
        .map(|first| VocabPart {
            first,
            len: each.min(vocab - first),
        })
        .collect();
    let mut all = vec![f32::NAN; parts.len() * rows * STATISTICS];
    let mut own: Vec<Vec<f32>> = Vec::new();
    for (part, stats) in parts.iter().zip(all.chunks_mut(rows * STATISTICS)) {
        let of_row = |row: &[f32]| row[part.first..part.first + part.len].to_vec();
        let mut logits: Vec<f32> = logits.chunks(vocab).flat_map(of_row).collect();
        cross_entropy::part_statistics(stats, &mut logits, targets, *part);
        own.push(logits);
    }
    for (rank, (&part, mut logits)) in parts.iter().zip(own).enumerate() {
        let got = cross_entropy::part_gradient(&mut logits, &all, rank, targets, part, 0.5);
        assert!(
            (got - loss).abs() <= 1e-5 * loss.abs().max(1.0),
            "loss {got} for {loss}"
        );
        let of_row = |row: &[f32]| row[part.first..part.first + part.len].to_vec();
        let want: Vec<f32> = grad.chunks(vocab).flat_map(of_row).collect();
        for (got, want) in logits.iter().zip(&want) {
            assert!((got - want).abs() < 1e-5, "{got} for {want}");
        }
    }
}

proptest! {
    #[test]
    fn linear_layers(
        m in 1usize..20, k in 1usize..40, n in 1usize..40, outputs_first: bool, biased: bool, threads in 1usize..4,
        seed in any::<u64>(),
    ) {
        let x = values(m * k, seed);
        // The matrix `[k, n]`, and as it is stored.
        let w = values(k * n, seed ^ 1);
        let stored = if outputs_first { transposed(&w, n) } else { w.clone() };
        let bias = values(if biased { n } else { 0 }, seed ^ 2);
        let dy = values(m * n, seed ^ 3);
        let order = if outputs_first { MatrixOrder::OutputsFirst } else { MatrixOrder::InputsFirst };
        let layer = Linear { weight: Weight::F32(&stored), bias: &bias, outputs: n, order };
        on(threads, || {
            let all = if biased { bias.clone() } else { vec![0.0; n] };
            let onto = |start: &[f32]| matmul_onto_biased(start, &all, &bounded(&x), &bounded(&w), k);
            let mut y = vec![f32::NAN; m * n];
            layer.forward(&mut y, &x);
            check(&y, &onto(&vec![0.0; m * n]), "forward");
            layer.product(&mut y, &x);
            check(&y, &matmul_onto(&vec![0.0; m * n], &bounded(&x), &bounded(&w), k, n), "product");
            layer.forward_residual(&mut y, &dy, &x);
            check(&y, &onto(&dy), "residual");

            let mut dx = vec![f32::NAN; m * k];
            layer.input_gradient(&mut dx, &dy);
            check(&dx, &matmul_onto(&vec![0.0; m * k], &bounded(&dy), &bounded(&transposed(&w, n)), n, k), "gradient of the input");

            let mut dw = vec![1.0; k * n];
            let mut dbias = vec![1.0; bias.len()];
            layer.weight_gradient([&mut dw, &mut dbias], &x, &dy);
            let dw = if outputs_first { transposed(&dw, k) } else { dw };
            check(&dw, &matmul_onto(&vec![1.0; k * n], &bounded(&transposed(&x, k)), &bounded(&dy), m, n), "weight");
            let column = |j| Bounded::sum((0..m).map(|i| Bounded::from(dy[i * n + j])).chain([Bounded::from(1.0)]));
            check(&dbias, &(0..bias.len()).map(column).collect::<Vec<_>>(), "bias");
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
            let norm = Norm { kind: NormKind::Layer, gain: &gain, bias: &bias, eps: 1e-5 };
            norm.forward(&mut y, &mut stats, &x);
            let mut dx = vec![0.0; m * n];
            let mut dgain = vec![0.0; n];
            let mut dbias = vec![0.0; n];
            norm.backward(&mut dx, [&mut dgain, &mut dbias], &dy, &x, &stats);

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
        let x: Vec<f32> = values(m * n, seed).iter().map(|v| v * 6.0).collect();
        let dy = values(m * n, seed ^ 1);
        on(threads, || {
            let mut y = vec![f32::NAN; m * n];
            Activation::GeluNew.forward(&mut y, &x);
            let mut dx = dy.clone();
            Activation::GeluNew.backward(&mut dx, &x);
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
        kv_heads in 1usize..3,
        group in 1usize..4,
        d in 1usize..9,
        window in prop_oneof![Just(usize::MAX), 1usize..70],
        dropped in prop_oneof![Just(0.0f32), 0.0f32..0.6],
        scale in 0.2f32..1.0,
        threads in 1usize..4,
        seed in any::<u64>(),
    ) {
        let heads = kv_heads * group;
        let window = window.min(seq);
        let shape = Shape { batch, seq, heads, kv_heads, d, window, scale, products: None };
        let width = (heads + 2 * kv_heads) * d;
        let starts = documents(batch, seq, seed);
        let draws = Draws::new(BatchRows { seed, step: 3, first: 5 }, batch);
        let dropout = draws.dropout(dropped, 7);
        let masks = Masks { starts: &starts, dropout };
        let qkv = values(batch * seq * width, seed);
        let dout = values(batch * seq * heads * d, seed ^ 1);
        on(threads, || {
            let mut out = vec![f32::NAN; dout.len()];
            let mut lse = vec![f32::NAN; batch * heads * seq];
            attention::forward(&mut out, &mut lse, &qkv, masks, shape);
            let mut dqkv = vec![f32::NAN; qkv.len()];
            attention::backward(&mut dqkv, &dout, &qkv, &out, &lse, masks, shape);

            for (b, kv) in (0..batch).flat_map(|b| (0..kv_heads).map(move |kv| (b, kv))) {
                // [seq, d] of head `index` in rows of `width` elements.
                let head = |x: &[f32], width: usize, index: usize| -> Vec<f32> {
                    let start = |t| (b * seq + t) * width + index * d;
                    (0..seq).flat_map(|t| x[start(t)..start(t) + d].to_vec()).collect()
                };
                let [key, value] = [heads + kv, heads + kv_heads + kv];
                let first = |t: usize| {
                    let start = starts.get(b * seq + t).map_or(0, |&start| start as usize);
                    start.max((t + 1).saturating_sub(window))
                };
                let mut shared = [(); 2].map(|()| vec![Vec::new(); seq * d]);
                for h in kv * group..(kv + 1) * group {
                    let [q, k, v] = [h, key, value].map(|index| bounded(&head(&qkv, width, index)));
                    let dout = bounded(&head(&dout, heads * d, h));
                    let mut factors = vec![1.0; seq * seq];
                    for (t, factors) in factors.chunks_mut(seq).enumerate() {
                        if let Some(dropout) = dropout {
                            dropout.factors(factors, b, h * seq + t, 0);
                        }
                    }
                    let HeadOracle { out: want, gradients: [dq, dk, dv] } =
                        HeadOracle::new([q, k, v, dout], [d, seq], scale, first, &factors);
                    check(&head(&out, heads * d, h), &want, "forward");
                    check(&head(&dqkv, width, h), &dq, "query");
                    for (terms, of_head) in shared.iter_mut().zip([dk, dv]) {
                        terms.iter_mut().zip(of_head).for_each(|(terms, term)| terms.push(term));
                    }
                }
                let [dk, dv] = shared.map(|terms| terms.into_iter().map(Bounded::sum).collect::<Vec<_>>());
                check(&head(&dqkv, width, key), &dk, "key");
                check(&head(&dqkv, width, value), &dv, "value");
            }
        });
    }

    #[test]
    fn rms_norms(m in 1usize..8, n in 1usize..40, threads in 1usize..4, seed in any::<u64>()) {
        let x = values(m * n, seed);
        let gain = values(n, seed ^ 1);
        let dy = values(m * n, seed ^ 2);
        on(threads, || {
            let mut y = vec![f32::NAN; m * n];
            let mut stats = vec![f32::NAN; m];
            let norm = Norm { kind: NormKind::Rms, gain: &gain, bias: &[], eps: 1e-5 };
            norm.forward(&mut y, &mut stats, &x);
            let mut dx = vec![0.0; m * n];
            let mut dgain = vec![0.0; n];
            norm.backward(&mut dx, [&mut dgain, &mut []], &dy, &x, &stats);

            let want = RmsOracle::new(&x, &gain, &dy);
            check(&y, &want.y, "forward");
            check(&dx, &want.dx, "input");
            check(&dgain, &want.dgain, "gain");
        });
    }

    #[test]
    fn norms_of_heads(
        m in 1usize..6, queries in 1usize..4, keys in 1usize..3, d in 1usize..20, threads in 1usize..4, seed in any::<u64>(),
    ) {
        let width = (queries + 2 * keys) * d;
        let heads = Heads { queries, keys, d };
        let x = values(m * width, seed);
        let gains = values(2 * d, seed ^ 1);
        let dy = values(m * width, seed ^ 2);
        on(threads, || {
            let mut y = x.clone();
            let mut raw = vec![f32::NAN; m * (queries + keys) * d];
            let mut stats = vec![f32::NAN; m * (queries + keys)];
            head_norm::forward(&mut y, &mut raw, &mut stats, &gains, heads, 1e-5);
            let mut dx = dy.clone();
            let mut dgains = vec![0.0; 2 * d];
            head_norm::backward(&mut dx, &mut dgains, &raw, &stats, &gains, heads);

            for (part, range) in [0..queries, queries..queries + keys].into_iter().enumerate() {
                let of = |x: &[f32]| -> Vec<f32> {
                    let rows = x.chunks(width);
                    rows.flat_map(|row| row[range.start * d..range.end * d].to_vec()).collect()
                };
                let want = RmsOracle::new(&of(&x), &gains[part * d..][..d], &of(&dy));
                check(&of(&y), &want.y, "forward");
                check(&of(&dx), &want.dx, "input");
                check(&dgains[part * d..][..d], &want.dgain, "gain");
            }
            let values_of = |x: &[f32]| -> Vec<f32> {
                x.chunks(width).flat_map(|row| row[(queries + keys) * d..].to_vec()).collect()
            };
            assert_eq!((values_of(&y), values_of(&dx)), (values_of(&x), values_of(&dy)));
        });
    }

    #[test]
    fn rotations(
        batch in 1usize..3, seq in 1usize..9, queries in 1usize..4, half in 1usize..20, threads in 1usize..4, seed in any::<u64>(),
    ) {
        let d = 2 * half;
        let heads = Heads { queries, keys: 1, d };
        let x = values(batch * seq * heads.width(), seed);
        let table = values(seq * d, seed ^ 1);
        let starts = documents(batch, seq, seed);
        on(threads, || {
            let mut y = x.clone();
            rope::forward(&mut y, &table, &starts, Span::whole(seq), heads);
            let mut back = x.clone();
            rope::backward(&mut back, &table, &starts, Span::whole(seq), heads);

            for (got, sign) in [(&y, 1.0), (&back, -1.0)] {
                let mut want = bounded(&x);
                for (row, want) in want.chunks_mut(heads.width()).enumerate() {
                    let position = row % seq - starts.get(row).map_or(0, |&start| start as usize);
                        let (cos, sin) = table[position * d..][..d].split_at(half);
                    for head in want[..heads.turned() * d].chunks_mut(d) {
                        for i in 0..half {
                            let (a, b) = (head[i], head[i + half]);
                            let (cos, sin) = (Bounded::from(cos[i]), Bounded::from(sign * sin[i]));
                            head[i] = a * cos - b * sin;
                            head[i + half] = b * cos + a * sin;
                        }
                    }
                }
                check(got, &want, "rotation");
            }
        });
    }

    #[test]
    fn swiglus(m in 1usize..6, n in 1usize..50, threads in 1usize..4, seed in any::<u64>()) {
        let gate_up: Vec<f32> = values(2 * m * n, seed).iter().map(|v| v * 6.0).collect();
        let dact = values(m * n, seed ^ 1);
        on(threads, || {
            let mut act = vec![f32::NAN; m * n];
            swiglu::forward(&mut act, &gate_up, n);
            let mut grads = gate_up.clone();
            swiglu::backward(&mut grads, &dact, n);

            let one = Bounded::from(1.0);
            let mut want_act = Vec::new();
            let mut want = Vec::new();
            for (row, dact) in bounded(&gate_up).chunks(2 * n).zip(bounded(&dact).chunks(n)) {
                let (gate, up) = row.split_at(n);
                let sigmoid = |x: Bounded| (one + (Bounded::from(0.0) - x).exp()).recip();
                let silu: Vec<_> = gate.iter().map(|&g| g * sigmoid(g)).collect();
                want_act.extend((0..n).map(|i| silu[i] * up[i]));
                want.extend((0..n).map(|i| {
                    let s = sigmoid(gate[i]);
                    dact[i] * up[i] * (silu[i] * (one - s) + s)
                }));
                want.extend((0..n).map(|i| dact[i] * silu[i]));
            }
            check(&act, &want_act, "forward");
            check(&grads, &want, "backward");
        });
    }

    #[test]
    fn cross_entropies(rows in 1usize..12, vocab in 1usize..60, threads in 1usize..4, seed in any::<u64>()) {
        let logits: Vec<f32> = values(rows * vocab, seed).iter().map(|v| v * 10.0).collect();
        // A fifth of the rows is not trained.
        let target = |i: usize| match (seed >> (2 * i)) % 5 {
            0 => IGNORED,
            _ => ((seed >> i) % vocab as u64) as u32,
        };
        let targets: Vec<u32> = (0..rows).map(target).collect();
        on(threads, || {
            let mut grad = logits.clone();
            let loss = cross_entropy::forward_backward(&mut grad, &targets, vocab, 0.5);
            assert_eq!(cross_entropy::forward(&mut logits.clone(), &targets, vocab).to_bits(), loss.to_bits());
            let mut want = Vec::new();
            let mut losses = Vec::new();
            for (row, &target) in bounded(&logits).chunks(vocab).zip(&targets) {
                if target == IGNORED {
                    want.extend(row.iter().map(|_| Bounded::from(0.0)));
                    continue;
                }
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
            parts_have_the_whole(&logits, &targets, vocab, loss, &grad);
        });
    }

    #[test]
    fn embeddings(batch in 1usize..4, seq in 1usize..9, c in 1usize..20, threads in 1usize..4, seed in any::<u64>()) {
        let vocab = 7;
        let rows = batch * seq;
        let tokens: Vec<u32> = (0..rows).map(|i| ((seed >> i) % vocab as u64) as u32).collect();
        let starts = documents(batch, seq, seed);
        let wte = values(vocab * c, seed);
        let wpe = values(seq * c, seed ^ 1);
        let dx = values(rows * c, seed ^ 2);

        on(threads, || {
            let mut x = vec![f32::NAN; rows * c];
            let of_batch = embedding::BatchTokens { tokens: &tokens, starts: &starts, span: Span::whole(seq) };
            embedding::forward(&mut x, of_batch, &wte, &wpe, c);
            let mut dwte = vec![0.0; vocab * c];
            let mut dwpe = vec![0.0; seq * c];
            embedding::backward_tokens(&mut dwte, &tokens, &dx, c, None);
            embedding::backward_positions(&mut dwpe, of_batch, &dx, c);
            // fp32 sums in the order of the rows are exact expectations.
            let mut want_wte = vec![0.0; vocab * c];
            let mut want_wpe = vec![0.0; seq * c];
            for row in 0..rows {
                for j in 0..c {
                    let e = tokens[row] as usize * c + j;
                    let start = starts.get(row).map_or(0, |&start| start as usize);
                    let p = (row % seq - start) * c + j;
                    assert_eq!(x[row * c + j], wte[e] + wpe[p]);
                    want_wte[e] += dx[row * c + j];
                    want_wpe[p] += dx[row * c + j];
                }
            }
            assert_eq!((dwte, dwpe), (want_wte.clone(), want_wpe));

            embedding::forward_tokens(&mut x, &tokens, &wte, c);
            for (x, &token) in x.chunks(c).zip(&tokens) {
                assert_eq!(x, &wte[token as usize * c..][..c]);
            }
            for padding in [None, Some(seed as u32 % vocab as u32)] {
                let mut dwte = vec![0.0; vocab * c];
                embedding::backward_tokens(&mut dwte, &tokens, &dx, c, padding);
                if let Some(token) = padding {
                    want_wte[token as usize * c..][..c].fill(0.0);
                }
                assert_eq!(dwte, want_wte);
            }
        });
    }
}
