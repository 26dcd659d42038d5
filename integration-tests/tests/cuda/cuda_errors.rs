//! Arguments that do not fit are errors that name them, and nothing is enqueued.

use zero_alloc::device::{DType, Device, Stream};
use zero_models::cuda::attention::{Attention, Masks, Shape};
use zero_models::cuda::cross_entropy::Scale;
use zero_models::cuda::matmul::{Epilogue, Matmul, Matrix, Product};
use zero_models::cuda::norm::{self, Norm};
use zero_models::cuda::{OpError, column_sums, cross_entropy, gelu};
use zero_models::ops::norm::NormKind;

use zero_trainer::ModelError;

use crate::cuda_model::{options, tiny};
use crate::gpu::{Gpu, LIMIT};
use crate::steps::{batches_of, config_of};
use integration_tests::GPT2;

fn is_length(result: Result<(), OpError>, expected: usize, got: usize) {
    let error = result.unwrap_err();
    let OpError::Length {
        expected: e,
        got: g,
        ..
    } = error
    else {
        panic!("{error}");
    };
    assert_eq!((e, g), (expected, got), "{error}");
}

fn is_size<T>(result: Result<T, OpError>, size: usize) {
    let error = result.err().unwrap();
    assert!(
        matches!(error, OpError::Size { got, .. } if got == size),
        "{error}"
    );
}

#[test]
#[ignore = "needs a CUDA device"]
fn lengths_types_and_sizes_that_do_not_fit() {
    let gpu = Gpu::open();
    let ops = gpu.kernels(DType::Bf16);
    let bf16 = |n| gpu.fresh(n, DType::Bf16);
    let stream = &gpu.stream;

    is_length(gelu::forward(&ops, stream, bf16(8), bf16(9)), 9, 8);

    let error = gelu::forward(&ops, stream, bf16(8), gpu.fresh(8, DType::F32)).unwrap_err();
    assert!(
        matches!(
            error,
            OpError::DType {
                expected: DType::Bf16,
                got: DType::F32,
                ..
            }
        ),
        "{error}"
    );

    let layer_norm = |n: usize, stats| {
        let params = Norm {
            kind: NormKind::Layer,
            gain: bf16(n),
            bias: bf16(n),
            eps: 1e-5,
        };
        let y = bf16(2 * n);
        norm::forward(&ops, stream, params, y, gpu.zeros(stats), bf16(2 * n))
    };

    is_length(layer_norm(16, 3), 4, 3);
    // Odd and wide, and wide.
    is_size(layer_norm(1025, 4), 1025);
    is_size(layer_norm(4104, 4), 4104);
    layer_norm(4096, 4).unwrap();

    let sums = gpu.zeros(8).into();
    let summed = column_sums::sum_rows(&ops, stream, sums, bf16(16), gpu.zeros(7));
    is_length(summed, 8, 7);

    let targets = gpu.words(&[1, 2]);
    let scale = Scale {
        loss_scale: gpu.double(1.0),
        divisor: gpu.double(2.0),
    };

    let loss = |logits| {
        let losses = gpu.zeros(2);
        cross_entropy::forward(&ops, stream, logits, losses, targets, 50, Some(scale))
    };
    is_length(loss(bf16(64)), 128, 64);
    assert!(loss(bf16(129).slice(1..129)).is_err());

    let shape = Shape {
        batch: 1,
        seq: 4,
        heads: 1,
        kv_heads: 1,
        d: 257,
        window: 4,
    };

    is_size(Attention::new(&ops, shape), 257);
    let attention = Attention::new(&ops, Shape { d: 64, ..shape }).unwrap();
    let out = bf16(256);
    let lse = gpu.zeros(4);
    let qkv = bf16(767);
    let attended = attention.forward(&ops, stream, out, lse, qkv, Masks::default());
    is_length(attended, 768, 767);

    stream.synchronize(LIMIT).unwrap();
}

#[test]
#[ignore = "needs a CUDA device"]
fn matrices_that_do_not_fit() {
    let gpu = Gpu::open();
    let matmul = Matmul::new(&gpu.device, gpu.fresh(1 << 20, DType::F32)).unwrap();
    let matrix = |rows, cols| Matrix::new(gpu.fresh(rows * cols, DType::Bf16), cols);
    let good = Product::new(matrix(4, 8), matrix(8, 16), matrix(4, 16));

    assert!(matmul.supports(&good).unwrap());
    let wrong = [
        Product {
            right: matrix(9, 16),
            ..good
        },
        Product {
            out: matrix(5, 16),
            ..good
        },
        Product {
            out: matrix(4, 8),
            ..good
        },
        Product {
            out: matrix(16, 4).t(),
            ..good
        },
        Product {
            add: Some(matrix(4, 15)),
            ..good
        },
        good.with(Epilogue::Bias(gpu.fresh(15, DType::Bf16))),
        good.with(Epilogue::Bias(gpu.fresh(16, DType::F32))),
        good.with(Epilogue::GeluBackward {
            input: gpu.fresh(63, DType::Bf16),
        }),
        Product {
            right: Matrix::new(gpu.fresh(128, DType::F16), 16),
            ..good
        },
        Product {
            left: Matrix::with_stride(gpu.fresh(16, DType::Bf16), 8, 4),
            ..good
        },
    ];

    for (i, product) in wrong.iter().enumerate() {
        assert!(matmul.run(&gpu.stream, product).is_err(), "{i}");
    }
    gpu.stream.synchronize(LIMIT).unwrap();
}

/// The model's own buffers are ordered by its stream, and a kernel reads the rows of tokens.
#[test]
#[ignore = "needs a CUDA device"]
fn models_refuse_other_streams_and_tokens() {
    let gpu = Gpu::open();
    let mut on_gpu = tiny(&gpu, &options(DType::F32));
    let batch = &batches_of(GPT2, 0)[0];
    let other = gpu.device.create_stream("other").unwrap();
    let embedding = on_gpu.params[0];
    let model = &mut on_gpu.model;
    let refused = |result: Result<(), ModelError>| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("stream other is not the one"), "{error}");
    };
    refused(model.set_batch(&other, batch));
    refused(model.forward(&other, 0, &[embedding]));
    refused(model.add_losses(&other, &[embedding], 1));
    refused(model.token_logits(&other, &[embedding], 0).map(drop));

    let vocab = config_of(GPT2).vocab_size() as u32;
    let mut outside = batch.clone();
    outside.inputs[3] = vocab;
    let error = model.set_batch(&gpu.stream, &outside).unwrap_err();
    let expected = format!("input 3 of the batch is token {vocab}");
    assert!(error.to_string().contains(&expected), "{error}");
    model.set_batch(&gpu.stream, batch).unwrap();
    gpu.stream.synchronize(LIMIT).unwrap();
}
