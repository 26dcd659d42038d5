//! The activations of a [`super::Gpt2`]: what it allocates, and the views that its passes take.
//!
//! A `*Slices` value is what an enqueued pass captures; its `view()` gives the plain slices that the
//! arithmetic works on.

use zero_alloc::device::{DType, DeviceSlice};
use zero_alloc::host::{HostDevice, HostStream};
use zero_alloc::{Block, Pool, Purpose};

use super::Gpt2Options;
use crate::error::TrainError;
use crate::model::config::GptConfig;

/// Logits of at most this many elements are in memory at once (64 MiB).
const LOGITS_ELEMS: usize = 16 << 20;

/// Declares slices cut from one allocation, and the view of them as host slices.
macro_rules! views {
    ($(#[$doc:meta])* $slices:ident, $view:ident { $($field:ident),* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $slices { $(pub(super) $field: DeviceSlice<f32>),* }

        pub(super) struct $view<'a> { $(pub(super) $field: &'a mut [f32]),* }

        impl $slices {
            /// Elements of each field in order, cut from `all`.
            fn cut(all: DeviceSlice<f32>, sizes: &[usize]) -> Self {
                let mut parts = cut(all, sizes);
                Self { $($field: parts.next().unwrap_or_else(|| all.slice(0..0))),* }
            }

            /// The buffers as host slices; for the pass that the stream runs now.
            pub(super) fn view<'a>(self) -> $view<'a> {
                // SAFETY: distinct parts of a block that the model holds as long as its stream runs, and
                // all passes that use them are ordered by that one stream.
                $view { $($field: unsafe { self.$field.as_host_mut() }),* }
            }
        }
    };
}

views! {
    /// Activations of a block: `[M, C]` but for the statistics `[M, 2]`, `qkv` `[M, 3 C]`, `lse`
    /// `[batch, heads, seq]`, `fc` and `act` `[M, F]`.
    BlockSlices, BlockView { ln1, ln1_stats, qkv, attended, lse, mid, ln2, ln2_stats, fc, act }
}
views! {
    /// The head's layer norm: `out` `[M, C]`, `stats` `[M, 2]`.
    HeadSlices, HeadView { out, stats }
}
views! {
    /// Gradients of activations: `dres` and `narrow` `[M, C]`, `wide` `[M, max(F, 3 C)]`, and some rows
    /// of `logits`.
    ScratchSlices, ScratchView { dres, narrow, wide, logits }
}

/// What a pass reads and writes.
pub(super) struct Activations {
    pub(super) input: DeviceSlice<f32>,
    pub(super) output: DeviceSlice<f32>,
    pub(super) block: BlockSlices,
}

/// All buffers; the blocks are held so that the slices stay valid.
pub(super) struct Buffers {
    residual: Vec<DeviceSlice<f32>>,
    blocks: Vec<BlockSlices>,
    pub(super) head: HeadSlices,
    pub(super) scratch: ScratchSlices,
    pub(super) upcast: DeviceSlice<f32>,
    pub(super) loss: DeviceSlice<f64>,
    held: Vec<Block<HostDevice>>,
    stream: HostStream,
}

impl Drop for Buffers {
    fn drop(&mut self) {
        for block in &mut self.held {
            // A stream that refuses is closed, and uses the block no more.
            let _closed = block.record_use(&self.stream);
        }
    }
}

/// Elements of the activations, in fp32.
struct Sizes {
    /// Of the input of a block or of the head: `[M, C]`.
    row: usize,
    /// How many blocks keep theirs.
    distinct: usize,
    block: [usize; 10],
    head: [usize; 2],
    scratch: [usize; 4],
}

impl Sizes {
    /// For options that [`Gpt2Options::validate`] accepts, so that nothing overflows.
    fn new(config: &GptConfig, options: &Gpt2Options) -> Self {
        let (c, f) = (config.n_embd, config.n_inner);
        let tokens = options.micro_batch * options.seq_len;
        let row = tokens * c;
        let logits = config.vocab_size * (LOGITS_ELEMS / config.vocab_size).clamp(1, tokens);
        let (stats, lse, wide) = (2 * tokens, tokens * config.n_head, tokens * f);
        Self {
            row,
            distinct: if options.activation_checkpointing { 1 } else { config.n_layer },
            block: [row, stats, 3 * row, row, lse, row, row, stats, wide, wide],
            head: [row, stats],
            scratch: [row, row, tokens * f.max(3 * c), logits],
        }
    }
}

/// Bytes of activations of a model on the host; for options that [`Gpt2Options::validate`] accepts.
pub(super) fn activations_bytes(config: &GptConfig, options: &Gpt2Options) -> u64 {
    let Sizes { row, distinct, block, head, scratch } = Sizes::new(config, options);
    let sum = |sizes: &[usize]| sizes.iter().map(|&n| n as u128).sum::<u128>();
    let kept = (config.n_layer as u128 + 1) * row as u128 + distinct as u128 * sum(&block);
    u64::try_from(4 * (kept + sum(&head) + sum(&scratch))).unwrap_or(u64::MAX)
}

impl Buffers {
    pub(super) fn new(
        config: &GptConfig,
        options: &Gpt2Options,
        upcast: usize,
        pool: &Pool<HostDevice>,
        stream: &HostStream,
    ) -> Result<Self, TrainError> {
        let Sizes { row, distinct, block, head, scratch } = Sizes::new(config, options);
        let mut held = Vec::new();
        let mut take = |elems: usize, dtype, purpose| {
            let block = pool.allocate(elems, dtype, purpose, stream)?;
            // SAFETY: the block lives in `Buffers::held`, whose drop notes the stream of all its uses.
            let slice = unsafe { block.slice() };
            held.push(block);
            Ok::<_, TrainError>(slice)
        };
        let mut floats = |elems, purpose| Ok::<_, TrainError>(take(elems, DType::F32, purpose)?.typed::<f32>()?);

        let residual = (0..=config.n_layer).map(|_| floats(row, Purpose::Activations)).collect::<Result<_, _>>()?;
        let blocks = (0..distinct)
            .map(|_| Ok(BlockSlices::cut(floats(block.iter().sum(), Purpose::Activations)?, &block)))
            .collect::<Result<_, TrainError>>()?;
        let head = HeadSlices::cut(floats(head.iter().sum(), Purpose::Activations)?, &head);
        let scratch = ScratchSlices::cut(floats(scratch.iter().sum(), Purpose::Activations)?, &scratch);
        let upcast = floats(upcast, Purpose::Workspace)?;
        let loss = take(1, DType::F64, Purpose::Workspace)?.typed::<f64>()?;
        Ok(Self { residual, blocks, head, scratch, upcast, loss, held, stream: stream.clone() })
    }

    /// Buffers of pass `pass`: the embedding's output is `residual[0]`, the head's input the last.
    pub(super) fn of_pass(&self, pass: usize) -> Activations {
        let last = self.residual.len() - 1;
        Activations {
            input: self.residual[pass.saturating_sub(1)],
            output: self.residual[pass.min(last)],
            block: self.blocks[pass.saturating_sub(1).min(self.blocks.len() - 1)],
        }
    }
}

/// Consecutive parts of `all` of these sizes.
fn cut(all: DeviceSlice<f32>, sizes: &[usize]) -> impl Iterator<Item = DeviceSlice<f32>> + '_ {
    let mut end = 0;
    sizes.iter().map(move |&n| {
        end += n;
        all.slice(end - n..end)
    })
}
