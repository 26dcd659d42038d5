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
use crate::decoder::Decoder;
use crate::decoder::arch::{Backward, Branch, Forward, HostArch, HostModel};
use crate::decoder::params::{Flat, UnitParams};
use crate::decoder::passes;
use crate::decoder::sequence_part::{Exchanges, SequencePart};
use crate::decoder::sizes::{Extent, Sizes};
use crate::decoder::slices::{HeadView, ScratchSlices, ScratchView};
use crate::ops::dropout::{Draws, Dropout};
use crate::ops::{Span, Threads, attention, embedding, layer_norm};
use crate::options::ModelOptions;
use crate::tensor::TensorRank;
use block::BlockSlices;

/// The head's norm.
const FINAL_NORM: [&str; 2] = ["ln_f.weight", "ln_f.bias"];

/// The passes of a GPT-2, one per unit: the embedding, each block, the head.
pub fn passes(config: &GptConfig) -> Vec<Pass> {
    passes::passes(config.n_layer, config.tied_head)
}

/// A GPT-2 and its batch, on the host.
struct Gpt2Arch {
    config: GptConfig,
    options: ModelOptions,
    part: SequencePart,
    tensor: TensorRank,
    units: Vec<UnitSpec>,
}

impl Gpt2Arch {
    fn attention(&self, layer: usize) -> attention::Shape {
        let heads = self.heads() / self.options.sequence_ranks;
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

    /// Heads of this rank's part of the parameters.
    fn heads(&self) -> usize {
        self.config.n_head / self.tensor.ranks
    }

    fn block<'a>(&self, p: &Flat<'a>) -> block::Shape<'a> {
        let config = &self.config;
        let site = |of_block| 1 + 3 * p.layer as u32 + of_block;
        let seq = self.options.seq_len;
        let span = self.span();
        let heads = self.heads();
        let first_line = self.tensor.rank * heads * seq + self.part.first_line(heads, seq);
        let of_attention = p.draws.dropout(config.attn_pdrop, site(0));
        let of_residual = |of_block| {
            let dropout = p.draws.dropout(config.resid_pdrop, site(of_block));
            dropout.map(|dropout| dropout.from_line(span.first))
        };
        block::Shape {
            attention: self.attention(p.layer),
            tokens: span.tokens,
            width: config.n_embd,
            divides_rows: self.options.sequence_parallel,
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

    /// The rows of a batch with these places of its tokens.
    fn rows<'a>(&self, p: &Flat<'a>, tokens: &'a [u32]) -> embedding::Rows<'a> {
        embedding::Rows {
            tokens,
            starts: &p.batch.starts,
            span: self.span(),
        }
    }
}

impl HostArch for Gpt2Arch {
    type Block = BlockSlices;

    const NAME: &'static str = "GPT-2's backward";

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
        [&mut block.ln1, &mut block.ln2]
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
        let local = self.tensor.of_batch(p.batch, self.config.vocab_size);
        match self.tensor.is_first() {
            true => embedding::forward(x, self.rows(p, &local), wte, wpe, c),
            // The first rank adds the positions.
            false => embedding::forward_tokens(x, &local, wte, c),
        }
    }

    fn drop_embedding(&self, x: &mut [f32], first: usize, p: &Flat<'_>) {
        if let Some(dropout) = self.embedding_dropout(p) {
            let tokens = self.span().tokens;
            dropout
                .of_rows_from(first)
                .apply(x, tokens, self.config.n_embd);
        }
    }

    fn embed_backward(&self, grad: &mut [f32], unit: &UnitParams, dx: &[f32], p: &Flat<'_>) {
        let [dwte, dwpe] = unit.split_mut(grad);
        let c = self.config.n_embd;
        let local = self.tensor.of_batch(p.batch, self.config.vocab_size);
        embedding::backward(dwte, dwpe, self.rows(p, &local), dx, c);
    }

    fn forward(&self, part: Forward, block: BlockSlices, x: &[f32], p: &Flat<'_>) {
        block::forward(part, &mut block.view(), x, p, self.block(p));
    }

