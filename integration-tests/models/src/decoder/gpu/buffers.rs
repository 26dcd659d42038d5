//! The buffers of a [`super::GpuDecoder`]: allocation, and the buffers of each pass.

use std::sync::Arc;

use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice, Stream};
use zero_alloc::{Pool, Purpose};
use zero_comm::Communicator;

use super::GpuArch;
use super::batch::Layout;
use super::checkpoints::{Checkpoints, RING};
use super::sequence::ExchangeSlices;
use super::tensor;
use crate::cuda::{cross_entropy, matmul};
use crate::decoder::buffers::{Held, Layers};
use crate::decoder::part_rows::{self, PartRows};
use crate::decoder::sequence::Exchanges;
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

/// The head's norm: `out` `[M, C]`, and its `stats`.
#[derive(Clone, Copy)]
pub(crate) struct HeadSlices {
    pub(crate) out: AnySlice,
    pub(crate) stats: DeviceSlice<f32>,
}

/// `normed` `[M, C]`, the output of a norm; gradients of activations: `dres` `[M, C]`, `narrow` and
/// `wide` of a block's inner widths, some rows of `logits`; `delta` `[batch, heads, seq]` of
/// attention; `losses` `[M]`; and the `partials` of sums over rows.
#[derive(Clone, Copy)]
pub(crate) struct ScratchSlices {
    pub(crate) normed: AnySlice,
    pub(crate) dres: AnySlice,
    pub(crate) narrow: AnySlice,
    pub(crate) wide: AnySlice,
    pub(crate) logits: AnySlice,
    pub(crate) delta: DeviceSlice<f32>,
    pub(crate) losses: DeviceSlice<f32>,
    pub(crate) partials: DeviceSlice<f32>,
    /// Gradients that are sums over the ranks of tensor parallelism.
    pub(crate) sums: DeviceSlice<f32>,
}

/// All buffers of the model; `B` are a block's activations.
pub(super) struct Buffers<B> {
    pub(super) layers: Layers<AnySlice, B>,
    pub(super) head: HeadSlices,
    pub(super) scratch: ScratchSlices,
    /// `None` if the model shares no sequences.
    pub(super) exchange: Option<ExchangeSlices>,
    /// The architecture's constants.
    pub(super) table: DeviceSlice<f32>,
    pub(super) batch: AnySlice,
    pub(super) matmul_workspace: AnySlice,
    pub(super) loss: DeviceSlice<f64>,
    /// The inputs of blocks in host memory, if they are offloaded. Dropped before `_held`, which
    /// has the ring.
    pub(super) checkpoints: Option<Checkpoints>,
    /// The parts of those inputs, if each rank of tensor parallelism has one on the device.
    pub(super) rows: Option<PartRows<CudaDevice>>,
    /// The statistics of [`super::tensor`].
    pub(super) stats: DeviceSlice<f32>,
    _held: Held<CudaDevice>,
}

/// What the sizes of a decoder's buffers follow from. M is the number of tokens.
pub(crate) struct Extent {
    /// Blocks.
    pub(crate) layers: usize,
    /// The width C of the residual stream.
    pub(crate) width: usize,
    pub(crate) vocab: usize,
    /// Heads of queries.
    pub(crate) heads: usize,
    /// Statistics of a row of the head's norm.
    pub(crate) head_stats: usize,
    /// Elements of a row of [`ScratchSlices::narrow`], at least C.
    pub(crate) narrow: usize,
    /// Elements of a row of [`ScratchSlices::wide`].
    pub(crate) wide: usize,
    /// The sums of a block's backward.
    pub(crate) partials: usize,
    /// Elements of [`ScratchSlices::sums`].
    pub(crate) sums: usize,
    /// Elements of the largest matrix of a block.
    pub(crate) matrix: usize,
    /// The architecture's constants.
    pub(crate) table: usize,
    /// Whether training drops elements.
    pub(crate) dropout: bool,
    pub(crate) exchanges: Exchanges,
    /// The activations of a block, in the order of [`GpuArch::block`].
    pub(crate) block: Vec<(usize, DType)>,
}

