//! The buffers of a [`super::CudaGpt2`]: allocation, and the buffers of each pass.

use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice, Stream};
use zero_alloc::{Pool, Purpose};

use super::batch;
use super::checkpoints::{Checkpoints, RING};
use crate::cuda::{column_sums, cross_entropy, layer_norm, matmul};
use crate::error::TrainError;
use crate::model::config::GptConfig;
use crate::model::gpt2::Gpt2Options;
use crate::model::gpt2::buffers::{Held, Layers};

/// Buffers that share a block start at multiples of this many bytes.
const ALIGN_BYTES: usize = 256;

/// The activations of a block: `[M, C]` except for `qkv` `[M, 3 C]`, `fc` and `act` `[M, F]`, the statistics
/// `[M, 2]`, and `lse` `[batch, heads, seq]`.
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

/// `normed` `[M, C]`, the output of a layer norm; gradients of activations: `dres` and `narrow`
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

/// All buffers of the model.
pub(super) struct Buffers {
    pub(super) layers: Layers<AnySlice, BlockSlices>,
    pub(super) head: HeadSlices,
    pub(super) scratch: ScratchSlices,
    pub(super) batch: AnySlice,
    pub(super) matmul_workspace: AnySlice,
    pub(super) loss: DeviceSlice<f64>,
    /// The inputs of blocks in host memory, if they are offloaded. Dropped before `_held`, which has the ring.
    pub(super) checkpoints: Option<Checkpoints>,
    _held: Held<CudaDevice>,
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
        let mut held = Held::new(pool, stream);
        let loss = held.allocate(1, DType::F64, Purpose::Workspace)?.typed::<f64>()?;
        let mut allocate = |bytes: usize, purpose| held.allocate(bytes, DType::U8, purpose);

        let distinct = if options.activation_checkpointing { 1 } else { config.n_layer };
        let rows = config.n_layer + 1;
        let ring = (0..if options.offload_activations { RING.min(rows) } else { rows })
            .map(|_| Ok(Parts::new(allocate(row * act.size_bytes(), Purpose::Activations)?).take(row, act)))
            .collect::<Result<Vec<_>, TrainError>>()?;
        let residual = (0..rows).map(|i| ring[i % ring.len()]).collect();
        let parts = [(5 * row + 2 * tokens * f, act), (4 * tokens + heads, DType::F32)];
        let blocks = (0..distinct)
            .map(|_| {
                let mut all = Parts::new(allocate(bytes(&parts, 8), Purpose::Activations)?);
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
        let mut all = Parts::new(allocate(bytes(&[(row, act), (2 * tokens, DType::F32)], 2), Purpose::Activations)?);
        let head = HeadSlices { out: all.take(row, act), stats: all.floats(2 * tokens) };

        let wide = tokens * f.max(3 * c);
        let logits = logits_elems(config, tokens, act, logits_bytes);
        let width = f.max(3 * c);
        let partials = layer_norm::workspace_elems(tokens, c).max(column_sums::workspace_elems(tokens, width));
        let parts = [(3 * row + wide + logits, act), (heads + tokens + partials, DType::F32)];
        let mut all = Parts::new(allocate(bytes(&parts, 8), Purpose::Activations)?);
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
        let batch = allocate(batch::device_bytes(tokens), Purpose::Workspace)?;
        let matmul_bytes = matmul::workspace_bytes((c * width) as u64) as usize;
        let matmul_workspace = allocate(matmul_bytes, Purpose::Workspace)?;
        let checkpoints = if ring.len() < rows {
            let name = stream.name().strip_suffix("compute").unwrap_or_default();
            let copies = pool.device().create_stream(&format!("{name}activations"))?;
            held.also_on(&copies);
            Some(Checkpoints::new(pool.device(), copies, &ring, rows)?)
        } else {
            None
        };
        let layers = Layers { residual, blocks };
        Ok(Self { layers, head, scratch, batch, matmul_workspace, loss, checkpoints, _held: held })
    }
}

/// Elements of the logits' buffer: the whole rows that fit `max_bytes`, at least one and at most one per token.
fn logits_elems(config: &GptConfig, tokens: usize, act: DType, max_bytes: usize) -> usize {
    let stride = cross_entropy::stride_elems(config.vocab_size);
    stride * (max_bytes / act.size_bytes() / stride).clamp(1, tokens)
}

/// Bytes of a block with these contents, including the alignment of its `parts` parts.
fn bytes(contents: &[(usize, DType)], parts: usize) -> usize {
    contents.iter().map(|(elems, dtype)| elems * dtype.size_bytes()).sum::<usize>() + parts * ALIGN_BYTES
}

/// Splits a block into consecutive aligned parts.
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
        let part =
            unsafe { AnySlice::from_raw_parts(self.rest.slice(0..len).as_ptr(), elems, dtype, self.rest.device()) };
        let next = len.next_multiple_of(ALIGN_BYTES).min(self.rest.len());
        self.rest = self.rest.slice(next..self.rest.len());
        part
    }

    fn floats(&mut self, elems: usize) -> DeviceSlice<f32> {
        let part = self.take(elems, DType::F32);
        // SAFETY: as in `take`.
        unsafe { DeviceSlice::from_raw_parts(part.as_ptr().cast(), elems, part.device()) }
    }
}
