//! GPT-2 on CUDA, with C the width, F the MLP's width.
//!
//! A block keeps (5 C + 2 F) M elements and statistics in fp32. GELU's output, F M of it, takes no
//! memory where it is recomputed: it is in the buffer of the gradient that backward writes after its
//! last use, in forward and in backward. cuBLASLt's fused GELU reads the fp32 sum, the recomputed one
//! its 16-bit rounding, so low bits of one gradient differ. A forward without the fusion would have
//! equal bits and cost more than the recomputation.

mod block;

use zero_alloc::Pool;
use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, DType};
use zero_shard::UnitSpec;
use zero_trainer::{ModelError, ModelRanks};

use crate::cuda::attention::{Attention, Shape};
use crate::cuda::layer_norm::Sums;
use crate::cuda::{OpError, OpKernels, SumOut, column_sums, embedding, gelu, layer_norm};
use crate::decoder::gpu::GpuDecoder;
use crate::decoder::gpu::arch::{GpuArch, GpuModel};
use crate::decoder::gpu::pass_context::PassContext;
use crate::decoder::gpu::sizes::{self, Extent, workspace_elems};
use crate::decoder::gpu::slices::{BlockParts, HeadSlices, ScratchSlices};
use crate::decoder::sequence_part::Exchanges;
use crate::gpt2::config::GptConfig;
use crate::options::{GpuBytes, ModelOptions};
use crate::tensor::TensorRank;
use block::BlockSlices;

/// A GPT-2 and its kernels of attention.
struct Gpt2Gpu {
    config: GptConfig,
    options: ModelOptions,
    attention: Attention,
    units: Vec<UnitSpec>,
    tensor: TensorRank,
}

/// A GPT-2 on a GPU, with the logits of `logits_rows` tokens in memory at once. The configuration
/// and the options must be valid.
///
/// # Errors
/// As for [`GpuDecoder::new`].
pub(crate) fn on_cuda(
    config: GptConfig,
    options: ModelOptions,
    logits_rows: Option<usize>,
    pool: &Pool<CudaDevice>,
    stream: &CudaStream,
    ranks: &ModelRanks<CudaDevice>,
) -> Result<Box<dyn GpuModel>, ModelError> {
    let tensor = TensorRank::new(&options, ranks)?;
    let units = tensor.units(config.units())?;
    let heads = config.n_head / options.tensor_ranks / options.sequence_ranks;
    let shape = Shape {
        batch: options.micro_batch,
        seq: options.seq_len,
        heads,
        kv_heads: heads,
        d: config.head_dim(),
        window: options.seq_len,
    };
    let arch = |kernels: &OpKernels| {
        Ok(Gpt2Gpu {
            attention: Attention::new(kernels, shape)?,
            config: config.clone(),
            options: options.clone(),
            units: units.clone(),
            tensor,
        })
    };
    let dropout = config.drops();
    let model = GpuDecoder::new(arch, &options, dropout, logits_rows, pool, stream, ranks)?;
    Ok(Box::new(model))
}

/// The bytes that a model requests. The options must be valid for the configuration.
pub(crate) fn gpu_bytes(config: &GptConfig, options: &ModelOptions) -> GpuBytes {
    sizes::gpu_bytes(extent(config, options), options)
}

/// Whether GELU's output is kept from forward to backward.
fn keeps_act(options: &ModelOptions) -> bool {
    !options.activation_checkpointing && !options.recompute_gelu
}

/// With sequence parallelism the gradients of which each rank has a part of the sum, of C elements each:
/// of the gains and biases of a block's norms, and of the biases before them.
pub(crate) const PARTIAL_SUMS: usize = 6;

fn extent(config: &GptConfig, options: &ModelOptions) -> Extent {
    let c = config.n_embd;
    let f = config.n_inner / options.tensor_ranks;
    let heads = config.n_head / options.tensor_ranks;
    let attended = heads * config.head_dim();
    let dtype = options.dtype;
    let tokens = options.tokens();
    let row = options.rows() * c;
    // With dropout, the gradient before it is in the same buffer.
    let wide = f.max(3 * attended).max(if config.drops() { c } else { 0 });
    let stats = (2 * options.rows(), DType::F32);
    let act = if keeps_act(options) { tokens * f } else { 0 };
    let dropped = match config.resid_pdrop {
        0.0 => 0,
        _ => column_sums::workspace_elems(tokens, c),
    };
    let attention = workspace_elems(options, 3 * attended);
    Extent {
        layers: config.n_layer,
        width: c,
        vocab: config.vocab_size,
        heads,
        head_stats: 2,
        narrow: c,
        wide,
        partials: layer_norm::workspace_elems(tokens, c)
            .max(attention)
            .max(column_sums::workspace_elems(tokens, f))
            .max(dropped),
        sums: match options.sequence_parallel {
            true => PARTIAL_SUMS * c,
            false => 0,
        },
        matrix: c * wide,
        table: 0,
        dropout: config.drops(),
        exchanges: Exchanges::new(options, [heads; 2], config.head_dim()),
        block: vec![
            stats,
            (3 * tokens * attended, dtype),
            (tokens * attended, dtype),
            (tokens * heads, DType::F32),
            (row, dtype),
            stats,
            (tokens * f, dtype),
            (act, dtype),
        ],
    }
}