/// Elements and bytes of the allocations. M is the number of tokens.
struct Sizes {
    /// Of the rank's rows of the residual stream.
    row: usize,
    /// `[M, C]`.
    whole: usize,
    narrow: usize,
    wide: usize,
    /// `[batch, heads, seq]`.
    heads: usize,
    head_stats: usize,
    logits: usize,
    partials: usize,
    sums: usize,
    table: usize,
    /// Inputs of blocks and of the head, and those of them on the device.
    rows: usize,
    ring: usize,
    /// Elements of a row that a rank keeps.
    part: usize,
    stats: usize,
    part_bytes: usize,
    /// Blocks with separate activations.
    blocks: usize,
    block: Vec<(usize, DType)>,
    exchanges: Exchanges,
    /// Of `send`, `recv` and `attended`; 0 without other ranks.
    exchange_bytes: usize,
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
    fn new(extent: Extent, options: &ModelOptions, logits_rows: usize) -> Self {
        let act = options.dtype;
        let tokens = options.tokens();
        let whole = tokens * extent.width;
        let row = options.rows() * extent.width;
        let narrow = tokens * extent.narrow;
        let wide = tokens * extent.wide;
        let heads = tokens * extent.heads;
        let head_stats = options.rows() * extent.head_stats;
        let ranks = options.tensor_ranks;
        let vocab = extent.vocab.div_ceil(ranks);
        let stride = cross_entropy::stride_elems(vocab);
        // Of one token, the logits of this rank and those of all.
        let gathered = if ranks == 1 {
            0
        } else {
            stride + ranks * vocab
        };
        let logits_rows = logits_rows.clamp(1, tokens);
        let logits = (stride * logits_rows).max(gathered);
        let stats = tensor::stats_elems(ranks, logits_rows);
        let partials = extent.partials;
        let sums = extent.sums;
        let rows = extent.layers + 1;
        let scratch = [
            (2 * whole + narrow + wide + logits, act),
            (heads + tokens + partials + sums + stats, DType::F32),
        ];
        let ring = match (options.offload_activations, options.partition_activations) {
            (true, _) => RING.min(rows),
            (false, true) => part_rows::RING.min(rows),
            (false, false) => rows,
        };
        let part = match options.partition_activations {
            true => row / ranks,
            false => row,
        };
        let blocks = if options.activation_checkpointing {
            1
        } else {
            extent.layers
        };
        let exchanges = extent.exchanges;
        let exchange_bytes = match exchanges.buffer_elems() {
            0 => 0,
            elems => {
                let all = 2 * elems + blocks * exchanges.attended_elems();
                bytes(&[(all, act)], 2 + blocks)
            }
        };
        Self {
            row,
            whole,
            narrow,
            wide,
            heads,
            head_stats,
            logits,
            partials,
            sums,
            table: extent.table,
            rows,
            ring,
            part,
            stats,
            part_bytes: part * act.size_bytes(),
            blocks,
            exchanges,
            exchange_bytes,
            row_bytes: row * act.size_bytes(),
            block_bytes: bytes(&extent.block, extent.block.len()),
            head_bytes: bytes(&[(whole, act), (head_stats, DType::F32)], 2),
            scratch_bytes: bytes(&scratch, 10),
            batch_bytes: Layout::new(options, extent.dropout).bytes(),
            matmul_bytes: matmul::workspace_bytes(extent.matrix as u64) as usize,
            block: extent.block,
        }
    }
}

/// The bytes that a model requests. The options must pass [`ModelOptions::validate`].
pub(crate) fn gpu_bytes(extent: Extent, options: &ModelOptions) -> GpuBytes {
    let vocab = extent.vocab.div_ceil(options.tensor_ranks);
    let rows = logits_rows(vocab, extent.width, options);
    let sizes = Sizes::new(extent, options, rows);
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
        part_bytes,
        block_bytes,
        head_bytes,
        scratch_bytes,
        exchange_bytes,
        batch_bytes,
        matmul_bytes,
        table,
        ..
    } = sizes;

    // Parts of rows on the device.
    let kept = match options.partition_activations && !options.offload_activations {
        true => rows,
        false => 0,
    };
    GpuBytes {
        activations: sum(&[
            (ring, row_bytes),
            (kept, part_bytes + ALIGN_BYTES),
            (blocks, block_bytes),
            (1, head_bytes),
            (1, scratch_bytes),
            (1, exchange_bytes),
        ]),
        workspace: sum(&[
            (1, size_of::<f64>()),
            (1, batch_bytes),
            (1, matmul_bytes),
            (table, size_of::<f32>()),
        ]),
        host: match options.offload_activations {
            true => sum(&[(rows - ring, part_bytes)]),
            false => 0,
        },
    }
}

/// The tokens whose logits are in memory at once: as many as fit [`LOGITS_BYTES`] or
/// [`FILLING_ELEMS`] in parts of about equal size. It does not depend on the device, and so the
/// bits of the gradient do not.
pub(super) fn logits_rows(vocab: usize, width: usize, options: &ModelOptions) -> usize {
    let tokens = options.tokens();
    let fit = LOGITS_BYTES / (cross_entropy::stride_elems(vocab) * options.dtype.size_bytes());
    let parts = tokens.div_ceil(fit.max(FILLING_ELEMS.div_ceil(width)));
    tokens
        .div_ceil(parts)
        .next_multiple_of(TILE_ROWS)
        .min(tokens)
}

