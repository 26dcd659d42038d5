//! The buffers of a [`super::CudaGpt2`]: allocation, and the buffers of each pass.

use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice, Stream};
use zero_alloc::{Pool, Purpose};

use super::batch;
use super::checkpoints::{Checkpoints, RING};
use crate::cuda::{attention, column_sums, cross_entropy, layer_norm, matmul};
use crate::decoder::buffers::{Held, Layers};
use crate::gpt2::config::GptConfig;
use crate::options::{GpuBytes, ModelOptions};
use zero_trainer::ModelError;

/// Buffers that share a block start at multiples of this many bytes.
const ALIGN_BYTES: usize = 256;
/// Maximum bytes of logits in memory at once. The number of parts depends on the model and the
/// batch alone: the gradient of the head's matrix is a sum over parts, so with the memory of the
/// device its bits would depend on the card.
const LOGITS_BYTES: usize = 256 << 20;
/// Minimum elements of the gradient of the head's input that are computed at once: a tile of 128 x
/// 256 for each of the 132 multiprocessors of an H100 or H200. Fewer would leave some idle.
const FILLING_ELEMS: usize = 132 * TILE_ROWS * 256;
/// Rows of a tile.
const TILE_ROWS: usize = 128;

/// The activations of a block: `[M, C]` except for `qkv` `[M, 3 C]`, `fc` and `act` `[M, F]`, the
/// statistics `[M, 2]`, and `lse` `[batch, heads, seq]`.
#[derive(Clone, Copy)]
pub(super) struct BlockSlices {
    pub(super) ln1_stats: DeviceSlice<f32>,
    pub(super) qkv: AnySlice,
    pub(super) attended: AnySlice,
    pub(super) lse: DeviceSlice<f32>,
    pub(super) mid: AnySlice,
    pub(super) ln2_stats: DeviceSlice<f32>,
    pub(super) fc: AnySlice,
    /// GELU's output. If it is not kept it is the start of [`ScratchSlices::wide`], which backward
    /// must not write before its last read of this one.
    pub(super) act: AnySlice,
}

/// The head's layer norm: `out` `[M, C]`, `stats` `[M, 2]`.
#[derive(Clone, Copy)]
pub(super) struct HeadSlices {
    pub(super) out: AnySlice,
    pub(super) stats: DeviceSlice<f32>,
}

/// `normed` `[M, C]`, the output of a layer norm; gradients of activations: `dres` and `narrow`
/// `[M, C]`, `wide` `[M, max(F, 3 C)]`, some rows of `logits`; `delta` `[batch, heads, seq]` of
/// attention; `losses` `[M]`; and the `partials` of sums over rows.
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
    /// The inputs of blocks in host memory, if they are offloaded. Dropped before `_held`, which
    /// has the ring.
    pub(super) checkpoints: Option<Checkpoints>,
    _held: Held<CudaDevice>,
}

/// Elements and bytes of the allocations. M is the number of tokens, `act` the type of activations.
struct Sizes {
    /// `[M, C]`.
    row: usize,
    /// `[M, F]`.
    act: usize,
    /// `[M, max(F, 3 C)]`.
    wide: usize,
    /// `[batch, heads, seq]`.
    heads: usize,
    logits: usize,
    partials: usize,
    /// Inputs of blocks and of the head, and those of them on the device.
    rows: usize,
    ring: usize,
    /// Blocks with separate activations.
    blocks: usize,
    /// Whether GELU's output is kept from forward to backward.
    keeps_act: bool,
    row_bytes: usize,
    block_bytes: usize,
    head_bytes: usize,
    scratch_bytes: usize,
    batch_bytes: usize,
    matmul_bytes: usize,
}

