//! The Llama family on the device against PyTorch (gradients, losses) and the host, and the same bits
//! with checkpointing.

use std::collections::HashMap;

use serde_json::Value;
use zero_alloc::Purpose;
use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice};
use zero_kernels::host::AdamSlices;
use zero_kernels::{AdamHyper, AdamScalars, reference};
use zero_models::llama::config::{Family, LlamaConfig};
use zero_models::llama::rope::{Rope, Scaling, Yarn};
use zero_models::{GpuModel, ModelConfig, ModelOptions};
use zero_trainer::{Batch, Grad, IGNORED};

use crate::cuda_attention::documents;
use crate::gpu::{Gpu, LIMIT, values};
use crate::tiny::on_host;
use integration_tests::{LLAMA, Oracle, QWEN2, relative_error};

pub(crate) fn options(dtype: DType, micro_batch: usize, seq_len: usize) -> ModelOptions {
    ModelOptions {
        micro_batch,
        seq_len,
        sequence_ranks: 1,
        tensor_ranks: 1,
        partition_activations: false,
        sequence_parallel: false,
        dtype,
        activation_checkpointing: false,
        offload_activations: false,
        matmul_timing: false,
        recompute_gelu: false,
    }
}

/// A model with its parameters and gradients on the device.
pub(crate) struct OnGpu<'a> {
    gpu: &'a Gpu,
    config: ModelConfig,
    model: Box<dyn GpuModel>,
    params: Vec<AnySlice>,
    grads: Vec<Grad>,
}

impl<'a> OnGpu<'a> {
    pub(crate) fn new(
        gpu: &'a Gpu,
        config: &ModelConfig,
        options: ModelOptions,
        weights: &[Vec<f32>],
    ) -> Self {
        let put = |w: &Vec<f32>| gpu.put(w, options.dtype);
        let params = weights.iter().map(put).collect();
        let sums = |w: &Vec<f32>| Grad::Add(gpu.zeros(w.len()));
        let grads = weights.iter().map(sums).collect();
        let model = config.on_cuda(options, &gpu.pool, &gpu.stream).unwrap();
        Self {
            gpu,
            config: config.clone(),
            model,
            params,
            grads,
        }
    }

    fn loss_slice(&self) -> DeviceSlice<f64> {
        // SAFETY: used on the stream of the passes.
        unsafe { self.model.loss() }
    }

    /// Returns the loss and the gradients of a step of these micro-batches.
    pub(crate) fn step(&mut self, batches: &[Batch]) -> (f64, Vec<Vec<f32>>) {
        let stream = &self.gpu.stream;
        let device = &self.gpu.device;
        let zero = |slice| device.fill_zero(stream, slice).unwrap();
        zero(self.loss_slice().erase());
        self.grads.iter().for_each(|grad| zero(grad.elements()));
        let scale = self.gpu.double(1.0 / batches.len() as f64);
        let passes = self.config.passes();

        for batch in batches {
            self.model.set_batch(stream, batch).unwrap();
            for (i, pass) in passes.iter().enumerate() {
                let reads: Vec<_> = pass.forward_reads.iter().map(|&u| self.params[u]).collect();
                self.model.forward(stream, i, &reads).unwrap();
            }
            for (i, pass) in passes.iter().enumerate().rev() {
                let reads: Vec<_> = pass
                    .backward_reads
                    .iter()
                    .map(|&u| self.params[u])
                    .collect();
                let grads: Vec<_> = pass.grads.iter().map(|&u| self.grads[u]).collect();
                self.model
                    .backward(stream, i, &reads, &grads, scale)
                    .unwrap();
            }
        }

        let mut loss = [0.0f64];
        let bytes = bytemuck::cast_slice_mut(&mut loss);
        let sum = self.loss_slice().erase();
        device.download(stream, sum, bytes, LIMIT).unwrap();
        let grads = self.grads.iter().map(|grad| self.gpu.get(grad.elements()));
        (loss[0] / batches.len() as f64, grads.collect())
    }
}

fn oracle_config(oracle: Oracle) -> ModelConfig {
    let text = std::fs::read_to_string(oracle.data("model/config.json")).unwrap();
    ModelConfig::from_hf_json(&text).unwrap().0
}

/// Splits or joins flat parameters by name.
pub(crate) fn by_name(config: &ModelConfig, flat: &[Vec<f32>]) -> Vec<(String, Vec<f32>)> {
    let mut all = Vec::new();
    for (unit, flat) in config.units().into_iter().zip(flat) {
        let mut rest = flat.as_slice();
        for param in unit.params {
            let (own, tail) = rest.split_at(param.shape.iter().product::<u64>() as usize);
            all.push((param.name, own.to_vec()));
            rest = tail;
        }
    }
    all
}

