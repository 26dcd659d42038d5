//! The engine of decoder-only transformers on CUDA: the host's passes, with activations in the type
//! of the parameters and statistics in fp32. An architecture ([`GpuArch`]) has the rest.
//!
//! Buffers and their lifetimes, with M = batch x seq tokens, C the width, `act` the type of
//! activations:
//!
//! | buffer | elements | lifetime |
//! |---|---|---|
//! | `residual[i]` | M x C `act`, one a block and one for the head | written by forward, read by backward; offloaded, a ring of three for all |
//! | `checkpoints` | M x C `act`, one a block except two, in pinned host memory | forward to backward; only if offloaded |
//! | `block[i]` | what the architecture keeps | forward to backward; with checkpointing one for all |
//! | `head` | M x C `act`, and the statistics of its norm | forward to backward of the head |
//! | `scratch` | gradients of activations, partial sums, logits | a backward pass; `dres` also until the next one |
//! | `table` | constants of the architecture, such as rotary angles | the model's |
//! | `exchange` | those of [`crate::decoder::sequence`] | the same; only if ranks share sequences |
//! | `batch` | tokens and the lists for the embedding's backward | one micro-batch; copied from pinned memory |
//!
//! The backward of a norm computes its output again, so that it is not kept.
//!
//! A pass enqueues kernels and products without allocating. The host waits only for a batch's
//! pinned memory, if the device is several micro-batches behind.

mod batch;
pub(crate) mod buffers;
mod checkpoints;
pub(crate) use checkpoints::RING;
mod head;
pub(crate) mod sequence;
mod tensor;

use std::ops::Range;
use std::time::Duration;

use zero_alloc::Pool;
use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, Device, DeviceSlice, Stream};
use zero_kernels::cuda::Loader;
use zero_shard::UnitSpec;
use zero_trainer::{Batch, Grad, Model, ModelError, ModelRanks, Pass};

use super::buffers::Activations;
use super::params::UnitParams;
use super::passes;
use super::sequence::{Exchanges, SequencePart};
use crate::cuda::attention::Masks;
use crate::cuda::cross_entropy::{self, Scale, stride_elems};
use crate::cuda::dropout::Dropout;
use crate::cuda::embedding::TokenLists;
use crate::cuda::matmul::{Matmul, Timing};
use crate::cuda::rope::Angles;
use crate::cuda::{OpError, OpKernels, SumOut};
use crate::ops::Span;
use crate::ops::sequence::Exchange;
use crate::options::ModelOptions;
use crate::tensor::TensorRank;
use batch::{Batches, Layout};
use buffers::{BlockParts, Buffers, Extent, HeadSlices, ScratchSlices, logits_rows};
use sequence::SequenceGroup;
use tensor::TensorGroup;

/// The limit of the upload of the constants.
const LIMIT: Duration = Duration::from_secs(300);

