//! The engine of decoder-only transformers on the host, in fp32: passes, buffers, the residual
//! stream, the head and its loss. An architecture ([`HostArch`]) has the rest.
//!
//! Buffers and their lifetimes, with M = batch x seq tokens and C the width:
//!
//! | buffer | elements | lifetime |
//! |---|---|---|
//! | `residual[i]` | M x C, one a block and one for the head | written by forward, read by backward |
//! | `block[i]` | what the architecture keeps | forward to backward; with checkpointing one for all blocks |
//! | `head` | M x C, and the statistics of its norm | forward to backward of the head |
//! | `scratch` | gradients of activations and the logits | a backward pass; `dres` also until the next one |
//! | `table` | constants of the architecture, such as rotary angles | the model's |
//! | `upcast` | the parameters of a pass | within a pass; only for 16-bit parameters |

pub(crate) mod buffers;
pub(crate) mod gpu;
mod head;
pub(crate) mod params;
pub(crate) mod part_rows;
pub(crate) mod sequence;
mod steps;
pub(crate) mod tensor;

use std::sync::Arc;

use zero_alloc::Pool;
use zero_alloc::device::{AnySlice, DType, DeviceError, DeviceId, DeviceSlice, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_shard::UnitSpec;
use zero_trainer::{Batch, Grad, IGNORED, Model, ModelError, ModelRanks, Pass};

use crate::ops::Threads;
use crate::ops::dropout::Draws;
use crate::options::ModelOptions;
use crate::tensor::TensorRank;
use buffers::{Buffers, HeadView, ScratchSlices, ScratchView, Sizes};
use params::{Flat, UnitParams};
use part_rows::{PartRows, RING};
use sequence::{SequenceGroup, SequencePart};
use steps::Steps;
use tensor::TensorGroup;

/// A part of a block's forward. Between two parts, ranks that share a micro-batch exchange what the
/// first has computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Forward {
    /// The first norm's output.
    Norm1,
    /// Queries, keys and values, as attention reads them.
    Qkv,
    /// The output of attention.
    Attention,
    /// The second norm's output.
    Norm2,
    /// The activations that the output reads.
    Mlp,
}

/// A part of a block that is added to the residual stream: the product of activations and a second
/// matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Branch {
    Attention,
    Mlp,
}

/// A part of a block's backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backward {
    /// To `s.narrow`, the gradient of the second norm's output.
    Mlp,
    /// To `s.dres`, that of the residual stream behind attention.
    Norm2,
    /// The gradient of what the heads attend to.
    Attended,
    /// The gradient of queries, keys and values, as attention reads them.
    Attention,
    /// To `s.narrow`, that of the first norm's output.
    Qkv,
    /// To `s.dres`, that of the block's input.
    Norm1,
    /// Adds the partial sums ([`HostArch::partial_elems`]) to the unit's gradient.
    PartialSums,
}

