//! GPT-2 on the host: pre-LN blocks, learned positions, tanh GELU, tied or untied head, in fp32.
//!
//! Buffers and their lifetimes, with M = batch x seq tokens, C the width, F the MLP's width:
//!
//! | buffer | elements | lifetime |
//! |---|---|---|
//! | `residual[i]` | M x C, one a block and one for the head | written by forward, read by backward |
//! | `block[i]` | about (8 C + 2 F) M | forward to backward; with checkpointing one for all blocks |
//! | `head` | M x C | forward to backward of the head |
//! | `scratch` | gradients of activations and the logits | a backward pass; `dres` also until the next one |
//! | `upcast` | the parameters of a pass | within a pass; only for 16-bit parameters |

mod block;
mod buffers;
pub mod config;
pub mod gpu;
mod head;
mod params;

use std::sync::Arc;

use zero_alloc::Pool;
use zero_alloc::device::{AnySlice, DType, DeviceError, DeviceId, DeviceSlice, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_shard::UnitSpec;
use zero_trainer::param_groups::ParamKind;
use zero_trainer::{Grad, Model, ModelError, Pass};

use self::config::GptConfig;
use crate::ops::{Threads, attention, embedding};
use buffers::{Activations, Buffers};
use params::{Flat, UnitParams};

/// Maximum number of tokens of a micro-batch, so that no buffer size of a valid model overflows 64
/// bits.
const MAX_TOKENS: usize = 1 << 31;

/// The kind of a GPT-2's tensor by its name.
pub fn param_kind(name: &str) -> ParamKind {
    match name {
        _ if name.contains(".wte.") || name.contains(".wpe.") => ParamKind::Embedding,
        _ if name.contains("ln_") => ParamKind::Norm,
        _ if name.ends_with(".bias") => ParamKind::Bias,
        _ => ParamKind::Linear,
    }
}

/// Options of a [`Gpt2`].
#[derive(Clone, Debug)]
pub struct Gpt2Options {
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Type of the parameters.
    pub dtype: DType,
    /// Whether only the input of each block is kept, and the rest is recomputed in backward.
    pub activation_checkpointing: bool,
    /// Whether a GPU keeps those inputs in pinned host memory; needs `activation_checkpointing`. On
    /// the host it changes nothing, because the device's memory is the host's.
    pub offload_activations: bool,
    /// Whether matrix products on a GPU choose their algorithm by time, with choices kept in the
    /// user's folder: see [`Timing`](crate::cuda::matmul::Timing). Otherwise they use the library's
    /// first choice.
    pub matmul_timing: bool,
    /// Whether a GPU computes GELU's output again in backward, in place of `micro_batch` x
    /// `seq_len` x `n_inner` elements a block. In 16-bit types the gradient of the MLP's second
    /// matrix then has other low bits, because cuBLASLt's first output comes from an fp32 input and
    /// the second from the rounded one. With `activation_checkpointing` it changes nothing, and on
    /// the host neither.
    pub recompute_gelu: bool,
}

/// Bytes of a [`CudaGpt2`](gpu::CudaGpt2), as it requests them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuBytes {
    /// Activations and their gradients on the device.
    pub activations: u64,
    /// The batch, the loss and the workspace of matrix products on the device.
    pub workspace: u64,
    /// Inputs of blocks in pinned host memory.
    pub host: u64,
}

impl Gpt2Options {
    /// Checks the configuration and the batch size.
    ///
    /// # Errors
    /// An invalid configuration, or batch sizes outside the model's limits.
    pub fn validate(&self, config: &GptConfig) -> Result<(), ModelError> {
        config.validate()?;
        if self.seq_len == 0 || self.seq_len > config.n_positions || self.micro_batch == 0 {
            return Err(ModelError::from(format!(
                "micro-batch {} x sequence {}: the model supports 1 to {} positions and needs at least one sequence",
                self.micro_batch, self.seq_len, config.n_positions
            )));
        }

        if self
            .micro_batch
            .checked_mul(self.seq_len)
            .is_none_or(|tokens| tokens > MAX_TOKENS)
        {
            return Err(ModelError::from(format!(
                "micro-batch {} x sequence {}: a micro-batch can have at most {MAX_TOKENS} tokens",
                self.micro_batch, self.seq_len
            )));
        }

        if self.offload_activations && !self.activation_checkpointing {
            return Err(ModelError::from(
                "offloaded activations are the inputs of checkpointed blocks: set activation checkpointing, too",
            ));
        }

        Ok(())
    }