/// An architecture on CUDA: what a decoder enqueues between two points of the residual stream.
/// Shapes: `x`, `out` and gradients `[M, C]`.
pub(crate) trait GpuArch: Send + 'static {
    /// The activations of a block.
    type Block: Copy + Send;

    /// Its name in messages.
    const NAME: &'static str;

    /// The part of the embedding's name that no other parameter of its unit has.
    const EMBEDDING: &'static str;

    /// The units: the embedding, each block, the head.
    fn units(&self) -> Vec<UnitSpec>;

    /// Whether the head's matrix is the embedding's.
    fn tied(&self) -> bool;

    /// Tokens of the vocabulary.
    fn vocab(&self) -> usize;

    /// Sizes of the buffers.
    fn extent(&self) -> Extent;

    /// The activations of a block, in the order of [`Extent::block`].
    fn block(&self, parts: BlockParts, s: &ScratchSlices) -> Result<Self::Block, ModelError>;

    /// Writes the constants.
    fn fill_table(&self, table: &mut [f32]);

    /// Computes `out` of the batch's tokens.
    fn embed(&self, cx: &PassContext<'_>, out: AnySlice) -> Result<(), OpError>;

    /// Adds to the gradient of the embedding's unit; `dx` is that of its output.
    fn embed_backward(&self, cx: &PassContext<'_>, dx: AnySlice) -> Result<(), ModelError>;

    /// Computes a block's output, and the activations that its backward reads.
    fn forward(
        &self,
        cx: &PassContext<'_>,
        a: &Self::Block,
        x: AnySlice,
        out: AnySlice,
    ) -> Result<(), ModelError>;

    /// Computes again what forward did not keep.
    fn recompute(
        &self,
        cx: &PassContext<'_>,
        a: &Self::Block,
        x: AnySlice,
    ) -> Result<(), ModelError>;

    /// Computes the backward of a block, which adds to or writes the unit's gradient. `cx.s.dres` is
    /// the gradient of the output on entry and of the input on return.
    fn backward(
        &self,
        cx: &PassContext<'_>,
        a: &Self::Block,
        x: AnySlice,
    ) -> Result<(), ModelError>;

    /// Computes `h.out`, the head's norm of `x`.
    fn final_norm(&self, cx: &PassContext<'_>, h: &HeadSlices, x: AnySlice) -> Result<(), OpError>;

    /// The gradients of the head's norm, of C elements each.
    fn final_norm_sums(&self, cx: &PassContext<'_>) -> Vec<SumOut>;

    /// Adds the gradient of `x` to `dx`, and those of the norm to `sums`, as in
    /// [`Self::final_norm_sums`].
    fn final_norm_backward(
        &self,
        cx: &PassContext<'_>,
        h: &HeadSlices,
        x: AnySlice,
        dx_and_dout: [AnySlice; 2],
        sums: &[SumOut],
    ) -> Result<(), OpError>;
}

/// What the operations of a pass depend on.
#[derive(Clone, Copy)]
pub(crate) struct PassContext<'a> {
    pub(crate) ops: &'a Ops,
    pub(crate) stream: &'a CudaStream,
    pub(crate) s: &'a ScratchSlices,
    pub(crate) p: Flat<'a>,
    /// The block of the pass, from 0.
    pub(crate) layer: usize,
    pub(crate) lists: TokenLists,
    /// The starts of documents of this rank's tokens.
    pub(crate) documents: Option<DeviceSlice<u32>>,
    /// Those of all tokens of the sequences.
    whole_documents: Option<DeviceSlice<u32>>,
    /// The keys of dropout, unless the batch drops nothing.
    pub(crate) keys: Option<DeviceSlice<u32>>,
    pub(crate) table: DeviceSlice<f32>,
    /// The ranks that have the other parts of the parameters.
    pub(crate) tensor: Option<&'a TensorGroup>,
    part: SequencePart,
    exchanges: &'a Exchanges,
    /// `None` if the rank has all tokens of its sequences.
    group: Option<&'a SequenceGroup>,
}

impl PassContext<'_> {
    /// Whether this rank adds what is the same on all ranks to sums over them.
    pub(crate) fn is_first(&self) -> bool {
        self.tensor.is_none_or(|tensor| tensor.rank.is_first())
    }

    /// Sums `values` over the ranks of tensor parallelism, in place.
    pub(crate) fn sum(&self, values: AnySlice) -> Result<(), OpError> {
        match self.tensor {
            Some(tensor) => tensor.sum(self.stream, values),
            None => Ok(()),
        }
    }

    /// The head's norm of the own rows.
    fn own_head(&self, head: &HeadSlices) -> HeadSlices {
        HeadSlices {
            out: self.own(head.out),
            stats: head.stats,
        }
    }

    /// This rank's tokens of each sequence.
    pub(crate) fn span(&self) -> Span {
        self.part.span(self.exchanges.qkv.seq)
    }

    /// The dropout of the operation `site` with this probability, over this rank's tokens.
    pub(crate) fn dropout(&self, probability: f32, site: u32) -> Option<Dropout> {
        let dropout = Dropout::new(self.keys?, probability, site)?;
        Some(dropout.from_line(self.span().first))
    }

    /// The masks of attention.
    pub(crate) fn masks(&self, probability: f32, site: u32) -> Masks {
        let Exchange { heads, seq, .. } = self.exchanges.qkv;
        let before = self.tensor.map_or(0, |tensor| tensor.rank.rank) * heads * seq;
        let first = before + self.part.first_line(heads, seq);
        let dropout = self
            .keys
            .and_then(|keys| Dropout::new(keys, probability, site));
        Masks {
            starts: self.whole_documents,
            dropout: dropout.map(|dropout| dropout.from_line(first)),
        }
    }

    /// The angles of the positions of this rank's tokens.
    pub(crate) fn angles(&self) -> Angles {
        Angles {
            table: self.table,
            starts: self.documents,
            span: self.span(),
        }
    }

    /// The angles of the positions of all tokens.
    fn angles_of_sequences(&self) -> Angles {
        Angles {
            table: self.table,
            starts: self.whole_documents,
            span: Span::whole(self.exchanges.qkv.seq),
        }
    }
}

/// A model on a GPU, whose logits can be read.
///
/// # Safety
/// As for [`Model`]; it also writes to `out`.
pub unsafe trait GpuModel: Model<CudaDevice> {
    /// Enqueues the logits of this rank's tokens, `[tokens, stride_elems(vocab)]`, after a forward of
    /// every pass. See [`stride_elems`](crate::cuda::cross_entropy::stride_elems).
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

/// A decoder on a GPU.
pub(crate) struct GpuDecoder<A: GpuArch> {
    arch: A,
    /// The stream that orders the passes.
    stream_id: u64,
    passes: Vec<Pass>,
    params: Vec<UnitParams>,
    ops: Ops,
    batches: Batches,
    buffers: Buffers<A::Block>,
    tensor: Option<TensorGroup>,
    options: ModelOptions,
    part: SequencePart,
    exchanges: Exchanges,
    /// `None` if the rank has all tokens of its sequences.
    group: Option<SequenceGroup>,
}

/// Kernels and libraries of the passes.
pub(crate) struct Ops {
    pub(crate) kernels: OpKernels,
    pub(crate) matmul: Matmul,
    device: CudaDevice,
}

impl<A: GpuArch> GpuDecoder<A> {
    /// Allocates activations for the model from `pool`, first used on `stream`; compiles the
    /// kernels that are not in the user's [`KernelCache`](zero_kernels::cuda::KernelCache), which
    /// takes seconds; those that only dropout needs if `dropout` is set. `make` makes the
    /// architecture for the kernels. The logits of `rows` tokens, or of as many as [`logits_rows`]
    /// chooses, are in memory at once.
    ///
    /// # Errors
    /// Sizes that no kernel supports, memory ran out, or NVRTC or cuBLASLt is missing.
    pub(crate) fn new(
        make: impl FnOnce(&OpKernels) -> Result<A, OpError>,
        options: &ModelOptions,
        dropout: bool,
        rows: Option<usize>,
        pool: &Pool<CudaDevice>,
        stream: &CudaStream,
        ranks: &ModelRanks<CudaDevice>,
    ) -> Result<Self, ModelError> {
        let part = SequencePart::new(options, ranks)?;
        let tensor_rank = TensorRank::new(options, ranks)?;
        let device = pool.device();
        let kernels = OpKernels::load(&Loader::new(device)?, options.dtype, dropout)?;
        let arch = make(&kernels)?;
        let extent = arch.extent();
        let vocab = extent.vocab.div_ceil(tensor_rank.ranks);
        let rows = rows.unwrap_or_else(|| logits_rows(vocab, extent.width, options));
        let exchanges = extent.exchanges;
        let comm = ranks.tensor.as_ref();
        let mut buffers = Buffers::new(&arch, extent, options, rows, pool, stream, comm)?;
        let tensor = comm
            .map(|comm| TensorGroup::new(comm, tensor_rank, arch.vocab(), buffers.stats, options));
        let group = ranks.sequence.as_ref().zip(buffers.exchange.take());
        let group = group.map(|(comm, slices)| SequenceGroup::new(comm, exchanges, slices));

        let mut table = vec![0.0; buffers.table.len()];
        if !table.is_empty() {
            arch.fill_table(&mut table);
            let bytes = bytemuck::cast_slice(&table);
            device.upload(stream, bytes, buffers.table.erase(), LIMIT)?;
        }

        let timing = if options.matmul_timing {
            Timing::of_user(pool)
        } else {
            None
        };
        let matmul = Matmul::new(device, buffers.matmul_workspace)?.with_timing(timing);
        let units = arch.units();
        let params: Vec<_> = units.iter().map(UnitParams::new).collect();
        let layout = Layout::new(options, dropout);
        let batches = Batches::new(
            device,
            options,
            part,
            (tensor_rank, arch.vocab()),
            layout,
            buffers.batch,
        )?;
        let passes = passes(units.len() - 2, arch.tied());
        let ops = Ops {
            kernels,
            matmul,
            device: device.clone(),
        };

        Ok(Self {
            arch,
            stream_id: stream.id(),
            passes,
            params,
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
        tensor.map_or_else(|| self.arch.vocab(), |tensor| tensor.part().len)
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
            self.arch.embed(&cx, cx.before_sum(output))?;
            cx.sum_to(output)?;
        } else if pass + 1 == self.passes.len() {
            let head = &self.buffers.head;
            self.arch.final_norm(&cx, &cx.own_head(head), input)?;
            cx.gather_rows(head.out)?;
        } else {
            self.arch.forward(&cx, &block, input, output)?;
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
            self.arch.embed_backward(&cx, scratch.dres)?;
        } else if pass + 1 == self.passes.len() {
            let targets = self.batches.targets();
            let divisor = self.batches.divisor();
            let scale = Scale {
                loss_scale,
                divisor,
            };
            head::backward(&self.arch, &cx, &self.buffers.head, input, targets, scale)?;
            if self.is_first() {
                cross_entropy::add_over(
                    &self.ops.kernels,
                    stream,
                    self.buffers.loss,
                    scratch.losses,
                    divisor,
                )?;
            }
        } else {
            self.arch.recompute(&cx, &block, input)?;
            self.arch.backward(&cx, &block, input)?;
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
                ..self.flat(pass, params)
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

    fn flat<'a>(&'a self, pass: usize, params: &'a [AnySlice]) -> Flat<'a> {
        Flat {
            units: &self.params,
            reads: &self.passes[pass].forward_reads,
            embedding: A::EMBEDDING,
            params,
            grads: &[],
        }
    }
}

// SAFETY: as for `Model`.
unsafe impl<A: GpuArch> GpuModel for GpuDecoder<A> {
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
        let flat = self.flat(self.passes.len() - 1, params);
        let x = self.buffers.head.out;
        Ok(head::logits(
            &self.ops,
            stream,
            out,
            x,
            &flat,
            self.arch.vocab(),
        )?)
    }
}

impl From<Grad> for SumOut {
    fn from(grad: Grad) -> Self {
        match grad {
            Grad::Add(sums) => Self::Add(sums),
            Grad::Write(grad) => Self::Write(grad),
        }
    }
}

/// The flat parameters of a pass, and its flat gradients, by the units that it reads.
#[derive(Clone, Copy)]
pub(crate) struct Flat<'a> {
    units: &'a [UnitParams],
    reads: &'a [usize],
    embedding: &'static str,
    pub(crate) params: &'a [AnySlice],
    pub(crate) grads: &'a [Grad],
}

impl Flat<'_> {
    /// The parameter of the `read`-th unit whose name contains `part`.
    pub(crate) fn get(&self, read: usize, part: &str) -> AnySlice {
        self.params[read].slice(self.units[self.reads[read]].range(part))
    }

    /// The gradient of the parameter of the `read`-th unit whose name contains `part`.
    pub(crate) fn grad(&self, read: usize, part: &str) -> Grad {
        self.grads[read].slice(self.units[self.reads[read]].range(part))
    }

    /// The same, for the units of several passes.
    pub(crate) fn sums(&self, read: usize, part: &str) -> Result<DeviceSlice<f32>, ModelError> {
        self.grad(read, part)
            .sums("the embedding of a model on a GPU")
    }

    /// The unit and range of the head's matrix `[vocab, c]`; if tied, the embedding's. If the flat
    /// parameter is long enough, the range is extended to `stride_elems(vocab)` rows, because
    /// products of round sizes are faster. The logits of the added rows are ignored and their
    /// gradient is 0. For GPT-2's 50257 tokens these are 47 rows of the position embedding.
    fn head_matrix(&self, vocab: usize, c: usize) -> (usize, Range<usize>) {
        let (read, part) = if self.reads.len() > 1 {
            (1, self.embedding)
        } else {
            (0, "lm_head")
        };
        let all = self.units[self.reads[read]].range(part);
        // Behind the rows of the vocabulary may be padding of tensor parallelism.
        let own = all.start..all.start + vocab * c;
        let round = own.start..own.start + stride_elems(vocab) * c;
        (
            read,
            if round.end <= self.params[read].len() {
                round
            } else {
                own
            },
        )
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
unsafe impl<A: GpuArch> Model<CudaDevice> for GpuDecoder<A> {
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
        let flat = self.flat(self.passes.len() - 1, params);
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
        Ok(cross_entropy::add_sum(
            &ops.kernels,
            stream,
            *loss,
            scratch
                .losses
                .slice(0..tokens / self.options.sequence_ranks),
        )?)
    }

    fn token_logits(
        &mut self,
        stream: &CudaStream,
        params: &[AnySlice],
        token: usize,
    ) -> Result<AnySlice, ModelError> {
        self.check_stream(stream)?;
        let flat = self.flat(self.passes.len() - 1, params);
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
