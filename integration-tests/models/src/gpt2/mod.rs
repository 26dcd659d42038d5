//! GPT-2: pre-LN blocks, learned positions, tanh GELU, tied or untied head.

mod block;
pub mod config;
pub(crate) mod gpu;
mod hf_json;

use zero_alloc::Pool;
use zero_alloc::device::DeviceSlice;
use zero_alloc::host::{HostDevice, HostStream};
use zero_shard::UnitSpec;
use zero_trainer::{ModelError, ModelRanks, Pass};

use self::config::GptConfig;
use crate::decoder::buffers::{Extent, HeadView, ScratchSlices, ScratchView, Sizes};
use crate::decoder::params::{Flat, UnitParams};
use crate::decoder::sequence::{Exchanges, SequencePart};
use crate::decoder::{self, Backward, Decoder, Forward, HostArch, HostModel};
use crate::ops::dropout::Dropout;
use crate::ops::{Span, Threads, attention, embedding, layer_norm};
use crate::options::ModelOptions;
use block::BlockSlices;

/// The passes of a GPT-2, one per unit: the embedding, each block, the head.
pub fn passes(config: &GptConfig) -> Vec<Pass> {
    decoder::passes(config.n_layer, config.tied_head)
}

/// A GPT-2 and its batch, on the host.
struct Gpt2Arch {
    config: GptConfig,
    options: ModelOptions,
    part: SequencePart,
}

impl Gpt2Arch {
    fn attention(&self, layer: usize) -> attention::Shape {
        let heads = self.config.n_head / self.options.sequence_ranks;
        attention::Shape {
            batch: self.options.micro_batch,
            seq: self.options.seq_len,
            heads,
            kv_heads: heads,
            d: self.config.head_dim(),
            window: self.options.seq_len,
            scale: self.config.attention_scale(layer),
        }
    }

    fn block<'a>(&self, p: &Flat<'a>) -> block::Shape<'a> {
        let config = &self.config;
        let site = |of_block| 1 + 3 * p.layer as u32 + of_block;
        let seq = self.options.seq_len;
        let span = self.span();
        let first_line = self.part.first_line(config.n_head, seq);
        let of_attention = p.draws.dropout(config.attn_pdrop, site(0));
        let of_residual = |of_block| {
            let dropout = p.draws.dropout(config.resid_pdrop, site(of_block));
            dropout.map(|dropout| dropout.from_line(span.first))
        };
        block::Shape {
            attention: self.attention(p.layer),
            tokens: span.tokens,
            width: config.n_embd,
            masks: attention::Masks {
                starts: &p.whole.starts,
                dropout: of_attention.map(|dropout| dropout.from_line(first_line)),
            },
            eps: config.layer_norm_epsilon,
            activation: config.activation,
            dropouts: [1, 2].map(of_residual),
        }
    }

    fn embedding_dropout<'a>(&self, p: &Flat<'a>) -> Option<Dropout<'a>> {
        let dropout = p.draws.dropout(self.config.embd_pdrop, 0);
        dropout.map(|dropout| dropout.from_line(self.span().first))
    }

    fn span(&self) -> Span {
        self.part.span(self.options.seq_len)
    }

    fn rows<'a>(&self, p: &Flat<'a>) -> embedding::Rows<'a> {
        embedding::Rows {
            tokens: &p.batch.inputs,
            starts: &p.batch.starts,
            span: self.span(),
        }
    }
}

impl HostArch for Gpt2Arch {
    type Block = BlockSlices;

    const NAME: &'static str = "GPT-2's backward";

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
        [
            s.narrow.slice(0..block.attended.len()),
            s.wide.slice(0..block.qkv.len()),
        ]
    }

    fn fill_table(&self, _table: &mut [f32]) {}

    fn embed(&self, x: &mut [f32], p: &Flat<'_>) {
        let wte = p.get(0, "wte");
        let wpe = p.get(0, "wpe");
        let c = self.config.n_embd;
        embedding::forward(x, self.rows(p), wte, wpe, c);
        if let Some(dropout) = self.embedding_dropout(p) {
            dropout.apply(x, self.span().tokens, c);
        }
    }

    fn embed_backward(&self, grad: &mut [f32], unit: &UnitParams, dx: &mut [f32], p: &Flat<'_>) {
        let [dwte, dwpe] = unit.split_mut(grad);
        let c = self.config.n_embd;
        if let Some(dropout) = self.embedding_dropout(p) {
            dropout.apply(dx, self.span().tokens, c);
        }
        embedding::backward(dwte, dwpe, self.rows(p), dx, c);
    }

    fn forward(&self, part: Forward, block: BlockSlices, x: &[f32], p: &Flat<'_>) {
        block::forward(part, &mut block.view(), x, p, self.block(p));
    }

    fn output(&self, out: &mut [f32], block: BlockSlices, p: &Flat<'_>) {
        block::output(out, &block.view(), p, self.block(p));
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
        block::backward(part, s, &block.view(), x, p, grad, self.block(p));
    }

    fn final_norm(&self, h: &mut HeadView<'_>, x: &[f32], p: &Flat<'_>) {
        layer_norm::forward(
            h.out,
            h.stats,
            x,
            p.get(0, "ln_f.weight"),
            p.get(0, "ln_f.bias"),
            self.config.layer_norm_epsilon,
        );
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
        let [dgain, dbias] = p.unit(0).split_mut(grad);
        layer_norm::backward(dx, dgain, dbias, dout, x, h.stats, p.get(0, "ln_f.weight"));
    }
}

/// Elements of the activations on the host. The options must be valid for the configuration.
fn sizes(config: &GptConfig, options: &ModelOptions) -> Sizes {
    let c = config.n_embd;
    let f = config.n_inner;
    let tokens = options.tokens();
    let row = tokens * c;
    let stats = 2 * tokens;
    let lse = tokens * config.n_head;
    let wide = tokens * f;
    let exchanges = Exchanges::new(options, [config.n_head; 2], config.head_dim());
    let extent = Extent {
        exchanges,
        layers: config.n_layer,
        width: c,
        vocab: config.vocab_size,
        head_stats: 2,
        wide: f.max(3 * c),
        table: 0,
    };

    let block = vec![row, stats, 3 * row, row, lse, row, row, stats, wide, wide];
    Sizes::new(&extent, block, options)
}

/// Bytes of activations on the host. The options must be valid for the configuration.
pub(crate) fn activations_bytes(config: &GptConfig, options: &ModelOptions) -> u64 {
    sizes(config, options).bytes()
}

/// A GPT-2 on the host. The options must be valid for the configuration.
pub(crate) fn on_host(
    config: GptConfig,
    options: ModelOptions,
    pool: &Pool<HostDevice>,
    stream: &HostStream,
    threads: Threads,
    ranks: &ModelRanks<HostDevice>,
) -> Result<Box<dyn HostModel>, ModelError> {
    let arch = Gpt2Arch {
        config,
        part: SequencePart::new(&options, ranks)?,
        options: options.clone(),
    };
    Ok(Box::new(Decoder::new(
        arch, options, pool, stream, threads, ranks,
    )?))
}
