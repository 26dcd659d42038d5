//! GPT-2 on CUDA: the host's passes, with activations in the type of the parameters and statistics
//! in fp32.
//!
//! Buffers and their lifetimes, with M = batch x seq tokens, C the width, F the MLP's width, `act`
//! the type of activations:
//!
//! | buffer | elements | lifetime |
//! |---|---|---|
//! | `residual[i]` | M x C `act`, one a block and one for the head | written by forward, read by backward; offloaded, a ring of three for all |
//! | `checkpoints` | M x C `act`, one a block except two, in pinned host memory | forward to backward; only if offloaded |
//! | `block[i]` | (5 C + 2 F) M `act`, statistics in fp32 | forward to backward; with checkpointing one for all. GELU's output, F M of it, is in `scratch` if it is recomputed |
//! | `head` | M x C `act` | forward to backward of the head |
//! | `scratch` | gradients of activations, partial sums, logits | a backward pass; `dres` also until the next one |
//! | `batch` | tokens and the lists for the embedding's backward | one micro-batch; copied from pinned memory |
//!
//! The backward of a layer norm computes its output again, so that an eighth of the activations is
//! not kept.
//!
//! A pass enqueues kernels and products without allocating. The host waits only for a batch's
//! pinned memory, if the device is several micro-batches behind.
//!
//! GELU's output takes no memory where it is recomputed: it is in the buffer of the gradient that
//! backward writes after its last use, in forward and in backward. cuBLASLt's fused GELU reads the
//! fp32 sum, the recomputed one its 16-bit rounding, so low bits of one gradient differ. A forward
//! without the fusion would have equal bits and cost more than the recomputation.

mod batch;
mod block;
mod buffers;
mod checkpoints;
mod head;

use std::ops::Range;

use zero_alloc::Pool;
use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, DType, DeviceSlice};
use zero_kernels::cuda::Loader;

use super::passes;
use crate::cuda::attention::{Attention, Shape};
use crate::cuda::cross_entropy::{self, Scale, stride_elems};
use crate::cuda::matmul::{Matmul, Product, Timing};
use crate::cuda::{OpError, OpKernels, SumOut, embedding, gelu};
use crate::decoder::buffers::Activations;
use crate::decoder::params::UnitParams;
use crate::gpt2::config::GptConfig;
use crate::options::ModelOptions;
use batch::Batches;
pub(crate) use buffers::gpu_bytes;
use buffers::{Buffers, logits_rows};
use zero_trainer::ModelError;
use zero_trainer::{Batch, Grad, Model, Pass};

/// A GPT-2 on a GPU.
pub struct CudaGpt2 {
    config: GptConfig,
    options: ModelOptions,
    passes: Vec<Pass>,
    params: Vec<UnitParams>,
    ops: Ops,
    batches: Batches,
    buffers: Buffers,
}

/// Kernels and libraries of the passes.
struct Ops {
    kernels: OpKernels,
    matmul: Matmul,
    attention: Attention,
    device: CudaDevice,
}

impl Ops {
    /// Whether the library fuses GELU into the product. Not used in fp32, where its accuracy is not
    /// specified.
    fn fuses_gelu(&self, product: &Product) -> Result<bool, OpError> {
        Ok(self.kernels.dtype() != DType::F32 && self.matmul.supports(product)?)
    }
}

impl CudaGpt2 {
    /// Allocates activations for the model from `pool`, first used on `stream`; compiles the
    /// kernels that are not in the user's [`KernelCache`](zero_kernels::cuda::KernelCache), which
    /// takes seconds.
    ///
    /// # Errors
    /// The configuration is not valid or has sizes that no kernel supports, the sequence is longer
    /// than its positions, memory ran out, or NVRTC or cuBLASLt is missing.
    pub fn new(
        config: GptConfig,
        options: ModelOptions,
        pool: &Pool<CudaDevice>,
        stream: &CudaStream,
    ) -> Result<Self, ModelError> {
        config.validate()?;
        options.validate(config.n_positions)?;
        let logits = logits_rows(&config, &options);
        Self::with_logits_rows(config, options, logits, pool, stream)
    }

