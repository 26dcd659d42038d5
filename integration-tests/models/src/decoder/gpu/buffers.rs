//! The buffers of a [`super::GpuDecoder`]: allocation.

use std::sync::Arc;

use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice, Stream};
use zero_alloc::{Pool, Purpose};
use zero_comm::Communicator;
use zero_trainer::ModelError;

use super::checkpoints::Checkpoints;
use super::sizes::{ALIGN_BYTES, Sizes, keeps_act};
use super::slices::{BlockSlices, ExchangeSlices, HeadSlices, ScratchSlices};
use crate::decoder::config::DecoderConfig;
use crate::decoder::part_rows::PartRows;
use crate::decoder::slices::{HeldBlocks, Layers};
use crate::options::ModelOptions;

/// All buffers of the model.
pub(super) struct Buffers {
    pub(super) layers: Layers<AnySlice, BlockSlices>,
    pub(super) head: HeadSlices,
    pub(super) scratch: ScratchSlices,
    /// `None` if the model shares no sequences.
    pub(super) exchange: Option<ExchangeSlices>,
    /// The angles of the rotary embedding.
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
    _held: HeldBlocks<CudaDevice>,
}

impl Buffers {
    /// Those of a rank's part of a model.
    pub(super) fn new(
        config: &DecoderConfig,
        options: &ModelOptions,
        logits_rows: usize,
        pool: &Pool<CudaDevice>,
        stream: &CudaStream,
        comm: Option<&Arc<dyn Communicator<CudaDevice>>>,
    ) -> Result<Self, ModelError> {
        let act = options.dtype;
        let sizes = Sizes::new(config, options, logits_rows);
        let Sizes {
            row, whole, rows, ..
        } = sizes;
        let mut held = HeldBlocks::new(pool, stream);
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

        let mut all = SliceSplitter::new(allocate(sizes.scratch_bytes, Purpose::Activations)?);
        let scratch = all.scratch(&sizes, options);
        let stats = all.floats(sizes.stats);

        let exchange = match sizes.exchange_bytes {
            0 => None,
            bytes => {
                let mut all = SliceSplitter::new(allocate(bytes, Purpose::Activations)?);
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
            .map(|_| {
                Ok(
                    SliceSplitter::new(allocate(sizes.row_bytes, Purpose::Activations)?)
                        .take(row, act),
                )
            })
            .collect::<Result<Vec<_>, ModelError>>()?;
        let residual = (0..rows).map(|i| ring[i % ring.len()]).collect();

        let act_elems = options.tokens() * config.inner;
        let recomputed = (!keeps_act(config, options)).then(|| scratch.wide.slice(0..act_elems));
        let blocks = (0..sizes.blocks)
            .map(|_| {
                let all = allocate(sizes.block_bytes, Purpose::Activations)?;
                SliceSplitter::new(all).block(&sizes, recomputed)
            })
            .collect::<Result<_, ModelError>>()?;

        let mut all = SliceSplitter::new(allocate(sizes.head_bytes, Purpose::Activations)?);
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
                    Ok(SliceSplitter::new(all).take(sizes.part, act))
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

/// Splits a block into consecutive aligned parts.
struct SliceSplitter {
    rest: AnySlice,
}

impl SliceSplitter {
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

    fn scratch(&mut self, sizes: &Sizes, options: &ModelOptions) -> ScratchSlices {
        let act = options.dtype;
        ScratchSlices {
            normed: self.take(sizes.whole, act),
            dres: self.take(sizes.whole, act),
            narrow: self.take(sizes.narrow, act),
            wide: self.take(sizes.wide, act),
            logits: self.take(sizes.logits, act),
            delta: self.floats(sizes.heads),
            losses: self.floats(options.tokens()),
            partials: self.floats(sizes.partials),
            sums: self.floats(sizes.sums),
            dropped: self.take(sizes.dropped, act),
            low_rank: self.take(sizes.low_rank, act),
        }
    }

    /// The activations of a block; those of the MLP in `act` if they are not kept.
    fn block(&mut self, sizes: &Sizes, act: Option<AnySlice>) -> Result<BlockSlices, ModelError> {
        let parts = sizes.block.map(|(elems, dtype)| self.take(elems, dtype));
        let [
            stats1,
            qkv,
            raw,
            raw_stats,
            attended,
            lse,
            mid,
            stats2,
            up,
            kept,
        ] = parts;
        Ok(BlockSlices {
            stats1: stats1.typed()?,
            qkv,
            raw,
            raw_stats: raw_stats.typed()?,
            attended,
            lse: lse.typed()?,
            mid,
            stats2: stats2.typed()?,
            up,
            act: act.unwrap_or(kept),
        })
    }

    fn floats(&mut self, elems: usize) -> DeviceSlice<f32> {
        let part = self.take(elems, DType::F32);
        // SAFETY: as in `take`.
        unsafe { DeviceSlice::from_raw_parts(part.as_ptr().cast(), elems, part.device()) }
    }
}
