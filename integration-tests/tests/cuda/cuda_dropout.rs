//! Dropout: the device draws the host's masks.

use zero_alloc::device::{DType, DeviceSlice};
use zero_kernels::cuda::Loader;
use zero_models::cuda::OpKernels;
use zero_models::cuda::dropout::{self, Dropout};
use zero_models::cuda::{SumOut, column_sums};
use zero_models::gpt2::config::GptConfig;
use zero_models::ops::dropout::Draws;
use zero_models::{ModelConfig, ModelOptions};
use zero_trainer::{Batch, BatchRows};

use crate::cuda_llama::{BATCH, batch, families, options, weights};
use crate::cuda_model::is_planned;
use crate::gpu::{FLOATS, Gpu, close, rounded, tolerance, values};
use crate::on_gpu::{OnGpu, agree, agree_in_all, on_host};

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
pub(crate) fn factors([batch, seq, n]: [usize; 3], probability: f32) -> Vec<f32> {
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
                    dropout::add_residual(&ops, &gpu.stream, y, y, residual, n, Some(dropout))
                        .unwrap();
                    let got: Vec<f64> = gpu.get(y).into_iter().map(f64::from).collect();
                    assert_eq!(got, kept, "{what}");
                }

                // Some rows alone, as ranks that divide them have them; without dropout it only adds.
                let own = rows / 3..rows - rows / 4;
                let [ones, halves] = [1.0, 0.5].map(|x| gpu.put(&vec![x; own.len() * n], dtype));
                let of_own = dropout.from_row(own.start, rows);
                dropout::add_residual(&ops, &gpu.stream, ones, ones, None, n, Some(of_own))
                    .unwrap();
                let got: Vec<f64> = gpu.get(ones).into_iter().map(f64::from).collect();
                assert_eq!(got, kept[own.start * n..own.end * n], "{what}");
                let residual = gpu.put(&vec![0.25; own.len() * n], dtype);
                dropout::add_residual(&ops, &gpu.stream, halves, halves, Some(residual), n, None)
                    .unwrap();
                assert!(gpu.get(halves).into_iter().all(|y| y == 0.75), "{what}");

                // Columns of a line, as ranks of tensor parallelism have them.
                let first = n / 3;
                let line = factors([batch, seq, first + n], probability);
                let lines = line.chunks(first + n).flat_map(|line| &line[first..]);
                let want_part: Vec<f32> = lines.copied().collect();
                let ones = gpu.put(&vec![1.0; rows * n], dtype);
                let y = gpu.fresh(rows * n, dtype);
                let part = Some(dropout.from_column(first));
                dropout::add_residual(&ops, &gpu.stream, y, ones, None, n, part).unwrap();
                let got: Vec<f64> = gpu.get(y).into_iter().map(f64::from).collect();
                assert_eq!(got, rounded(&want_part, dtype), "{what}: some columns");

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
    let error = dropout::add_residual(&ops, &gpu.stream, y, y, Some(y), 8, behind).unwrap_err();
    assert!(
        error.to_string().contains("rows behind the first"),
        "{error}"
    );
}

/// A GPT-2 with heads of `d`.
pub(crate) fn gpt2(d: usize, n_inner: usize) -> ModelConfig {
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
pub(crate) fn drawing(config: &ModelConfig, packed: bool) -> [Batch; 2] {
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
        let options = options(DType::F32);
        let mut model = OnGpu::new(&gpu, &config, &options, &weights);
        for packed in [false, true] {
            let batches = drawing(&config, packed);
            let want = on_host(&config, &options, &weights, &batches);
            let what = format!("packed {packed}");
            agree(&config, &what, &model.step(&batches), &want, [2e-6, 2e-5]);
        }

        let evaluated = [batch(&config, true)];
        let mut without = OnGpu::new(&gpu, &plain, &options, &weights);
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
        let kept = options(DType::Bf16);
        is_planned(&gpu, &config, &kept);
        let want = on_host(&config, &kept, &weights, &batches);
        let got = OnGpu::new(&gpu, &config, &kept, &weights).step(&batches);
        agree_in_all(&format!("{config:?}"), &got, &want, [1e-3, 2e-2]);

        let checkpointed = ModelOptions {
            activation_checkpointing: true,
            ..kept
        };
        let again = OnGpu::new(&gpu, &config, &checkpointed, &weights).step(&batches);
        assert!(again == got, "{config:?}: other bits");
    }
}