    /// [`Self::new`] with the logits of `rows` tokens in memory at once, at least of one. The
    /// gradient of the head's matrix is summed over tokens in parts of `rows`.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub fn with_logits_rows(
        config: GptConfig,
        options: ModelOptions,
        rows: usize,
        pool: &Pool<CudaDevice>,
        stream: &CudaStream,
    ) -> Result<Self, ModelError> {
        config.validate()?;
        options.validate(config.n_positions)?;
        let device = pool.device();
        let kernels = OpKernels::load(&Loader::new(device)?, options.dtype)?;
        let ModelOptions {
            micro_batch: batch,
            seq_len: seq,
            ..
        } = options;

        let shape = Shape {
            batch,
            seq,
            heads: config.n_head,
            d: config.head_dim(),
        };

        let attention = Attention::new(&kernels, shape)?;
        let buffers = Buffers::new(&config, &options, rows, pool, stream)?;
        let timing = if options.matmul_timing {
            Timing::of_user(pool)
        } else {
            None
        };

        let matmul = Matmul::new(device, buffers.matmul_workspace)?.with_timing(timing);
        let params: Vec<_> = config.units().iter().map(UnitParams::new).collect();
        let batches = Batches::new(device, batch * seq, buffers.batch)?;
        let passes = passes(&config);
        let ops = Ops {
            kernels,
            matmul,
            attention,
            device: device.clone(),
        };

        Ok(Self {
            config,
            options,
            passes,
            params,
            ops,
            batches,
            buffers,
        })
    }

    /// Enqueues the logits `[micro_batch * seq_len, stride_elems(vocab)]` after a forward of every
    /// pass.
    ///
    /// # Errors
    /// The stream failed.
    pub fn logits(
        &self,
        stream: &CudaStream,
        params: &[AnySlice],
        out: AnySlice,
    ) -> Result<(), ModelError> {
        let flat = self.flat(self.passes.len() - 1, params);
        Ok(head::logits(
            &self.ops,
            stream,
            out,
            self.buffers.head.out,
            &flat,
            self.config.vocab_size,
        )?)
    }

    fn enqueue_forward(
        &self,
        stream: &CudaStream,
        pass: usize,
        params: &[AnySlice],
    ) -> Result<(), ModelError> {
        let ops = &self.ops;
        let flat = self.flat(pass, params);
        let seq = self.options.seq_len;
        let eps = self.config.layer_norm_epsilon;
        let Activations {
            input,
            output,
            block,
        } = self.buffers.layers.of_pass(pass);

        let scratch = &self.buffers.scratch;
        if pass == 0 {
            let tables = [flat.get(0, "wte"), flat.get(0, "wpe")];
            embedding::forward(
                &ops.kernels,
                stream,
                output,
                self.batches.lists().tokens,
                tables,
                seq,
            )?;
        } else if pass + 1 == self.passes.len() {
            head::forward(ops, stream, &self.buffers.head, input, &flat, eps)?;
        } else {
            block::forward(ops, stream, scratch, &block, input, &flat, eps)?;
            block::output(ops, stream, output, &block, &flat)?;
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
        let ops = &self.ops;
        let flat = Flat {
            grads,
            ..self.flat(pass, params)
        };

        let seq = self.options.seq_len;
        let eps = self.config.layer_norm_epsilon;
        let Activations { input, block, .. } = self.buffers.layers.of_pass(pass);
        let scratch = &self.buffers.scratch;

        if pass == 0 {
            let tables = [flat.sums(0, "wte")?, flat.sums(0, "wpe")?];
            embedding::backward(
                &ops.kernels,
                stream,
                tables,
                &self.batches.lists(),
                scratch.dres,
                seq,
            )?;
        } else if pass + 1 == self.passes.len() {
            let targets = self.batches.targets();
            let divisor = self.batches.divisor();
            let scale = Scale {
                loss_scale,
                divisor,
            };
            head::backward(
                ops,
                stream,
                scratch,
                &self.buffers.head,
                input,
                targets,
                &flat,
                self.config.vocab_size,
                scale,
            )?;
            cross_entropy::add_over(
                &ops.kernels,
                stream,
                self.buffers.loss,
                scratch.losses,
                divisor,
            )?;
        } else {
            if self.options.activation_checkpointing {
                block::forward(ops, stream, scratch, &block, input, &flat, eps)?;
            } else if self.options.recompute_gelu {
                gelu::forward(&ops.kernels, stream, block.act, block.fc)?;
            }
            block::backward(ops, stream, scratch, &block, input, &flat)?;
        }

        Ok(())
    }

    fn flat<'a>(&'a self, pass: usize, params: &'a [AnySlice]) -> Flat<'a> {
        Flat {
            units: &self.params,
            reads: &self.passes[pass].forward_reads,
            params,
            grads: &[],
        }
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
struct Flat<'a> {
    units: &'a [UnitParams],
    reads: &'a [usize],
    params: &'a [AnySlice],
    grads: &'a [Grad],
}

impl Flat<'_> {
    /// The parameter of the `read`-th unit whose name contains `part`.
    fn get(&self, read: usize, part: &str) -> AnySlice {
        self.params[read].slice(self.units[self.reads[read]].range(part))
    }

    /// The gradient of the parameter of the `read`-th unit whose name contains `part`.
    fn grad(&self, read: usize, part: &str) -> Grad {
        self.grads[read].slice(self.units[self.reads[read]].range(part))
    }

    /// The same, for the units of several passes.
    fn sums(&self, read: usize, part: &str) -> Result<DeviceSlice<f32>, ModelError> {
        self.grad(read, part).sums("GPT-2's embedding and head")
    }

    /// The unit and range of the head's matrix `[vocab, c]`; if tied, the embedding's. If the flat
    /// parameter is long enough, the range is extended to `stride_elems(vocab)` rows, because
    /// products of round sizes are faster. The logits of the added rows are ignored and their
    /// gradient is 0. For GPT-2's 50257 tokens these are 47 rows of the position embedding.
    fn head_matrix(&self, vocab: usize, c: usize) -> (usize, Range<usize>) {
        let (read, part) = if self.reads.len() > 1 {
            (1, "wte")
        } else {
            (0, "lm_head")
        };
        let own = self.units[self.reads[read]].range(part);
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

/// Whether a pass of a GPT-2 on a GPU with `passes` passes writes its gradient instead of adding to
/// it: those of blocks do. The head adds the weight's gradient part by part, to that of the
/// embedding if tied.
pub fn writes_grad(passes: usize, pass: usize) -> bool {
    (1..passes.saturating_sub(1)).contains(&pass)
}

impl Model<CudaDevice> for CudaGpt2 {
    fn set_batch(&mut self, stream: &CudaStream, batch: &Batch) -> Result<(), ModelError> {
        self.batches.set(stream, batch)
    }

    fn forward(
        &mut self,
        stream: &CudaStream,
        pass: usize,
        params: &[AnySlice],
    ) -> Result<(), ModelError> {
        // The pass reads row `pass - 1` and writes row `pass`.
        let reads = pass.checked_sub(1);
        let writes = (pass + 1 < self.passes.len()).then_some(pass);
        if let Some(rows) = &mut self.buffers.checkpoints {
            reads.map_or(Ok(()), |row| rows.before_read(stream, row))?;
            writes.map_or(Ok(()), |row| rows.before_write(stream, row))?;
        }
        self.enqueue_forward(stream, pass, params)?;
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
        let reads = pass.checked_sub(1);
        if let (Some(rows), Some(row)) = (&mut self.buffers.checkpoints, reads) {
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
            self.config.vocab_size,
        )?;

        Ok(cross_entropy::add_sum(
            &ops.kernels,
            stream,
            *loss,
            scratch.losses.slice(0..tokens),
        )?)
    }

    fn token_logits(
        &mut self,
        stream: &CudaStream,
        params: &[AnySlice],
        token: usize,
    ) -> Result<AnySlice, ModelError> {
        let flat = self.flat(self.passes.len() - 1, params);
        let Buffers { head, scratch, .. } = &self.buffers;
        let tokens = self.batches.targets().len();
        if token >= tokens {
            return Err(ModelError::from(format!(
                "the logits of token {token} of {tokens}"
            )));
        }
        let vocab = self.config.vocab_size;
        let at = [token, tokens];
        Ok(head::token_logits(
            &self.ops, stream, scratch, head, &flat, vocab, at,
        )?)
    }

    unsafe fn loss(&self) -> DeviceSlice<f64> {
        self.buffers.loss
    }
}
