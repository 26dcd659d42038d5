//! The buffers of a [`super::Decoder`]: allocation, and views for the passes.
//!
//! An enqueued pass captures `*Slices` values; when it runs, `view()` converts them to host slices.

use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice};
use zero_alloc::host::{HostDevice, HostStream};
use zero_alloc::{Block, Pool, Purpose};

use super::HostArch;
use super::part_rows::RING;
use super::sequence::Exchanges;
use super::tensor;
use crate::options::ModelOptions;
use zero_trainer::ModelError;

/// Maximum number of logits in memory at once (64 MiB).
const LOGITS_ELEMS: usize = 16 << 20;

/// Declares slices cut from one allocation, and the view of them as host slices.
macro_rules! views {
    ($(#[$doc:meta])* $slices:ident, $view:ident { $($field:ident),* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $slices { $(pub(crate) $field: DeviceSlice<f32>),* }

        pub(crate) struct $view<'a> { $(pub(crate) $field: &'a mut [f32]),* }

        impl $slices {
            /// Splits `all` into the fields; `sizes` are their elements, in order.
            pub(crate) fn cut(all: DeviceSlice<f32>, sizes: &[usize]) -> Self {
                let mut parts = $crate::decoder::buffers::cut(all, sizes);
                Self { $($field: parts.next().unwrap_or_else(|| all.slice(0..0))),* }
            }

            /// The buffers as host slices, for a pass that is running on the stream.
            pub(crate) fn view<'a>(self) -> $view<'a> {
                // SAFETY: distinct parts of a block that the model holds as long as its stream
                // runs, and all passes that use them are ordered by that one stream.
                $view { $($field: unsafe { self.$field.as_host_mut() }),* }
            }
        }
    };
}

pub(crate) use views;

views! {
    /// The head's norm: `out` `[M, C]`, and its `stats`.
    HeadSlices, HeadView { out, stats }
}
views! {
    /// Gradients of activations: `dres` and `narrow` `[M, C]`, `wide` of a block's inner widths,
    /// and some rows of `logits`.
    ScratchSlices, ScratchView { dres, narrow, wide, logits }
}

/// The activations that a pass reads and writes: `X` of the residual stream, `B` of a block.
pub(crate) struct Activations<X, B> {
    pub(crate) input: X,
    pub(crate) output: X,
    pub(crate) block: B,
}

/// The activations of all passes.
pub(crate) struct Layers<X, B> {
    /// The input of each block, and of the head.
    pub(crate) residual: Vec<X>,
    /// One for each block, or one for all.
    pub(crate) blocks: Vec<B>,
}

impl<X: Copy, B: Copy> Layers<X, B> {
    /// Buffers of pass `pass`: the embedding's output is `residual[0]`, the head's input the last.
    pub(crate) fn of_pass(&self, pass: usize) -> Activations<X, B> {
        let last = self.residual.len() - 1;
        Activations {
            input: self.residual[pass.saturating_sub(1)],
            output: self.residual[pass.min(last)],
            block: self.blocks[pass.saturating_sub(1).min(self.blocks.len() - 1)],
        }
    }
}

/// Blocks of the pool that keep slices valid. Dropping it records the streams of all their uses.
pub(crate) struct Held<D: Device> {
    blocks: Vec<Block<D>>,
    pool: Pool<D>,
    stream: D::Stream,
    other: Option<D::Stream>,
}

impl<D: Device> Held<D> {
    pub(crate) fn new(pool: &Pool<D>, stream: &D::Stream) -> Self {
        Self {
            blocks: Vec::new(),
            pool: pool.clone(),
            stream: stream.clone(),
            other: None,
        }
    }

    /// Allows uses on `stream`, too.
    pub(crate) fn also_on(&mut self, stream: &D::Stream) {
        self.other = Some(stream.clone());
    }

