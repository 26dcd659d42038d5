//! Arguments that do not fit are errors that name them, and nothing is enqueued.

use zero_alloc::device::{DType, Device, Stream};
use zero_models::cuda::attention::{Attention, Masks, Shape};
use zero_models::cuda::cross_entropy::Scale;
use zero_models::cuda::matmul::{Epilogue, Matmul, Matrix, Product};
use zero_models::cuda::norm::{self, Norm};
use zero_models::cuda::{OpError, column_sums, cross_entropy, gelu};
use zero_models::ops::norm::NormKind;

use zero_trainer::ModelError;

use crate::gpu::{Gpu, LIMIT};
use crate::tiny::{OnGpu, batch, config, options, weights};

#[test]
#[ignore = "needs a CUDA device"]
fn lengths_types_and_sizes_that_do_not_fit() {
    let gpu = Gpu::open();
    let ops = gpu.kernels(DType::Bf16);
    let bf16 = |n| gpu.fresh(n, DType::Bf16);
    let stream = &gpu.stream;

    let error = gelu::forward(&ops, stream, bf16(8), bf16(9)).unwrap_err();
    assert!(
        matches!(
            error,
            OpError::Length {
                expected: 9,
                got: 8,
                ..
            }
        ),
        "{error}"
    );

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

    assert!(matches!(
        layer_norm(16, 3).unwrap_err(),
        OpError::Length {
            expected: 4,
            got: 3,
            ..
        }
    ));

    assert!(
        matches!(
            layer_norm(1025, 4).unwrap_err(),
            OpError::Size { got: 1025, .. }
        ),
        "odd and wide"
    );
    assert!(
        matches!(
            layer_norm(4104, 4).unwrap_err(),
            OpError::Size { got: 4104, .. }
        ),
        "wide"
    );
    layer_norm(4096, 4).unwrap();

    let error = column_sums::sum_rows(&ops, stream, gpu.zeros(8).into(), bf16(16), gpu.zeros(7))
        .unwrap_err();
    assert!(
        matches!(
            error,
            OpError::Length {
                expected: 8,
                got: 7,
                ..
            }
        ),
        "{error}"
    );

    let targets = gpu.words(&[1, 2]);
    let scale = Scale {
        loss_scale: gpu.double(1.0),
        divisor: gpu.double(2.0),
    };

    let error =
        cross_entropy::forward_backward(&ops, stream, bf16(64), gpu.zeros(2), targets, 50, scale)
            .unwrap_err();
    assert!(
        matches!(
            error,
            OpError::Length {
                expected: 128,
                got: 64,
                ..
            }
        ),
        "{error}"
    );

    let off = bf16(129).slice(1..129);
    assert!(
        cross_entropy::forward_backward(&ops, stream, off, gpu.zeros(2), targets, 50, scale)
            .is_err()
    );

    let shape = Shape {
        batch: 1,
        seq: 4,
        heads: 1,
        kv_heads: 1,
        d: 257,
        window: 4,
    };

    assert!(matches!(
        Attention::new(&ops, shape).unwrap_err(),
        OpError::Size { got: 257, .. }
    ));
    let attention = Attention::new(&ops, Shape { d: 64, ..shape }).unwrap();
    let error = attention
        .forward(
            &ops,
            stream,
            bf16(256),
            gpu.zeros(4),
            bf16(767),
            Masks::default(),
        )
        .unwrap_err();

    assert!(
        matches!(
            error,
            OpError::Length {
                expected: 768,
                got: 767,
                ..
            }
        ),
        "{error}"
    );

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
    let mut on_gpu = OnGpu::new(&gpu, options(DType::F32, false), 64, &weights());
    let other = gpu.device.create_stream("other").unwrap();
    let embedding = on_gpu.params[0];
    let model = &mut on_gpu.model;
    let refused = |result: Result<(), ModelError>| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("stream other is not the one"), "{error}");
    };
    refused(model.set_batch(&other, &batch(0)));
    refused(model.forward(&other, 0, &[embedding]));
    refused(model.add_losses(&other, &[embedding], 1));
    refused(model.token_logits(&other, &[embedding], 0).map(drop));

    let vocab = config().vocab_size as u32;
    let mut outside = batch(0);
    outside.inputs[3] = vocab;
    let error = model.set_batch(&gpu.stream, &outside).unwrap_err();
    let expected = format!("input 3 of the batch is token {vocab}");
    assert!(error.to_string().contains(&expected), "{error}");
    model.set_batch(&gpu.stream, &batch(0)).unwrap();
    gpu.stream.synchronize(LIMIT).unwrap();
}
