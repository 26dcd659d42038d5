//! The activations of a [`super::Gpt2`]: allocation, and views for the passes.
//!
//! An enqueued pass captures `*Slices` values; when it runs, `view()` converts them to host slices.

use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice};
use zero_alloc::host::{HostDevice, HostStream};
use zero_alloc::{Block, Pool, Purpose};

use super::Gpt2Options;
use crate::gpt2::config::GptConfig;
use zero_trainer::ModelError;

/// Maximum number of logits in memory at once (64 MiB).
const LOGITS_ELEMS: usize = 16 << 20;

/// Declares slices cut from one allocation, and the view of them as host slices.
macro_rules! views {
    ($(#[$doc:meta])* $slices:ident, $view:ident { $($field:ident),* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $slices { $(pub(super) $field: DeviceSlice<f32>),* }

        pub(super) struct $view<'a> { $(pub(super) $field: &'a mut [f32]),* }

        impl $slices {
            /// Splits `all` into the fields; `sizes` are their elements, in order.
            fn cut(all: DeviceSlice<f32>, sizes: &[usize]) -> Self {
                let mut parts = cut(all, sizes);
                Self { $($field: parts.next().unwrap_or_else(|| all.slice(0..0))),* }
            }

            /// The buffers as host slices, for a pass that is running on the stream.
            pub(super) fn view<'a>(self) -> $view<'a> {
                // SAFETY: distinct parts of a block that the model holds as long as its stream
                // runs, and all passes that use them are ordered by that one stream.
                $view { $($field: unsafe { self.$field.as_host_mut() }),* }
            }
        }
    };
}

views! {
    /// Activations of a block: `[M, C]` except for the statistics `[M, 2]`, `qkv` `[M, 3 C]`, `lse`
    /// `[batch, heads, seq]`, `fc` and `act` `[M, F]`.
    BlockSlices, BlockView { ln1, ln1_stats, qkv, attended, lse, mid, ln2, ln2_stats, fc, act }
}
views! {
    /// The head's layer norm: `out` `[M, C]`, `stats` `[M, 2]`.
    HeadSlices, HeadView { out, stats }
}
views! {
    /// Gradients of activations: `dres` and `narrow` `[M, C]`, `wide` `[M, max(F, 3 C)]`, and some
    /// rows of `logits`.
    ScratchSlices, ScratchView { dres, narrow, wide, logits }
}

/// The activations that a pass reads and writes: `X` of the residual stream, `B` of a block.
pub(super) struct Activations<X, B> {
    pub(super) input: X,
    pub(super) output: X,
    pub(super) block: B,
}

/// The activations of all passes.
pub(super) struct Layers<X, B> {
    /// The input of each block, and of the head.
    pub(super) residual: Vec<X>,
    /// One for each block, or one for all.
    pub(super) blocks: Vec<B>,
}

impl<X: Copy, B: Copy> Layers<X, B> {
    /// Buffers of pass `pass`: the embedding's output is `residual[0]`, the head's input the last.
    pub(super) fn of_pass(&self, pass: usize) -> Activations<X, B> {
        let last = self.residual.len() - 1;
        Activations {
            input: self.residual[pass.saturating_sub(1)],
            output: self.residual[pass.min(last)],
            block: self.blocks[pass.saturating_sub(1).min(self.blocks.len() - 1)],
        }
    }
}

/// Blocks of the pool that keep slices valid. Dropping it records the streams of all their uses.
pub(super) struct Held<D: Device> {
    blocks: Vec<Block<D>>,
    pool: Pool<D>,
    stream: D::Stream,
    other: Option<D::Stream>,
}

impl<D: Device> Held<D> {
    pub(super) fn new(pool: &Pool<D>, stream: &D::Stream) -> Self {
        Self {
            blocks: Vec::new(),
            pool: pool.clone(),
            stream: stream.clone(),
            other: None,
        }
    }

    /// Allows uses on `stream`, too.
    pub(super) fn also_on(&mut self, stream: &D::Stream) {
        self.other = Some(stream.clone());
    }

