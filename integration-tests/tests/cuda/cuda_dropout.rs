//! Dropout: the device draws the host's masks.

use std::collections::HashMap;

use integration_tests::relative_error;
use zero_alloc::device::{DType, DeviceSlice};
use zero_kernels::cuda::Loader;
use zero_models::cuda::OpKernels;
use zero_models::cuda::dropout::{self, Dropout};
use zero_models::cuda::embedding::{self, TokenLists, sort_tokens};
use zero_models::cuda::{SumOut, column_sums};
use zero_models::gpt2::config::GptConfig;
use zero_models::ops::Span;
use zero_models::ops::dropout::Draws;
use zero_models::{ModelConfig, ModelOptions};
use zero_trainer::{Batch, BatchRows};

use crate::cuda_attention::documents;
use crate::cuda_llama::{
    BATCH, OnGpu, SEQ, batch, by_name, families, is_planned, options, weights,
};
use crate::gpu::{FLOATS, Gpu, close, rounded, tolerance, values};
use crate::tiny::on_host;

/// The operation of the tests.
pub(crate) const SITE: u32 = 11;

/// Rows in the middle of a run.
const ROWS: BatchRows = BatchRows {
    seed: 0x9_1234_5678,
    step: 17,
    first: 5,
};

/// The streams of a batch.
pub(crate) fn draws(batch: usize) -> Draws {
    Draws::new(ROWS, batch)
}

/// Their keys on the device.
pub(crate) fn keys(gpu: &Gpu, draws: &Draws) -> DeviceSlice<u32> {
    let words: Vec<u32> = draws.keys().flatten().collect();
    gpu.words(&words)
}

/// The host's factors `[batch, seq, n]`.
fn factors([batch, seq, n]: [usize; 3], probability: f32) -> Vec<f32> {
    let draws = draws(batch);
    let dropout = draws.dropout(probability, SITE).unwrap();
    let mut all = vec![f32::NAN; batch * seq * n];
    for (row, out) in all.chunks_mut(n).enumerate() {
        dropout.factors(out, row / seq, row % seq, 0);
    }
    all
}

/// Whole groups of four numbers, widths that are not multiples of 8, and one row.
const SIZES: [[usize; 3]; 4] = [[3, 7, 264], [2, 5, 13], [1, 1, 8], [5, 1, 2]];

#[test]
#[ignore = "needs a CUDA device"]
fn masks_are_the_hosts() {
    let gpu = Gpu::open();
    for dtype in FLOATS {
        let ops = gpu.kernels(dtype);
        for probability in [0.1, 0.5, 0.97] {
            for sizes in SIZES {
                let [batch, seq, n] = sizes;
                let rows = batch * seq;
                let what = format!("{dtype} {sizes:?} {probability}");
                let keys = keys(&gpu, &draws(batch));
                let dropout = Dropout::new(keys, probability, SITE).unwrap();
                let want = factors(sizes, probability);
                let kept = rounded(&want, dtype);

                // Ones become the factors themselves.
                let residual = gpu.put(&vec![0.0; rows * n], dtype);
                for residual in [Some(residual), None] {
                    let y = gpu.put(&vec![1.0; rows * n], dtype);
                    dropout::add_residual(&ops, &gpu.stream, y, residual, n, Some(dropout))
                        .unwrap();
                    let got: Vec<f64> = gpu.get(y).into_iter().map(f64::from).collect();
                    assert_eq!(got, kept, "{what}");
                }

                // Some rows alone, as ranks that divide them have them; without dropout it only adds.
                let own = rows / 3..rows - rows / 4;
                let [ones, halves] = [1.0, 0.5].map(|x| gpu.put(&vec![x; own.len() * n], dtype));
                let of_own = dropout.from_row(own.start, rows);
                dropout::add_residual(&ops, &gpu.stream, ones, None, n, Some(of_own)).unwrap();
                let got: Vec<f64> = gpu.get(ones).into_iter().map(f64::from).collect();
                assert_eq!(got, kept[own.start * n..own.end * n], "{what}");
                let residual = gpu.put(&vec![0.25; own.len() * n], dtype);
                dropout::add_residual(&ops, &gpu.stream, halves, Some(residual), n, None).unwrap();
                assert!(gpu.get(halves).into_iter().all(|y| y == 0.75), "{what}");

                let x = values(rows * n, 1);
                let sums = gpu.floats(&vec![0.5; n]);
                let workspace = gpu.floats(&vec![f32::NAN; column_sums::workspace_elems(rows, n)]);
                let mut want_sums = vec![0.5; n];
                let x64 = rounded(&x, dtype);
                let want: Vec<f64> = x64
                    .iter()
                    .zip(&want)
                    .map(|(x, factor)| x * f64::from(*factor))
                    .collect();
                for row in want.chunks(n) {
                    want_sums.iter_mut().zip(row).for_each(|(sum, v)| *sum += v);
                }
                let y = gpu.fresh(rows * n, dtype);
                let x = gpu.put(&x, dtype);
                let out = SumOut::Add(sums);
                let stream = &gpu.stream;
                column_sums::drop_and_sum_rows(&ops, stream, out, y, x, dropout, workspace)
                    .unwrap();
                close(&gpu.get(y), &want, tolerance(dtype), &what);
                let got = gpu.get(sums.erase());
                close(&got, &want_sums, 2e-6, &format!("{what}: sums"));

                let [some, y] = [x, y].map(|all| all.slice(own.start * n..own.end * n));
                let of_own = dropout.from_row(own.start, rows);
                column_sums::drop_and_sum_rows(&ops, stream, out, y, some, of_own, workspace)
                    .unwrap();
                let want = &want[own.start * n..own.end * n];
                close(
                    &gpu.get(y),
                    want,
                    tolerance(dtype),
                    &format!("{what}: some rows"),
                );
            }
        }
    }
}