    /// The exact bytes of activations on the host. The options must be valid for the configuration.
    pub fn activations_bytes(&self, config: &GptConfig) -> u64 {
        buffers::activations_bytes(config, self)
    }

    /// The exact bytes on a GPU. The options must be valid for the configuration.
    pub fn gpu_bytes(&self, config: &GptConfig) -> GpuBytes {
        gpu::gpu_bytes(config, self)
    }
}

/// A GPT-2 on the host.
pub struct Gpt2 {
    config: GptConfig,
    options: Gpt2Options,
    passes: Vec<Pass>,
    params: Arc<Vec<UnitParams>>,
    buffers: Buffers,
    /// The stream that orders the passes.
    stream_id: u64,
    threads: Threads,
    inputs: Arc<Vec<u32>>,
    targets: Arc<Vec<u32>>,
}

impl Gpt2 {
    /// Allocates activations for the model from `pool`, for passes on `stream` only.
    ///
    /// # Errors
    /// The configuration is not valid, the sequence is longer than its positions, or memory ran
    /// out.
    pub fn new(
        config: GptConfig,
        options: Gpt2Options,
        pool: &Pool<HostDevice>,
        stream: &HostStream,
        threads: Threads,
    ) -> Result<Self, ModelError> {
        options.validate(&config)?;
        let units = config.units();
        let params = units.iter().map(UnitParams::new).collect();
        let passes = passes(&config);
        let upcast = if options.dtype == DType::F32 {
            0
        } else {
            widest_pass(&passes, &units)
        };

        let buffers = Buffers::new(&config, &options, upcast, pool, stream)?;
        Ok(Self {
            config,
            options,
            passes,
            params: Arc::new(params),
            buffers,
            stream_id: stream.id(),
            threads,
            inputs: Arc::default(),
            targets: Arc::default(),
        })
    }

    /// Enqueues the logits `[micro_batch * seq_len, vocab]` after a forward of every pass.
    ///
    /// # Errors
    /// The stream failed.
    pub fn logits(
        &self,
        stream: &HostStream,
        params: &[AnySlice],
        out: DeviceSlice<f32>,
    ) -> Result<(), ModelError> {
        let head = self.buffers.head;
        let vocab = self.config.vocab_size;
        self.check(stream, "logits", params, &[out])?;
        self.enqueue(
            stream,
            "logits",
            self.passes.len() - 1,
            params,
            &[],
            move |flat, _| {
                // SAFETY: the buffer is this model's, and the stream orders its passes.
                let x = unsafe { head.out.as_host() };
                // SAFETY: `check` found host memory apart from the parameters; its maker promised
                // ordered accesses.
                let out = unsafe { out.as_host_mut() };
                head::logits(out, x, flat.head_weight(), vocab);
            },
        )
    }