/// An architecture with its batch: what a decoder computes between two points of the residual
/// stream. Shapes: `x`, `out` and gradients `[M, C]`.
pub(crate) trait HostArch: Send + Sync + 'static {
    /// The activations of a block.
    type Block: Copy + Send + 'static;

    /// Its name in messages.
    const NAME: &'static str;

    /// The units: the embedding, each block, the head.
    fn units(&self) -> Vec<UnitSpec>;

    /// Whether the head's matrix is the embedding's.
    fn tied(&self) -> bool;

    /// Tokens of the vocabulary.
    fn vocab(&self) -> usize;

    /// Elements of the buffers.
    fn sizes(&self) -> Sizes;

    /// The activations of a block as parts of `all`, as in [`Sizes::block`].
    fn cut(all: DeviceSlice<f32>, sizes: &[usize]) -> Self::Block;

    /// The residual stream behind attention.
    fn mid(block: Self::Block) -> DeviceSlice<f32>;

    /// Elements at the start of `s.logits` in which a block's backward adds gradients that ranks of
    /// tensor parallelism sum.
    fn partial_elems(&self) -> usize;

    /// The outputs of the two norms.
    fn norms(block: &mut Self::Block) -> [&mut DeviceSlice<f32>; 2];

    /// The activations of a block that attention reads and writes: `qkv` and `attended`.
    fn attention(block: &mut Self::Block) -> [&mut DeviceSlice<f32>; 2];

    /// The gradients of what the heads attend to, and of queries, keys and values, of the lengths
    /// that they have in `block`.
    fn attention_grads(s: ScratchSlices, block: Self::Block) -> [DeviceSlice<f32>; 2];

    /// Writes the constants.
    fn fill_table(&self, table: &mut [f32]);

    /// `x` of the batch, before its dropout.
    fn embed(&self, x: &mut [f32], p: &Flat<'_>);

    /// Applies the embedding's dropout to its output or the gradient of it: rows from `first` on.
    fn drop_embedding(&self, _x: &mut [f32], _first: usize, _p: &Flat<'_>) {}

    /// Adds to `grad`, the gradient of the unit with this layout.
    fn embed_backward(&self, grad: &mut [f32], unit: &UnitParams, dx: &[f32], p: &Flat<'_>);

    /// One part of a block's forward from its input `x`.
    fn forward(&self, part: Forward, block: Self::Block, x: &[f32], p: &Flat<'_>);

    /// `out = residual + dropout(x w + bias)` of a branch.
    fn branch(
        &self,
        branch: Branch,
        out: &mut [f32],
        residual: &[f32],
        block: Self::Block,
        p: &Flat<'_>,
    );

    /// `out = x w` of a branch: with tensor parallelism a part of the sum over its ranks.
    fn product(&self, branch: Branch, out: &mut [f32], block: Self::Block, p: &Flat<'_>);

    /// `out = residual + dropout(sum + bias)` of a branch: rows from `first` on.
    fn add_branch(
        &self,
        branch: Branch,
        out: &mut [f32],
        residual_and_sum: [&[f32]; 2],
        first: usize,
        p: &Flat<'_>,
    );

    /// The gradient of the input of a branch's dropout, `[M, C]`, which its backward reads: `s.dres` if
    /// nothing is dropped.
    fn before_dropout(
        &self,
        s: ScratchSlices,
        _branch: Branch,
        _draws: &Draws,
    ) -> DeviceSlice<f32> {
        s.dres
    }

    /// Computes that gradient, of rows from `first` on, from the gradient `dy` of a branch. Called if a
    /// branch has dropout.
    fn drop_gradient(
        &self,
        _branch: Branch,
        dx: &mut [f32],
        dy: &[f32],
        _first: usize,
        _p: &Flat<'_>,
    ) {
        dx.copy_from_slice(dy);
    }

    /// One part of a block's backward. Adds to `grad`, the unit's gradient. `s.dres` is the gradient
    /// of the output before [`Backward::Mlp`] and of the input after [`Backward::Norm1`]. May overwrite
    /// the block's activations except for the norms' outputs.
    fn backward(
        &self,
        part: Backward,
        s: ScratchView<'_>,
        block: Self::Block,
        x: &[f32],
        p: &Flat<'_>,
        grad: &mut [f32],
    );

    /// `h.out`, the head's norm of `x`.
    fn final_norm(&self, h: &mut HeadView<'_>, x: &[f32], p: &Flat<'_>);

    /// Elements of the parameters of the head's norm.
    fn final_norm_elems(&self) -> usize;

    /// The gradient of the head's norm, a part of that of the head's unit.
    fn final_norm_grad<'g>(&self, grad: &'g mut [f32], p: &Flat<'_>) -> &'g mut [f32];

    /// Adds the gradient of `x` to `dx`, and those of the norm to `dnorm`, as in
    /// [`Self::final_norm_grad`].
    fn final_norm_backward(
        &self,
        dx: &mut [f32],
        dnorm: &mut [f32],
        dout: &[f32],
        x: &[f32],
        h: &HeadView<'_>,
        p: &Flat<'_>,
    );
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

/// A decoder on the host.
pub(crate) struct Decoder<A: HostArch> {
    arch: Arc<A>,
    options: ModelOptions,
    passes: Vec<Pass>,
    params: Arc<Vec<UnitParams>>,
    buffers: Buffers<A::Block>,
    /// The stream that orders the passes.
    stream_id: u64,
    threads: Threads,
    part: SequencePart,
    /// `None` if the rank has all tokens of its sequences.
    sequence: Option<SequenceGroup>,
    /// `None` if the rank has all parameters.
    tensor: Option<TensorGroup>,
    /// `None` if all rows of the residual stream are whole.
    rows: Option<PartRows<HostDevice>>,
    /// This rank's tokens.
    batch: Arc<Batch>,
    /// Those of all ranks that share its sequences.
    whole: Arc<Batch>,
    draws: Arc<Draws>,
}

impl<A: HostArch> Decoder<A> {
    /// Allocates activations from `pool`, for passes on `stream` only, with the other `ranks`. The
    /// options must be valid for the architecture.
    ///
    /// # Errors
    /// Memory ran out, the stream failed, or the options are for other numbers of ranks.
    pub(crate) fn new(
        arch: A,
        options: ModelOptions,
        pool: &Pool<HostDevice>,
        stream: &HostStream,
        threads: Threads,
        ranks: &ModelRanks<HostDevice>,
    ) -> Result<Self, ModelError> {
        let units = arch.units();
        let params = units.iter().map(UnitParams::new).collect();
        let passes = passes(units.len() - 2, arch.tied());
        let upcast = if options.dtype == DType::F32 {
            0
        } else {
            widest_pass(&passes, &units)
        };

        let buffers = Buffers::new::<A>(&arch.sizes(), upcast, pool, stream)?;
        let part = SequencePart::new(&options, ranks)?;
        let group = ranks.sequence.as_ref().zip(buffers.exchange.clone());
        let exchanges = arch.sizes().exchanges;
        let sequence = group.map(|(comm, slices)| SequenceGroup::new(comm, exchanges, slices));
        let rank = TensorRank::new(&options, ranks)?;
        let tensor = ranks
            .tensor
            .as_ref()
            .map(|comm| TensorGroup::new(comm, rank, buffers.stats, arch.vocab(), &options));
        let erase = |slices: &[DeviceSlice<f32>]| slices.iter().map(|s| s.erase()).collect();
        let ring = &buffers.layers.residual[..RING.min(buffers.layers.residual.len())];
        let rows = ranks
            .tensor
            .as_ref()
            .filter(|_| options.partition_activations)
            .map(|comm| PartRows::new(pool.device(), comm, erase(ring), erase(&buffers.parts)));
        let model = Self {
            arch: Arc::new(arch),
            options,
            passes,
            params: Arc::new(params),
            buffers,
            stream_id: stream.id(),
            threads,
            part,
            sequence,
            tensor,
            rows,
            batch: Arc::new(Batch::zeros(0)),
            whole: Arc::new(Batch::zeros(0)),
            draws: Arc::default(),
        };

        model.fill_table(stream)?;
        Ok(model)
    }

    fn fill_table(&self, stream: &HostStream) -> Result<(), ModelError> {
        let table = self.buffers.table;
        let arch = Arc::clone(&self.arch);
        stream.enqueue("constants", move || {
            // SAFETY: the buffer is this model's, and the stream orders its passes.
            arch.fill_table(unsafe { table.as_host_mut() });
            Ok(())
        })?;
        Ok(())
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
        let table = self.buffers.table;
        let params = params.to_vec();
        let grads = grads.to_vec();
        let batch = Arc::clone(&self.batch);
        let whole = Arc::clone(&self.whole);
        let draws = Arc::clone(&self.draws);

        stream.enqueue(label, move || {
            threads.run(|| {
                let mut flats = Vec::with_capacity(params.len());
                let mut used = 0;
                for slice in params {
                    flats.push(in_fp32(slice, upcast, &mut used)?);
                }
                let on_host = |grad: DeviceSlice<f32>| {
                    // SAFETY: `check` found host memory, and that the gradients overlap neither one
                    // another nor a parameter; their makers promised accesses ordered by the
                    // stream.
                    unsafe { grad.as_host_mut() }
                };
                let grads = grads.into_iter().map(on_host).collect();
                work(
                    Flat {
                        units: &all,
                        reads: &reads,
                        flats,
                        layer: pass.saturating_sub(1),
                        // SAFETY: the buffer is this model's, and nothing writes it after `new`.
                        table: unsafe { table.as_host() },
                        batch: &batch,
                        whole: &whole,
                        draws: &draws,
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
}

// SAFETY: as for `Model`.
unsafe impl<A: HostArch> HostModel for Decoder<A> {
    fn logits(
        &self,
        stream: &HostStream,
        params: &[AnySlice],
        out: DeviceSlice<f32>,
    ) -> Result<(), ModelError> {
        let head = self.buffers.head;
        let vocab = self.arch.vocab();
        if self.tensor.is_some() {
            return Err(ModelError::from(
                "no rank of tensor parallelism has all logits: use Model::token_logits",
            ));
        }
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
                head::logits(out, x, &flat, vocab);
            },
        )
    }
}

/// Checks the lengths of a batch, and that documents begin before their tokens.
fn check_batch(batch: &Batch, options: &ModelOptions, vocab: usize) -> Result<(), ModelError> {
    let tokens = options.micro_batch * options.seq_len;
    let seq = options.seq_len;
    let lens = [&batch.inputs, &batch.targets, &batch.starts].map(Vec::len);
    if lens[..2] != [tokens; 2] || ![0, tokens].contains(&lens[2]) {
        let [inputs, targets, starts] = lens;
        return Err(ModelError::from(format!(
            "a batch of {inputs} inputs, {targets} targets and {starts} starts of documents; the model needs {tokens} (starts may be empty)"
        )));
    }

    let starts = batch.starts.iter().enumerate();
    let mut early = starts.filter(|&(row, &start)| start as usize > row % seq);
    if let Some((row, start)) = early.next() {
        let at = row % seq;
        return Err(ModelError::from(format!(
            "the document of token {at} of row {} begins at token {start}, after it",
            row / seq
        )));
    }

    // A kernel reads the row of a token, and writes that of its gradient.
    let is_token = |token: u32| (token as usize) < vocab;
    let input = batch.inputs.iter().position(|&token| !is_token(token));
    let is_target = |token: u32| is_token(token) || token == IGNORED;
    let target = batch.targets.iter().position(|&token| !is_target(token));
    for (what, tokens, at) in [
        ("input", &batch.inputs, input),
        ("target", &batch.targets, target),
    ] {
        if let Some(at) = at {
            return Err(ModelError::from(format!(
                "{what} {at} of the batch is token {}, and the model has {vocab}: use data of its tokenizer",
                tokens[at]
            )));
        }
    }

    Ok(())
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

/// The passes of a decoder of `layers` blocks, one per unit: the embedding, each block, the head.
pub(crate) fn passes(layers: usize, tied: bool) -> Vec<Pass> {
    let head = layers + 1;
    let mut passes = vec![Pass {
        forward_reads: vec![0],
        backward_reads: vec![],
        grads: vec![0],
    }];

    passes.extend((1..head).map(Pass::of_unit));
    let reads = if tied { vec![head, 0] } else { vec![head] };
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

// SAFETY: the slices are used by the operations that a call enqueues on its stream, which is always
// the same, and by collectives on it.
unsafe impl<A: HostArch> Model<HostDevice> for Decoder<A> {
    fn set_batch(&mut self, _stream: &HostStream, batch: &Batch) -> Result<(), ModelError> {
        check_batch(batch, &self.options, self.arch.vocab())?;
        let own = self.part.batch(batch, self.options.seq_len);
        self.whole = Arc::new(batch.clone());
        self.batch = own.map_or_else(|| Arc::clone(&self.whole), Arc::new);
        let count = self.options.micro_batch;
        let draws = batch.rows.map(|rows| Draws::new(rows, count));
        self.draws = Arc::new(draws.unwrap_or_default());
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
            Some(rows) if pass + 1 < self.passes.len() => rows.after_write(stream, pass),
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
            .map(|grad| grad.sums(A::NAME))
            .collect::<Result<Vec<_>, _>>()?;
        if pass + 1 == self.passes.len() {
            return self.backward_of_head(stream, params, grads, loss_scale);
        }

        if pass == 0 {
            let mut steps = Steps::new(self, stream, "backward embedding", pass, params, grads);
            return steps.embed_backward();
        }

        let mut steps = Steps::new(self, stream, "backward block", pass, params, grads);
        if self.options.activation_checkpointing {
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
        let head = self.buffers.head;
        let loss = self.buffers.loss;
        let scratch = self.buffers.scratch;
        let sizes = [self.arch.vocab(), self.options.tokens()];
        let tokens = tokens / self.options.sequence_ranks;
        if let Some(group) = &self.tensor {
            return self.cut_losses(group, stream, params, tokens, None);
        }
        self.enqueue(
            stream,
            "losses",
            self.passes.len() - 1,
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
        let head = self.buffers.head;
        let scratch = self.buffers.scratch;
        let vocab = self.arch.vocab();
        let tokens = self.options.tokens();
        let token = self.part.token(token, &self.options)?;
        if let Some(group) = &self.tensor {
            return self.cut_token_logits(group, stream, params, token);
        }
        self.enqueue(
            stream,
            "token logits",
            self.passes.len() - 1,
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
        self.buffers.loss
    }
}

impl<A: HostArch> Decoder<A> {
    /// Enqueues the forward of a pass, whose input is whole.
    fn enqueue_pass(
        &self,
        stream: &HostStream,
        pass: usize,
        params: &[AnySlice],
    ) -> Result<(), ModelError> {
        if pass == 0 {
            return Steps::new(self, stream, "forward embedding", pass, params, &[]).embed();
        }
        if pass + 1 == self.passes.len() {
            return Steps::new(self, stream, "forward head", pass, params, &[]).final_norm();
        }

        let out = self.buffers.layers.of_pass(pass).output;
        let mut steps = Steps::new(self, stream, "forward block", pass, params, &[]);
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
        let arch = Arc::clone(&self.arch);
        let pass = self.passes.len() - 1;
        let input = self.buffers.layers.of_pass(pass).input;
        let scratch = self.buffers.scratch;
        let head = self.buffers.head;
        let loss = self.buffers.loss;
        loss_scale
            .erase()
            .check_device("backward head: loss scale", DeviceId::HOST)?;
        if let Some(group) = &self.tensor {
            return self.cut_backward_of_head(group, stream, params, grads, loss_scale);
        }

        self.enqueue(
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
                    &*arch,
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
}
