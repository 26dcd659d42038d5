//! The buffers of a [`super::CudaGpt2`]: what it allocates, and how passes find theirs.

use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, DType, DeviceSlice};
use zero_alloc::{Block, Pool, Purpose};

use super::batch;
use crate::cuda::{column_sums, cross_entropy, layer_norm, matmul};
use crate::error::TrainError;
use crate::model::config::GptConfig;
use crate::model::gpt2::Gpt2Options;

/// Buffers that share a block start at multiples of this many bytes.
const ALIGN_BYTES: usize = 256;

/// What is kept of a block: `[M, C]` but for `qkv` `[M, 3 C]`, `fc` and `act` `[M, F]`, the statistics `[M, 2]`, and
/// `lse` `[batch, heads, seq]`.
#[derive(Clone, Copy)]
pub(super) struct BlockSlices {
    pub(super) ln1_stats: DeviceSlice<f32>,
    pub(super) qkv: AnySlice,
    pub(super) attended: AnySlice,
    pub(super) lse: DeviceSlice<f32>,
    pub(super) mid: AnySlice,
    pub(super) ln2_stats: DeviceSlice<f32>,
    /// GELU's input.
    pub(super) fc: AnySlice,
    pub(super) act: AnySlice,
}

/// The head's layer norm: `out` `[M, C]`, `stats` `[M, 2]`.
#[derive(Clone, Copy)]
pub(super) struct HeadSlices {
    pub(super) out: AnySlice,
    pub(super) stats: DeviceSlice<f32>,
}

/// `normed` `[M, C]`, a layer norm's output on its way into products; gradients of activations: `dres` and `narrow`
/// `[M, C]`, `wide` `[M, max(F, 3 C)]`, some rows of `logits`; `delta` `[batch, heads, seq]` of attention; `losses`
/// `[M]`; and the `partials` of sums over rows.
#[derive(Clone, Copy)]
pub(super) struct ScratchSlices {
    pub(super) normed: AnySlice,
    pub(super) dres: AnySlice,
    pub(super) narrow: AnySlice,
    pub(super) wide: AnySlice,
    pub(super) logits: AnySlice,
    pub(super) delta: DeviceSlice<f32>,
    pub(super) losses: DeviceSlice<f32>,
    pub(super) partials: DeviceSlice<f32>,
}

/// What a pass reads and writes.
pub(super) struct Activations {
    pub(super) input: AnySlice,
    pub(super) output: AnySlice,
    pub(super) block: BlockSlices,
}

/// All buffers; the blocks are held so that the slices stay valid.
pub(super) struct Buffers {
    residual: Vec<AnySlice>,
    blocks: Vec<BlockSlices>,
    pub(super) head: HeadSlices,
    pub(super) scratch: ScratchSlices,
    pub(super) batch: AnySlice,
    pub(super) matmul_workspace: AnySlice,
    pub(super) loss: DeviceSlice<f64>,
    held: Vec<Block<CudaDevice>>,
    stream: CudaStream,
}

impl Drop for Buffers {
    fn drop(&mut self) {
        for block in &mut self.held {
            // A stream that refuses is closed, and uses the block no more.
            let _closed = block.record_use(&self.stream);
        }
    }
}

