//! Adapters on a frozen model: the host's losses and gradients, and the same bits with
//! checkpointing and recording.

use zero_alloc::device::DType;
use zero_models::lora::LoraConfig;
use zero_models::{ModelConfig, ModelOptions};

use crate::cuda_dropout::{drawing, gpt2};
use crate::cuda_llama::{families, options, weights};
use crate::cuda_model::is_planned;
use crate::gpu::Gpu;
use crate::on_gpu::{OnGpu, agree, agree_in_all, on_host};

/// The model with adapters of these modules.
pub(crate) fn adapted(model: ModelConfig, targets: &[&str], dropout: f32) -> ModelConfig {
    let lora = LoraConfig {
        r: 3,
        alpha: 6.0,
        dropout,
        rslora: false,
        targets: targets.iter().map(|target| (*target).to_owned()).collect(),
    };
    model.with_lora(Some(lora)).unwrap()
}

/// Adapters of some or all modules of a block, with dropout of all kinds and without.
fn models() -> [ModelConfig; 5] {
    let [biased, mistral, _, qwen3] = families();
    let attention = ["q_proj", "k_proj", "v_proj", "o_proj"];
    let mlp = ["gate_proj", "up_proj", "down_proj"];
    [
        adapted(gpt2(18, 71), &["c_attn", "c_proj", "c_fc"], 0.2).with_dropout(0.1),
        adapted(gpt2(32, 128), &["mlp.c_proj", "c_fc"], 0.0).with_dropout(0.1),
        adapted(biased, &mlp, 0.2),
        adapted(mistral, &["q_proj", "v_proj", "up_proj"], 0.0),
        adapted(qwen3, &[&attention[..], &mlp].concat(), 0.2),
    ]
}

#[test]
#[ignore = "needs a CUDA device"]
fn adapters_are_the_hosts() {
    let gpu = Gpu::open();
    for config in models() {
        let weights = weights(&config);
        let options = options(DType::F32);
        let batches = drawing(&config, true);
        let want = on_host(&config, &options, &weights, &batches);
        let got = OnGpu::new(&gpu, &config, &options, &weights).step(&batches);
        agree(&config, "adapters", &got, &want, [2e-6, 2e-5]);
    }
}

/// Products of 16 bits have fused epilogues. Blocks may write the gradients of adapters, and
/// checkpointing changes no bit; the device has the memory that the plan has.
#[test]
#[ignore = "needs a CUDA device"]
fn adapters_in_16_bits() {
    let gpu = Gpu::open();
    for (config, dtype) in models()
        .into_iter()
        .zip([DType::Bf16, DType::F16].repeat(3))
    {
        let weights = weights(&config);
        let batches = drawing(&config, true);
        let kept = options(dtype);
        let want = on_host(&config, &kept, &weights, &batches);

        let checkpointed = ModelOptions {
            activation_checkpointing: true,
            ..kept.clone()
        };
        let offloaded = ModelOptions {
            offload_activations: true,
            ..checkpointed.clone()
        };
        let results = [&kept, &checkpointed, &offloaded].map(|options| {
            is_planned(&gpu, &config, options);
            OnGpu::new(&gpu, &config, options, &weights).step(&batches)
        });
        assert!(results.iter().all(|result| result == &results[0]));
        let what = format!("{config:?}");
        agree_in_all(&what, &results[0], &want, [1e-3, 2e-2]);

        let mut writes = OnGpu::new(&gpu, &config, &kept, &weights);
        writes.write_blocks(&gpu, dtype);
        let (_, written) = writes.step(&batches[..1]);
        let (_, sums) = OnGpu::new(&gpu, &config, &kept, &weights).step(&batches[..1]);
        let what = format!("{config:?}, written");
        agree_in_all(&what, &(1.0, written), &(1.0, sums), [1e-9, 4e-3]);
    }
}