    /// Enqueues `work` on the threads of this rank. It receives the flat parameters of the pass in
    /// fp32 and the gradients, both as host slices.
    fn enqueue(
        &self,
        stream: &HostStream,
        label: &'static str,
        pass: usize,
        params: &[AnySlice],
        grads: &[DeviceSlice<f32>],
        work: impl FnOnce(Flat<'_>, Vec<&mut [f32]>) + Send + 'static,
    ) -> Result<(), ModelError> {
        self.check(stream, label, params, grads)?;
        let reads = self.passes[pass].forward_reads.clone();
        let all = Arc::clone(&self.params);
        let threads = self.threads.clone();
        let upcast = self.buffers.upcast;
        let params = params.to_vec();
        let grads = grads.to_vec();

        stream.enqueue(label, move || {
            threads.run(|| {
                let mut flats = Vec::with_capacity(params.len());
                let mut used = 0;
                for slice in params {
                    flats.push(in_fp32(slice, upcast, &mut used)?);
                }
                // SAFETY: `check` found host memory, and that the gradients overlap neither one
                // another nor a parameter; their makers promised accesses ordered by the stream.
                let grads = grads
                    .into_iter()
                    .map(|g| unsafe { g.as_host_mut() })
                    .collect();
                work(
                    Flat {
                        units: &all,
                        reads: &reads,
                        flats,
                    },
                    grads,
                );
                Ok(())
            })
        })?;

        Ok(())
    }

    /// Checks the slices of a pass, of which it makes Rust slices: host memory, and what is written
    /// overlaps nothing. The model's own buffers are ordered by one stream.
    fn check(
        &self,
        stream: &HostStream,
        label: &'static str,
        read: &[AnySlice],
        written: &[DeviceSlice<f32>],
    ) -> Result<(), ModelError> {
        if stream.id() != self.stream_id {
            let name = stream.name();
            return Err(ModelError::from(format!(
                "{label}: stream {name} is not the one that the model was made for"
            )));
        }

        let extent =
            |slice: AnySlice| slice.as_ptr().addr()..slice.as_ptr().addr() + slice.len_bytes();
        let written: Vec<AnySlice> = written.iter().map(|slice| slice.erase()).collect();
        for (i, &slice) in written.iter().chain(read).enumerate() {
            slice.check_device(label, DeviceId::HOST)?;
            let a = extent(slice);
            for b in written.iter().take(i).map(|&slice| extent(slice)) {
                if a.start < b.end && b.start < a.end {
                    return Err(ModelError::from(format!(
                        "{label}: a gradient overlaps another argument"
                    )));
                }
            }
        }

        Ok(())
    }

    fn attention_shape(&self) -> attention::Shape {
        attention::Shape {
            batch: self.options.micro_batch,
            seq: self.options.seq_len,
            heads: self.config.n_head,
            d: self.config.head_dim(),
        }
    }
}

/// Returns the flat parameter in fp32: the slice itself, or a copy in `upcast` behind its first
/// `used` elements.
fn in_fp32<'a>(
    slice: AnySlice,
    upcast: DeviceSlice<f32>,
    used: &mut usize,
) -> Result<&'a [f32], DeviceError> {
    if slice.dtype() == DType::F32 {
        // SAFETY: `check` found host memory, apart from what the pass writes; its maker promised
        // ordered accesses.
        return Ok(unsafe { slice.typed::<f32>()?.as_host() });
    }
    let copy = upcast.slice(*used..*used + slice.len());
    *used += slice.len();
    // SAFETY: the workspace is this model's, one part a parameter, and its one stream orders the
    // passes.
    let out = unsafe { copy.as_host_mut() };
    params::upcast(slice, out)?;
    // SAFETY: as above; the writable view has ended.
    Ok(unsafe { copy.as_host() })
}

/// The passes of a GPT-2, one per unit: the embedding, each block, the head.
pub fn passes(config: &GptConfig) -> Vec<Pass> {
    let head = config.n_layer + 1;
    let mut passes = vec![Pass {
        forward_reads: vec![0],
        backward_reads: vec![],
        grads: vec![0],
    }];

    let block = |i| Pass {
        forward_reads: vec![i],
        backward_reads: vec![i],
        grads: vec![i],
    };

    passes.extend((1..head).map(block));
    let reads = if config.tied_head {
        vec![head, 0]
    } else {
        vec![head]
    };

    passes.push(Pass {
        forward_reads: reads.clone(),
        backward_reads: reads.clone(),
        grads: reads,
    });
    passes
}

fn widest_pass(passes: &[Pass], units: &[UnitSpec]) -> usize {
    // The slices that a pass receives have no padding.
    let numel = |&u: &usize| {
        units[u]
            .params
            .iter()
            .map(|p| p.shape.iter().product::<u64>() as usize)
            .sum::<usize>()
    };
    passes
        .iter()
        .map(|p| p.forward_reads.iter().map(numel).sum())
        .max()
        .unwrap_or(0)
}

impl Model<HostDevice> for Gpt2 {
    fn set_batch(
        &mut self,
        _stream: &HostStream,
        inputs: &[u32],
        targets: &[u32],
    ) -> Result<(), ModelError> {
        self.inputs = Arc::new(inputs.to_vec());
        self.targets = Arc::new(targets.to_vec());
        Ok(())
    }

