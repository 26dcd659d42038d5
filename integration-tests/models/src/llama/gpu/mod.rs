//! The Llama family on CUDA, with C the width, F the MLP's width and W the elements of a token's
//! queries, keys and values.
//!
//! A block keeps W + C + 2 F elements a token and those of attention's output, and statistics in
//! fp32; with norms of heads also queries and keys before them. SwiGLU's output is not kept: its
//! backward writes it again, over its gradient, for the gradient of the matrix behind it.

mod block;

use zero_alloc::Pool;
use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, DType};
use zero_shard::UnitSpec;
use zero_trainer::{ModelError, ModelRanks};

use super::config::LlamaConfig;
use crate::cuda::attention::{Attention, Shape};
use crate::cuda::rope::{self, Heads};
use crate::cuda::{OpError, OpKernels, SumOut, column_sums, embedding, rms_norm};
use crate::decoder::gpu::GpuDecoder;
use crate::decoder::gpu::arch::{GpuArch, GpuModel};
use crate::decoder::gpu::pass_context::PassContext;
use crate::decoder::gpu::sizes::{self, Extent, workspace_elems};
use crate::decoder::gpu::slices::{BlockParts, HeadSlices, ScratchSlices};
use crate::llama::{exchanges, partial_elems};
use crate::options::{GpuBytes, ModelOptions};
use crate::tensor::TensorRank;
use block::BlockSlices;

/// A model of the family and its kernels of attention.
struct LlamaGpu {
    config: LlamaConfig,
    options: ModelOptions,
    /// Of each block: they differ in their windows.
    attention: Vec<Attention>,
    units: Vec<UnitSpec>,
    tensor: TensorRank,
}

/// A model of the family on a GPU, with the logits of `logits_rows` tokens in memory at once. The
/// configuration and the options must be valid.
///
/// # Errors
/// As for [`GpuDecoder::new`].
pub(crate) fn on_cuda(
    config: LlamaConfig,
    options: ModelOptions,
    logits_rows: Option<usize>,
    pool: &Pool<CudaDevice>,
    stream: &CudaStream,
    ranks: &ModelRanks<CudaDevice>,
) -> Result<Box<dyn GpuModel>, ModelError> {
    let tensor = TensorRank::new(&options, ranks)?;
    let units = tensor.units(config.units())?;
    let config = config.cut(tensor.ranks);
    let seq = options.seq_len;
    let [heads, kv_heads] = exchanges(&config, &options).qkv.heads_of_rank();
    let shape = |layer: usize| Shape {
        batch: options.micro_batch,
        seq,
        heads,
        kv_heads,
        d: config.head_dim,
        window: config.window_of(layer, seq),
    };
    let arch = |kernels: &OpKernels| {
        Ok(LlamaGpu {
            attention: (0..config.layers)
                .map(|layer| Attention::new(kernels, shape(layer)))
                .collect::<Result<_, _>>()?,
            config: config.clone(),
            options: options.clone(),
            units: units.clone(),
            tensor,
        })
    };
    let dropout = config.attention_dropout != 0.0;
    let model = GpuDecoder::new(arch, &options, dropout, logits_rows, pool, stream, ranks)?;
    Ok(Box::new(model))
}

/// The bytes that a model requests. The options must be valid for the configuration.
pub(crate) fn gpu_bytes(config: &LlamaConfig, options: &ModelOptions) -> GpuBytes {
    sizes::gpu_bytes(extent(&config.cut(options.tensor_ranks), options), options)
}

/// The heads of a row of qkv.
fn heads(config: &LlamaConfig) -> Heads {
    Heads {
        queries: config.heads,
        keys: config.kv_heads,
        d: config.head_dim,
    }
}

/// The workspace of a block's sums over rows.
fn partials(config: &LlamaConfig, options: &ModelOptions) -> usize {
    let tokens = options.tokens();
    let width = config.qkv_width();
    let columns = |has: bool, n: usize| match has {
        true => column_sums::workspace_elems(tokens, n),
        false => 0,
    };
    let norms = match config.has_qk_norm() {
        true => rope::workspace_elems(tokens, heads(config)),
        false => 0,
    };
    let attention = match config.qkv_bias {
        true => workspace_elems(options, width),
        false => 0,
    };
    rms_norm::workspace_elems(tokens, config.hidden)
        .max(norms)
        .max(attention)
        .max(columns(
            config.output_bias || config.mlp_bias,
            config.hidden,
        ))
        .max(columns(config.mlp_bias, 2 * config.intermediate))
}

