//! Each kernel, forward and backward, against fp64 on the same inputs.

use zero_alloc::device::{AnySlice, DType};
use zero_models::cuda::cross_entropy::Scale;
use zero_models::cuda::dropout::Dropout;
use zero_models::cuda::embedding::{TokenLists, sort_tokens};
use zero_models::cuda::norm::{self, Norm};
use zero_models::cuda::{SumOut, column_sums, cross_entropy, embedding, gelu};
use zero_models::ops::Span;
use zero_models::ops::cross_entropy::{STATISTICS, VocabPart};
use zero_models::ops::norm::NormKind;
use zero_trainer::IGNORED;

use crate::cuda_attention::documents;
use crate::cuda_dropout::{SITE, draws, factors, keys};
use crate::fp64;
use crate::gpu::{FLOATS, Gpu, close, rounded, tolerance, values};

fn check_norm(gpu: &Gpu, kind: NormKind, dtype: DType, rows: usize, n: usize) {
    let ops = gpu.kernels(dtype);
    let what = format!("{kind:?} {dtype} {rows} x {n}");
    let close = |got: &[f32], want: &[f64], tolerance: f64, name: &str| {
        close(got, want, tolerance, &format!("{what}: {name}"));
    };
    let x = values(rows * n, 1);
    let dy = values(rows * n, 2);
    let gain = values(n, 3);
    let bias = values(n, 4);
    let start = values(rows * n, 5);
    let r = |v: &[f32]| rounded(v, dtype);
    let column_sum = |j: usize| r(&start).iter().skip(j).step_by(n).sum::<f64>();
    let [want_y, mut want_dx, sums @ ..] = match kind {
        NormKind::Layer => {
            let [y, dx, dgain, dbias] = fp64::layer_norm(&r(&x), &r(&gain), &r(&bias), &r(&dy));
            [y, dx, dgain, dbias, (0..n).map(column_sum).collect()]
        }
        NormKind::Rms => {
            let [y, dx, dgain] = fp64::rms_norm(&r(&x), &r(&gain), &r(&dy));
            [y, dx, dgain, Vec::new(), Vec::new()]
        }
    };
    want_dx
        .iter_mut()
        .zip(r(&start))
        .for_each(|(want, start)| *want += start);

    let x = gpu.put(&x, dtype);
    let dy = gpu.put(&dy, dtype);
    let norm = Norm {
        kind,
        gain: gpu.put(&gain, dtype),
        bias: gpu.put(&bias, dtype),
        eps: 1e-5,
    };
    let y = gpu.fresh(rows * n, dtype);
    let stats = gpu.floats(&vec![f32::NAN; kind.stats() * rows]);
    norm::forward(&ops, &gpu.stream, norm, y, stats, x).unwrap();
    close(&gpu.get(y), &want_y, tolerance(dtype), "y");

    // All sums are added to existing values, or those of gain and bias written.
    for all in [true, false] {
        let has = |want: &&Vec<f64>| !want.is_empty();
        let count = if all { 3 } else { kind.params() };
        let wants = sums.iter().filter(has).take(count);
        let outs: Vec<_> = wants
            .clone()
            .map(|_| gpu.floats(&vec![if all { 0.5 } else { f32::NAN }; n]))
            .collect();
        let places = outs.iter().map(|out| match all {
            true => SumOut::Add(*out),
            false => SumOut::Write(out.erase()),
        });
        let places: Vec<_> = places.collect();
        let again = gpu.fresh(rows * n, dtype);
        let output = all.then_some(again);
        let workspace = gpu.floats(&vec![f32::NAN; norm::workspace_elems(kind, rows, n)]);
        let dx = gpu.put(&start, dtype);
        let stream = &gpu.stream;
        norm::backward(
            &ops, stream, norm, dx, &places, output, dy, x, stats, workspace,
        )
        .unwrap();

        close(&gpu.get(dx), &want_dx, tolerance(dtype), "dx");
        for ((out, want), name) in outs.iter().zip(wants).zip(["dgain", "dbias", "sums of dx"]) {
            let off = if all { 0.5 } else { 0.0 };
            let want: Vec<f64> = want.iter().map(|v| v + off).collect();
            close(&gpu.get(out.erase()), &want, 2e-6, name);
        }
        if all {
            assert_eq!(gpu.get(again), gpu.get(y), "{what}: y again");
        }

        // Frozen parameters.
        let frozen = gpu.put(&start, dtype);
        let none = gpu.floats(&[]);
        norm::backward(&ops, stream, norm, frozen, &[], output, dy, x, stats, none).unwrap();
        assert_eq!(gpu.get(frozen), gpu.get(dx), "{what}: frozen");
    }
}

