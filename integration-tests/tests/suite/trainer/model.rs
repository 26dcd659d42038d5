//! The model without the trainer, against PyTorch: logits of the first micro-batch, and gradients
//! of the first step.

use std::collections::HashMap;
use std::time::Duration;

use super::support::{relative_error, tensors, tokens};
use integration_tests::data;
use zero_alloc::Pool;
use zero_alloc::device::{DType, Device, DeviceId, DeviceSlice, Stream};
use zero_alloc::host::HostDevice;
use zero_models::gpt2::config::GptConfig;
use zero_models::gpt2::{self, Gpt2, Gpt2Options};
use zero_models::ops::Threads;
use zero_trainer::{Grad, Model};

const LIMIT: Duration = Duration::from_secs(60);
const BATCH: usize = 4;
const SEQ: usize = 32;

/// A slice of a vector that outlives all uses in the test.
fn slice<T>(data: &mut [T]) -> DeviceSlice<T> {
    // SAFETY: the vectors live to the end of the test, which drains the stream before it reads
    // them.
    unsafe { DeviceSlice::from_raw_parts(data.as_mut_ptr(), data.len(), DeviceId::HOST) }
}

fn check(threads: usize, activation_checkpointing: bool) {
    let config =
        GptConfig::from_hf_json(&std::fs::read_to_string(data("model/config.json")).unwrap())
            .unwrap()
            .0;
    let device = HostDevice::new();
    let stream = device.create_stream("compute").unwrap();
    let pool = Pool::new(device, usize::MAX);

    // On the host, offload of activations changes nothing.
    let options = Gpt2Options {
        micro_batch: BATCH,
        seq_len: SEQ,
        dtype: DType::F32,
        activation_checkpointing,
        offload_activations: activation_checkpointing,
        matmul_timing: false,
        recompute_gelu: false,
    };

    let mut model = Gpt2::new(
        config.clone(),
        options,
        &pool,
        &stream,
        Threads::new(threads).unwrap(),
    )
    .unwrap();

    let weights: HashMap<String, Vec<f32>> =
        tensors("model/model.safetensors").into_iter().collect();
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

    let mut logits = vec![f32::NAN; BATCH * SEQ * config.vocab_size];
    let tokens = tokens();
    let mut half = [0.5f64];
    let passes = gpt2::passes(&config);
    let twice = model.backward(
        &stream,
        passes.len() - 1,
        &params[..1],
        &[grad_slices[0]; 2],
        slice(&mut half),
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

    for micro in 0..2 {
        let rows = (0..BATCH).map(|b| (micro * BATCH + b) * SEQ);
        let (inputs, targets): (Vec<_>, Vec<_>) = rows
            .flat_map(|at| at..at + SEQ)
            .map(|at| (tokens[at], tokens[at + 1]))
            .unzip();
        model.set_batch(&stream, &inputs, &targets).unwrap();
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
            // Each of the two micro-batches contributes half of the step's mean loss.
            model
                .backward(&stream, i, &reads, &adds, slice(&mut half))
                .unwrap();
        }
    }

    stream.synchronize(LIMIT).unwrap();

    let want = &tensors("logits_first_micro_batch.safetensors")[0].1;
    let error = relative_error(&logits, want);
    assert!(error < 1e-5, "logits differ by {error:e}");
    let want: HashMap<_, _> = tensors("grads_first_step.safetensors")
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
    check(1, false);
}

#[test]
fn two_threads() {
    check(2, false);
}

#[test]
fn with_activation_checkpointing() {
    check(1, true);
}
