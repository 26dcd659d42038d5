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
use crate::decoder::Decoder;
use crate::decoder::arch::{Backward, Branch, Forward, HostArch, HostModel};
use crate::decoder::params::{Flat, UnitParams};
use crate::decoder::sequence_part::{Exchanges, SequencePart};
use crate::decoder::sizes::{Extent, Sizes};
use crate::decoder::slices::{HeadView, ScratchSlices, ScratchView};
use crate::ops::{Threads, attention, embedding, linear, rms_norm};
use crate::options::ModelOptions;
use crate::tensor::TensorRank;
use block::{BlockSlices, Shape};

/// The head's norm.
const NORM: &str = "model.norm.weight";

/// A model of the family and its batch, on the host.
struct LlamaArch {
    /// With the sizes of the rank's part of a block.
    config: LlamaConfig,
    options: ModelOptions,
    part: SequencePart,
    tensor: TensorRank,
    units: Vec<UnitSpec>,
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
        let before = self.tensor.rank * config.heads * seq;
        let first_line = before + self.part.first_line(config.heads, seq);
        let span = self.part.span(seq);
        let divides_rows = self.options.sequence_parallel;
        Shape::new(
            config,
            attention,
            span,
            first_line,
            self.tensor,
            divides_rows,
        )
    }
}

impl HostArch for LlamaArch {
    type Block = BlockSlices;

    const NAME: &'static str = "the backward of a Llama";

    fn units(&self) -> Vec<UnitSpec> {
        self.units.clone()
    }

    fn tied(&self) -> bool {
        self.config.tied_head
    }

    fn vocab(&self) -> usize {
        self.config.vocab_size
    }

    fn mid(block: BlockSlices) -> DeviceSlice<f32> {
        block.mid
    }

    fn partial_elems(&self) -> usize {
        partial_elems(&self.config, &self.options)
    }

    fn norms(block: &mut BlockSlices) -> [&mut DeviceSlice<f32>; 2] {
        [&mut block.norm1, &mut block.norm2]
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
        let local = self.tensor.of_batch(p.batch, self.config.vocab_size);
        embedding::forward_tokens(x, &local, p.flats[0], self.config.hidden);
    }

    fn embed_backward(&self, grad: &mut [f32], _unit: &UnitParams, dx: &[f32], p: &Flat<'_>) {
        let vocab = self.config.vocab_size;
        let padding = self.config.padding_token().map(|token| token as u32);
        let padding = padding.map(|token| self.tensor.vocab(vocab).local(token));
        let local = self.tensor.of_batch(p.batch, vocab);
        embedding::backward_tokens(grad, &local, dx, self.config.hidden, padding);
    }

    fn forward(&self, part: Forward, block: BlockSlices, x: &[f32], p: &Flat<'_>) {
        let shape = self.shape(p.layer);
        block::forward(part, &mut block.view(), x, p, &shape);
    }

    fn branch(
        &self,
        branch: Branch,
        out: &mut [f32],
        residual: &[f32],
        block: BlockSlices,
        p: &Flat<'_>,
    ) {
        let shape = self.shape(p.layer);
        block::branch(branch, out, residual, &block.view(), p.flats[0], &shape);
    }

    fn product(&self, branch: Branch, out: &mut [f32], block: BlockSlices, p: &Flat<'_>) {
        let shape = self.shape(p.layer);
        block::product(branch, out, &block.view(), p.flats[0], &shape);
    }

    fn add_branch(
        &self,
        branch: Branch,
        out: &mut [f32],
        [residual, sum]: [&[f32]; 2],
        _first: usize,
        p: &Flat<'_>,
    ) {
        let bias = self.shape(p.layer).bias(branch, p.flats[0]);
        linear::add_residual(out, residual, sum, bias, self.config.hidden);
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
        let gain = p.get(0, NORM);
        rms_norm::forward(h.out, h.stats, x, gain, self.config.rms_norm_eps);
    }

    fn final_norm_elems(&self) -> usize {
        self.config.hidden
    }

    fn final_norm_grad<'g>(&self, grad: &'g mut [f32], p: &Flat<'_>) -> &'g mut [f32] {
        let [gain] = p.unit(0).of_names(grad, [NORM]);
        gain
    }

    fn final_norm_backward(
        &self,
        dx: &mut [f32],
        dnorm: &mut [f32],
        dout: &[f32],
        x: &[f32],
        h: &HeadView<'_>,
        p: &Flat<'_>,
    ) {
        let gain = p.get(0, NORM);
        rms_norm::backward(dx, dnorm, dout, x, h.stats, gain);
    }
}

fn exchanges(config: &LlamaConfig, options: &ModelOptions) -> Exchanges {
    Exchanges::new(options, [config.heads, config.kv_heads], config.head_dim)
}

/// Elements of the gradients of which each rank of tensor parallelism has a part of the sum: those of
/// the norms of heads, and with sequence parallelism of all norms.
pub(crate) fn partial_elems(config: &LlamaConfig, options: &ModelOptions) -> usize {
    let heads = match config.has_qk_norm() && options.tensor_ranks > 1 {
        true => 2 * config.head_dim,
        false => 0,
    };
    let norms = match options.sequence_parallel {
        true => 2 * config.hidden,
        false => 0,
    };
    heads + norms
}

/// Elements of the activations on the host, with the sizes of a rank's part of a block. The options
/// must be valid for the configuration.
fn sizes(config: &LlamaConfig, options: &ModelOptions) -> Sizes {
    let tokens = options.tokens();
    let rows = options.rows();
    let own = rows * config.hidden;
    // Blocks share the outputs of norms if each rank has some rows of them.
    let norm = match options.sequence_parallel {
        true => 0,
        false => own,
    };
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
        partial: partial_elems(config, options),
        table: options.seq_len * config.head_dim,
    };

    let block = vec![
        norm,
        rows,
        qkv,
        tokens * heads * config.head_dim,
        tokens * heads,
        tokens * queries,
        tokens * config.heads,
        own,
        norm,
        rows,
        tokens * 2 * inner,
        tokens * inner,
    ];
    Sizes::new(&extent, block, options)
}

/// Bytes of activations on the host. The options must be valid for the configuration.
pub(crate) fn activations_bytes(config: &LlamaConfig, options: &ModelOptions) -> u64 {
    sizes(&config.cut(options.tensor_ranks), options).bytes()
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
    let tensor = TensorRank::new(&options, ranks)?;
    let arch = LlamaArch {
        units: tensor.units(config.units())?,
        config: config.cut(tensor.ranks),
        tensor,
        part: SequencePart::new(&options, ranks)?,
        options: options.clone(),
    };
    Ok(Box::new(Decoder::new(
        arch, options, pool, stream, threads, ranks,
    )?))
}