impl Buffers {
    pub(super) fn new(
        config: &GptConfig,
        options: &Gpt2Options,
        logits_bytes: usize,
        pool: &Pool<CudaDevice>,
        stream: &CudaStream,
    ) -> Result<Self, TrainError> {
        let (c, f, act) = (config.n_embd, config.n_inner, options.dtype);
        let tokens = options.micro_batch * options.seq_len;
        let (row, heads) = (tokens * c, tokens * config.n_head);
        let mut held = Vec::new();
        let mut take = |bytes: usize, purpose| {
            let block = pool.allocate(bytes, DType::U8, purpose, stream)?;
            // SAFETY: the block lives in `Buffers::held`, whose drop notes the stream of all its uses.
            let slice = unsafe { block.slice() };
            held.push(block);
            Ok::<_, TrainError>(slice)
        };

        let distinct = if options.activation_checkpointing { 1 } else { config.n_layer };
        let residual = (0..=config.n_layer)
            .map(|_| Ok(Parts::new(take(row * act.size_bytes(), Purpose::Activations)?).take(row, act)))
            .collect::<Result<_, TrainError>>()?;
        let parts = [(5 * row + 2 * tokens * f, act), (4 * tokens + heads, DType::F32)];
        let blocks = (0..distinct)
            .map(|_| {
                let mut all = Parts::new(take(bytes(&parts, 8), Purpose::Activations)?);
                Ok(BlockSlices {
                    ln1_stats: all.floats(2 * tokens),
                    qkv: all.take(3 * row, act),
                    attended: all.take(row, act),
                    lse: all.floats(heads),
                    mid: all.take(row, act),
                    ln2_stats: all.floats(2 * tokens),
                    fc: all.take(tokens * f, act),
                    act: all.take(tokens * f, act),
                })
            })
            .collect::<Result<_, TrainError>>()?;
        let mut all = Parts::new(take(bytes(&[(row, act), (2 * tokens, DType::F32)], 2), Purpose::Activations)?);
        let head = HeadSlices { out: all.take(row, act), stats: all.floats(2 * tokens) };

        let wide = tokens * f.max(3 * c);
        let logits = logits_elems(config, tokens, act, logits_bytes);
        let width = f.max(3 * c);
        let partials = layer_norm::workspace_elems(tokens, c).max(column_sums::workspace_elems(tokens, width));
        let parts = [(3 * row + wide + logits, act), (heads + tokens + partials, DType::F32)];
        let mut all = Parts::new(take(bytes(&parts, 8), Purpose::Activations)?);
        let scratch = ScratchSlices {
            normed: all.take(row, act),
            dres: all.take(row, act),
            narrow: all.take(row, act),
            wide: all.take(wide, act),
            logits: all.take(logits, act),
            delta: all.floats(heads),
            losses: all.floats(tokens),
            partials: all.floats(partials),
        };
        let batch = take(batch::device_bytes(tokens), Purpose::Workspace)?;
        let matmul_workspace = take(matmul::WORKSPACE_BYTES, Purpose::Workspace)?;
        let loss = pool.allocate(1, DType::F64, Purpose::Workspace, stream)?;
        // SAFETY: as for the others.
        let slice = unsafe { loss.typed::<f64>() }?;
        held.push(loss);
        let stream = stream.clone();
        Ok(Self { residual, blocks, head, scratch, batch, matmul_workspace, loss: slice, held, stream })
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

/// Whole rows of logits, as many as there are tokens if they fit.
fn logits_elems(config: &GptConfig, tokens: usize, act: DType, most_bytes: usize) -> usize {
    let stride = cross_entropy::stride_elems(config.vocab_size);
    stride * (most_bytes / act.size_bytes() / stride).clamp(1, tokens)
}

/// Bytes of a block with these contents, cut into `parts` parts.
fn bytes(contents: &[(usize, DType)], parts: usize) -> usize {
    contents.iter().map(|(elems, dtype)| elems * dtype.size_bytes()).sum::<usize>() + parts * ALIGN_BYTES
}

/// A block that is cut into aligned parts, one after another.
struct Parts {
    rest: AnySlice,
}

impl Parts {
    fn new(all: AnySlice) -> Self {
        Self { rest: all }
    }

    fn take(&mut self, elems: usize, dtype: DType) -> AnySlice {
        let len = elems * dtype.size_bytes();
        // SAFETY: within a block of the pool, whose slice was made with the promise that this one needs; blocks start
        // at multiples of 256 bytes, and so do their parts.
        let part = unsafe { AnySlice::from_raw_parts(self.rest.slice(0..len).as_ptr(), elems, dtype) };
        let next = len.next_multiple_of(ALIGN_BYTES).min(self.rest.len());
        self.rest = self.rest.slice(next..self.rest.len());
        part
    }

    fn floats(&mut self, elems: usize) -> DeviceSlice<f32> {
        let part = self.take(elems, DType::F32);
        // SAFETY: as in `take`.
        unsafe { DeviceSlice::from_raw_parts(part.as_ptr().cast(), elems) }
    }
}
