//! Each operation in fp64, by its definition.

use zero_models::cuda::attention::Shape;
use zero_trainer::IGNORED;

/// Returns y, and for `dy` the gradients of x, gain and bias.
pub(crate) fn layer_norm(x: &[f64], gain: &[f64], bias: &[f64], dy: &[f64]) -> [Vec<f64>; 4] {
    let n = gain.len();
    let mut y = Vec::new();
    let mut dx = Vec::new();
    let mut dgain = vec![0.0; n];
    let mut dbias = vec![0.0; n];

    for (x, dy) in x.chunks(n).zip(dy.chunks(n)) {
        let mean = x.iter().sum::<f64>() / n as f64;
        let var = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n as f64;
        let rstd = 1.0 / (var + 1e-5).sqrt();
        let h: Vec<f64> = x.iter().map(|v| (v - mean) * rstd).collect();
        let g: Vec<f64> = (0..n).map(|i| dy[i] * gain[i]).collect();
        let mean_g = g.iter().sum::<f64>() / n as f64;
        let mean_gh = g.iter().zip(&h).map(|(g, h)| g * h).sum::<f64>() / n as f64;
        for i in 0..n {
            y.push(h[i] * gain[i] + bias[i]);
            dx.push(rstd * (g[i] - mean_g - h[i] * mean_gh));
            dgain[i] += dy[i] * h[i];
            dbias[i] += dy[i];
        }
    }

    [y, dx, dgain, dbias]
}

/// GELU and its slope.
pub(crate) fn gelu(x: f64) -> [f64; 2] {
    let root = (2.0 / std::f64::consts::PI).sqrt();
    let cubic = 0.044715;
    let t = (root * (x + cubic * x * x * x)).tanh();
    let slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * root * (1.0 + 3.0 * cubic * x * x);
    [0.5 * x * (1.0 + t), slope]
}

/// The mean loss, and the gradient of the sum of losses.
pub(crate) fn cross_entropy(logits: &[f64], targets: &[u32], vocab: usize) -> (f64, Vec<f64>) {
    let mut loss = 0.0;
    let mut grad = Vec::new();
    for (row, &target) in logits.chunks(vocab).zip(targets) {
        if target == IGNORED {
            grad.extend(vec![0.0; vocab]);
            continue;
        }
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
        loss += sum.ln() + max - row[target as usize];
        grad.extend(
            (0..vocab)
                .map(|i| (row[i] - max).exp() / sum - f64::from(u8::from(i == target as usize))),
        );
    }
    (loss / targets.len() as f64, grad)
}