    fn branch(
        &self,
        branch: Branch,
        out: &mut [f32],
        residual: &[f32],
        block: BlockSlices,
        p: &Flat<'_>,
    ) {
        block::branch(branch, out, residual, &block.view(), p, self.block(p));
    }

    fn product(&self, branch: Branch, out: &mut [f32], block: BlockSlices, p: &Flat<'_>) {
        block::product(branch, out, &block.view(), p);
    }

    fn add_branch(
        &self,
        branch: Branch,
        out: &mut [f32],
        rows: [&[f32]; 2],
        first: usize,
        p: &Flat<'_>,
    ) {
        self.block(p).add_branch(branch, out, rows, first, p);
    }

    fn before_dropout(&self, s: ScratchSlices, branch: Branch, draws: &Draws) -> DeviceSlice<f32> {
        match branch {
            _ if draws.dropout(self.config.resid_pdrop, 1).is_none() => s.dres,
            Branch::Attention => s.wide.slice(0..s.dres.len()),
            Branch::Mlp => s.narrow.slice(0..s.dres.len()),
        }
    }

    fn drop_gradient(
        &self,
        branch: Branch,
        dx: &mut [f32],
        dy: &[f32],
        first: usize,
        p: &Flat<'_>,
    ) {
        match self.block(p).dropout(branch) {
            Some(dropout) => {
                let tokens = self.span().tokens;
                dropout
                    .of_rows_from(first)
                    .of(dx, dy, tokens, self.config.n_embd);
            }
            None => dx.copy_from_slice(dy),
        }
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

    fn final_norm_elems(&self) -> usize {
        2 * self.config.n_embd
    }

    fn final_norm_grad<'g>(&self, grad: &'g mut [f32], p: &Flat<'_>) -> &'g mut [f32] {
        // The bias is behind the gain.
        let [gain, bias] = FINAL_NORM.map(|name| p.unit(0).range(name));
        &mut grad[gain.start..bias.end]
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
        let (dgain, dbias) = dnorm.split_at_mut(self.config.n_embd);
        layer_norm::backward(dx, dgain, dbias, dout, x, h.stats, p.get(0, "ln_f.weight"));
    }
}

/// Elements of the gradients of which each rank of tensor parallelism has a part of the sum: with
/// sequence parallelism those of the norms.
pub(crate) fn partial_elems(config: &GptConfig, options: &ModelOptions) -> usize {
    match options.sequence_parallel {
        true => 4 * config.n_embd,
        false => 0,
    }
}

/// Elements of the activations on the host. The options must be valid for the configuration.
fn sizes(config: &GptConfig, options: &ModelOptions) -> Sizes {
    let c = config.n_embd;
    let f = config.n_inner / options.tensor_ranks;
    let heads = config.n_head / options.tensor_ranks;
    let attended = heads * config.head_dim();
    let tokens = options.tokens();
    let rows = options.rows();
    let own = rows * c;
    // Blocks share the outputs of norms if each rank has some rows of them.
    let norm = match options.sequence_parallel {
        true => 0,
        false => own,
    };
    let stats = 2 * rows;
    let lse = tokens * heads;
    let wide = tokens * f;
    let exchanges = Exchanges::new(options, [heads; 2], config.head_dim());
    let extent = Extent {
        exchanges,
        layers: config.n_layer,
        width: c,
        vocab: config.vocab_size,
        head_stats: 2,
        // The gradient before a dropout is in the same buffer.
        wide: f
            .max(3 * attended)
            .max(if options.tensor_ranks > 1 { c } else { 0 }),
        partial: partial_elems(config, options),
        table: 0,
    };

    let attended = tokens * attended;
    let block = vec![
        norm,
        stats,
        3 * attended,
        attended,
        lse,
        own,
        norm,
        stats,
        wide,
        wide,
    ];
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
    let tensor = TensorRank::new(&options, ranks)?;
    let arch = Gpt2Arch {
        units: tensor.units(config.units())?,
        tensor,
        config,
        part: SequencePart::new(&options, ranks)?,
        options: options.clone(),
    };
    Ok(Box::new(Decoder::new(
        arch, options, pool, stream, threads, ranks,
    )?))
}