impl Gpt2Gpu {
    fn rows(&self, cx: &PassContext<'_>) -> embedding::Rows {
        embedding::Rows {
            batch: self.options.micro_batch,
            span: cx.span(),
            documents: cx.documents,
            dropout: cx.dropout(self.config.embd_pdrop, 0),
        }
    }
}

impl GpuArch for Gpt2Gpu {
    type Block = BlockSlices;

    const NAME: &'static str = "GPT-2";
    const EMBEDDING: &'static str = "wte";

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

    fn block(&self, parts: BlockParts, s: &ScratchSlices) -> Result<BlockSlices, ModelError> {
        let [ln1_stats, qkv, attended, lse, mid, ln2_stats, fc, act] = parts.all()?;
        Ok(BlockSlices {
            ln1_stats: ln1_stats.typed()?,
            qkv,
            attended,
            lse: lse.typed()?,
            mid,
            ln2_stats: ln2_stats.typed()?,
            fc,
            act: if keeps_act(&self.options) {
                act
            } else {
                s.wide.slice(0..fc.len())
            },
        })
    }

    fn fill_table(&self, _table: &mut [f32]) {}

    fn embed(&self, cx: &PassContext<'_>, out: AnySlice) -> Result<(), OpError> {
        embedding::forward(
            &cx.ops.kernels,
            cx.stream,
            out,
            cx.lists.tokens,
            cx.p.get(0, "wte"),
            self.tensor.is_first().then(|| cx.p.get(0, "wpe")),
            self.rows(cx),
        )
    }

    fn embed_backward(&self, cx: &PassContext<'_>, dx: AnySlice) -> Result<(), ModelError> {
        let kernels = &cx.ops.kernels;
        let dwte = cx.p.sums(0, "wte")?;
        let dwpe = cx.p.sums(0, "wpe")?;
        let rows = self.rows(cx);
        embedding::backward_tokens(kernels, cx.stream, dwte, &cx.lists, dx, None, rows)?;
        embedding::backward_positions(kernels, cx.stream, dwpe, dx, rows)?;
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
        Ok(block::output(self, cx, out, a)?)
    }

    fn recompute(
        &self,
        cx: &PassContext<'_>,
        a: &BlockSlices,
        x: AnySlice,
    ) -> Result<(), ModelError> {
        if self.options.activation_checkpointing {
            block::forward(self, cx, a, x)
        } else if self.options.recompute_gelu {
            Ok(gelu::forward(&cx.ops.kernels, cx.stream, a.act, a.fc)?)
        } else {
            Ok(())
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
        let gain = cx.p.get(0, "ln_f.weight");
        let bias = cx.p.get(0, "ln_f.bias");
        let eps = self.config.layer_norm_epsilon;
        let kernels = &cx.ops.kernels;
        layer_norm::forward(kernels, cx.stream, h.out, h.stats, x, gain, bias, eps)
    }

    fn final_norm_sums(&self, cx: &PassContext<'_>) -> Vec<SumOut> {
        let names = ["ln_f.weight", "ln_f.bias"];
        names.map(|name| cx.p.grad(0, name).into()).to_vec()
    }

    fn final_norm_backward(
        &self,
        cx: &PassContext<'_>,
        h: &HeadSlices,
        x: AnySlice,
        [dx, dout]: [AnySlice; 2],
        sums: &[SumOut],
    ) -> Result<(), OpError> {
        let sums = Sums {
            gain: sums[0],
            bias: sums[1],
            residual: None,
        };
        layer_norm::backward(
            &cx.ops.kernels,
            cx.stream,
            dx,
            sums,
            None,
            dout,
            x,
            h.stats,
            cx.p.get(0, "ln_f.weight"),
            cx.s.partials,
        )
    }
}
