//! Models on the device against PyTorch (logits, gradients, losses) and the host, and the same bits
//! with checkpointing, repetition and recording.

use serde_json::Value;
use zero_alloc::Purpose;
use zero_alloc::device::{DType, DeviceError};
use zero_kernels::adam::AdamSlices;
use zero_kernels::{AdamHyper, AdamScalars, reference};
use zero_models::gpt2::config::GptConfig;
use zero_models::{ModelConfig, ModelOptions};
use zero_trainer::{Batch, Grad, ModelError, ModelRanks};

use crate::gpu::{Gpu, values};
use crate::on_gpu::{OnGpu, agree, agree_in_all, on_host};
use crate::steps::{are_pytorchs, batches_of, config_of, options_of, weights_of};
use integration_tests::{GPT2, LLAMA, Oracle, QWEN2, relative_error};

fn config() -> GptConfig {
    match config_of(GPT2) {
        ModelConfig::Gpt2(config) => config,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn options(dtype: DType) -> ModelOptions {
    options_of(GPT2, dtype)
}

/// GPT-2 with PyTorch's weights.
pub(crate) fn tiny<'a>(gpu: &'a Gpu, options: &ModelOptions) -> OnGpu<'a> {
    OnGpu::new(gpu, &config_of(GPT2), options, &weights_of(GPT2))
}

fn checkpointed(dtype: DType) -> ModelOptions {
    ModelOptions {
        activation_checkpointing: true,
        ..options(dtype)
    }
}

