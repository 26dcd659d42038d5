//! GPT-2 on the device against PyTorch (logits, gradients, losses) and the host, and the same bits
//! with checkpointing, repetition and recording.

use std::collections::HashMap;

use half::bf16;
use serde_json::Value;
use zero_alloc::Purpose;
use zero_alloc::device::{DType, Device, DeviceError};
use zero_kernels::host::AdamSlices;
use zero_kernels::{AdamHyper, AdamScalars, reference};
use zero_models::gpt2;
use zero_models::gpt2::config::GptConfig;
use zero_models::{ModelConfig, ModelOptions};
use zero_trainer::ModelError;
use zero_trainer::{Batch, Grad};

use crate::gpu::{Gpu, LIMIT, values};
use crate::tiny::{ACCUM, BATCH, OnGpu, SEQ, batch, by_name, config, on_host, options, weights};
use integration_tests::data;
use integration_tests::{relative_error, tensors};

/// All logits at once.
const WHOLE: usize = usize::MAX;

#[test]
#[ignore = "needs a CUDA device"]
fn logits_and_gradients_in_fp32_are_pytorchs() {
    let gpu = Gpu::open();
    let mut tiny = OnGpu::new(&gpu, options(DType::F32, false), WHOLE, &weights());
    tiny.step(0);
    let got = by_name(&tiny.gradients());
    let batch = batch(0);
    tiny.model.set_batch(&gpu.stream, &batch).unwrap();
    tiny.forward().unwrap();
    let error = relative_error(
        &tiny.logits(),
        &tensors("logits_first_micro_batch.safetensors")[0].1,
    );
    assert!(error < 1e-5, "logits differ by {error:e}");
    let want: HashMap<_, _> = tensors("grads_first_step.safetensors")
        .into_iter()
        .collect();
    assert_eq!(want.len(), got.len());

    for (name, got) in got {
        let error = relative_error(&got, &want[&name]);
        assert!(error < 1e-5, "gradient of {name} differs by {error:e}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn losses_in_fp32_are_pytorchs() {
    let expected: Value =
        serde_json::from_str(&std::fs::read_to_string(data("expected.json")).unwrap()).unwrap();
    let gpu = Gpu::open();
    let hyper = AdamHyper {
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.1,
        decoupled: true,
        bias_correction: true,
    };

    let mut masters = weights();
    let mut moments: Vec<[Vec<f32>; 2]> = masters
        .iter()
        .map(|w| [vec![0.0; w.len()], vec![0.0; w.len()]])
        .collect();
    let mut tiny = OnGpu::new(&gpu, options(DType::F32, false), WHOLE, &masters);

    // The stand-in computes two seconds a step.
    let steps = match std::env::var_os("ZERO_STANDIN_RACES") {
        Some(_) => 10,
        None => usize::MAX,
    };
    let wanted = expected["steps"].as_array().unwrap();
    for (step, want) in wanted.iter().take(steps).enumerate() {
        tiny.step(step);
        let want_loss = want["loss"].as_f64().unwrap();
        let want_norm = want["grad_norm"].as_f64().unwrap();
        let loss = tiny.loss();
        let grads = tiny.gradients();
        let norm = grads
            .iter()
            .flatten()
            .map(|g| f64::from(*g).powi(2))
            .sum::<f64>()
            .sqrt();
        let loss_error = (loss - want_loss).abs() / want_loss;
        let norm_error = (norm - want_norm).abs() / want_norm;
        // The stand-in, whose exponentials are exact, stays within a tenth of these limits.
        assert!(
            loss_error < 1e-5,
            "step {}: loss differs by {loss_error:e}",
            step + 1
        );
        assert!(
            norm_error < 1e-4,
            "step {}: norm differs by {norm_error:e}",
            step + 1
        );
        let clip = if norm > 1.0 { 1.0 / (norm + 1e-6) } else { 1.0 };
        let scalars = AdamScalars::new(step as u64 + 1, 1e-3, &hyper, clip);
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
            gpu.device
                .upload(
                    &gpu.stream,
                    bytemuck::cast_slice(weights),
                    tiny.params[unit],
                    LIMIT,
                )
                .unwrap();
        }
    }
}

/// Loss and gradients of the first step on the host, from the same bf16 parameters.
fn on_host_in_bf16(weights: &[Vec<f32>]) -> (f64, Vec<Vec<f32>>) {
    let rounded = |w: &Vec<f32>| w.iter().map(|v| bf16::from_f32(*v)).collect();
    let params: Vec<Vec<bf16>> = weights.iter().map(rounded).collect();
    on_host(
        &config().into(),
        options(DType::Bf16, false),
        params,
        &[batch(0), batch(1)],
    )
}

#[test]
#[ignore = "needs a CUDA device"]
fn in_16_bits_it_is_as_near_to_fp32_as_rounding_allows() {
    let gpu = Gpu::open();
    let weights = weights();
    let (host_loss, host) = on_host_in_bf16(&weights);
    for dtype in [DType::Bf16, DType::F16] {
        let mut tiny = OnGpu::new(&gpu, options(dtype, false), WHOLE, &weights);
        tiny.step(0);
        let loss = tiny.loss();
        let got = tiny.gradients();
        // The host computes in fp32 from parameters rounded to bf16. The device rounds activations
        // and their gradients too, as PyTorch does in bf16.
        let loss_error = (loss - host_loss).abs() / host_loss;
        assert!(
            loss_error < 1e-4,
            "{dtype}: loss {loss}, on the host {host_loss}"
        );
        let (got, want): (Vec<f32>, Vec<f32>) = (got.concat(), host.concat());
        let error = relative_error(&got, &want);
        assert!(error < 1e-2, "{dtype}: gradients differ by {error:e}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn blocks_write_their_gradients() {
    let gpu = Gpu::open();
    let weights = weights();
    let batch = batch(0);
    let mut tiny = OnGpu::new(&gpu, options(DType::Bf16, false), WHOLE, &weights);
    tiny.model.set_batch(&gpu.stream, &batch).unwrap();
    tiny.forward().unwrap();
    tiny.backward().unwrap();
    let sums = tiny.gradients();
    let passes = gpt2::passes(&config());
    let scale = gpu.double(1.0 / ACCUM as f64);

    for (dtype, limit) in [(DType::F32, 1e-6), (DType::Bf16, 3e-3)] {
        tiny.forward().unwrap();
        for (i, pass) in passes.iter().enumerate().rev() {
            let reads: Vec<_> = pass
                .backward_reads
                .iter()
                .map(|&u| tiny.params[u])
                .collect();
            let grads: Vec<_> = pass
                .grads
                .iter()
                .map(|&unit| match tiny.model.writes_grad(i, unit) {
                    true => Grad::Write(gpu.fresh(weights[unit].len(), dtype)),
                    false => Grad::Add(gpu.zeros(weights[unit].len())),
                })
                .collect();
            tiny.model
                .backward(&gpu.stream, i, &reads, &grads, scale)
                .unwrap();
            for (&unit, grad) in pass.grads.iter().zip(&grads) {
                let Grad::Write(written) = *grad else {
                    continue;
                };
                // NaN is within no limit, so every element was written.
                let error = relative_error(&gpu.get(written), &sums[unit]);
                assert!(error < limit, "unit {unit} in {dtype} differs by {error:e}");
            }
        }
    }

    let wrote = passes
        .iter()
        .enumerate()
        .filter(|(i, pass)| pass.grads.iter().any(|&u| tiny.model.writes_grad(*i, u)));
    assert_eq!(wrote.count(), config().n_layer);
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
        let options = ModelOptions {
            micro_batch: 3,
            seq_len: 33,
            ..options(DType::F32, false)
        };
        let rows = 3 * 33;
        let params: Vec<usize> = config.units().iter().map(numel).collect();
        let params: Vec<Vec<f32>> = params
            .into_iter()
            .enumerate()
            .map(|(u, n)| values(n, u as u64))
            .collect();
        let params: Vec<Vec<f32>> = params
            .into_iter()
            .map(|p| p.iter().map(|v| 0.2 * v).collect())
            .collect();
        let token = |i: usize, odd: usize| (i * i * odd % config.vocab_size) as u32;
        let ids = |salt| (0..rows).map(|i| token(i, salt)).collect::<Vec<_>>();
        let tokens = Batch::plain(ids(7), ids(11));
        let (want_loss, want) = on_host(
            &config.clone().into(),
            options.clone(),
            params.clone(),
            std::slice::from_ref(&tokens),
        );

        let model = ModelConfig::from(config.clone());
        let mut model = model.on_cuda(options, &gpu.pool, &gpu.stream).unwrap();
        let on_gpu: Vec<_> = params.iter().map(|p| gpu.put(p, DType::F32)).collect();
        let grads: Vec<_> = params.iter().map(|p| gpu.zeros(p.len())).collect();
        // SAFETY: used on the stream of the passes.
        let sum = unsafe { model.loss() }.erase();
        gpu.device.fill_zero(&gpu.stream, sum).unwrap();
        model.set_batch(&gpu.stream, &tokens).unwrap();
        let passes = gpt2::passes(&config);
        let one = gpu.double(1.0);
        for (i, pass) in passes.iter().enumerate() {
            let reads: Vec<_> = pass.forward_reads.iter().map(|&u| on_gpu[u]).collect();
            model.forward(&gpu.stream, i, &reads).unwrap();
        }
        for (i, pass) in passes.iter().enumerate().rev() {
            let reads: Vec<_> = pass.backward_reads.iter().map(|&u| on_gpu[u]).collect();
            let adds: Vec<_> = pass.grads.iter().map(|&u| Grad::Add(grads[u])).collect();
            model.backward(&gpu.stream, i, &reads, &adds, one).unwrap();
        }
        let mut loss = [0.0f64];
        let bytes = bytemuck::cast_slice_mut(&mut loss);
        gpu.device.download(&gpu.stream, sum, bytes, LIMIT).unwrap();
        assert!(
            (loss[0] - want_loss).abs() / want_loss < 1e-6,
            "{config:?}: loss {} for {want_loss}",
            loss[0]
        );
        for ((unit, got), want) in config.units().iter().zip(&grads).zip(&want) {
            let error = relative_error(&gpu.get(got.erase()), want);
            assert!(
                error < 1e-5,
                "{config:?}: gradient of {} differs by {error:e}",
                unit.name
            );
        }
    }
}

/// Elements of a unit.
fn numel(unit: &zero_shard::UnitSpec) -> usize {
    unit.params
        .iter()
        .map(|p| p.shape.iter().product::<u64>() as usize)
        .sum()
}

#[test]
#[ignore = "needs a CUDA device"]
fn bits_do_not_depend_on_checkpointing_or_repetition() {
    let gpu = Gpu::open();
    for dtype in [DType::F32, DType::Bf16] {
        let mut kept = OnGpu::new(&gpu, options(dtype, false), WHOLE, &weights());
        kept.step(0);
        let loss = kept.loss();
        let grads = kept.gradients();
        kept.step(0);
        assert!(
            kept.loss().to_bits() == loss.to_bits() && kept.gradients() == grads,
            "{dtype}: the second time"
        );
        let mut again = OnGpu::new(&gpu, options(dtype, true), WHOLE, &weights());
        again.step(0);
        assert!(
            again.loss().to_bits() == loss.to_bits() && again.gradients() == grads,
            "{dtype}: checkpointed"
        );
        let offload = ModelOptions {
            offload_activations: true,
            ..options(dtype, true)
        };
        let mut offloaded = OnGpu::new(&gpu, offload, WHOLE, &weights());
        // A forward without backward, as of an evaluation, leaves nothing behind.
        let batch = batch(1);
        offloaded.model.set_batch(&gpu.stream, &batch).unwrap();
        offloaded.forward().unwrap();
        offloaded.step(0);
        assert!(
            offloaded.loss().to_bits() == loss.to_bits() && offloaded.gradients() == grads,
            "{dtype}: offloaded"
        );
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
    for (dtype, tolerance) in [(DType::F32, 0.0), (DType::Bf16, 5e-3)] {
        let mut kept = OnGpu::new(&gpu, options(dtype, false), WHOLE, &weights());
        let again = ModelOptions {
            recompute_gelu: true,
            ..options(dtype, false)
        };
        let mut again = OnGpu::new(&gpu, again, WHOLE, &weights());
        kept.step(0);
        again.step(0);
        assert_eq!(again.loss().to_bits(), kept.loss().to_bits(), "{dtype}");
        let error = relative_error(&again.gradients().concat(), &kept.gradients().concat());
        assert!(error <= tolerance, "{dtype}: gradients differ by {error:e}");
    }
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

    let held = || {
        let report = gpu.pool.report();
        [Purpose::Activations, Purpose::Workspace]
            .map(|purpose| report.of(purpose).live_bytes as u64)
    };

    let tiny = |dtype| [options(dtype, false), options(dtype, true)];
    let mut all: Vec<ModelOptions> = [DType::F32, DType::Bf16]
        .into_iter()
        .flat_map(tiny)
        .collect();
    all.extend(all.clone().into_iter().map(|options| ModelOptions {
        recompute_gelu: true,
        ..options
    }));
    all.push(ModelOptions {
        offload_activations: true,
        ..options(DType::Bf16, true)
    });
    all.push(ModelOptions {
        micro_batch: 3,
        seq_len: 31,
        ..options(DType::Bf16, false)
    });

    for options in all {
        let before = held();
        let model = ModelConfig::from(config.clone());
        let model = model
            .on_cuda(options.clone(), &gpu.pool, &gpu.stream)
            .unwrap();
        let after = held();
        let planned = ModelConfig::from(config.clone()).gpu_bytes(&options);
        assert_eq!(
            [after[0] - before[0], after[1] - before[1]],
            [planned.activations, planned.workspace],
            "{options:?}"
        );
        drop(model);
    }

    let row = (BATCH * SEQ * config.n_embd * 2) as u64;
    let [kept, offloaded] = [false, true].map(|offload_activations| {
        let options = ModelOptions {
            offload_activations,
            ..options(DType::Bf16, true)
        };
        ModelConfig::from(config.clone()).gpu_bytes(&options)
    });

    // Six rows, three of them on the device.
    assert_eq!((kept.host, offloaded.host), (0, 3 * row));
    assert_eq!(kept.activations - offloaded.activations, 3 * row);
}

/// Blocks write their gradients in 16 bits: every element, and as the rounded fp32 sums.
#[test]
#[ignore = "needs a CUDA device"]
fn written_gradients_are_rounded_sums() {
    let gpu = Gpu::open();
    for dtype in [DType::F32, DType::Bf16] {
        let mut adds = OnGpu::new(&gpu, options(dtype, false), WHOLE, &weights());
        adds.micro_batch(0);
        let mut writes = OnGpu::new(&gpu, options(dtype, false), WHOLE, &weights());
        writes.write_blocks(dtype);
        writes.micro_batch(0);
        for (unit, (sum, written)) in config()
            .units()
            .iter()
            .zip(adds.gradients().iter().zip(writes.gradients()))
        {
            let error = relative_error(&written, sum);
            let limit = if dtype == DType::F32 { 1e-5 } else { 4e-3 };
            assert!(
                error < limit,
                "{dtype}: gradient of {} differs by {error:e}",
                unit.name
            );
        }
    }

    // Embedding and head only add.
    let tiny = OnGpu::new(&gpu, options(DType::Bf16, false), WHOLE, &weights());
    let Grad::Add(sums) = tiny.grads[0] else {
        panic!("the embedding adds")
    };
    let mut model = tiny.model;

    let error = model
        .backward(
            &gpu.stream,
            0,
            &[],
            &[Grad::Write(sums.erase())],
            gpu.double(1.0),
        )
        .unwrap_err();

    assert!(error.to_string().contains("writes_grad"), "{error}");
}

#[test]
#[ignore = "needs a CUDA device"]
fn logits_in_parts_are_logits() {
    let gpu = Gpu::open();
    let mut whole = OnGpu::new(&gpu, options(DType::F32, false), WHOLE, &weights());
    // 50 of the 128 rows at a time.
    let mut parts = OnGpu::new(&gpu, options(DType::F32, false), 50, &weights());
    whole.step(0);
    parts.step(0);
    assert_eq!(parts.loss().to_bits(), whole.loss().to_bits());
    let error = relative_error(&parts.gradients().concat(), &whole.gradients().concat());
    assert!(error < 1e-6, "gradients differ by {error:e}");
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_step_can_be_recorded_and_takes_no_memory() {
    let gpu = Gpu::open();
    let mut tiny = OnGpu::new(&gpu, options(DType::Bf16, false), WHOLE, &weights());
    tiny.step(0);
    let want = (tiny.loss(), tiny.gradients());
    let before = gpu.pool.report();
    // The second step of a run, except for the batch, which the host writes.
    let first = batch(0);
    let stream = gpu.stream.clone();
    tiny.model.set_batch(&stream, &first).unwrap();

    let graph = stream.capture(|| {
        let failed = |e: ModelError| DeviceError::Driver {
            call: "capture",
            message: e.to_string(),
        };
        tiny.forward()
            .and_then(|()| tiny.backward())
            .map_err(failed)
    });

    let graph = graph.unwrap();
    // SAFETY: used on the stream of the passes.
    gpu.device
        .fill_zero(&stream, unsafe { tiny.model.loss() }.erase())
        .unwrap();
    tiny.grads
        .iter()
        .for_each(|g| gpu.device.fill_zero(&stream, g.elements()).unwrap());

    for micro in 0..ACCUM {
        let batch = batch(micro);
        tiny.model.set_batch(&stream, &batch).unwrap();
        // SAFETY: the model's memory and kernels live until the end of the test, which waits for
        // the stream.
        unsafe { graph.launch(&stream) }.unwrap();
    }

    assert!(
        (tiny.loss(), tiny.gradients()) == want,
        "the recorded step has other bits"
    );
    assert_eq!(gpu.pool.report().total.live_bytes, before.total.live_bytes);
    assert_eq!(
        gpu.pool.report().backing_allocations,
        before.backing_allocations
    );
}

#[test]
#[ignore = "needs a CUDA device"]
fn what_the_model_does_not_take_is_refused() {
    let gpu = Gpu::open();
    let refused = |options: ModelOptions, config: GptConfig| {
        ModelConfig::from(config)
            .on_cuda(options, &gpu.pool, &gpu.stream)
            .err()
            .unwrap()
            .to_string()
    };

    let good = options(DType::F32, false);
    let error = refused(
        ModelOptions {
            seq_len: 65,
            ..good.clone()
        },
        config(),
    );

    assert!(error.contains("65") && error.contains("64"), "{error}");
    let error = refused(
        ModelOptions {
            dtype: DType::F64,
            ..good.clone()
        },
        config(),
    );

    assert!(error.contains("fp64"), "{error}");
    let wide = GptConfig {
        n_embd: 260,
        n_head: 1,
        n_inner: 16,
        n_layer: 1,
        ..config()
    };

    let error = refused(good, wide);
    assert!(error.contains("260"), "{error}");
    let mut tiny = OnGpu::new(&gpu, options(DType::F32, false), WHOLE, &weights());
    let error = tiny
        .model
        .set_batch(&gpu.stream, &Batch::plain([0; 128], [0; 127]))
        .unwrap_err()
        .to_string();
    assert!(error.contains("127") && error.contains("128"), "{error}");
}
