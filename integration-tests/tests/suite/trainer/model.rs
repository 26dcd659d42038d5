//! The model without the trainer, against PyTorch: logits of the first micro-batch, and gradients
//! of the first step.

use integration_tests::{GPT2, LLAMA, Oracle, QWEN2};
use zero_alloc::device::{DType, Device};
use zero_alloc::host::HostDevice;
use zero_models::ModelOptions;

use super::support::relative_error;
use crate::arrays::Arrays;
use crate::steps::{OnHost, are_pytorchs, batches_of, config_of, options_of, weights_of};

fn check(oracle: Oracle, threads: usize, activation_checkpointing: bool) {
    let config = config_of(oracle);
    let arrays = Arrays::on(HostDevice::new());
    // On the host, offload of activations changes nothing.
    let options = ModelOptions {
        activation_checkpointing,
        offload_activations: activation_checkpointing,
        ..options_of(oracle, DType::F32)
    };
    let mut model = OnHost::new(&arrays, &config, options, &weights_of(oracle), threads);

    let last = config.passes().len() - 1;
    let params = &model.params[..1];
    let twice = [model.grads[0]; 2];
    let one = arrays.double(1.0);
    let error = model
        .model
        .backward(&arrays.stream, last, params, &twice, one);
    assert!(error.unwrap_err().to_string().contains("overlaps"));
    let other = HostDevice::new().create_stream("other").unwrap();
    let error = model.model.forward(&other, 0, params).unwrap_err();
    assert!(error.to_string().contains("stream other"), "{error}");

    let batches = batches_of(oracle, 0);
    let (_, gradients) = model.step(&batches);
    are_pytorchs(oracle, &gradients, 1e-5);

    model.set_batch(&batches[0]).unwrap();
    model.forward().unwrap();
    let logits = arrays.zeros(oracle.batch * oracle.seq * config.vocab_size());
    let reads = config.passes()[last].forward_reads.clone();
    let reads: Vec<_> = reads.into_iter().map(|u| model.params[u]).collect();
    model.model.logits(&arrays.stream, &reads, logits).unwrap();
    let want = &oracle.tensors("logits_first_micro_batch.safetensors")[0].1;
    let error = relative_error(&arrays.get(logits.erase()), want);
    assert!(error < 1e-5, "logits differ by {error:e}");
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
