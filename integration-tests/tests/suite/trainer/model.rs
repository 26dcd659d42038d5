//! The model without the trainer, against PyTorch: logits of the first micro-batch, and gradients
//! of the first step.

use std::collections::HashMap;
use std::time::Duration;

use super::support::relative_error;
use integration_tests::{GPT2, LLAMA, Oracle, QWEN2};
use zero_alloc::Pool;
use zero_alloc::device::{DType, Device, DeviceId, DeviceSlice, Stream};
use zero_alloc::host::HostDevice;
use zero_models::ops::Threads;
use zero_models::{ModelConfig, ModelOptions};
use zero_trainer::Batch;
use zero_trainer::Grad;

const LIMIT: Duration = Duration::from_secs(60);

/// A slice of a vector that outlives all uses in the test.
fn slice<T>(data: &mut [T]) -> DeviceSlice<T> {
    // SAFETY: the vectors live to the end of the test, which drains the stream before it reads
    // them.
    unsafe { DeviceSlice::from_raw_parts(data.as_mut_ptr(), data.len(), DeviceId::HOST) }
}

fn check(oracle: Oracle, threads: usize, activation_checkpointing: bool) {
    let Oracle {
        batch,
        seq,
        grad_accum,
        ..
    } = oracle;
    let text = std::fs::read_to_string(oracle.data("model/config.json")).unwrap();
    let (config, _) = ModelConfig::from_hf_json(&text).unwrap();
    let device = HostDevice::new();
    let stream = device.create_stream("compute").unwrap();
    let pool = Pool::new(device, usize::MAX);

    // On the host, offload of activations changes nothing.
    let options = ModelOptions {
        micro_batch: batch,
        seq_len: seq,
        sequence_ranks: 1,
        tensor_ranks: 1,
        partition_activations: false,
        sequence_parallel: false,
        dtype: DType::F32,
        activation_checkpointing,
        offload_activations: activation_checkpointing,
        matmul_timing: false,
        recompute_gelu: false,
    };

    let threads = Threads::new(threads).unwrap();
    let mut model = config.on_host(options, &pool, &stream, threads).unwrap();

    let weights: HashMap<String, Vec<f32>> = oracle
        .tensors("model/model.safetensors")
        .into_iter()
        .collect();
    let units = config.units();
    let flat = |u: &zero_shard::UnitSpec| {
        u.params
            .iter()
            .flat_map(|p| weights[&p.name].clone())
            .collect::<Vec<_>>()
    };

    let mut params: Vec<Vec<f32>> = units.iter().map(flat).collect();
    let params: Vec<_> = params.iter_mut().map(|p| slice(p).erase()).collect();
    let mut grads: Vec<Vec<f32>> = params.iter().map(|p| vec![0.0; p.len()]).collect();
    let grad_slices: Vec<_> = grads.iter_mut().map(|g| Grad::Add(slice(g))).collect();

    let mut logits = vec![f32::NAN; batch * seq * config.vocab_size()];
    let tokens = oracle.tokens();
    // Each of the micro-batches contributes its part of the step's mean loss.
    let mut scale = [1.0 / grad_accum as f64];
    let passes = config.passes();
    let twice = model.backward(
        &stream,
        passes.len() - 1,
        &params[..1],
        &[grad_slices[0]; 2],
        slice(&mut scale),
    );

    assert!(twice.unwrap_err().to_string().contains("overlaps"));
    let other = HostDevice::new().create_stream("other").unwrap();
    assert!(
        model
            .forward(&other, 0, &params[..1])
            .unwrap_err()
            .to_string()
            .contains("stream other")
    );

    for micro in 0..grad_accum {
        let rows = (0..batch).map(|b| (micro * batch + b) * seq);
        let (inputs, targets): (Vec<_>, Vec<_>) = rows
            .flat_map(|at| at..at + seq)
            .map(|at| (tokens[at], tokens[at + 1]))
            .unzip();
        let batch = Batch::plain(inputs, targets);
        model.set_batch(&stream, &batch).unwrap();
        for (i, pass) in passes.iter().enumerate() {
            let reads: Vec<_> = pass.forward_reads.iter().map(|&u| params[u]).collect();
            model.forward(&stream, i, &reads).unwrap();
            if micro == 0 && i + 1 == passes.len() {
                model.logits(&stream, &reads, slice(&mut logits)).unwrap();
            }
        }
        for (i, pass) in passes.iter().enumerate().rev() {
            let reads: Vec<_> = pass.backward_reads.iter().map(|&u| params[u]).collect();
            let adds: Vec<_> = pass.grads.iter().map(|&u| grad_slices[u]).collect();
            model
                .backward(&stream, i, &reads, &adds, slice(&mut scale))
                .unwrap();
        }
    }

    stream.synchronize(LIMIT).unwrap();

    let want = &oracle.tensors("logits_first_micro_batch.safetensors")[0].1;
    let error = relative_error(&logits, want);
    assert!(error < 1e-5, "logits differ by {error:e}");
    let want: HashMap<_, _> = oracle
        .tensors("grads_first_step.safetensors")
        .into_iter()
        .collect();
    assert_eq!(
        want.len(),
        units.iter().map(|u| u.params.len()).sum::<usize>()
    );

    for (unit, grad) in units.iter().zip(&grads) {
        let mut rest = grad.as_slice();
        for param in &unit.params {
            let (got, tail) = rest.split_at(want[&param.name].len());
            rest = tail;
            let error = relative_error(got, &want[&param.name]);
            assert!(
                error < 1e-5,
                "gradient of {} differs by {error:e}",
                param.name
            );
        }
    }
}

#[test]
fn one_thread() {
    check(GPT2, 1, false);
}

#[test]
fn two_threads() {
    check(GPT2, 2, false);
}

#[test]
fn with_activation_checkpointing() {
    check(GPT2, 1, true);
}

#[test]
fn llama() {
    check(LLAMA, 1, false);
    check(LLAMA, 3, true);
}

#[test]
fn qwen2() {
    check(QWEN2, 1, true);
    check(QWEN2, 2, false);
}