    /// Allocates a slice for first use on the stream. It is valid as long as `self`.
    pub(super) fn allocate(
        &mut self,
        elems: usize,
        dtype: DType,
        purpose: Purpose,
    ) -> Result<AnySlice, ModelError> {
        let block = self.pool.allocate(elems, dtype, purpose, &self.stream)?;
        // SAFETY: the block lives as long as `self`, whose drop records the streams that use it.
        let slice = unsafe { block.slice() };
        self.blocks.push(block);
        Ok(slice)
    }
}

impl<D: Device> Drop for Held<D> {
    fn drop(&mut self) {
        for block in &mut self.blocks {
            for stream in [Some(&self.stream), self.other.as_ref()]
                .into_iter()
                .flatten()
            {
                // Recording fails only on a closed stream, which no longer uses the block.
                let _closed = block.record_use(stream);
            }
        }
    }
}

/// All buffers of the model.
pub(super) struct Buffers {
    pub(super) layers: Layers<DeviceSlice<f32>, BlockSlices>,
    pub(super) head: HeadSlices,
    pub(super) scratch: ScratchSlices,
    pub(super) upcast: DeviceSlice<f32>,
    pub(super) loss: DeviceSlice<f64>,
    _held: Held<HostDevice>,
}

/// Elements of the activations, in fp32.
struct Sizes {
    /// The input of a block or of the head: `[M, C]`.
    row: usize,
    /// Number of blocks with separate activations.
    distinct: usize,
    block: [usize; 10],
    head: [usize; 2],
    scratch: [usize; 4],
}

impl Sizes {
    /// The options must pass [`Gpt2Options::validate`], so that no size overflows.
    fn new(config: &GptConfig, options: &Gpt2Options) -> Self {
        let c = config.n_embd;
        let f = config.n_inner;
        let tokens = options.micro_batch * options.seq_len;
        let row = tokens * c;
        let logits = config.vocab_size * (LOGITS_ELEMS / config.vocab_size).clamp(1, tokens);
        let stats = 2 * tokens;
        let lse = tokens * config.n_head;
        let wide = tokens * f;
        Self {
            row,
            distinct: if options.activation_checkpointing {
                1
            } else {
                config.n_layer
            },
            block: [row, stats, 3 * row, row, lse, row, row, stats, wide, wide],
            head: [row, stats],
            scratch: [row, row, tokens * f.max(3 * c), logits],
        }
    }
}

/// Bytes of activations of a model on the host. The options must pass [`Gpt2Options::validate`].
pub(super) fn activations_bytes(config: &GptConfig, options: &Gpt2Options) -> u64 {
    let Sizes {
        row,
        distinct,
        block,
        head,
        scratch,
    } = Sizes::new(config, options);
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
    ) -> Result<Self, ModelError> {
        let Sizes {
            row,
            distinct,
            block,
            head,
            scratch,
        } = Sizes::new(config, options);

        let mut held = Held::new(pool, stream);
        let loss = held
            .allocate(1, DType::F64, Purpose::Workspace)?
            .typed::<f64>()?;
        let mut floats = |elems, purpose| {
            Ok::<_, ModelError>(held.allocate(elems, DType::F32, purpose)?.typed::<f32>()?)
        };

        let residual = (0..=config.n_layer)
            .map(|_| floats(row, Purpose::Activations))
            .collect::<Result<_, _>>()?;
        let blocks = (0..distinct)
            .map(|_| {
                Ok(BlockSlices::cut(
                    floats(block.iter().sum(), Purpose::Activations)?,
                    &block,
                ))
            })
            .collect::<Result<_, ModelError>>()?;

        let head = HeadSlices::cut(floats(head.iter().sum(), Purpose::Activations)?, &head);
        let scratch = ScratchSlices::cut(
            floats(scratch.iter().sum(), Purpose::Activations)?,
            &scratch,
        );
        let upcast = floats(upcast, Purpose::Workspace)?;

        Ok(Self {
            layers: Layers { residual, blocks },
            head,
            scratch,
            upcast,
            loss,
            _held: held,
        })
    }
}

/// Splits `all` into consecutive parts of these sizes.
fn cut(all: DeviceSlice<f32>, sizes: &[usize]) -> impl Iterator<Item = DeviceSlice<f32>> + '_ {
    let mut end = 0;
    sizes.iter().map(move |&n| {
        end += n;
        all.slice(end - n..end)
    })
}
