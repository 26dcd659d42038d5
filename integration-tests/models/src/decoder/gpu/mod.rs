//! Decoder-only transformers on CUDA: the host's passes, with activations in the type of the parameters
//! and statistics in fp32.
//!
//! Buffers and their lifetimes, with M = batch x seq tokens, C the width, `act` the type of
//! activations:
//!
//! | buffer | elements | lifetime |
//! |---|---|---|
//! | `residual[i]` | M x C `act`, one a block and one for the head | written by forward, read by backward; offloaded, a ring of three for all |
//! | `checkpoints` | M x C `act`, one a block except two, in pinned host memory | forward to backward; only if offloaded |
//! | `block[i]` | those of [`slices::BlockSlices`] | forward to backward; with checkpointing one for all |
//! | `head` | M x C `act`, and the statistics of its norm | forward to backward of the head |
//! | `scratch` | gradients of activations, partial sums, logits; within adapters | a pass; `dres` also until the next one |
//! | `table` | angles of the rotary embedding | the model's |
//! | `exchange` | those of [`crate::decoder::sequence`] | the same; only if ranks share sequences |
//! | `batch` | tokens and the lists for the embedding's backward | one micro-batch; copied from pinned memory |
//!
//! The backward of a norm computes its output again, so that it is not kept.
//!
//! A pass enqueues kernels and products without allocating. The host waits only for a batch's
//! pinned memory, if the device is several micro-batches behind.

mod adapter;
mod batch;
mod block;
mod buffers;
mod check;
mod checkpoints;
pub(crate) use checkpoints::RING;
mod head;
mod linear;
mod pass_context;
mod sequence;
mod sequence_group;
mod sizes;
mod slices;
mod tensor;

use std::time::Duration;

use zero_alloc::Pool;
use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, Device, DeviceSlice, Stream};
use zero_kernels::cuda::Loader;
use zero_trainer::{Batch, Grad, Model, ModelError, ModelRanks, Pass};

use super::config::DecoderConfig;
use super::params::ParamRanges;
use super::passes::passes;
use super::sequence_part::{Exchanges, SequencePart};
use super::slices::Activations;
use super::tensor_group::TensorGroup;
use crate::cuda::attention::{Attention, Shape};
use crate::cuda::cross_entropy::{self, Scale};
use crate::cuda::matmul::{Matmul, Timing};
use crate::cuda::{OpError, OpKernels, embedding, norm};
use crate::ops::sequence::HeadExchange;
use crate::options::ModelOptions;
use crate::tensor::TensorRank;
use batch::{Batches, Layout};
use block::Block;
pub(crate) use block::partial_elems;
use buffers::Buffers;
use pass_context::{Flat, Ops, PassContext};
use sequence_group::SequenceGroup;
pub(crate) use sizes::gpu_bytes;
use sizes::logits_rows;
use slices::BlockSlices;

/// The limit of the upload of the constants.
const LIMIT: Duration = Duration::from_secs(300);

/// A decoder on a GPU.
pub(crate) struct GpuDecoder {
    /// With the sizes of the rank's part of a block.
    config: DecoderConfig,
    /// Of each block: they differ in their windows.
    attention: Vec<Attention>,
    /// The stream that orders the passes.
    stream_id: u64,
    passes: Vec<Pass>,
    ranges: ParamRanges,
    ops: Ops,
    batches: Batches,
    buffers: Buffers,
    tensor: Option<TensorGroup<CudaDevice>>,
    options: ModelOptions,
    part: SequencePart,
    exchanges: Exchanges,
    /// `None` if the rank has all tokens of its sequences.
    group: Option<SequenceGroup>,
}

