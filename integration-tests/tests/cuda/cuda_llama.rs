//! The Llama family on the device against the host, and the same bits with checkpointing.

use zero_alloc::device::DType;
use zero_models::llama::config::{Family, LlamaConfig};
use zero_models::llama::rope::{Rope, Scaling, Yarn};
use zero_models::{ModelConfig, ModelOptions};
use zero_trainer::{Batch, IGNORED};

use crate::cuda_attention::documents;
use crate::cuda_model::is_planned;
use crate::gpu::{Gpu, values};
use crate::on_gpu::{OnGpu, agree, agree_in_all, on_host};

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
const SEQ: usize = 40;

pub(crate) fn options(dtype: DType) -> ModelOptions {
    ModelOptions::new(BATCH, SEQ, dtype)
}

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
            let options = options(DType::F32);
            let want = on_host(&config, &options, &weights, &batches);
            let got = OnGpu::new(&gpu, &config, &options, &weights).step(&batches);
            let what = format!("packed {packed}");
            agree(&config, &what, &got, &want, [2e-6, 2e-5]);
        }
    }
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
        let kept = options(DType::Bf16);
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
        writes.write_blocks(&gpu, DType::Bf16);
        let written = writes.step(&batches);
        let what = format!("{config:?}, written");
        agree_in_all(&what, &written, &results[0], [1e-9, 4e-3]);
    }
}
