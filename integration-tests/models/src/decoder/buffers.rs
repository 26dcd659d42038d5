//! The buffers of a [`super::Decoder`]: allocation.

use zero_alloc::device::{DType, DeviceSlice};
use zero_alloc::host::{HostDevice, HostStream};
use zero_alloc::{Pool, Purpose};
use zero_trainer::ModelError;

use super::sizes::Sizes;
use super::slices::{BlockSlices, ExchangeSlices, HeadSlices, HeldBlocks, Layers, ScratchSlices};

/// All buffers of the model.
pub(super) struct Buffers {
    pub(super) layers: Layers<DeviceSlice<f32>, BlockSlices>,
    pub(super) head: HeadSlices,
    pub(super) scratch: ScratchSlices,
    /// `None` if the model shares no sequences.
    pub(super) exchange: Option<ExchangeSlices>,
    pub(super) table: DeviceSlice<f32>,
    pub(super) upcast: DeviceSlice<f32>,
    pub(super) loss: DeviceSlice<f64>,
    /// The statistics of [`super::tensor`], of rows of logits.
    pub(super) stats: DeviceSlice<f32>,
    /// This rank's part of each row of the residual stream; empty if all rows are whole.
    pub(super) parts: Vec<DeviceSlice<f32>>,
    _held: HeldBlocks<HostDevice>,
}

impl Buffers {
    pub(super) fn new(
        sizes: &Sizes,
        upcast: usize,
        pool: &Pool<HostDevice>,
        stream: &HostStream,
    ) -> Result<Self, ModelError> {
        let mut held = HeldBlocks::new(pool, stream);
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
            let all = activations(sizes.block.iter().sum())?;
            let mut block = BlockSlices::cut(all, &sizes.block);
            if sizes.norm > 0 {
                [block.norm1, block.norm2] = norms;
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