/// One chunk of columns, odd widths, several chunks, a partial chunk, and more rows than the blocks have
/// warps; then the first and the last width of each kernel.
#[test]
#[ignore = "needs a CUDA device"]
fn norms() {
    let gpu = Gpu::open();
    let layer_norms: &[usize] = &[768, 1024, 1032, 1280, 1288, 1792, 1800, 4096, 1023];
    let rms_norms: &[usize] = &[1024, 1032, 2048, 2056, 4096, 4104, 8192, 1023];
    for (kind, widths, widest) in [
        (NormKind::Layer, layer_norms, 4096),
        (NormKind::Rms, rms_norms, 8192),
    ] {
        for dtype in FLOATS {
            for (rows, n) in [(5, 8), (3, 13), (9, 776), (1, 40), (2200, 8)] {
                check_norm(&gpu, kind, dtype, rows, n);
            }
        }
        for &n in widths {
            check_norm(&gpu, kind, DType::Bf16, 5, n);
        }
        check_norm(&gpu, kind, DType::F32, 3, widest);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn sums_over_rows() {
    let gpu = Gpu::open();
    for dtype in FLOATS {
        let ops = gpu.kernels(dtype);
        for (rows, n) in [(1, 8), (7, 13), (300, 264), (1030, 3)] {
            let x = values(rows * n, 1);
            let out = values(n, 2);
            let mut want: Vec<f64> = rounded(&out, DType::F32);
            for row in rounded(&x, dtype).chunks(n) {
                want.iter_mut().zip(row).for_each(|(sum, v)| *sum += v);
            }
            let x = gpu.put(&x, dtype);
            let sums = gpu.floats(&out);
            let workspace = gpu.floats(&vec![f32::NAN; column_sums::workspace_elems(rows, n)]);
            column_sums::sum_rows(&ops, &gpu.stream, SumOut::Add(sums), x, workspace).unwrap();
            close(
                &gpu.get(sums.erase()),
                &want,
                2e-6,
                &format!("{dtype} {rows} x {n}"),
            );
            // A written sum overwrites NaN, and is the added one before its start, rounded once.
            want.iter_mut()
                .zip(&out)
                .for_each(|(sum, start)| *sum -= f64::from(*start));
            let write = |to| {
                let out = gpu.fresh(n, to);
                column_sums::sum_rows(&ops, &gpu.stream, SumOut::Write(out), x, workspace).unwrap();
                gpu.get(out)
            };
            let exact = write(DType::F32);
            // Sums that are complete, such as those over ranks, are added or written as they are.
            let complete = gpu.floats(&exact);
            let outs = [gpu.fresh(n, DType::F32), gpu.fresh(n, dtype)];
            for out in outs {
                let place = [SumOut::Write(out)];
                column_sums::sum_partials(&ops, &gpu.stream, &place, complete, 1).unwrap();
                let want = rounded(&exact, out.dtype());
                let got: Vec<f64> = gpu.get(out).into_iter().map(f64::from).collect();
                assert_eq!(got, want, "{dtype} {rows} x {n}");
            }
            close(
                &exact,
                &want,
                2e-6,
                &format!("{dtype} {rows} x {n}, written"),
            );
            for to in [DType::Bf16, DType::F16] {
                let once: Vec<f32> = rounded(&exact, to).iter().map(|v| *v as f32).collect();
                assert_eq!(write(to), once, "{dtype} to {to}");
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn gelus() {
    let gpu = Gpu::open();
    for dtype in FLOATS {
        let ops = gpu.kernels(dtype);
        // The second slice is not aligned to 16 bytes.
        for (n, start) in [(4099, 0), (77, 3)] {
            let x: Vec<f32> = values(n + start, 1).iter().map(|v| v * 6.0).collect();
            let dy = values(n + start, 2);
            let pairs: Vec<[f64; 2]> = rounded(&x, dtype)[start..]
                .iter()
                .map(|x| fp64::gelu(*x))
                .collect();
            let want: Vec<f64> = pairs.iter().map(|p| p[0]).collect();
            let dy64 = rounded(&dy, dtype);
            let want_dx: Vec<f64> = pairs
                .iter()
                .zip(&dy64[start..])
                .map(|(p, dy)| p[1] * dy)
                .collect();
            let part = |v: AnySlice| v.slice(start..start + n);
            let x = part(gpu.put(&x, dtype));
            let dy = part(gpu.put(&dy, dtype));
            let y = part(gpu.fresh(n + start, dtype));
            gelu::forward(&ops, &gpu.stream, y, x).unwrap();
            close(&gpu.get(y), &want, tolerance(dtype), &format!("{dtype}: y"));
            gelu::backward(&ops, &gpu.stream, dy, x).unwrap();
            close(
                &gpu.get(dy),
                &want_dx,
                tolerance(dtype),
                &format!("{dtype}: dx"),
            );
        }
    }
}

/// The tokens on the device, grouped.
pub(crate) fn token_lists(gpu: &Gpu, tokens: &[u32]) -> TokenLists {
    let mut order = vec![0; tokens.len()];
    let mut starts = vec![u32::MAX; tokens.len()];
    let segments = sort_tokens(tokens, &mut order, &mut starts);
    TokenLists {
        tokens: gpu.words(tokens),
        order: gpu.words(&order),
        starts: gpu.words(&starts),
        segments: gpu.words(&[segments]),
    }
}

fn check_embeddings(
    gpu: &Gpu,
    dtype: DType,
    [batch, seq, n]: [usize; 3],
    packed: bool,
    drops: bool,
) {
    let ops = gpu.kernels(dtype);
    let stream = &gpu.stream;
    let vocab = 11;
    let rows = batch * seq;
    let what = format!("{dtype} {batch} x {seq} x {n}, documents: {packed}, dropout: {drops}");
    let close = |got, want: &[f64], tolerance, name: &str| {
        close(&gpu.get(got), want, tolerance, &format!("{what}: {name}"));
    };
    // Token 4 is frequent, some tokens are absent.
    let token = |i: usize| {
        if i.is_multiple_of(3) {
            4
        } else {
            i * i % vocab
        }
    };
    let tokens: Vec<u32> = (0..rows).map(|i| token(i) as u32).collect();
    let starts = documents(batch, seq, 9);
    let start = |row: usize| if packed { starts[row] as usize } else { 0 };
    let factors = match drops {
        true => factors([batch, seq, n], 0.4),
        false => vec![1.0; rows * n],
    };
    let keys = keys(gpu, &draws(batch));
    let of = embedding::BatchLayout {
        batch,
        span: Span::whole(seq),
        documents: packed.then(|| gpu.words(&starts)),
        dropout: Dropout::new(keys, 0.4, SITE).filter(|_| drops),
    };

    let wte = values(vocab * n, 1);
    let wpe = values((seq + 2) * n, 2);
    let dx = values(rows * n, 3);
    let e = rounded(&wte, dtype);
    let p = rounded(&wpe, dtype);
    let d = rounded(&dx, dtype);
    let mut want = Vec::new();
    let mut want_without = Vec::new();
    let mut want_wte = vec![0.5; vocab * n];
    let mut want_wpe = vec![0.25; (seq + 2) * n];
    for (i, factor) in factors.iter().enumerate() {
        let row = i / n;
        let factor = f64::from(*factor);
        let at_e = tokens[row] as usize * n + i % n;
        let at_p = (row % seq - start(row)) * n + i % n;
        want.push((e[at_e] + p[at_p]) * factor);
        want_without.push(e[at_e] * factor);
        want_wte[at_e] += d[i] * factor;
        want_wpe[at_p] += d[i] * factor;
    }
    // The frequent token is padding: its row keeps its value.
    let mut want_padded = want_wte.clone();
    want_padded[4 * n..5 * n].fill(0.5);

    let lists = token_lists(gpu, &tokens);
    let x = gpu.fresh(rows * n, dtype);
    let wte = gpu.put(&wte, dtype);
    let wpe = gpu.put(&wpe, dtype);
    for (wpe, want, name) in [(Some(wpe), want, "x"), (None, want_without, "no positions")] {
        embedding::forward(&ops, stream, x, lists.tokens, wte, wpe, of).unwrap();
        close(x, &want, tolerance(dtype), name);
    }

    let dx = gpu.put(&dx, dtype);
    for (padding, want, name) in [(None, want_wte, "dwte"), (Some(4), want_padded, "padding")] {
        let dwte = gpu.floats(&vec![0.5; vocab * n]);
        embedding::backward_tokens(&ops, stream, dwte, &lists, dx, padding, of).unwrap();
        close(dwte.erase(), &want, 2e-6, name);
    }
    let dwpe = gpu.floats(&vec![0.25; (seq + 2) * n]);
    embedding::backward_positions(&ops, stream, dwpe, dx, of).unwrap();
    close(dwpe.erase(), &want_wpe, 2e-6, "dwpe");
}

/// Embeddings of rows with documents and dropout, of each alone, and of neither.
#[test]
#[ignore = "needs a CUDA device"]
fn embeddings() {
    let gpu = Gpu::open();
    for dtype in FLOATS {
        for sizes in [[1, 1, 8], [3, 7, 264], [40, 3, 5]] {
            check_embeddings(&gpu, dtype, sizes, false, false);
        }
        for (packed, drops) in [(false, true), (true, false), (true, true)] {
            for sizes in [[3, 40, 16], [2, 23, 5]] {
                check_embeddings(&gpu, dtype, sizes, packed, drops);
            }
        }
    }
}

/// The first `len` columns of rows of `stride`, and whether all others are 0.
fn columns(all: &[f32], stride: usize, len: usize) -> (Vec<f32>, bool) {
    let rows = all.chunks(stride);
    let real = rows.clone().flat_map(|row| row[..len].to_vec()).collect();
    let others = rows.flat_map(|row| &row[len..]).all(|v| *v == 0.0);
    (real, others)
}

/// The parts of a vocabulary on three ranks, of which the last has fewer tokens.
#[test]
#[ignore = "needs a CUDA device"]
fn cross_entropy_of_parts() {
    let gpu = Gpu::open();
    for dtype in FLOATS {
        let ops = gpu.kernels(dtype);
        let rows = 4;
        let vocab = 131;
        let each = 44;
        let what = format!("{dtype}");
        let all: Vec<f32> = values(rows * vocab, 1).iter().map(|v| 10.0 * v).collect();
        // In each of the parts, and one that is not trained.
        let targets = [3, IGNORED, 130, 60];
        let (want_loss, grad) = fp64::cross_entropy(&rounded(&all, dtype), &targets, vocab);
        let targets = gpu.words(&targets);
        let scale = Scale {
            loss_scale: gpu.double(8.0),
            divisor: gpu.double(16.0),
        };

        let parts: Vec<_> = (0..vocab)
            .step_by(each)
            .map(|first| VocabPart {
                first,
                len: each.min(vocab - first),
            })
            .collect();
        let stats = gpu.floats(&vec![f32::NAN; parts.len() * rows * STATISTICS]);
        let logits: Vec<_> = parts
            .iter()
            .enumerate()
            .map(|(rank, &part)| {
                let stride = cross_entropy::stride_elems(part.len);
                let mut own = vec![77.0; rows * stride];
                for (own, all) in own.chunks_mut(stride).zip(all.chunks(vocab)) {
                    own[..part.len].copy_from_slice(&all[part.first..part.first + part.len]);
                }
                let logits = gpu.put(&own, dtype);
                let of_rank = rows * STATISTICS;
                let own = stats.slice(rank * of_rank..(rank + 1) * of_rank);
                let stream = &gpu.stream;
                cross_entropy::part_statistics(&ops, stream, own, logits, targets, part).unwrap();
                logits
            })
            .collect();

        for (&part, logits) in parts.iter().zip(logits) {
            let losses = gpu.floats(&vec![f32::NAN; rows]);
            let alone = gpu.floats(&vec![f32::NAN; rows]);
            let stream = &gpu.stream;
            let before = gpu.get(logits);
            let gradient = |losses, scale| {
                cross_entropy::part_gradient(
                    &ops, stream, logits, losses, stats, targets, part, scale,
                )
                .unwrap();
            };
            gradient(alone, None);
            assert_eq!(gpu.get(logits), before, "{what}: logits");
            gradient(losses, Some(scale));
            assert_eq!(gpu.get(alone.erase()), gpu.get(losses.erase()), "{what}");
            let got = gpu.get(losses.erase());
            let mean = got.iter().map(|loss| f64::from(*loss)).sum::<f64>() / rows as f64;
            assert!(
                (mean - want_loss).abs() < 1e-6 * want_loss,
                "{what}: losses"
            );

            let stride = cross_entropy::stride_elems(part.len);
            let (got, zeros_behind) = columns(&gpu.get(logits), stride, part.len);
            assert!(zeros_behind, "{what}: behind");
            let want: Vec<f64> = grad
                .chunks(vocab)
                .flat_map(|row| row[part.first..part.first + part.len].to_vec())
                .map(|g| 0.5 * g)
                .collect();
            close(&got, &want, tolerance(dtype), &format!("{what}: gradient"));
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cross_entropies() {
    let gpu = Gpu::open();
    for dtype in FLOATS {
        let ops = gpu.kernels(dtype);
        // Less than a group, a remainder, and more than a block computes at once.
        for (rows, vocab) in [(3, 5), (4, 131), (2, 9001)] {
            let stride = cross_entropy::stride_elems(vocab);
            let what = format!("{dtype} {rows} x {vocab}");
            let mut logits = vec![77.0; rows * stride];
            for (i, v) in values(rows * vocab, 1).into_iter().enumerate() {
                logits[i / vocab * stride + i % vocab] = 10.0 * v;
            }
            let mut targets: Vec<u32> = (0..rows).map(|i| (i * 7919 % vocab) as u32).collect();
            targets[1] = IGNORED;
            let (real, _) = columns(&logits, stride, vocab);
            let (want_loss, grad) = fp64::cross_entropy(&rounded(&real, dtype), &targets, vocab);
            let want: Vec<f64> = grad.iter().map(|g| 0.5 * g).collect();

            let logits = gpu.put(&logits, dtype);
            let targets = gpu.words(&targets);
            let losses = gpu.floats(&vec![f32::NAN; rows]);
            let before = gpu.get(logits);
            let alone = gpu.floats(&vec![f32::NAN; rows]);
            let forward = |losses, scale| {
                let stream = &gpu.stream;
                cross_entropy::forward(&ops, stream, logits, losses, targets, vocab, scale)
                    .unwrap();
            };
            forward(alone, None);
            assert_eq!(gpu.get(logits), before, "{what}: logits");
            // The launch covers a part of the averaged tokens.
            let half = Scale {
                loss_scale: gpu.double(8.0),
                divisor: gpu.double(16.0),
            };
            forward(losses, Some(half));
            assert_eq!(
                gpu.get(alone.erase()),
                gpu.get(losses.erase()),
                "{what}: losses without a gradient"
            );
            let (got, zeros_behind) = columns(&gpu.get(logits), stride, vocab);
            assert!(zeros_behind, "{what}: behind the vocabulary");
            close(&got, &want, tolerance(dtype), &format!("{what}: gradient"));
            let sum = gpu.double(1.0);
            let rows = gpu.double(rows as f64);
            cross_entropy::add(&ops, &gpu.stream, sum, losses, Some(rows)).unwrap();
            let loss = gpu.get_double(sum) - 1.0;
            let error = (loss - want_loss).abs() / want_loss;
            assert!(error < 1e-6, "{what}: loss {loss} for {want_loss}");
        }
    }
}
