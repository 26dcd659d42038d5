//! Decoder-only transformers on the host, in fp32, with products in bf16 where parameters are and
//! the CPU has instructions for them ([`crate::ops::bf16`]): passes, buffers, blocks, the head and
//! its loss. A family of models chooses their sizes and parts ([`DecoderConfig`]).
//!
//! Buffers and their lifetimes, with M = batch x seq tokens and C the width:
//!
//! | buffer | elements | lifetime |
//! |---|---|---|
//! | `residual[i]` | M x C, one a block and one for the head | written by forward, read by backward |
//! | `block[i]` | those of [`slices::BlockSlices`] | forward to backward; with checkpointing one for all blocks |
//! | `head` | M x C, and the statistics of its norm | forward to backward of the head |
//! | `scratch` | gradients of activations and the logits | a backward pass; `dres` also until the next one |
//! | `table` | angles of the rotary embedding | the model's |
//! | `upcast` | the parameters of a pass | within a pass; only for 16-bit parameters, and of them only the vectors if products are in bf16 |

pub(crate) mod block;
pub(crate) mod block_params;
mod buffers;
pub(crate) mod config;
mod engine;
pub(crate) mod gpu;
mod head;
mod operations;
mod params;
pub(crate) mod part_rows;
pub(crate) mod passes;
mod sequence;
mod sequence_group;
pub(crate) mod sequence_part;
mod sizes;
mod slices;
mod steps;
mod tensor;
mod tensor_group;
mod tensor_head;

use std::sync::Arc;