/// Returns out `[batch, seq, heads, d]`, and for `dout` the gradient of qkv
/// `[batch, seq, heads + 2 kv_heads, d]`. `starts` `[batch, seq]` are those of documents, if it is not
/// empty, and `factors` `[batch, heads, seq, seq]` those of the probabilities.
pub(crate) fn attention(
    qkv: &[f64],
    dout: &[f64],
    s: Shape,
    starts: &[u32],
    factors: &[f32],
) -> [Vec<f64>; 2] {
    let c = s.heads * s.d;
    let group = s.heads / s.kv_heads;
    let scale = 1.0 / (s.d as f64).sqrt();
    let mut out = vec![0.0; s.batch * s.seq * c];
    let mut dqkv = vec![0.0; s.batch * s.seq * s.width()];

    for b in 0..s.batch {
        for h in 0..s.heads {
            let heads = [h, s.heads + h / group, s.heads + s.kv_heads + h / group];
            let at = |part: usize, t: usize| (b * s.seq + t) * s.width() + heads[part] * s.d;
            let o = |t: usize| (b * s.seq + t) * c + h * s.d;
            let dot = |a: &[f64], i: usize, b: &[f64], j: usize| {
                (0..s.d).map(|e| a[i + e] * b[j + e]).sum::<f64>()
            };
            for t in 0..s.seq {
                let start = starts.get(b * s.seq + t).map_or(0, |&start| start as usize);
                let first = start.max((t + 1).saturating_sub(s.window));
                let weights: Vec<f64> = (first..=t)
                    .map(|u| (dot(qkv, at(0, t), qkv, at(1, u)) * scale).exp())
                    .collect();
                let sum: f64 = weights.iter().sum();
                let p: Vec<f64> = weights.iter().map(|w| w / sum).collect();
                let factor = |u: usize| {
                    let line = (b * s.heads + h) * s.seq + t;
                    factors.get(line * s.seq + u).map_or(1.0, |&v| f64::from(v))
                };
                for e in 0..s.d {
                    out[o(t) + e] = (first..=t)
                        .map(|u| p[u - first] * factor(u) * qkv[at(2, u) + e])
                        .sum();
                }
                let dp: Vec<f64> = (first..=t)
                    .map(|u| factor(u) * dot(dout, o(t), qkv, at(2, u)))
                    .collect();
                let delta: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
                for u in first..=t {
                    let ds = p[u - first] * (dp[u - first] - delta) * scale;
                    for e in 0..s.d {
                        dqkv[at(0, t) + e] += ds * qkv[at(1, u) + e];
                        dqkv[at(1, u) + e] += ds * qkv[at(0, t) + e];
                        dqkv[at(2, u) + e] += p[u - first] * factor(u) * dout[o(t) + e];
                    }
                }
            }
        }
    }

    [out, dqkv]
}

/// Returns y, and for `dy` the gradients of x and gain.
pub(crate) fn rms_norm(x: &[f64], gain: &[f64], dy: &[f64]) -> [Vec<f64>; 3] {
    let n = gain.len();
    let mut y = Vec::new();
    let mut dx = Vec::new();
    let mut dgain = vec![0.0; n];

    for (x, dy) in x.chunks(n).zip(dy.chunks(n)) {
        let square = x.iter().map(|v| v * v).sum::<f64>() / n as f64;
        let scale = 1.0 / (square + 1e-5).sqrt();
        let mean = (0..n).map(|i| dy[i] * gain[i] * x[i] * scale).sum::<f64>() / n as f64;
        for i in 0..n {
            let h = x[i] * scale;
            y.push(h * gain[i]);
            dx.push(scale * (dy[i] * gain[i] - h * mean));
            dgain[i] += dy[i] * h;
        }
    }

    [y, dx, dgain]
}

/// Rotates the first `turned` heads of `d` elements of rows of `width` by the angles of `positions`,
/// or back with sign -1. `table` has a position's cosines, then its sines.
pub(crate) fn rotate(
    x: &mut [f64],
    table: &[f32],
    positions: &[usize],
    [width, turned, d]: [usize; 3],
    sign: f64,
) {
    for (row, position) in x.chunks_mut(width).zip(positions) {
        for head in row[..turned * d].chunks_mut(d) {
            for i in 0..d / 2 {
                let cos = f64::from(table[position * d + i]);
                let sin = sign * f64::from(table[position * d + d / 2 + i]);
                let (a, b) = (head[i], head[i + d / 2]);
                head[i] = a * cos - b * sin;
                head[i + d / 2] = b * cos + a * sin;
            }
        }
    }
}

/// `a b`: a `[m, k]`, b `[k, n]`.
pub(crate) fn matmul(a: &[f64], b: &[f64], k: usize, n: usize) -> Vec<f64> {
    let rows = a
        .chunks(k)
        .flat_map(|row| (0..n).map(move |j| (0..k).map(|i| row[i] * b[i * n + j]).sum()));
    rows.collect()
}

/// `[rows, cols]` to `[cols, rows]`.
pub(crate) fn transpose(x: &[f64], cols: usize) -> Vec<f64> {
    (0..cols)
        .flat_map(|j| x.chunks(cols).map(move |row| row[j]))
        .collect()
}