impl Sizes {
    /// With the logits of `logits_rows` tokens. The options must pass [`ModelOptions::validate`], so
    /// that no size overflows.
    fn new(config: &GptConfig, options: &ModelOptions, logits_rows: usize) -> Self {
        let c = config.n_embd;
        let f = config.n_inner;
        let act = options.dtype;
        let tokens = options.micro_batch * options.seq_len;
        let row = tokens * c;
        let heads = tokens * config.n_head;
        let width = f.max(3 * c);
        let wide = tokens * width;
        let logits = cross_entropy::stride_elems(config.vocab_size) * logits_rows.clamp(1, tokens);

        let partials = layer_norm::workspace_elems(tokens, c)
            .max(attention::workspace_elems(
                options.micro_batch,
                options.seq_len,
                3 * c,
            ))
            .max(column_sums::workspace_elems(tokens, f));

        let again = options.activation_checkpointing;
        let rows = config.n_layer + 1;
        let keeps_act = !again && !options.recompute_gelu;
        let fc = if keeps_act { 2 } else { 1 } * tokens * f;
        Self {
            row,
            act: tokens * f,
            wide,
            heads,
            logits,
            partials,
            rows,
            ring: if options.offload_activations {
                RING.min(rows)
            } else {
                rows
            },
            blocks: if again { 1 } else { config.n_layer },
            keeps_act,
            row_bytes: row * act.size_bytes(),
            block_bytes: bytes(&[(5 * row + fc, act), (4 * tokens + heads, DType::F32)], 8),
            head_bytes: bytes(&[(row, act), (2 * tokens, DType::F32)], 2),
            scratch_bytes: bytes(
                &[
                    (3 * row + wide + logits, act),
                    (heads + tokens + partials, DType::F32),
                ],
                8,
            ),
            batch_bytes: batch::device_bytes(tokens),
            matmul_bytes: matmul::workspace_bytes((c * width) as u64) as usize,
        }
    }
}

/// The bytes that a model requests. The options must pass [`ModelOptions::validate`].
pub(crate) fn gpu_bytes(config: &GptConfig, options: &ModelOptions) -> GpuBytes {
    let sizes = Sizes::new(config, options, logits_rows(config, options));
    let sum = |parts: &[(usize, usize)]| {
        let sum = parts
            .iter()
            .map(|&(count, bytes)| count as u128 * bytes as u128)
            .sum::<u128>();
        u64::try_from(sum).unwrap_or(u64::MAX)
    };

    let Sizes {
        rows,
        ring,
        blocks,
        row_bytes,
        block_bytes,
        head_bytes,
        scratch_bytes,
        batch_bytes,
        matmul_bytes,
        ..
    } = sizes;

    GpuBytes {
        activations: sum(&[
            (ring, row_bytes),
            (blocks, block_bytes),
            (1, head_bytes),
            (1, scratch_bytes),
        ]),
        workspace: sum(&[(1, size_of::<f64>()), (1, batch_bytes), (1, matmul_bytes)]),
        host: sum(&[(rows - ring, row_bytes)]),
    }
}

/// The tokens whose logits are in memory at once: as many as fit [`LOGITS_BYTES`] or
/// [`FILLING_ELEMS`] in parts of about equal size. It does not depend on the device, and so the
/// bits of the gradient do not.
pub(super) fn logits_rows(config: &GptConfig, options: &ModelOptions) -> usize {
    let tokens = options.micro_batch * options.seq_len;
    let fit = LOGITS_BYTES
        / (cross_entropy::stride_elems(config.vocab_size) * options.dtype.size_bytes());
    let parts = tokens.div_ceil(fit.max(FILLING_ELEMS.div_ceil(config.n_embd)));
    tokens
        .div_ceil(parts)
        .next_multiple_of(TILE_ROWS)
        .min(tokens)
}