fn is_pytorchs(oracle: Oracle, steps: usize) {
    let gpu = Gpu::open();
    let config = oracle_config(oracle);
    let read = |name: &str| oracle.tensors(name).into_iter().collect::<HashMap<_, _>>();
    let all = read("model/model.safetensors");
    let want_grads = read("grads_first_step.safetensors");
    let expected = std::fs::read_to_string(oracle.data("expected.json")).unwrap();
    let expected: Value = serde_json::from_str(&expected).unwrap();
    let setting = |key: &str| expected["config"][key].as_f64().unwrap();
    let tokens = oracle.tokens();
    let Oracle {
        batch,
        seq,
        grad_accum,
        ..
    } = oracle;
    let micro_batch = |micro: usize| {
        let rows = (0..batch).map(|b| (micro * batch + b) * seq);
        let (inputs, targets): (Vec<u32>, Vec<u32>) = rows
            .flat_map(|at| at..at + seq)
            .map(|at| (tokens[at], tokens[at + 1]))
            .unzip();
        Batch::plain(inputs, targets)
    };

    let flat =
        |u: zero_shard::UnitSpec| u.params.iter().flat_map(|p| all[&p.name].clone()).collect();
    let mut masters: Vec<Vec<f32>> = config.units().into_iter().map(flat).collect();
    let mut moments: Vec<[Vec<f32>; 2]> = masters
        .iter()
        .map(|w| [vec![0.0; w.len()], vec![0.0; w.len()]])
        .collect();
    let mut model = OnGpu::new(&gpu, &config, options(DType::F32, batch, seq), &masters);
    let hyper = AdamHyper {
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: setting("wd"),
        decoupled: true,
        bias_correction: true,
    };

    for step in 0..steps {
        let want = &expected["steps"][step];
        let micro = step * grad_accum..(step + 1) * grad_accum;
        let batches: Vec<Batch> = micro.map(micro_batch).collect();
        let (loss, grads) = model.step(&batches);
        let want_loss = want["loss"].as_f64().unwrap();
        let error = (loss - want_loss).abs() / want_loss;
        assert!(error < 1e-5, "step {step}: loss {loss} for {want_loss}");
        if step == 0 {
            for (name, got) in by_name(&config, &grads) {
                let error = relative_error(&got, &want_grads[&name]);
                assert!(error < 2e-5, "gradient of {name} differs by {error:e}");
            }
        }

        let squares = grads.iter().flatten().map(|g| f64::from(*g).powi(2));
        let norm = squares.sum::<f64>().sqrt();
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
            let bytes = bytemuck::cast_slice(weights);
            let device = &gpu.device;
            device
                .upload(&gpu.stream, bytes, model.params[unit], LIMIT)
                .unwrap();
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn llama_is_pytorchs() {
    is_pytorchs(LLAMA, 4);
}

#[test]
#[ignore = "needs a CUDA device"]
fn qwen2_is_pytorchs() {
    is_pytorchs(QWEN2, 4);
}

fn tiny(family: Family) -> LlamaConfig {
    LlamaConfig {
        family,
        vocab_size: 75,
        max_positions: 64,
        hidden: 48,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 32,
        intermediate: 56,
        ..LlamaConfig::llama2()
    }
}

/// One of each family, with all that a family may have.
pub(crate) fn families() -> [ModelConfig; 4] {
    // It scales queries and keys, too.
    let yarn = Yarn {
        factor: 4.0,
        original_positions: 16,
        attention_factor: None,
        beta_fast: None,
        beta_slow: None,
        mscale: None,
        mscale_all_dim: None,
        truncate: true,
    };
    let yarn = Rope {
        scaling: Scaling::Yarn(yarn),
        ..Rope::new(10_000.0)
    };
    let biased = LlamaConfig {
        hidden: 44,
        head_dim: 6,
        intermediate: 37,
        kv_heads: 4,
        qkv_bias: true,
        output_bias: true,
        mlp_bias: true,
        special_tokens: vec![("pad_token_id", 3.into())],
        ..tiny(Family::Llama)
    };
    let mistral = LlamaConfig {
        window: Some(9),
        windowed: vec![true, false],
        kv_heads: 1,
        ..tiny(Family::Mistral)
    };
    let qwen2 = LlamaConfig {
        qkv_bias: true,
        tied_head: true,
        rope: yarn,
        ..tiny(Family::Qwen2)
    };
    let qwen3 = LlamaConfig {
        tied_head: true,
        qkv_bias: true,
        rope: yarn,
        ..tiny(Family::Qwen3)
    };
    [biased, mistral, qwen2, qwen3].map(ModelConfig::from)
}

pub(crate) fn weights(config: &ModelConfig) -> Vec<Vec<f32>> {
    let mut weights = Vec::new();
    for (u, unit) in config.units().iter().enumerate() {
        let mut flat = Vec::new();
        for (i, param) in unit.params.iter().enumerate() {
            let numel = param.shape.iter().product::<u64>() as usize;
            let name = &param.name;
            let is_gain =
                name.contains("norm.") || name.contains("ln_") && name.ends_with("weight");
            let gain = if is_gain { 1.0 } else { 0.0 };
            let random = values(numel, (100 * u + i) as u64);
            flat.extend(random.iter().map(|v| gain + 0.2 * v));
        }
        weights.push(flat);
    }
    weights
}

pub(crate) const BATCH: usize = 2;
pub(crate) const SEQ: usize = 40;

pub(crate) fn batch(config: &ModelConfig, packed: bool) -> Batch {
    let ids = |odd: usize| -> Vec<u32> {
        let id = |i: usize| (i * i * odd % config.vocab_size()) as u32;
        (0..BATCH * SEQ).map(id).collect()
    };
    let mut batch = Batch::plain(ids(7), ids(11));
    if packed {
        batch.starts = documents(BATCH, SEQ, 30);
        batch.targets[5..9].fill(IGNORED);
        batch.divisor = 70.0;
    }
    batch
}

#[test]
#[ignore = "needs a CUDA device"]
fn families_are_the_hosts() {
    let gpu = Gpu::open();
    for config in families() {
        let weights = weights(&config);
        for packed in [false, true] {
            let batches = [batch(&config, packed)];
            let options = options(DType::F32, BATCH, SEQ);
            let (want_loss, want) = on_host(&config, options.clone(), weights.clone(), &batches);
            let (loss, got) = OnGpu::new(&gpu, &config, options, &weights).step(&batches);
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
        .on_cuda(options.clone(), &gpu.pool, &gpu.stream)
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

/// In 16 bits, attention is on tensor cores. Blocks may write their gradients, and checkpointing
/// changes no bit; the device has the memory that the plan has.
#[test]
#[ignore = "needs a CUDA device"]
fn families_in_16_bits() {
    let gpu = Gpu::open();
    for config in families() {
        let weights = weights(&config);
        let batches = [batch(&config, true)];
        let round = |w: &Vec<f32>| w.iter().map(|v| half::bf16::from_f32(*v)).collect();
        let rounded: Vec<Vec<half::bf16>> = weights.iter().map(round).collect();
        let kept = options(DType::Bf16, BATCH, SEQ);
        let (want_loss, want) = on_host(&config, kept.clone(), rounded, &batches);

        let checkpointed = ModelOptions {
            activation_checkpointing: true,
            ..kept.clone()
        };
        let offloaded = ModelOptions {
            offload_activations: true,
            ..checkpointed.clone()
        };
        let mut results = Vec::new();
        for options in [kept, checkpointed, offloaded] {
            is_planned(&gpu, &config, &options);
            results.push(OnGpu::new(&gpu, &config, options.clone(), &weights).step(&batches));
        }

        let (loss, got) = &results[0];
        assert!(results.iter().all(|result| result == &results[0]));
        let error = (loss - want_loss).abs() / want_loss;
        assert!(error < 1e-3, "{config:?}: loss {loss} for {want_loss}");
        let error = relative_error(&got.concat(), &want.concat());
        assert!(error < 2e-2, "{config:?}: gradients differ by {error:e}");

        let options = options(DType::Bf16, BATCH, SEQ);
        let mut writes = OnGpu::new(&gpu, &config, options, &weights);
        let blocks = 1..writes.grads.len() - 1;
        for (pass, weights) in weights
            .iter()
            .enumerate()
            .filter(|(i, _)| blocks.contains(i))
        {
            assert!(writes.model.writes_grad(pass, pass));
            writes.grads[pass] = Grad::Write(gpu.fresh(weights.len(), DType::Bf16));
        }
        let (_, written) = writes.step(&batches);
        let error = relative_error(&written.concat(), &got.concat());
        assert!(error < 4e-3, "{config:?}: written ones differ by {error:e}");
    }
}