    /// Allocates a slice for first use on the stream. It is valid as long as `self`.
    pub(crate) fn allocate(
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

/// The buffers of exchanges between ranks that share sequences; see [`super::sequence`].
#[derive(Clone)]
pub(crate) struct ExchangeSlices {
    pub(crate) send: DeviceSlice<f32>,
    pub(crate) recv: DeviceSlice<f32>,
    /// One for each block with separate activations.
    pub(crate) attended: Vec<DeviceSlice<f32>>,
}

/// All buffers of the model; `B` are a block's activations.
pub(super) struct Buffers<B> {
    pub(super) layers: Layers<DeviceSlice<f32>, B>,
    pub(super) head: HeadSlices,
    pub(super) scratch: ScratchSlices,
    /// `None` if the model shares no sequences.
    pub(super) exchange: Option<ExchangeSlices>,
    pub(super) table: DeviceSlice<f32>,
    pub(super) upcast: DeviceSlice<f32>,
    pub(super) loss: DeviceSlice<f64>,
    /// The statistics of [`super::tensor`].
    pub(super) stats: DeviceSlice<f32>,
    /// This rank's part of each row of the residual stream; empty if all rows are whole.
    pub(super) parts: Vec<DeviceSlice<f32>>,
    _held: Held<HostDevice>,
}

/// Elements of the activations, in fp32.
pub(crate) struct Sizes {
    /// Blocks.
    pub(crate) layers: usize,
    /// Blocks with separate activations.
    pub(crate) distinct: usize,
    /// The input of a block or of the head: the rank's rows of the residual stream.
    pub(crate) row: usize,
    /// Whole rows.
    pub(crate) ring: usize,
    /// Elements of a rank's part of a row; 0 if all rows are whole.
    pub(crate) part: usize,
    pub(crate) block: Vec<usize>,
    /// `out` and `stats`.
    pub(crate) head: [usize; 2],
    /// `dres`, `narrow`, `wide` and `logits`.
    pub(crate) scratch: [usize; 4],
    pub(crate) exchanges: Exchanges,
    /// The output of a norm, if all blocks share it; otherwise 0.
    pub(crate) norm: usize,
    pub(crate) stats: usize,
    pub(crate) table: usize,
}

/// What the elements of a decoder's activations follow from.
pub(crate) struct Extent {
    pub(crate) layers: usize,
    pub(crate) width: usize,
    pub(crate) vocab: usize,
    /// Statistics of a row of the head's norm.
    pub(crate) head_stats: usize,
    /// The widest row of a block's gradients that is not on the residual stream.
    pub(crate) wide: usize,
    pub(crate) exchanges: Exchanges,
    /// The most gradients of a pass, besides those of cut parameters, that ranks of tensor parallelism
    /// sum.
    pub(crate) partial: usize,
    pub(crate) table: usize,
}

impl Sizes {
    /// The options must be valid, so that no size overflows. `block` are the elements of a block.
    pub(crate) fn new(extent: &Extent, block: Vec<usize>, options: &ModelOptions) -> Self {
        let tokens = options.tokens();
        let whole = tokens * extent.width;
        let row = options.rows() * extent.width;
        let tensor_ranks = options.tensor_ranks;
        let vocab = extent.vocab.div_ceil(tensor_ranks);
        let rows = (LOGITS_ELEMS / vocab).clamp(1, tokens);
        // Of one token, the logits of this rank and those of all.
        let gathered = match tensor_ranks {
            1 => 0,
            ranks => (ranks + 1) * vocab,
        };
        let logits = (vocab * rows).max(gathered).max(extent.partial);
        Self {
            layers: extent.layers,
            distinct: if options.activation_checkpointing {
                1
            } else {
                extent.layers
            },
            row,
            ring: match options.partition_activations {
                true => RING,
                false => extent.layers + 1,
            },
            part: match options.partition_activations {
                true => row / tensor_ranks,
                false => 0,
            },
            block,
            head: [whole, extent.head_stats * options.rows()],
            scratch: [whole, whole, tokens * extent.wide, logits],
            exchanges: extent.exchanges,
            norm: match options.sequence_parallel {
                true => whole,
                false => 0,
            },
            stats: tensor::stats_elems(tensor_ranks, rows),
            table: extent.table,
        }
    }

    /// Bytes of all activations.
    pub(crate) fn bytes(&self) -> u64 {
        let sum = |sizes: &[usize]| sizes.iter().map(|&n| n as u128).sum::<u128>();
        let rows = self.layers as u128 + 1;
        let residual = self.ring as u128 * self.row as u128 + rows * self.part as u128;
        let blocks =
            self.distinct as u128 * (sum(&self.block) + self.exchanges.attended_elems() as u128);
        let exchange = 2 * self.exchanges.buffer_elems() as u128;
        let rest = sum(&self.head) + sum(&self.scratch) + exchange;
        let rest = rest + 2 * self.norm as u128 + self.stats as u128 + self.table as u128;
        u64::try_from(4 * (residual + blocks + rest)).unwrap_or(u64::MAX)
    }
}

impl<B: Copy> Buffers<B> {
    pub(super) fn new<A: HostArch<Block = B>>(
        sizes: &Sizes,
        upcast: usize,
        pool: &Pool<HostDevice>,
        stream: &HostStream,
    ) -> Result<Self, ModelError> {
        let mut held = Held::new(pool, stream);
        let loss = held
            .allocate(1, DType::F64, Purpose::Workspace)?
            .typed::<f64>()?;
        let mut floats = |elems, purpose| {
            Ok::<_, ModelError>(held.allocate(elems, DType::F32, purpose)?.typed::<f32>()?)
        };
        let mut activations = |elems| floats(elems, Purpose::Activations);

        let ring = (0..sizes.ring)
            .map(|_| activations(sizes.row))
            .collect::<Result<Vec<_>, _>>()?;
        let residual = (0..=sizes.layers).map(|i| ring[i % ring.len()]).collect();
        let parts = (0..=sizes.layers).filter(|_| sizes.part > 0);
        let parts = parts
            .map(|_| activations(sizes.part))
            .collect::<Result<_, _>>()?;
        let norms = [activations(sizes.norm)?, activations(sizes.norm)?];
        let mut block = || {
            let mut block = A::cut(activations(sizes.block.iter().sum())?, &sizes.block);
            if sizes.norm > 0 {
                for (norm, shared) in A::norms(&mut block).into_iter().zip(norms) {
                    *norm = shared;
                }
            }
            Ok(block)
        };
        let blocks = (0..sizes.distinct)
            .map(|_| block())
            .collect::<Result<_, ModelError>>()?;

        let head = HeadSlices::cut(activations(sizes.head.iter().sum())?, &sizes.head);
        let scratch = ScratchSlices::cut(activations(sizes.scratch.iter().sum())?, &sizes.scratch);
        let exchange = match sizes.exchanges.buffer_elems() {
            0 => None,
            elems => Some(ExchangeSlices {
                send: activations(elems)?,
                recv: activations(elems)?,
                attended: (0..sizes.distinct)
                    .map(|_| activations(sizes.exchanges.attended_elems()))
                    .collect::<Result<_, _>>()?,
            }),
        };
        let stats = activations(sizes.stats)?;
        let table = activations(sizes.table)?;
        let upcast = floats(upcast, Purpose::Workspace)?;

        Ok(Self {
            layers: Layers { residual, blocks },
            head,
            scratch,
            exchange,
            table,
            upcast,
            loss,
            stats,
            parts,
            _held: held,
        })
    }
}

/// Splits `all` into consecutive parts of these sizes.
pub(crate) fn cut(
    all: DeviceSlice<f32>,
    sizes: &[usize],
) -> impl Iterator<Item = DeviceSlice<f32>> + '_ {
    let mut end = 0;
    sizes.iter().map(move |&n| {
        end += n;
        all.slice(end - n..end)
    })
}