impl Buffers {
    pub(super) fn new(
        config: &GptConfig,
        options: &ModelOptions,
        logits_rows: usize,
        pool: &Pool<CudaDevice>,
        stream: &CudaStream,
    ) -> Result<Self, ModelError> {
        let act = options.dtype;
        let tokens = options.micro_batch * options.seq_len;
        let sizes = Sizes::new(config, options, logits_rows);
        let Sizes {
            row, heads, rows, ..
        } = sizes;
        let mut held = Held::new(pool, stream);
        let loss = held
            .allocate(1, DType::F64, Purpose::Workspace)?
            .typed::<f64>()?;
        let mut allocate = |bytes: usize, purpose| held.allocate(bytes, DType::U8, purpose);

        let mut all = Parts::new(allocate(sizes.scratch_bytes, Purpose::Activations)?);
        let scratch = ScratchSlices {
            normed: all.take(row, act),
            dres: all.take(row, act),
            narrow: all.take(row, act),
            wide: all.take(sizes.wide, act),
            logits: all.take(sizes.logits, act),
            delta: all.floats(heads),
            losses: all.floats(tokens),
            partials: all.floats(sizes.partials),
        };

        let ring = (0..sizes.ring)
            .map(
                |_| Ok(Parts::new(allocate(sizes.row_bytes, Purpose::Activations)?).take(row, act)),
            )
            .collect::<Result<Vec<_>, ModelError>>()?;
        let residual = (0..rows).map(|i| ring[i % ring.len()]).collect();

        let blocks = (0..sizes.blocks)
            .map(|_| {
                let mut all = Parts::new(allocate(sizes.block_bytes, Purpose::Activations)?);
                Ok(BlockSlices {
                    ln1_stats: all.floats(2 * tokens),
                    qkv: all.take(3 * row, act),
                    attended: all.take(row, act),
                    lse: all.floats(heads),
                    mid: all.take(row, act),
                    ln2_stats: all.floats(2 * tokens),
                    fc: all.take(sizes.act, act),
                    act: if sizes.keeps_act {
                        all.take(sizes.act, act)
                    } else {
                        scratch.wide.slice(0..sizes.act)
                    },
                })
            })
            .collect::<Result<_, ModelError>>()?;

        let mut all = Parts::new(allocate(sizes.head_bytes, Purpose::Activations)?);
        let head = HeadSlices {
            out: all.take(row, act),
            stats: all.floats(2 * tokens),
        };

        let batch = allocate(sizes.batch_bytes, Purpose::Workspace)?;
        let matmul_workspace = allocate(sizes.matmul_bytes, Purpose::Workspace)?;
        let checkpoints = if ring.len() < rows {
            let name = stream.name().strip_suffix("compute").unwrap_or_default();
            let copies = pool.device().create_stream(&format!("{name}activations"))?;
            held.also_on(&copies);
            Some(Checkpoints::new(pool.device(), copies, &ring, rows)?)
        } else {
            None
        };

        let layers = Layers { residual, blocks };
        Ok(Self {
            layers,
            head,
            scratch,
            batch,
            matmul_workspace,
            loss,
            checkpoints,
            _held: held,
        })
    }
}

/// Bytes of a block with these contents, including the alignment of its `parts` parts.
fn bytes(contents: &[(usize, DType)], parts: usize) -> usize {
    contents
        .iter()
        .map(|(elems, dtype)| elems * dtype.size_bytes())
        .sum::<usize>()
        + parts * ALIGN_BYTES
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
        // SAFETY: within a block of the pool, whose slice was made with the promise that this one
        // needs; blocks start at multiples of 256 bytes, and so do their parts.
        let part = unsafe {
            AnySlice::from_raw_parts(
                self.rest.slice(0..len).as_ptr(),
                elems,
                dtype,
                self.rest.device(),
            )
        };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logits_are_capped_where_rows_fill_the_device() {
        let rows = |preset: &str, micro_batch, seq_len| {
            let options = ModelOptions {
                micro_batch,
                seq_len,
                dtype: DType::Bf16,
                activation_checkpointing: false,
                offload_activations: false,
                matmul_timing: false,
                recompute_gelu: false,
            };
            logits_rows(&GptConfig::preset(preset).unwrap(), &options)
        };

        // Four parts of 206 MB. At width 768, 256 MiB are less than a tile for each multiprocessor:
        // six parts of 554 MB.
        assert_eq!(
            (rows("gpt2-1.5b", 8, 1024), rows("gpt2-124m", 32, 1024)),
            (2048, 5504)
        );
        assert_eq!(
            (rows("gpt2-1.5b", 1, 1024), rows("nano", 3, 33)),
            (1024, 99),
            "all at once"
        );
    }
}