fn extent(config: &LlamaConfig, options: &ModelOptions) -> Extent {
    let dtype = options.dtype;
    let tokens = options.tokens();
    let row = options.rows() * config.hidden;
    let width = config.qkv_width();
    let exchanges = exchanges(config, options);
    let qkv = exchanges.qkv.elems();
    let stats = (options.rows(), DType::F32);
    let normed = match config.has_qk_norm() {
        true => tokens * heads(config).turned(),
        false => 0,
    };
    Extent {
        layers: config.layers,
        width: config.hidden,
        vocab: config.vocab_size,
        heads: config.heads,
        head_stats: 1,
        narrow: config.hidden.max(config.q_width()),
        wide: config.intermediate.max(qkv / tokens),
        partials: partials(config, options),
        sums: partial_elems(config, options),
        matrix: config.hidden * width.max(2 * config.intermediate),
        table: options.seq_len * config.head_dim,
        dropout: config.attention_dropout != 0.0,
        exchanges,
        block: vec![
            stats,
            (qkv, dtype),
            (normed * config.head_dim, dtype),
            (normed, DType::F32),
            (tokens * config.q_width(), dtype),
            (tokens * config.heads, DType::F32),
            (row, dtype),
            stats,
            (2 * tokens * config.intermediate, dtype),
        ],
    }
}

impl LlamaGpu {
    fn rows(&self, cx: &PassContext<'_>) -> embedding::Rows {
        embedding::Rows {
            batch: self.options.micro_batch,
            span: cx.span(),
            documents: None,
            dropout: None,
        }
    }
}

impl GpuArch for LlamaGpu {
    type Block = BlockSlices;

    const NAME: &'static str = "a model of the Llama family";
    const EMBEDDING: &'static str = "embed_tokens";

    fn units(&self) -> Vec<UnitSpec> {
        self.units.clone()
    }

    fn tied(&self) -> bool {
        self.config.tied_head
    }

    fn vocab(&self) -> usize {
        self.config.vocab_size
    }

    fn extent(&self) -> Extent {
        extent(&self.config, &self.options)
    }

    fn block(&self, parts: BlockParts, _s: &ScratchSlices) -> Result<BlockSlices, ModelError> {
        let [
            stats1,
            qkv,
            raw,
            raw_stats,
            attended,
            lse,
            mid,
            stats2,
            gate_up,
        ] = parts.all()?;
        Ok(BlockSlices {
            stats1: stats1.typed()?,
            qkv,
            raw,
            raw_stats: raw_stats.typed()?,
            attended,
            lse: lse.typed()?,
            mid,
            stats2: stats2.typed()?,
            gate_up,
        })
    }

    fn fill_table(&self, table: &mut [f32]) {
        self.config.rope.fill(table, self.config.head_dim);
    }

    fn embed(&self, cx: &PassContext<'_>, out: AnySlice) -> Result<(), OpError> {
        embedding::forward(
            &cx.ops.kernels,
            cx.stream,
            out,
            cx.lists.tokens,
            cx.p.get(0, Self::EMBEDDING),
            None,
            self.rows(cx),
        )
    }

    fn embed_backward(&self, cx: &PassContext<'_>, dx: AnySlice) -> Result<(), ModelError> {
        let sums = cx.p.sums(0, Self::EMBEDDING)?;
        let padding = self.config.padding_token().map(|token| token as u32);
        let part = self.tensor.vocab(self.config.vocab_size);
        let padding = padding.map(|token| part.local(token));
        let kernels = &cx.ops.kernels;
        embedding::backward_tokens(
            kernels,
            cx.stream,
            sums,
            &cx.lists,
            dx,
            padding,
            self.rows(cx),
        )?;
        Ok(())
    }

    fn forward(
        &self,
        cx: &PassContext<'_>,
        a: &BlockSlices,
        x: AnySlice,
        out: AnySlice,
    ) -> Result<(), ModelError> {
        block::forward(self, cx, a, x)?;
        Ok(block::output(self, cx, a, out)?)
    }

    fn recompute(
        &self,
        cx: &PassContext<'_>,
        a: &BlockSlices,
        x: AnySlice,
    ) -> Result<(), ModelError> {
        match self.options.activation_checkpointing {
            true => block::forward(self, cx, a, x),
            false => Ok(()),
        }
    }

    fn backward(
        &self,
        cx: &PassContext<'_>,
        a: &BlockSlices,
        x: AnySlice,
    ) -> Result<(), ModelError> {
        block::backward(self, cx, a, x)
    }

    fn final_norm(&self, cx: &PassContext<'_>, h: &HeadSlices, x: AnySlice) -> Result<(), OpError> {
        let gain = cx.p.get(0, "model.norm.weight");
        let eps = self.config.rms_norm_eps;
        rms_norm::forward(&cx.ops.kernels, cx.stream, h.out, h.stats, x, gain, eps)
    }

    fn final_norm_sums(&self, cx: &PassContext<'_>) -> Vec<SumOut> {
        vec![cx.p.grad(0, "model.norm.weight").into()]
    }

    fn final_norm_backward(
        &self,
        cx: &PassContext<'_>,
        h: &HeadSlices,
        x: AnySlice,
        [dx, dout]: [AnySlice; 2],
        sums: &[SumOut],
    ) -> Result<(), OpError> {
        rms_norm::backward(
            &cx.ops.kernels,
            cx.stream,
            dx,
            sums[0],
            None,
            dout,
            x,
            h.stats,
            cx.p.get(0, "model.norm.weight"),
            cx.s.partials,
        )
    }
}