/// Embeddings of rows with documents and dropout, of each alone, and of neither.
#[test]
#[ignore = "needs a CUDA device"]
fn embeddings_with_documents_and_dropout() {
    let gpu = Gpu::open();
    let vocab = 11;
    for dtype in FLOATS {
        let ops = gpu.kernels(dtype);
        for (packed, drops) in [(false, true), (true, false), (true, true)] {
            for [batch, seq, n] in [[3, 40, 16], [2, 23, 5]] {
                let rows = batch * seq;
                let what = format!("{dtype} {batch} x {seq} x {n}, {packed}, {drops}");
                let tokens: Vec<u32> = (0..rows).map(|i| (i * i % vocab) as u32).collect();
                let starts = documents(batch, seq, 9);
                let start = |row: usize| if packed { starts[row] as usize } else { 0 };
                let factors = match drops {
                    true => factors([batch, seq, n], 0.4),
                    false => vec![1.0; rows * n],
                };
                let keys = keys(&gpu, &draws(batch));
                let of = embedding::BatchLayout {
                    batch,
                    span: Span::whole(seq),
                    documents: packed.then(|| gpu.words(&starts)),
                    dropout: Dropout::new(keys, 0.4, SITE).filter(|_| drops),
                };

                let wte = values(vocab * n, 1);
                let wpe = values(seq * n, 2);
                let dx = values(rows * n, 3);
                let e = rounded(&wte, dtype);
                let p = rounded(&wpe, dtype);
                let d = rounded(&dx, dtype);
                let mut want = Vec::new();
                let mut want_wte = vec![0.5; vocab * n];
                let mut want_wpe = vec![0.25; seq * n];
                for (i, factor) in factors.iter().enumerate() {
                    let row = i / n;
                    let factor = f64::from(*factor);
                    let at_e = tokens[row] as usize * n + i % n;
                    let at_p = (row % seq - start(row)) * n + i % n;
                    want.push((e[at_e] + p[at_p]) * factor);
                    want_wte[at_e] += d[i] * factor;
                    want_wpe[at_p] += d[i] * factor;
                }

                let mut order = vec![0; rows];
                let mut firsts = vec![u32::MAX; rows];
                let segments = sort_tokens(&tokens, &mut order, &mut firsts);
                let lists = TokenLists {
                    tokens: gpu.words(&tokens),
                    order: gpu.words(&order),
                    starts: gpu.words(&firsts),
                    segments: gpu.words(&[segments]),
                };
                let stream = &gpu.stream;
                let x = gpu.fresh(rows * n, dtype);
                let wte = gpu.put(&wte, dtype);
                let wpe = Some(gpu.put(&wpe, dtype));
                embedding::forward(&ops, stream, x, lists.tokens, wte, wpe, of).unwrap();
                close(&gpu.get(x), &want, tolerance(dtype), &what);

                let dx = gpu.put(&dx, dtype);
                let dwte = gpu.floats(&vec![0.5; vocab * n]);
                let dwpe = gpu.floats(&vec![0.25; seq * n]);
                embedding::backward_tokens(&ops, stream, dwte, &lists, dx, None, of).unwrap();
                embedding::backward_positions(&ops, stream, dwpe, dx, of).unwrap();
                let got = gpu.get(dwte.erase());
                close(&got, &want_wte, 2e-6, &format!("{what}: dwte"));
                let got = gpu.get(dwpe.erase());
                close(&got, &want_wpe, 2e-6, &format!("{what}: dwpe"));
            }
        }
    }
}

