//! Arrays as they travel: encoded before a collective, and decoded behind it.

use std::ops::Range;
use std::sync::Arc;

use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice};
use zero_alloc::{Block, Pool, Purpose};
use zero_kernels::{Codec, EncodeSums, Feedback, KernelError, Kernels};
use zero_shard::BlockFormat;

use crate::CommError;

/// Encodes and decodes on a device.
#[derive(Clone)]
pub(crate) struct Encoder<D: Device> {
    kernels: Arc<dyn Kernels<D>>,
    pool: Pool<D>,
    /// Statistics of what is encoded in blocks, added to.
    sums: Option<DeviceSlice<EncodeSums>>,
}

/// Memory of one stream, freed in its order.
pub(crate) struct Scratch<D: Device> {
    block: Block<D>,
    stream: D::Stream,
}

impl<D: Device> Scratch<D> {
    /// The elements, for operations that are enqueued on the stream before the drop.
    pub(crate) fn slice(&self) -> AnySlice {
        // SAFETY: operations of the stream use it, which the drop records.
        unsafe { self.block.slice() }
    }
}

impl<D: Device> Drop for Scratch<D> {
    fn drop(&mut self) {
        // Recording fails only on a closed stream, which no longer uses the block.
        let _closed = self.block.record_use(&self.stream);
    }
}

impl<D: Device> Encoder<D> {
    pub(crate) fn new(kernels: Arc<dyn Kernels<D>>, pool: Pool<D>) -> Self {
        Self {
            kernels,
            pool,
            sums: None,
        }
    }

    /// Adds the statistics of encoded blocks to `sums`.
    pub(crate) fn add_to(&mut self, sums: DeviceSlice<EncodeSums>) {
        self.sums = Some(sums);
    }

    /// Memory for operations that are enqueued on `stream`.
    pub(crate) fn allocate(
        &self,
        stream: &D::Stream,
        len: usize,
        dtype: DType,
    ) -> Result<Scratch<D>, CommError> {
        Ok(Scratch {
            block: self.pool.allocate(len, dtype, Purpose::Buckets, stream)?,
            stream: stream.clone(),
        })
    }

    /// Enqueues the encoding of `src` to `wire`.
    pub(crate) fn encode(
        &self,
        stream: &D::Stream,
        codec: Codec,
        src: AnySlice,
        wire: AnySlice,
    ) -> Result<(), CommError> {
        match codec {
            Codec::Blocks(format) => self.encode_blocks(stream, format, src, wire, None),
            _ => Ok(self.kernels.cast(stream, src, wire, 1.0)?),
        }
    }

    /// Enqueues the encoding of `src` in blocks, with the errors of earlier ones in `feedback`.
    pub(crate) fn encode_blocks(
        &self,
        stream: &D::Stream,
        format: BlockFormat,
        src: AnySlice,
        blocks: AnySlice,
        feedback: Option<Feedback>,
    ) -> Result<(), CommError> {
        let sums = self.sums.filter(|sums| !sums.is_empty());
        let at_once = sums.map_or(src.len(), |sums| sums.len() * EncodeSums::ELEMS);
        for start in (0..src.len()).step_by(at_once.max(1)) {
            let range = start..src.len().min(start + at_once);
            let first = format.bytes(start);
            let part = first..first + format.bytes(range.len());
            let feedback = feedback.map(|all| Feedback {
                error: all.error.slice(range.clone()),
                ..all
            });
            let sums = sums.map(|sums| sums.slice(0..EncodeSums::count(range.len())));
            let blocks = blocks.slice(part);
            self.kernels
                .encode_blocks(stream, format, src.slice(range), blocks, feedback, sums)?;
        }
        Ok(())
    }

    /// Enqueues the decoding of the shards `ranks`, of `shard_elems` elements each in `whole`.
    pub(crate) fn decode_shards(
        &self,
        stream: &D::Stream,
        codec: Codec,
        (wire, whole): (AnySlice, AnySlice),
        shard_elems: usize,
        ranks: Range<usize>,
    ) -> Result<(), CommError> {
        // The last block of a shard has its own padding.
        let at_once = match shard_elems.is_multiple_of(codec.block_elems()) {
            true => ranks.len().max(1),
            false => 1,
        };
        let wire_elems = codec.bytes(shard_elems) / codec.dtype().size_bytes();
        for first in ranks.clone().step_by(at_once) {
            let shards = first..ranks.end.min(first + at_once);
            let of = |elems: usize| shards.start * elems..shards.end * elems;
            let wire = wire.slice(of(wire_elems));
            let values = whole.slice(of(shard_elems));
            match codec {
                Codec::Blocks(format) => {
                    self.kernels
                        .decode_blocks(stream, format, wire, 1, values)?;
                }
                _ => self.kernels.cast(stream, wire, values, 1.0)?,
            }
        }
        Ok(())
    }

    /// Enqueues the sum in fp32 of `parts` arrays in `blocks`, in their order.
    pub(crate) fn sum_blocks(
        &self,
        stream: &D::Stream,
        format: BlockFormat,
        (blocks, parts): (AnySlice, usize),
        sum: AnySlice,
    ) -> Result<(), CommError> {
        Ok(self
            .kernels
            .decode_blocks(stream, format, blocks, parts, sum)?)
    }
}

/// Refuses remainders, which are parts of values.
pub(crate) fn check_values(codec: Codec) -> Result<(), CommError> {
    match codec {
        Codec::Remainders => Err(KernelError::Unsupported {
            what: "gather: remainders of 16 bits",
            dtype: codec.dtype(),
        }
        .into()),
        _ => Ok(()),
    }
}