/// Compares the first steps in fp32: losses and norms, and the gradients and logits of the first within
/// `limit`.
fn is_pytorchs(oracle: Oracle, steps: usize, limit: f64) {
    let gpu = Gpu::open();
    let config = config_of(oracle);
    let expected = std::fs::read_to_string(oracle.data("expected.json")).unwrap();
    let expected: Value = serde_json::from_str(&expected).unwrap();
    let setting = |key: &str| expected["config"][key].as_f64().unwrap();
    let hyper = AdamHyper {
        weight_decay: setting("wd"),
        ..AdamHyper::default()
    };

    let mut masters = weights_of(oracle);
    let mut moments: Vec<[Vec<f32>; 2]> = masters
        .iter()
        .map(|w| [vec![0.0; w.len()], vec![0.0; w.len()]])
        .collect();
    let options = options_of(oracle, DType::F32);
    let mut model = OnGpu::new(&gpu, &config, &options, &masters);

    let first = batches_of(oracle, 0);
    model.set_batch(&first[0]).unwrap();
    model.forward().unwrap();
    let logits = model.logits(&gpu, &config, oracle.batch * oracle.seq);
    let want = oracle.tensors("logits_first_micro_batch.safetensors");
    let error = relative_error(&logits, &want[0].1);
    assert!(error < limit, "logits differ by {error:e}");

    let wanted = expected["steps"].as_array().unwrap();
    for (step, want) in wanted.iter().take(steps).enumerate() {
        let (loss, grads) = model.step(&batches_of(oracle, step));
        if step == 0 {
            are_pytorchs(oracle, &grads, limit);
        }
        let squares = grads.iter().flatten().map(|g| f64::from(*g).powi(2));
        let norm = squares.sum::<f64>().sqrt();
        // The stand-in, whose exponentials are exact, stays within a tenth of these limits.
        for (key, got, limit) in [("loss", loss, 1e-5), ("grad_norm", norm, 1e-4)] {
            let want = want[key].as_f64().unwrap();
            let error = (got - want).abs() / want;
            assert!(error < limit, "step {step}: {key} differs by {error:e}");
        }

        let most = setting("clip");
        let clip = if most > 0.0 && norm > most {
            most / (norm + 1e-6)
        } else {
            1.0
        };
        let scalars = AdamScalars::new(step as u64 + 1, setting("lr"), &hyper, clip);
        for ((unit, weights), moments) in masters.iter_mut().enumerate().zip(&mut moments) {
            let [first_moment, second_moment] = moments;
            let slices = AdamSlices {
                weights: &mut weights[..],
                first_moment,
                second_moment,
                grad: &grads[unit],
                param_out: None::<&mut [f32]>,
            };
            reference::adam(slices, &scalars, &hyper).unwrap();
            gpu.set(model.params[unit], weights);
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn gpt2_is_pytorchs() {
    // The stand-in computes two seconds a step.
    let steps = match std::env::var_os("ZERO_STANDIN_RACES") {
        Some(_) => 10,
        None => usize::MAX,
    };
    is_pytorchs(GPT2, steps, 1e-5);
}

#[test]
#[ignore = "needs a CUDA device"]
fn llama_is_pytorchs() {
    is_pytorchs(LLAMA, 4, 2e-5);
}

#[test]
#[ignore = "needs a CUDA device"]
fn qwen2_is_pytorchs() {
    is_pytorchs(QWEN2, 4, 2e-5);
}

/// The host computes in fp32 from parameters rounded to bf16. The device rounds activations and their
/// gradients too, as PyTorch does in bf16.
#[test]
#[ignore = "needs a CUDA device"]
fn in_16_bits_it_is_as_near_to_fp32_as_rounding_allows() {
    let gpu = Gpu::open();
    let batches = batches_of(GPT2, 0);
    let bf16 = options(DType::Bf16);
    let host = on_host(&config_of(GPT2), &bf16, &weights_of(GPT2), &batches);
    for dtype in [DType::Bf16, DType::F16] {
        let got = tiny(&gpu, &options(dtype)).step(&batches);
        agree_in_all(&format!("{dtype}"), &got, &host, [1e-4, 1e-2]);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn any_shape_is_the_hosts() {
    let gpu = Gpu::open();
    let base = GptConfig {
        n_layer: 1,
        n_positions: 60,
        ..config()
    };

    // A vocabulary and widths that are not multiples of 8; an untied head; a vocabulary whose
    // padding to the next round number has more rows than there are positions.
    let shapes = [
        GptConfig {
            vocab_size: 203,
            n_embd: 36,
            n_head: 3,
            n_inner: 71,
            ..base.clone()
        },
        GptConfig {
            vocab_size: 203,
            n_embd: 40,
            n_head: 2,
            n_inner: 64,
            tied_head: false,
            ..base.clone()
        },
        GptConfig {
            vocab_size: 129,
            n_embd: 64,
            n_head: 1,
            n_inner: 72,
            ..base
        },
    ];

    for config in shapes {
        let config = ModelConfig::from(config);
        let options = ModelOptions::new(3, 33, DType::F32);
        let numel = |unit: &zero_shard::UnitSpec| {
            let params = unit.params.iter();
            let elems = params.map(|p| p.shape.iter().product::<u64>());
            elems.sum::<u64>() as usize
        };
        let weights: Vec<Vec<f32>> = config
            .units()
            .iter()
            .enumerate()
            .map(|(u, unit)| {
                values(numel(unit), u as u64)
                    .iter()
                    .map(|v| 0.2 * v)
                    .collect()
            })
            .collect();
        let token = |i: usize, odd: usize| (i * i * odd % config.vocab_size()) as u32;
        let ids = |salt| (0..3 * 33).map(|i| token(i, salt)).collect::<Vec<_>>();
        let batches = [Batch::plain(ids(7), ids(11))];
        let want = on_host(&config, &options, &weights, &batches);
        let got = OnGpu::new(&gpu, &config, &options, &weights).step(&batches);
        agree(&config, "any shape", &got, &want, [1e-6, 1e-5]);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn bits_do_not_depend_on_checkpointing_or_repetition() {
    let gpu = Gpu::open();
    let batches = batches_of(GPT2, 0);
    for dtype in [DType::F32, DType::Bf16] {
        let mut kept = tiny(&gpu, &options(dtype));
        let want = kept.step(&batches);
        assert!(kept.step(&batches) == want, "{dtype}: the second time");
        let got = tiny(&gpu, &checkpointed(dtype)).step(&batches);
        assert!(got == want, "{dtype}: checkpointed");
        let offload = ModelOptions {
            offload_activations: true,
            ..checkpointed(dtype)
        };
        let mut offloaded = tiny(&gpu, &offload);
        // A forward without backward, as of an evaluation, leaves nothing behind.
        offloaded.set_batch(&batches[1]).unwrap();
        offloaded.forward().unwrap();
        assert!(offloaded.step(&batches) == want, "{dtype}: offloaded");
        // The inputs are gone after the backward.
        let error = offloaded.backward().unwrap_err().to_string();
        assert!(error.contains("run forward first"), "{error}");
    }
}

/// The forward has the bits of the run that keeps GELU's output. So has the backward in fp32, where
/// no product computes GELU; in bf16 the recomputed output comes from a rounded input.
#[test]
#[ignore = "needs a CUDA device"]
fn recomputed_gelu_follows_the_kept_one() {
    let gpu = Gpu::open();
    let batches = batches_of(GPT2, 0);
    for (dtype, tolerance) in [(DType::F32, 0.0), (DType::Bf16, 5e-3)] {
        let recompute = ModelOptions {
            recompute_gelu: true,
            ..options(dtype)
        };
        let (want_loss, want) = tiny(&gpu, &options(dtype)).step(&batches);
        let (loss, got) = tiny(&gpu, &recompute).step(&batches);
        assert_eq!(loss.to_bits(), want_loss.to_bits(), "{dtype}");
        let error = relative_error(&got.concat(), &want.concat());
        assert!(error <= tolerance, "{dtype}: gradients differ by {error:e}");
    }
}

/// Checks that a model has the memory that the plan has.
pub(crate) fn is_planned(gpu: &Gpu, config: &ModelConfig, options: &ModelOptions) {
    let held = || {
        let report = gpu.pool.report();
        [Purpose::Activations, Purpose::Workspace]
            .map(|purpose| report.of(purpose).live_bytes as u64)
    };

    let before = held();
    let model = config
        .on_cuda(
            options.clone(),
            &gpu.pool,
            &gpu.stream,
            &ModelRanks::default(),
        )
        .unwrap();
    let after = held();
    drop(model);
    let planned = config.gpu_bytes(options);
    assert_eq!(
        [after[0] - before[0], after[1] - before[1]],
        [planned.activations, planned.workspace],
        "{config:?}: {options:?}"
    );
}

/// The bytes that `zero plan` and the default of `--recompute-gelu` count.
#[test]
#[ignore = "needs a CUDA device"]
fn model_requests_the_computed_bytes() {
    let gpu = Gpu::open();
    let config = GptConfig {
        n_layer: 5,
        ..config()
    };
    let row = (GPT2.batch * GPT2.seq * config.n_embd * 2) as u64;
    let config = ModelConfig::from(config);

    let kept = checkpointed(DType::Bf16);
    let offloaded = ModelOptions {
        offload_activations: true,
        ..kept.clone()
    };
    for dtype in [DType::F32, DType::Bf16] {
        for options in [options(dtype), checkpointed(dtype)] {
            let recompute = ModelOptions {
                recompute_gelu: true,
                ..options.clone()
            };
            is_planned(&gpu, &config, &options);
            is_planned(&gpu, &config, &recompute);
        }
    }
    is_planned(&gpu, &config, &offloaded);
    is_planned(&gpu, &config, &ModelOptions::new(3, 31, DType::Bf16));

    // Six rows, three of them on the device.
    let [kept, offloaded] = [kept, offloaded].map(|options| config.gpu_bytes(&options));
    assert_eq!((kept.host, offloaded.host), (0, 3 * row));
    assert_eq!(kept.activations - offloaded.activations, 3 * row);
}

/// Blocks write their gradients: every element, and as the rounded fp32 sums.
#[test]
#[ignore = "needs a CUDA device"]
fn written_gradients_are_rounded_sums() {
    let gpu = Gpu::open();
    let batches = &batches_of(GPT2, 0)[..1];
    for (dtype, to, limit) in [
        (DType::F32, DType::F32, 1e-5),
        (DType::Bf16, DType::F32, 1e-6),
        (DType::Bf16, DType::Bf16, 3e-3),
    ] {
        let (_, sums) = tiny(&gpu, &options(dtype)).step(batches);
        let mut writes = tiny(&gpu, &options(dtype));
        writes.write_blocks(&gpu, to);
        let (_, written) = writes.step(batches);
        for (unit, (sum, written)) in sums.iter().zip(&written).enumerate() {
            // NaN is within no limit, so every element was written.
            let error = relative_error(written, sum);
            assert!(
                error < limit,
                "unit {unit} of {dtype} in {to} differs by {error:e}"
            );
        }
    }

    // Embedding and head only add.
    let mut tiny = tiny(&gpu, &options(DType::Bf16));
    let grad = Grad::Write(tiny.grads[0].elements());
    let one = gpu.double(1.0);
    let error = tiny.model.backward(&gpu.stream, 0, &[], &[grad], one);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("writes_grad"), "{error}");
}

#[test]
#[ignore = "needs a CUDA device"]
fn logits_in_parts_are_logits() {
    let gpu = Gpu::open();
    let batches = batches_of(GPT2, 0);
    let weights = weights_of(GPT2);
    // All of the 128 rows, and 50 at a time.
    let [whole, parts] = [usize::MAX, 50].map(|rows| {
        let options = options(DType::F32);
        OnGpu::with_logits(&gpu, &config_of(GPT2), &options, &weights, Some(rows)).step(&batches)
    });
    assert_eq!(parts.0.to_bits(), whole.0.to_bits());
    let error = relative_error(&parts.1.concat(), &whole.1.concat());
    assert!(error < 1e-6, "gradients differ by {error:e}");
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_step_can_be_recorded_and_takes_no_memory() {
    let gpu = Gpu::open();
    let batches = batches_of(GPT2, 0);
    let mut tiny = tiny(&gpu, &options(DType::Bf16));
    let want = tiny.step(&batches);
    let before = gpu.pool.report();
    // The second step of a run, except for the batch, which the host writes.
    tiny.set_batch(&batches[0]).unwrap();

    let graph = gpu.stream.capture(|| {
        let failed = |e: ModelError| DeviceError::Driver {
            call: "capture",
            message: e.to_string(),
        };
        tiny.forward()
            .and_then(|()| tiny.backward())
            .map_err(failed)
    });

    let graph = graph.unwrap();
    tiny.clear();
    for batch in &batches {
        tiny.set_batch(batch).unwrap();
        // SAFETY: the model's memory and kernels live until the end of the test, which waits for
        // the stream.
        unsafe { graph.launch(&gpu.stream) }.unwrap();
    }

    assert!(tiny.results() == want, "the recorded step has other bits");
    let after = gpu.pool.report();
    assert_eq!(after.total.live_bytes, before.total.live_bytes);
    assert_eq!(after.backing_allocations, before.backing_allocations);
}

#[test]
#[ignore = "needs a CUDA device"]
fn what_the_model_does_not_take_is_refused() {
    let gpu = Gpu::open();
    let refused = |options: ModelOptions, config: GptConfig, parts: &[&str]| {
        let config = ModelConfig::from(config);
        let model = config.on_cuda(options, &gpu.pool, &gpu.stream, &ModelRanks::default());
        let error = model.err().unwrap().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };

    let too_long = ModelOptions::new(GPT2.batch, 65, DType::F32);
    refused(too_long, config(), &["65", "64"]);
    refused(options(DType::F64), config(), &["fp64"]);
    let wide = GptConfig {
        n_embd: 260,
        n_head: 1,
        n_inner: 16,
        n_layer: 1,
        ..config()
    };
    refused(options(DType::F32), wide, &["260"]);

    let mut tiny = tiny(&gpu, &options(DType::F32));
    let error = tiny.set_batch(&Batch::plain([0; 128], [0; 127]));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("127") && error.contains("128"), "{error}");
}