impl GpuDecoder {
    /// Allocates activations for the model from `pool`, first used on `stream`; compiles the
    /// kernels that are not in the user's [`KernelCache`](zero_kernels::cuda::KernelCache), which
    /// takes seconds. The logits of `rows` tokens, or of as many as [`logits_rows`] chooses, are in
    /// memory at once. The configuration and the options must be valid, and
    /// [`DecoderConfig::check_on_gpu`] must have passed.
    ///
    /// # Errors
    /// Sizes that no kernel supports, memory ran out, or NVRTC or cuBLASLt is missing.
    pub(crate) fn new(
        config: &DecoderConfig,
        options: &ModelOptions,
        rows: Option<usize>,
        pool: &Pool<CudaDevice>,
        stream: &CudaStream,
        ranks: &ModelRanks<CudaDevice>,
    ) -> Result<Self, ModelError> {
        let part = SequencePart::new(options, ranks)?;
        let tensor_rank = TensorRank::new(options, ranks)?;
        let units = tensor_rank.units(config)?;
        let ranges = ParamRanges::new(config, &units, options)?;
        let passes = passes(config);
        let config = config.cut(tensor_rank.ranks);
        let device = pool.device();
        let dropout = config.drops();
        let kernels = OpKernels::load(&Loader::new(device)?, options.dtype, dropout)?;
        let exchanges = Exchanges::new(&config, options);
        let attention = attention(&kernels, &config, &exchanges)?;
        let vocab = config.vocab.div_ceil(tensor_rank.ranks);
        let rows = rows.unwrap_or_else(|| logits_rows(vocab, config.width, options));
        let comm = ranks.tensor.as_ref();
        let mut buffers = Buffers::new(&config, options, rows, pool, stream, comm)?;
        let tensor = comm
            .map(|comm| TensorGroup::new(comm, tensor_rank, config.vocab, buffers.stats, options));
        let group = ranks.sequence.as_ref().zip(buffers.exchange.take());
        let group = group.map(|(comm, slices)| SequenceGroup::new(comm, exchanges, slices));

        let mut table = vec![0.0; buffers.table.len()];
        if !table.is_empty() {
            config.fill_table(&mut table);
            let bytes = bytemuck::cast_slice(&table);
            device.upload(stream, bytes, buffers.table.erase(), LIMIT)?;
        }

        let timing = if options.matmul_timing {
            Timing::of_user(pool)
        } else {
            None
        };
        let matmul = Matmul::new(device, buffers.matmul_workspace)?.with_timing(timing);
        let layout = Layout::new(options, dropout);
        let batches = Batches::new(
            device,
            options,
            part,
            (tensor_rank, config.vocab),
            layout,
            buffers.batch,
        )?;
        let ops = Ops {
            kernels,
            matmul,
            device: device.clone(),
        };

        Ok(Self {
            config,
            attention,
            stream_id: stream.id(),
            passes,
            ranges,
            ops,
            batches,
            buffers,
            tensor,
            options: options.clone(),
            part,
            exchanges,
            group,
        })
    }

    /// Whether this rank adds the losses.
    fn is_first(&self) -> bool {
        let tensor = self.tensor.as_ref();
        tensor.is_none_or(|tensor| tensor.rank.is_first())
    }

    /// Tokens of this rank's part of the vocabulary.
    fn vocab_part(&self) -> usize {
        let tensor = self.tensor.as_ref();
        tensor.map_or_else(|| self.config.vocab, |tensor| tensor.part().len)
    }

    /// Refuses another stream than the one that orders the model's own buffers.
    fn check_stream(&self, stream: &CudaStream) -> Result<(), ModelError> {
        if stream.id() == self.stream_id {
            return Ok(());
        }
        let name = stream.name();
        Err(ModelError::from(format!(
            "stream {name} is not the one that the model was made for"
        )))
    }

    fn enqueue_forward(
        &self,
        stream: &CudaStream,
        pass: usize,
        params: &[AnySlice],
    ) -> Result<(), ModelError> {
        let cx = self.context(stream, pass, params, &[]);
        let Activations {
            input,
            output,
            block,
        } = self.buffers.layers.of_pass(pass);

        if pass == 0 {
            self.embed(&cx, cx.before_sum(output))?;
            cx.sum_to(output)?;
        } else if pass + 1 == self.passes.len() {
            let head = &self.buffers.head;
            let own = cx.own_head(head);
            let norm = cx.last_norm(&self.config);
            norm::forward(&self.ops.kernels, stream, norm, own.out, own.stats, input)?;
            cx.gather_rows(head.out)?;
        } else {
            self.block(&cx, block).output(input, output)?;
        }

        Ok(())
    }

    fn enqueue_backward(
        &self,
        stream: &CudaStream,
        pass: usize,
        params: &[AnySlice],
        grads: &[Grad],
        loss_scale: DeviceSlice<f64>,
    ) -> Result<(), ModelError> {
        let cx = self.context(stream, pass, params, grads);
        let Activations { input, block, .. } = self.buffers.layers.of_pass(pass);
        let scratch = &self.buffers.scratch;

        if pass == 0 {
            cx.gather_rows(scratch.dres)?;
            self.embed_backward(&cx, scratch.dres)?;
        } else if pass + 1 == self.passes.len() {
            let targets = self.batches.targets();
            let divisor = self.batches.divisor();
            let scale = Scale {
                loss_scale,
                divisor,
            };
            head::backward(&self.config, &cx, &self.buffers.head, input, targets, scale)?;
            if self.is_first() {
                let loss = self.buffers.loss;
                let kernels = &self.ops.kernels;
                cross_entropy::add(kernels, stream, loss, scratch.losses, Some(divisor))?;
            }
        } else {
            let block = self.block(&cx, block);
            block.recompute(input, &self.options)?;
            block.backward(input)?;
        }

        Ok(())
    }