    fn forward(
        &mut self,
        stream: &HostStream,
        pass: usize,
        params: &[AnySlice],
    ) -> Result<(), ModelError> {
        let seq = self.options.seq_len;
        let c = self.config.n_embd;
        let eps = self.config.layer_norm_epsilon;
        let Activations {
            input,
            output,
            block,
        } = self.buffers.layers.of_pass(pass);

        if pass == 0 {
            let tokens = Arc::clone(&self.inputs);
            return self.enqueue(
                stream,
                "forward embedding",
                pass,
                params,
                &[],
                move |flat, _| {
                    // SAFETY: the buffer is this model's, and the stream orders its passes.
                    let x = unsafe { output.as_host_mut() };
                    embedding::forward(x, &tokens, flat.get(0, "wte"), flat.get(0, "wpe"), seq, c);
                },
            );
        }

        // SAFETY of the views below: the buffers are this model's, and the stream orders its
        // passes.
        if pass + 1 == self.passes.len() {
            let head = self.buffers.head;
            return self.enqueue(stream, "forward head", pass, params, &[], move |flat, _| {
                // SAFETY: as above.
                let x = unsafe { input.as_host() };
                head::forward(&mut head.view(), x, &flat, eps);
            });
        }

        let shape = self.attention_shape();
        self.enqueue(
            stream,
            "forward block",
            pass,
            params,
            &[],
            move |flat, _| {
                // SAFETY: as above.
                let x = unsafe { input.as_host() };
                // SAFETY: as above; input and output are different buffers.
                let out = unsafe { output.as_host_mut() };
                block::forward(&mut block.view(), x, &flat, shape, eps);
                block::output(out, &block.view(), &flat);
            },
        )
    }

    fn backward(
        &mut self,
        stream: &HostStream,
        pass: usize,
        params: &[AnySlice],
        grads: &[Grad],
        loss_scale: DeviceSlice<f64>,
    ) -> Result<(), ModelError> {
        let seq = self.options.seq_len;
        let c = self.config.n_embd;
        let eps = self.config.layer_norm_epsilon;
        let Activations { input, block, .. } = self.buffers.layers.of_pass(pass);
        let scratch = self.buffers.scratch;
        let grads = &grads
            .iter()
            .map(|grad| grad.sums("GPT-2's backward"))
            .collect::<Result<Vec<_>, _>>()?;

        // SAFETY of the views below: the buffers are this model's, and the stream orders its
        // passes.
        if pass == 0 {
            let tokens = Arc::clone(&self.inputs);
            let layout = Arc::clone(&self.params);
            return self.enqueue(
                stream,
                "backward embedding",
                pass,
                params,
                grads,
                move |_, mut grads| {
                    let [dwte, dwpe] = layout[0].split_mut(grads[0]);
                    embedding::backward(dwte, dwpe, &tokens, scratch.view().dres, seq, c);
                },
            );
        }

        if pass + 1 == self.passes.len() {
            let head = self.buffers.head;
            let loss = self.buffers.loss;
            let targets = Arc::clone(&self.targets);
            let tokens = self.options.micro_batch * seq;
            loss_scale
                .erase()
                .check_device("backward head: loss scale", DeviceId::HOST)?;
            return self.enqueue(
                stream,
                "backward head",
                pass,
                params,
                grads,
                move |flat, grads| {
                    // SAFETY: as above.
                    let x = unsafe { input.as_host() };
                    // SAFETY: checked above to be host memory; its maker promised ordered accesses.
                    let scale = unsafe { loss_scale.as_host() }[0] as f32 / tokens as f32;
                    let sum = head::backward(
                        scratch.view(),
                        &head.view(),
                        x,
                        &targets,
                        &flat,
                        grads,
                        scale,
                    );
                    // SAFETY: as above.
                    let loss = unsafe { loss.as_host_mut() };
                    loss[0] += sum / tokens as f64;
                },
            );
        }

        let shape = self.attention_shape();
        let again = self.options.activation_checkpointing;
        self.enqueue(
            stream,
            "backward block",
            pass,
            params,
            grads,
            move |flat, mut grads| {
                // SAFETY: as above.
                let x = unsafe { input.as_host() };
                if again {
                    block::forward(&mut block.view(), x, &flat, shape, eps);
                }
                block::backward(scratch.view(), &block.view(), x, &flat, grads[0], shape);
            },
        )
    }

    fn add_losses(
        &mut self,
        stream: &HostStream,
        params: &[AnySlice],
        tokens: usize,
    ) -> Result<(), ModelError> {
        let head = self.buffers.head;
        let loss = self.buffers.loss;
        let scratch = self.buffers.scratch;
        let targets = Arc::clone(&self.targets);
        self.enqueue(
            stream,
            "losses",
            self.passes.len() - 1,
            params,
            &[],
            move |flat, _| {
                let sum = head::losses(scratch.view(), &head.view(), &targets[..tokens], &flat);
                // SAFETY: the buffer is this model's, and the stream orders its passes.
                let loss = unsafe { loss.as_host_mut() };
                loss[0] += sum;
            },
        )
    }

    unsafe fn loss(&self) -> DeviceSlice<f64> {
        self.buffers.loss
    }
}