use zero_alloc::Pool;
use zero_alloc::device::{AnySlice, DType, DeviceId, DeviceSlice, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_trainer::{Batch, Grad, Model, ModelError, ModelRanks};

use crate::ops::Threads;
use crate::ops::bf16::Bf16Products;
use crate::ops::dropout::Draws;
use crate::options::ModelOptions;
use crate::tensor::TensorRank;
use buffers::Buffers;
use config::DecoderConfig;
use engine::Engine;
use operations::Operations;
use params::ParamRanges;
use part_rows::{PartRows, RING};
use passes::{check_batch, passes, widest_pass};
use sequence_group::SequenceGroup;
use sequence_part::{Exchanges, SequencePart};
use sizes::Sizes;
use steps::{Groups, Steps};
use tensor_group::TensorGroup;

/// A decoder on the host.
pub(crate) struct Decoder {
    engine: Engine,
    groups: Groups,
    part: SequencePart,
    /// `None` if all rows of the residual stream are whole.
    rows: Option<PartRows<HostDevice>>,
}

impl Decoder {
    /// Allocates activations from `pool`, for passes on `stream` only, with the other `ranks`. The
    /// configuration and the options must be valid.
    ///
    /// # Errors
    /// Memory ran out, the stream failed, or the options are for other numbers of ranks.
    pub(crate) fn new(
        config: &DecoderConfig,
        options: ModelOptions,
        pool: &Pool<HostDevice>,
        stream: &HostStream,
        threads: Threads,
        ranks: &ModelRanks<HostDevice>,
    ) -> Result<Self, ModelError> {
        let part = SequencePart::new(&options, ranks)?;
        let rank = TensorRank::new(&options, ranks)?;
        let units = rank.units(config)?;
        let passes = passes(config);
        let upcast = if options.dtype == DType::F32 {
            0
        } else {
            widest_pass(&passes, &units, &options)?
        };
        let own = config.cut(rank.ranks);
        let exchanges = Exchanges::new(&own, &options);
        let buffers = Buffers::new(&Sizes::new(&own, &options), upcast, pool, stream)?;
        let group = ranks.sequence.as_ref().zip(buffers.exchange.clone());
        let sequence = group.map(|(comm, slices)| SequenceGroup::new(comm, exchanges, slices));
        let tensor = ranks
            .tensor
            .as_ref()
            .map(|comm| TensorGroup::new(comm, rank, config.vocab, buffers.stats, &options));
        let erase = |slices: &[DeviceSlice<f32>]| slices.iter().map(|s| s.erase()).collect();
        let ring = &buffers.layers.residual[..RING.min(buffers.layers.residual.len())];
        let rows = ranks
            .tensor
            .as_ref()
            .filter(|_| options.partition_activations)
            .map(|comm| PartRows::new(pool.device(), comm, erase(ring), erase(&buffers.parts)));
        let engine = Engine {
            ranges: Arc::new(ParamRanges::new(config, &units, &options)?),
            ops: Arc::new(Operations {
                config: own,
                options: options.clone(),
                part,
                tensor: rank,
                exchanges,
                products: Bf16Products::of_run(options.dtype),
            }),
            options,
            passes,
            buffers,
            stream_id: stream.id(),
            threads,
            batch: Arc::new(Batch::zeros(0)),
            whole: Arc::new(Batch::zeros(0)),
            draws: Arc::default(),
        };

        engine.fill_table(stream)?;
        Ok(Self {
            engine,
            groups: Groups { sequence, tensor },
            part,
            rows,
        })
    }
}

/// Bytes of activations on the host. The options must be valid for the configuration.
pub(crate) fn activations_bytes(config: &DecoderConfig, options: &ModelOptions) -> u64 {
    Sizes::new(&config.cut(options.tensor_ranks), options).bytes()
}

/// A model on the host, whose logits can be read.
///
/// # Safety
/// As for [`Model`]; it also writes to `out`.
pub unsafe trait HostModel: Model<HostDevice> {
    /// Enqueues the logits of this rank's tokens, `[tokens, vocab]`, after a forward of every pass.
    ///
    /// # Errors
    /// The stream failed.
    fn logits(
        &self,
        stream: &HostStream,
        params: &[AnySlice],
        out: DeviceSlice<f32>,
    ) -> Result<(), ModelError>;
}

// SAFETY: as for `Model`.
unsafe impl HostModel for Decoder {
    fn logits(
        &self,
        stream: &HostStream,
        params: &[AnySlice],
        out: DeviceSlice<f32>,
    ) -> Result<(), ModelError> {
        let head = self.engine.buffers.head;
        let vocab = self.engine.ops.config.vocab;
        if self.groups.tensor.is_some() {
            return Err(ModelError::from(
                "no rank of tensor parallelism has all logits: use Model::token_logits",
            ));
        }
        self.engine.check(stream, "logits", params, &[out])?;
        self.engine.enqueue(
            stream,
            "logits",
            self.engine.passes.len() - 1,
            params,
            &[],
            move |flat, _| {
                // SAFETY: the buffer is this model's, and the stream orders its passes.
                let x = unsafe { head.out.as_host() };
                // SAFETY: `check` found host memory apart from the parameters; its maker promised
                // ordered accesses.
                let out = unsafe { out.as_host_mut() };
                head::logits(out, x, &flat, vocab);
            },
        )
    }
}

// SAFETY: the slices are used by the operations that a call enqueues on its stream, which is always
// the same, and by collectives on it.
unsafe impl Model<HostDevice> for Decoder {
    fn set_batch(&mut self, _stream: &HostStream, batch: &Batch) -> Result<(), ModelError> {
        check_batch(batch, &self.engine.options, self.engine.ops.config.vocab)?;
        let own = self.part.batch(batch, self.engine.options.seq_len);
        self.engine.whole = Arc::new(batch.clone());
        self.engine.batch = own.map_or_else(|| Arc::clone(&self.engine.whole), Arc::new);
        let count = self.engine.options.micro_batch;
        let draws = batch.rows.map(|rows| Draws::new(rows, count));
        self.engine.draws = Arc::new(draws.unwrap_or_default());
        Ok(())
    }

    fn forward(
        &mut self,
        stream: &HostStream,
        pass: usize,
        params: &[AnySlice],
    ) -> Result<(), ModelError> {
        // The pass reads row `pass - 1` and writes row `pass`.
        if let (Some(rows), Some(row)) = (&mut self.rows, pass.checked_sub(1)) {
            rows.before_read(stream, row)?;
        }
        self.enqueue_pass(stream, pass, params)?;
        match &mut self.rows {
            Some(rows) if pass + 1 < self.engine.passes.len() => rows.after_write(stream, pass),
            _ => Ok(()),
        }
    }

    fn backward(
        &mut self,
        stream: &HostStream,
        pass: usize,
        params: &[AnySlice],
        grads: &[Grad],
        loss_scale: DeviceSlice<f64>,
    ) -> Result<(), ModelError> {
        if let (Some(rows), Some(row)) = (&mut self.rows, pass.checked_sub(1)) {
            rows.before_read(stream, row)?;
        }
        let grads = &grads
            .iter()
            .map(|grad| grad.sums(self.engine.ops.config.names.family))
            .collect::<Result<Vec<_>, _>>()?;
        if pass + 1 == self.engine.passes.len() {
            return self.backward_of_head(stream, params, grads, loss_scale);
        }

        if pass == 0 {
            let mut steps = self.steps(stream, "backward embedding", pass, params, grads);
            return steps.embed_backward();
        }

        let mut steps = self.steps(stream, "backward block", pass, params, grads);
        if self.engine.options.activation_checkpointing {
            steps.forward_block(None)?;
        }
        steps.backward_block()?;
        steps.enqueue()
    }

    fn add_losses(
        &mut self,
        stream: &HostStream,
        params: &[AnySlice],
        tokens: usize,
    ) -> Result<(), ModelError> {
        let head = self.engine.buffers.head;
        let loss = self.engine.buffers.loss;
        let scratch = self.engine.buffers.scratch;
        let sizes = [self.engine.ops.config.vocab, self.engine.options.tokens()];
        let tokens = tokens / self.engine.options.sequence_ranks;
        if let Some(group) = &self.groups.tensor {
            return self.engine.cut_losses(group, stream, params, tokens, None);
        }
        self.engine.enqueue(
            stream,
            "losses",
            self.engine.passes.len() - 1,
            params,
            &[],
            move |flat, _| {
                let targets = &flat.batch.targets[..tokens];
                let sum = head::losses(scratch.view(), &head.view(), targets, &flat, sizes);
                // SAFETY: the buffer is this model's, and the stream orders its passes.
                let loss = unsafe { loss.as_host_mut() };
                loss[0] += sum;
            },
        )
    }

    fn token_logits(
        &mut self,
        stream: &HostStream,
        params: &[AnySlice],
        token: usize,
    ) -> Result<AnySlice, ModelError> {
        let head = self.engine.buffers.head;
        let scratch = self.engine.buffers.scratch;
        let vocab = self.engine.ops.config.vocab;
        let tokens = self.engine.options.tokens();
        let token = self.part.token(token, &self.engine.options)?;
        if let Some(group) = &self.groups.tensor {
            return self.engine.cut_token_logits(group, stream, params, token);
        }
        self.engine.enqueue(
            stream,
            "token logits",
            self.engine.passes.len() - 1,
            params,
            &[],
            move |flat, _| {
                let h = head.view();
                let c = h.out.len() / tokens;
                let out = &h.out[token * c..(token + 1) * c];
                let s = scratch.view();
                head::logits(&mut s.logits[..vocab], out, &flat, vocab);
            },
        )?;
        Ok(scratch.logits.slice(0..vocab).erase())
    }

    unsafe fn loss(&self) -> DeviceSlice<f64> {
        self.engine.buffers.loss
    }
}

impl Decoder {
    /// The steps of a pass.
    fn steps<'a>(
        &'a self,
        stream: &'a HostStream,
        label: &'static str,
        pass: usize,
        params: &'a [AnySlice],
        grads: &'a [DeviceSlice<f32>],
    ) -> Steps<'a> {
        Steps::new(
            &self.engine,
            &self.groups,
            stream,
            label,
            pass,
            params,
            grads,
        )
    }

    /// Enqueues the forward of a pass, whose input is whole.
    fn enqueue_pass(
        &self,
        stream: &HostStream,
        pass: usize,
        params: &[AnySlice],
    ) -> Result<(), ModelError> {
        if pass == 0 {
            return self
                .steps(stream, "forward embedding", pass, params, &[])
                .embed();
        }
        if pass + 1 == self.engine.passes.len() {
            return self
                .steps(stream, "forward head", pass, params, &[])
                .final_norm();
        }

        let out = self.engine.buffers.layers.of_pass(pass).output;
        let mut steps = self.steps(stream, "forward block", pass, params, &[]);
        steps.forward_block(Some(out))?;
        steps.enqueue()
    }

    fn backward_of_head(
        &self,
        stream: &HostStream,
        params: &[AnySlice],
        grads: &[DeviceSlice<f32>],
        loss_scale: DeviceSlice<f64>,
    ) -> Result<(), ModelError> {
        let ops = Arc::clone(&self.engine.ops);
        let pass = self.engine.passes.len() - 1;
        let input = self.engine.buffers.layers.of_pass(pass).input;
        let scratch = self.engine.buffers.scratch;
        let head = self.engine.buffers.head;
        let loss = self.engine.buffers.loss;
        loss_scale
            .erase()
            .check_device("backward head: loss scale", DeviceId::HOST)?;
        if let Some(group) = &self.groups.tensor {
            return self.cut_backward_of_head(group, stream, params, grads, loss_scale);
        }

        self.engine.enqueue(
            stream,
            "backward head",
            pass,
            params,
            grads,
            move |flat, grads| {
                // SAFETY: the buffer is this model's, and the stream orders its passes.
                let x = unsafe { input.as_host() };
                // SAFETY: checked above to be host memory; its maker promised ordered accesses.
                let scale = unsafe { loss_scale.as_host() }[0] as f32 / flat.batch.divisor as f32;
                let sum = head::backward(
                    &ops,
                    scratch.view(),
                    &head.view(),
                    x,
                    &flat.batch.targets,
                    &flat,
                    grads,
                    scale,
                );
                // SAFETY: as above.
                let loss = unsafe { loss.as_host_mut() };
                loss[0] += sum / flat.batch.divisor;
            },
        )
    }

    /// Enqueues the head's backward with tensor parallelism.
    fn cut_backward_of_head(
        &self,
        group: &TensorGroup<HostDevice>,
        stream: &HostStream,
        params: &[AnySlice],
        grads: &[DeviceSlice<f32>],
        loss_scale: DeviceSlice<f64>,
    ) -> Result<(), ModelError> {
        let pass = self.engine.passes.len() - 1;
        let tokens = self.engine.options.tokens();
        self.engine
            .cut_losses(group, stream, params, tokens, Some((grads, loss_scale)))?;
        self.steps(stream, "backward head", pass, params, grads)
            .final_norm_backward()
    }
}
