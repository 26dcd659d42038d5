//! The operations of the Llama family, forward and backward, against fp64 on the same inputs.

use zero_models::cuda::rope::{self, Angles};
use zero_models::cuda::{SumOut, swiglu};
use zero_models::ops::{Heads, Span};

use crate::cuda_attention::{documents, table};
use crate::fp64;
use crate::gpu::{FLOATS, Gpu, close, rounded, tolerance, values};

#[test]
#[ignore = "needs a CUDA device"]
fn rotary_embeddings() {
    let gpu = Gpu::open();
    for dtype in FLOATS {
        let ops = gpu.kernels(dtype);
        for (queries, keys, d, packed) in [(2, 1, 16, false), (3, 1, 6, true), (1, 1, 64, true)] {
            let heads = Heads { queries, keys, d };
            let [batch, seq] = [2, 19];
            let rows = batch * seq;
            let what = format!("{dtype} {heads:?}");
            let x = values(rows * heads.width(), 1);
            let starts = documents(batch, seq, 9);
            let start = |row: usize| if packed { starts[row] as usize } else { 0 };
            let positions: Vec<usize> = (0..rows).map(|row| row % seq - start(row)).collect();
            let cos_sin = table(seq, d);
            let sizes = [heads.width(), heads.turned(), d];
            let rotated = |sign: f64| {
                let mut x = rounded(&x, dtype);
                fp64::rotate(&mut x, &cos_sin, &positions, sizes, sign);
                x
            };

            let angles = Angles {
                table: gpu.floats(&cos_sin),
                starts: packed.then(|| gpu.words(&starts)),
                span: Span::whole(seq),
            };
            let qkv = gpu.put(&x, dtype);
            rope::forward(&ops, &gpu.stream, qkv, angles, heads).unwrap();
            close(&gpu.get(qkv), &rotated(1.0), tolerance(dtype), &what);
            let qkv = gpu.put(&x, dtype);
            rope::backward(&ops, &gpu.stream, qkv, angles, heads).unwrap();
            close(&gpu.get(qkv), &rotated(-1.0), tolerance(dtype), &what);
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn norms_of_heads() {
    let gpu = Gpu::open();
    for dtype in FLOATS {
        let ops = gpu.kernels(dtype);
        for (queries, keys, d) in [(2, 1, 16), (3, 1, 10), (1, 1, 256)] {
            let heads = Heads { queries, keys, d };
            let [batch, seq] = [2, 9];
            let rows = batch * seq;
            let width = heads.width();
            let turned = heads.turned();
            let what = format!("{dtype} {heads:?}");
            let x = values(rows * width, 1);
            let gains = values(2 * d, 2);
            let dy = values(rows * width, 3);
            let cos_sin = table(seq, d);
            let positions: Vec<usize> = (0..rows).map(|row| row % seq).collect();

            let r = |v: &[f32]| rounded(v, dtype);
            let gains64 = r(&gains);
            let mut want = r(&x);
            let mut want_dx = r(&dy);
            let mut want_dgains = vec![0.0; 2 * d];
            for row in 0..rows {
                for head in 0..turned {
                    let at = row * width + head * d..row * width + (head + 1) * d;
                    let of = if head < queries { 0..d } else { d..2 * d };
                    let gain = &gains64[of.clone()];
                    let [y, dx, dgain] =
                        fp64::rms_norm(&want[at.clone()], gain, &want_dx[at.clone()]);
                    want[at.clone()].copy_from_slice(&y);
                    want_dx[at].copy_from_slice(&dx);
                    let sums = want_dgains[of].iter_mut().zip(dgain);
                    sums.for_each(|(sum, v)| *sum += v);
                }
            }
            let sizes = [width, turned, d];
            fp64::rotate(&mut want, &cos_sin, &positions, sizes, 1.0);

            let angles = Angles {
                table: gpu.floats(&cos_sin),
                starts: None,
                span: Span::whole(seq),
            };
            let qkv = gpu.put(&x, dtype);
            let raw = gpu.fresh(rows * turned * d, dtype);
            let stats = gpu.floats(&vec![f32::NAN; rows * turned]);
            let gains = gpu.put(&gains, dtype);
            rope::norm_forward(
                &ops,
                &gpu.stream,
                qkv,
                raw,
                stats,
                gains,
                angles,
                heads,
                1e-5,
            )
            .unwrap();
            close(&gpu.get(qkv), &want, tolerance(dtype), &what);

            let dqkv = gpu.put(&dy, dtype);
            let dgains = gpu.floats(&vec![0.5; 2 * d]);
            want_dgains.iter_mut().for_each(|sum| *sum += 0.5);
            let workspace = gpu.floats(&vec![f32::NAN; rope::workspace_elems(rows, heads)]);
            rope::norm_backward(
                &ops,
                &gpu.stream,
                dqkv,
                Some(SumOut::Add(dgains)),
                raw,
                stats,
                gains,
                heads,
                workspace,
            )
            .unwrap();
            close(&gpu.get(dqkv), &want_dx, tolerance(dtype), &what);
            let got = gpu.get(dgains.erase());
            close(&got, &want_dgains, 2e-6, &format!("{what}: dgains"));

            // Frozen gains.
            let frozen = gpu.put(&dy, dtype);
            let stream = &gpu.stream;
            rope::norm_backward(
                &ops, stream, frozen, None, raw, stats, gains, heads, workspace,
            )
            .unwrap();
            assert_eq!(gpu.get(frozen), gpu.get(dqkv), "{what}: frozen");
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn swiglus() {
    let gpu = Gpu::open();
    for dtype in FLOATS {
        let ops = gpu.kernels(dtype);
        for (rows, n) in [(3, 8), (5, 13), (2, 264)] {
            let what = format!("{dtype} {rows} x {n}");
            let x: Vec<f32> = values(rows * 2 * n, 1).iter().map(|v| 6.0 * v).collect();
            let dact = values(rows * n, 2);
            let x64 = rounded(&x, dtype);
            let d64 = rounded(&dact, dtype);
            let mut want = Vec::new();
            let mut want_dx = vec![0.0; rows * 2 * n];
            for (i, d) in d64.iter().enumerate() {
                let at = i / n * 2 * n + i % n;
                let (gate, up) = (x64[at], x64[at + n]);
                let sigmoid = 1.0 / (1.0 + (-gate).exp());
                want.push(gate * sigmoid * up);
                want_dx[at] = d * up * sigmoid * (1.0 + gate * (1.0 - sigmoid));
                want_dx[at + n] = d * gate * sigmoid;
            }

            let gate_up = gpu.put(&x, dtype);
            let act = gpu.fresh(rows * n, dtype);
            swiglu::forward(&ops, &gpu.stream, act, gate_up, n).unwrap();
            let kept = gpu.get(act);
            close(&kept, &want, tolerance(dtype), &format!("{what}: act"));
            let act = gpu.put(&dact, dtype);
            swiglu::backward(&ops, &gpu.stream, act, gate_up, n).unwrap();
            let got = gpu.get(gate_up);
            close(
                &got,
                &want_dx,
                tolerance(dtype),
                &format!("{what}: gradients"),
            );
            assert_eq!(gpu.get(act), kept, "{what}: act again");
        }
    }
}