impl<B> Buffers<B> {
    pub(super) fn new<A: GpuArch<Block = B>>(
        arch: &A,
        extent: Extent,
        options: &ModelOptions,
        logits_rows: usize,
        pool: &Pool<CudaDevice>,
        stream: &CudaStream,
        comm: Option<&Arc<dyn Communicator<CudaDevice>>>,
    ) -> Result<Self, ModelError> {
        let act = options.dtype;
        let sizes = Sizes::new(extent, options, logits_rows);
        let Sizes {
            row, whole, rows, ..
        } = sizes;
        let mut held = Held::new(pool, stream);
        let loss = held
            .allocate(1, DType::F64, Purpose::Workspace)?
            .typed::<f64>()?;
        let table = match sizes.table {
            0 => None,
            elems => Some(
                held.allocate(elems, DType::F32, Purpose::Workspace)?
                    .typed::<f32>()?,
            ),
        };
        let mut allocate = |bytes: usize, purpose| held.allocate(bytes, DType::U8, purpose);

        let mut all = Parts::new(allocate(sizes.scratch_bytes, Purpose::Activations)?);
        let scratch = ScratchSlices {
            normed: all.take(whole, act),
            dres: all.take(whole, act),
            narrow: all.take(sizes.narrow, act),
            wide: all.take(sizes.wide, act),
            logits: all.take(sizes.logits, act),
            delta: all.floats(sizes.heads),
            losses: all.floats(options.tokens()),
            partials: all.floats(sizes.partials),
            sums: all.floats(sizes.sums),
        };
        let stats = all.floats(sizes.stats);

        let exchange = match sizes.exchange_bytes {
            0 => None,
            bytes => {
                let mut all = Parts::new(allocate(bytes, Purpose::Activations)?);
                let elems = sizes.exchanges.buffer_elems();
                let attended = sizes.exchanges.attended_elems();
                Some(ExchangeSlices {
                    send: all.take(elems, act),
                    recv: all.take(elems, act),
                    attended: (0..sizes.blocks).map(|_| all.take(attended, act)).collect(),
                })
            }
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
                let parts = sizes.block.iter();
                let parts = parts
                    .map(|&(elems, dtype)| all.take(elems, dtype))
                    .collect();
                arch.block(BlockParts(parts), &scratch)
            })
            .collect::<Result<_, ModelError>>()?;

        let mut all = Parts::new(allocate(sizes.head_bytes, Purpose::Activations)?);
        let head = HeadSlices {
            out: all.take(whole, act),
            stats: all.floats(sizes.head_stats),
        };

        let batch = allocate(sizes.batch_bytes, Purpose::Workspace)?;
        let matmul_workspace = allocate(sizes.matmul_bytes, Purpose::Workspace)?;
        let offloads = options.offload_activations;
        let comm = comm.filter(|_| options.partition_activations);
        let kept = match comm {
            Some(comm) if !offloads => {
                let parts = (0..rows).map(|_| {
                    let bytes = sizes.part_bytes + ALIGN_BYTES;
                    let all = allocate(bytes, Purpose::Activations)?;
                    Ok(Parts::new(all).take(sizes.part, act))
                });
                let parts = parts.collect::<Result<Vec<_>, ModelError>>()?;
                Some(PartRows::new(pool.device(), comm, ring.clone(), parts))
            }
            _ => None,
        };
        let checkpoints = if offloads && ring.len() < rows {
            let name = stream.name().strip_suffix("compute").unwrap_or_default();
            let copies = pool.device().create_stream(&format!("{name}activations"))?;
            held.also_on(&copies);
            Some(Checkpoints::new(pool.device(), copies, &ring, rows, comm)?)
        } else {
            None
        };

        let layers = Layers { residual, blocks };
        Ok(Self {
            layers,
            head,
            table: table.unwrap_or(scratch.losses.slice(0..0)),
            scratch,
            exchange,
            batch,
            matmul_workspace,
            loss,
            checkpoints,
            rows: kept,
            stats,
            _held: held,
        })
    }
}

/// The activations of a block in the order of [`Extent::block`].
pub(crate) struct BlockParts(Vec<AnySlice>);

impl BlockParts {
    /// The parts, of which there are N.
    ///
    /// # Errors
    /// There is another number of parts.
    pub(crate) fn all<const N: usize>(self) -> Result<[AnySlice; N], ModelError> {
        let parts = self.0.len();
        self.0
            .try_into()
            .map_err(|_| ModelError::from(format!("a block of {parts} activations, not {N}")))
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
    use crate::ModelConfig;

    #[test]
    fn logits_are_capped_where_rows_fill_the_device() {
        let rows = |preset: &str, micro_batch, seq_len| {
            let options = ModelOptions {
                micro_batch,
                seq_len,
                sequence_ranks: 1,
                tensor_ranks: 1,
                partition_activations: false,
                sequence_parallel: false,
                dtype: DType::Bf16,
                activation_checkpointing: false,
                offload_activations: false,
                matmul_timing: false,
                recompute_gelu: false,
            };
            let config = ModelConfig::preset(preset).unwrap();
            logits_rows(config.vocab_size(), config.hidden(), &options)
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