    fn context<'a>(
        &'a self,
        stream: &'a CudaStream,
        pass: usize,
        params: &'a [AnySlice],
        grads: &'a [Grad],
    ) -> PassContext<'a> {
        PassContext {
            ops: &self.ops,
            stream,
            s: &self.buffers.scratch,
            p: Flat {
                grads,
                ..self.flat(params)
            },
            layer: pass.saturating_sub(1),
            lists: self.batches.lists(),
            documents: self.batches.documents(),
            whole_documents: self.batches.whole_documents(),
            keys: self.batches.keys(),
            table: self.buffers.table,
            tensor: self.tensor.as_ref(),
            part: self.part,
            exchanges: &self.exchanges,
            group: self.group.as_ref(),
        }
    }

    fn flat<'a>(&'a self, params: &'a [AnySlice]) -> Flat<'a> {
        Flat {
            ranges: &self.ranges,
            params,
            grads: &[],
        }
    }

    /// The block of a pass.
    fn block<'a>(&'a self, cx: &'a PassContext<'a>, a: BlockSlices) -> Block<'a> {
        Block::new(cx, &self.config, &self.attention[cx.layer], a)
    }

    fn rows(&self, cx: &PassContext<'_>) -> embedding::BatchLayout {
        embedding::BatchLayout {
            batch: self.options.micro_batch,
            span: cx.span(),
            documents: cx.documents,
            dropout: cx.dropout(self.config.dropout.embedding, 0),
        }
    }

    /// Computes `out` of the batch's tokens.
    fn embed(&self, cx: &PassContext<'_>, out: AnySlice) -> Result<(), OpError> {
        let [tokens, positions] = [&self.ranges.tokens, &self.ranges.positions];
        let [tokens, positions] =
            [tokens, positions].map(|range| cx.p.params[0].slice(range.clone()));
        embedding::forward(
            &cx.ops.kernels,
            cx.stream,
            out,
            cx.lists.tokens,
            tokens,
            (cx.is_first() && !positions.is_empty()).then_some(positions),
            self.rows(cx),
        )
    }

    /// Adds to the gradient of the embedding's unit; `dx` is that of its output.
    fn embed_backward(&self, cx: &PassContext<'_>, dx: AnySlice) -> Result<(), ModelError> {
        let kernels = &cx.ops.kernels;
        let grad = cx.p.grads[0].sums("the embedding of a model on a GPU")?;
        let ParamRanges {
            tokens, positions, ..
        } = &self.ranges;
        let padding = cx.tensor_rank().padding(&self.config);
        let rows = self.rows(cx);
        let dtokens = grad.slice(tokens.clone());
        embedding::backward_tokens(kernels, cx.stream, dtokens, &cx.lists, dx, padding, rows)?;
        if !positions.is_empty() {
            let dpositions = grad.slice(positions.clone());
            embedding::backward_positions(kernels, cx.stream, dpositions, dx, rows)?;
        }
        Ok(())
    }
}

/// The kernels of attention of each block.
fn attention(
    kernels: &OpKernels,
    config: &DecoderConfig,
    exchanges: &Exchanges,
) -> Result<Vec<Attention>, OpError> {
    let HeadExchange { batch, seq, d, .. } = exchanges.qkv;
    let [heads, kv_heads] = exchanges.qkv.heads_of_rank();
    let shape = |layer| Shape {
        batch,
        seq,
        heads,
        kv_heads,
        d,
        window: config.window_of(layer, seq),
    };
    let blocks = (0..config.layers).map(|layer| Attention::new(kernels, shape(layer)));
    blocks.collect()
}

/// A model on a GPU, whose logits can be read.
///
/// # Safety
/// As for [`Model`]; it also writes to `out`.
pub unsafe trait GpuModel: Model<CudaDevice> {
    /// Enqueues the logits of this rank's tokens, `[tokens, stride_elems(vocab)]`, after a forward
    /// of every pass. See [`stride_elems`](crate::cuda::cross_entropy::stride_elems).
    ///
    /// # Errors
    /// The stream failed.
    fn logits(
        &self,
        stream: &CudaStream,
        params: &[AnySlice],
        out: AnySlice,
    ) -> Result<(), ModelError>;
}

