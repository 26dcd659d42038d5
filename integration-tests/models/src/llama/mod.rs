//! The Llama family: RMS norm, rotary positions, grouped queries, SwiGLU, in the versions of Llama,
//! Mistral and Qwen.

mod block;
pub mod config;
pub(crate) mod gpu;
mod hf_json;
pub mod rope;

use zero_alloc::Pool;
use zero_alloc::device::DeviceSlice;
use zero_alloc::host::{HostDevice, HostStream};
use zero_shard::UnitSpec;
use zero_trainer::{ModelError, ModelRanks};

use self::config::LlamaConfig;
use crate::decoder::buffers::{Extent, HeadView, ScratchSlices, ScratchView, Sizes};
use crate::decoder::params::{Flat, UnitParams};
use crate::decoder::sequence::{Exchanges, SequencePart};
use crate::decoder::{Backward, Decoder, Forward, HostArch, HostModel};
use crate::ops::{Threads, attention, embedding, rms_norm};
use crate::options::ModelOptions;
use block::{BlockSlices, Shape};

/// A model of the family and its batch, on the host.
struct LlamaArch {
    config: LlamaConfig,
    options: ModelOptions,
    part: SequencePart,
}

impl LlamaArch {
    fn shape(&self, layer: usize) -> Shape {
        let config = &self.config;
        let seq = self.options.seq_len;
        let exchanges = exchanges(config, &self.options);
        let [heads, kv_heads] = exchanges.qkv.heads_of_rank();
        let attention = attention::Shape {
            batch: self.options.micro_batch,
            seq,
            heads,
            kv_heads,
            d: config.head_dim,
            window: config.window_of(layer, seq),
            scale: attention::scale_of(config.head_dim),
        };
        let first_line = self.part.first_line(config.heads, seq);
        Shape::new(config, attention, self.part.span(seq), first_line)
    }
}

impl HostArch for LlamaArch {
    type Block = BlockSlices;

    const NAME: &'static str = "the backward of a Llama";

    fn units(&self) -> Vec<UnitSpec> {
        self.config.units()
    }

    fn tied(&self) -> bool {
        self.config.tied_head
    }

    fn vocab(&self) -> usize {
        self.config.vocab_size
    }

    fn sizes(&self) -> Sizes {
        sizes(&self.config, &self.options)
    }

    fn cut(all: DeviceSlice<f32>, sizes: &[usize]) -> BlockSlices {
        BlockSlices::cut(all, sizes)
    }

    fn attention(block: &mut BlockSlices) -> [&mut DeviceSlice<f32>; 2] {
        [&mut block.qkv, &mut block.attended]
    }

    fn attention_grads(s: ScratchSlices, block: BlockSlices) -> [DeviceSlice<f32>; 2] {
        let [attended, qkv] = [block.attended.len(), block.qkv.len()];
        [
            s.wide.slice(0..attended),
            s.wide.slice(attended..attended + qkv),
        ]
    }

    fn fill_table(&self, table: &mut [f32]) {
        self.config.rope.fill(table, self.config.head_dim);
    }

    fn embed(&self, x: &mut [f32], p: &Flat<'_>) {
        embedding::forward_tokens(x, &p.batch.inputs, p.flats[0], self.config.hidden);
    }

    fn embed_backward(&self, grad: &mut [f32], _unit: &UnitParams, dx: &mut [f32], p: &Flat<'_>) {
        let padding = self.config.padding_token().map(|token| token as u32);
        embedding::backward_tokens(grad, &p.batch.inputs, dx, self.config.hidden, padding);
    }

    fn forward(&self, part: Forward, block: BlockSlices, x: &[f32], p: &Flat<'_>) {
        let shape = self.shape(p.layer);
        block::forward(part, &mut block.view(), x, p, &shape);
    }

    fn output(&self, out: &mut [f32], block: BlockSlices, p: &Flat<'_>) {
        block::output(out, &block.view(), p.flats[0], &self.shape(p.layer));
    }

    fn backward(
        &self,
        part: Backward,
        s: ScratchView<'_>,
        block: BlockSlices,
        x: &[f32],
        p: &Flat<'_>,
        grad: &mut [f32],
    ) {
        let shape = self.shape(p.layer);
        block::backward(part, s, &mut block.view(), x, p, grad, &shape);
    }

    fn final_norm(&self, h: &mut HeadView<'_>, x: &[f32], p: &Flat<'_>) {
        let gain = &p.flats[0][..self.config.hidden];
        rms_norm::forward(h.out, h.stats, x, gain, self.config.rms_norm_eps);
    }

    fn final_norm_backward(
        &self,
        dx: &mut [f32],
        grad: &mut [f32],
        dout: &[f32],
        x: &[f32],
        h: &HeadView<'_>,
        p: &Flat<'_>,
    ) {
        let gain = &p.flats[0][..self.config.hidden];
        rms_norm::backward(dx, grad, dout, x, h.stats, gain);
    }
}

fn exchanges(config: &LlamaConfig, options: &ModelOptions) -> Exchanges {
    Exchanges::new(options, [config.heads, config.kv_heads], config.head_dim)
}

/// Elements of the activations on the host. The options must be valid for the configuration.
fn sizes(config: &LlamaConfig, options: &ModelOptions) -> Sizes {
    let tokens = options.tokens();
    let row = tokens * config.hidden;
    let exchanges = exchanges(config, options);
    let qkv = exchanges.qkv.elems();
    let queries = config.q_width();
    let inner = config.intermediate;
    let heads = if config.has_qk_norm() {
        config.heads + config.kv_heads
    } else {
        0
    };
    let extent = Extent {
        exchanges,
        layers: config.layers,
        width: config.hidden,
        vocab: config.vocab_size,
        head_stats: 1,
        wide: inner.max(queries + qkv / tokens),
        table: options.seq_len * config.head_dim,
    };

    let block = vec![
        row,
        tokens,
        qkv,
        tokens * heads * config.head_dim,
        tokens * heads,
        tokens * queries,
        tokens * config.heads,
        row,
        row,
        tokens,
        tokens * 2 * inner,
        tokens * inner,
    ];
    Sizes::new(&extent, block, options)
}

/// Bytes of activations on the host. The options must be valid for the configuration.
pub(crate) fn activations_bytes(config: &LlamaConfig, options: &ModelOptions) -> u64 {
    sizes(config, options).bytes()
}

/// A model of the family on the host. The options must be valid for the configuration.
pub(crate) fn on_host(
    config: LlamaConfig,
    options: ModelOptions,
    pool: &Pool<HostDevice>,
    stream: &HostStream,
    threads: Threads,
    ranks: &ModelRanks<HostDevice>,
) -> Result<Box<dyn HostModel>, ModelError> {
    let arch = LlamaArch {
        config,
        part: SequencePart::new(&options, ranks)?,
        options: options.clone(),
    };
    Ok(Box::new(Decoder::new(
        arch, options, pool, stream, threads, ranks,
    )?))
}