/// Without a probability there is no dropout; rows behind the batch's are an error.
#[test]
#[ignore = "needs a CUDA device"]
fn nothing_is_dropped_without_probability() {
    let gpu = Gpu::open();
    assert!(Dropout::new(keys(&gpu, &draws(2)), 0.0, SITE).is_none());
    let loader = Loader::new(&gpu.device).unwrap();
    let ops = OpKernels::load(&loader, DType::Bf16, false).unwrap();
    let y = gpu.put(&[1.0; 24], DType::Bf16);
    let dropout = Dropout::new(keys(&gpu, &draws(1)), 0.5, SITE).unwrap();
    let behind = Some(dropout.from_row(2, 4));
    let error = dropout::add_residual(&ops, &gpu.stream, y, Some(y), 8, behind).unwrap_err();
    assert!(
        error.to_string().contains("rows behind the first"),
        "{error}"
    );
}

/// A GPT-2 with heads of `d`.
fn gpt2(d: usize, n_inner: usize) -> ModelConfig {
    ModelConfig::from(GptConfig {
        vocab_size: 75,
        n_positions: 64,
        n_embd: 2 * d,
        n_layer: 2,
        n_head: 2,
        n_inner,
        ..GptConfig::gpt2(2 * d, 2, 2)
    })
}

/// Two micro-batches of one step, which draw different masks.
fn drawing(config: &ModelConfig, packed: bool) -> [Batch; 2] {
    [0, 1].map(|micro| {
        let mut batch = batch(config, packed);
        let first = ROWS.first + (micro * BATCH) as u64;
        batch.rows = Some(BatchRows { first, ..ROWS });
        batch
    })
}

/// In fp32, with documents and without, and in evaluation, which drops nothing.
#[test]
#[ignore = "needs a CUDA device"]
fn models_with_dropout_are_the_hosts() {
    let gpu = Gpu::open();
    let [llama, ..] = families();
    for plain in [gpt2(18, 71), gpt2(32, 128), llama] {
        let config = plain.clone().with_dropout(0.2);
        let weights = weights(&config);
        let options = options(DType::F32, BATCH, SEQ);
        let mut model = OnGpu::new(&gpu, &config, options.clone(), &weights);
        for packed in [false, true] {
            let batches = drawing(&config, packed);
            let (want_loss, want) = on_host(&config, options.clone(), weights.clone(), &batches);
            let (loss, got) = model.step(&batches);
            let error = (loss - want_loss).abs() / want_loss;
            assert!(error < 2e-6, "{config:?}: loss {loss} for {want_loss}");
            let want: HashMap<_, _> = by_name(&config, &want).into_iter().collect();
            for (name, got) in by_name(&config, &got) {
                let error = relative_error(&got, &want[&name]);
                assert!(
                    error < 2e-5,
                    "{config:?}, packed {packed}: gradient of {name} differs by {error:e}"
                );
            }
        }

        let evaluated = [batch(&config, true)];
        let mut without = OnGpu::new(&gpu, &plain, options, &weights);
        let same = model.step(&evaluated) == without.step(&evaluated);
        assert!(same, "{config:?}: an evaluation drops elements");
    }
}

/// In 16 bits, attention is on tensor cores. Recomputation draws the masks of forward.
#[test]
#[ignore = "needs a CUDA device"]
fn dropout_in_16_bits() {
    let gpu = Gpu::open();
    let [_, mistral, ..] = families();
    for config in [gpt2(32, 128), mistral] {
        let config = config.with_dropout(0.2);
        let weights = weights(&config);
        let batches = drawing(&config, true);
        let round = |w: &Vec<f32>| w.iter().map(|v| half::bf16::from_f32(*v)).collect();
        let rounded: Vec<Vec<half::bf16>> = weights.iter().map(round).collect();
        let kept = options(DType::Bf16, BATCH, SEQ);
        is_planned(&gpu, &config, &kept);
        let (want_loss, want) = on_host(&config, kept.clone(), rounded, &batches);
        let (loss, got) = OnGpu::new(&gpu, &config, kept.clone(), &weights).step(&batches);
        let error = (loss - want_loss).abs() / want_loss;
        assert!(error < 1e-3, "{config:?}: loss {loss} for {want_loss}");
        let error = relative_error(&got.concat(), &want.concat());
        assert!(error < 2e-2, "{config:?}: gradients differ by {error:e}");

        let checkpointed = ModelOptions {
            activation_checkpointing: true,
            ..kept
        };
        let again = OnGpu::new(&gpu, &config, checkpointed, &weights).step(&batches);
        assert!(again == (loss, got), "{config:?}: other bits");
    }
}