// SAFETY: as for `Model`.
unsafe impl GpuModel for GpuDecoder {
    fn logits(
        &self,
        stream: &CudaStream,
        params: &[AnySlice],
        out: AnySlice,
    ) -> Result<(), ModelError> {
        self.check_stream(stream)?;
        if self.tensor.is_some() {
            return Err(ModelError::from(
                "no rank of tensor parallelism has all logits: use Model::token_logits",
            ));
        }
        let flat = self.flat(params);
        let x = self.buffers.head.out;
        Ok(head::logits(
            &self.ops,
            stream,
            out,
            x,
            &flat,
            self.config.vocab,
        )?)
    }
}

/// Whether a pass of a model on a GPU with `passes` passes writes its gradient instead of adding to
/// it: those of blocks do. The head adds the weight's gradient part by part, to that of the
/// embedding if tied.
pub fn writes_grad(passes: usize, pass: usize) -> bool {
    (1..passes.saturating_sub(1)).contains(&pass)
}

// SAFETY: the slices are used by the operations that a call enqueues on its stream, and by
// collectives on it.
unsafe impl Model<CudaDevice> for GpuDecoder {
    fn set_batch(&mut self, stream: &CudaStream, batch: &Batch) -> Result<(), ModelError> {
        self.check_stream(stream)?;
        self.batches.set(stream, batch)
    }

    fn forward(
        &mut self,
        stream: &CudaStream,
        pass: usize,
        params: &[AnySlice],
    ) -> Result<(), ModelError> {
        self.check_stream(stream)?;
        // The pass reads row `pass - 1` and writes row `pass`.
        let reads = pass.checked_sub(1);
        let writes = (pass + 1 < self.passes.len()).then_some(pass);
        if let Some(rows) = &mut self.buffers.checkpoints {
            reads.map_or(Ok(()), |row| rows.before_read(stream, row))?;
            writes.map_or(Ok(()), |row| rows.before_write(stream, row))?;
        }
        if let (Some(rows), Some(row)) = (&mut self.buffers.rows, reads) {
            rows.before_read(stream, row)?;
        }
        self.enqueue_forward(stream, pass, params)?;
        if let (Some(rows), Some(row)) = (&mut self.buffers.rows, writes) {
            rows.after_write(stream, row)?;
        }
        match (&mut self.buffers.checkpoints, writes) {
            (Some(rows), Some(row)) => rows.after_write(stream, row),
            _ => Ok(()),
        }
    }

    fn backward(
        &mut self,
        stream: &CudaStream,
        pass: usize,
        params: &[AnySlice],
        grads: &[Grad],
        loss_scale: DeviceSlice<f64>,
    ) -> Result<(), ModelError> {
        self.check_stream(stream)?;
        let reads = pass.checked_sub(1);
        if let (Some(rows), Some(row)) = (&mut self.buffers.checkpoints, reads) {
            rows.before_read(stream, row)?;
        }
        if let (Some(rows), Some(row)) = (&mut self.buffers.rows, reads) {
            rows.before_read(stream, row)?;
        }
        self.enqueue_backward(stream, pass, params, grads, loss_scale)?;
        match (&mut self.buffers.checkpoints, reads) {
            (Some(rows), Some(row)) => rows.after_backward(stream, row),
            _ => Ok(()),
        }
    }

    fn writes_grad(&self, pass: usize, _unit: usize) -> bool {
        writes_grad(self.passes.len(), pass)
    }

    fn add_losses(
        &mut self,
        stream: &CudaStream,
        params: &[AnySlice],
        tokens: usize,
    ) -> Result<(), ModelError> {
        self.check_stream(stream)?;
        let ops = &self.ops;
        let flat = self.flat(params);
        let Buffers {
            head,
            scratch,
            loss,
            ..
        } = &self.buffers;

        head::losses(
            ops,
            stream,
            scratch,
            head,
            self.batches.targets(),
            &flat,
            (self.vocab_part(), self.tensor.as_ref()),
        )?;

        if !self.is_first() {
            return Ok(());
        }
        let own = tokens / self.options.sequence_ranks;
        let losses = scratch.losses.slice(0..own);
        Ok(cross_entropy::add(
            &ops.kernels,
            stream,
            *loss,
            losses,
            None,
        )?)
    }

    fn token_logits(
        &mut self,
        stream: &CudaStream,
        params: &[AnySlice],
        token: usize,
    ) -> Result<AnySlice, ModelError> {
        self.check_stream(stream)?;
        let flat = self.flat(params);
        let Buffers { head, scratch, .. } = &self.buffers;
        let tokens = self.batches.targets().len();
        let token = self.part.token(token, &self.options)?;
        let vocab = (self.vocab_part(), self.tensor.as_ref());
        let at = [token, tokens];
        Ok(head::token_logits(
            &self.ops, stream, scratch, head, &flat, vocab, at,
        )?)
    }

    unsafe fn loss(&self) -> DeviceSlice<f64> {
        self.buffers.loss
    }
}
