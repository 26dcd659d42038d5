//! Slices of buffers, by their use in a pass, and the blocks that keep them valid.
//!
//! An enqueued pass captures `*Slices` values; when it runs, `view()` converts them to host slices.

use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice};
use zero_alloc::{Block, Pool, Purpose};
use zero_trainer::ModelError;

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
                let mut parts = $crate::decoder::slices::cut(all, sizes);
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

views! {
    /// Activations of a block: `norm1`, `mid` and `norm2` `[M, C]`, with the statistics of the norms;
    /// `qkv` `[M, (heads + 2 kv_heads) d]`, after the rotation; if queries and keys have norms, `raw` are
    /// they before them, with `raw_stats`; `attended` `[M, heads d]`, `lse` `[batch, heads, seq]`; `up`,
    /// what the MLP's first matrix computes, and `act` `[M, F]`.
    BlockSlices, BlockView {
        norm1, stats1, qkv, raw, raw_stats, attended, lse, mid, norm2, stats2, up, act
    }
}
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
pub(crate) struct HeldBlocks<D: Device> {
    blocks: Vec<Block<D>>,
    pool: Pool<D>,
    stream: D::Stream,
    other: Option<D::Stream>,
}

impl<D: Device> HeldBlocks<D> {
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

impl<D: Device> Drop for HeldBlocks<D> {
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

/// The buffers of exchanges between ranks that share sequences; see [`super::groups`].
#[derive(Clone)]
pub(crate) struct ExchangeSlices {
    pub(crate) send: DeviceSlice<f32>,
    pub(crate) recv: DeviceSlice<f32>,
    /// One for each block with separate activations.
    pub(crate) attended: Vec<DeviceSlice<f32>>,
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
