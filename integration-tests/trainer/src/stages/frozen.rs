//! Frozen units in blocks of few bits: stored and gathered so, and decoded where a pass reads them.
//!
//! | stored | as | on a rank |
//! |---|---|---|
//! | the flat parameter of a unit | blocks | its shard at stage 3, all of it at the others |
//! | biases, norms and other parameters that are [not in blocks](BlockFormat::holds) | the run's dtype | all of them |
//!
//! Only units with linear layers are: embeddings keep their dtype. A block is a range of a
//! parameter, so the decoded values are the same at any stage and number of ranks; encoding them
//! again gives the same blocks, so a checkpoint holds them exactly, as fp32.

use std::ops::Range;
use std::sync::Arc;

use zero_alloc::device::{AnySlice, DType, Device, Element};
use zero_alloc::{Block, Pool, Purpose};
use zero_comm::{CommError, Communicator};
use zero_kernels::{Codec, Float, Kernels, Rounding, host};
use zero_shard::{BlockFormat, Layout, UnitLayout};

use crate::error::TrainError;
use crate::frozen_layout::plain_ranges;
use crate::param_groups::ModelGroups;
use crate::settings::Settings;
use crate::workload::Fill;

/// Elements that are encoded or decoded at a time: whole blocks of any format.
const CHUNK_ELEMS: u64 = 1 << 20;

/// Frozen units in blocks.
pub(crate) struct FrozenUnits<D: Device> {
    format: BlockFormat,
    dtype: DType,
    /// By unit; `None`: it is not in blocks.
    units: Vec<Option<FrozenUnit>>,
    blocks: Block<D>,
    plain: Block<D>,
    kernels: Arc<dyn Kernels<D>>,
    pool: Pool<D>,
    /// The ranks that have the other shards, at stage 3.
    comm: Option<Arc<dyn Communicator<D>>>,
    streams: Vec<D::Stream>,
}

struct FrozenUnit {
    /// The range of the flat parameter that this rank has in blocks.
    held: Range<u64>,
    /// The bytes of the blocks.
    bytes: Range<usize>,
    /// Ranges of the flat parameter that are not in blocks, with the place of their first element.
    plain: Vec<(Range<usize>, usize)>,
}

impl<D: Device> FrozenUnits<D> {
    /// The frozen units of a rank, whose part of unit `u` is `held(u)`, shared with the ranks of
    /// `comm`; `None` if there are none in blocks.
    pub(crate) fn new(
        settings: &Settings,
        groups: &ModelGroups,
        layout: &Layout,
        held: impl Fn(usize) -> Range<u64>,
        comm: Option<Arc<dyn Communicator<D>>>,
        (pool, kernels): (&Pool<D>, &Arc<dyn Kernels<D>>),
        streams: Vec<D::Stream>,
    ) -> Result<Option<Self>, TrainError> {
        let Some(format) = settings.quantised_frozen else {
            return Ok(None);
        };
        let mut bytes = 0;
        let mut elems = 0;
        let unit = |(unit, placed): (usize, &UnitLayout)| {
            groups.in_blocks[unit]?;
            let held = held(unit);
            let start = bytes;
            bytes += format.bytes((held.end - held.start) as usize);
            let plain = plain_ranges(settings.kind_of, placed)
                .into_iter()
                .map(|range| {
                    let at = elems;
                    elems += (range.end - range.start) as usize;
                    (range.start as usize..range.end as usize, at)
                });
            Some(FrozenUnit {
                held,
                bytes: start..bytes,
                plain: plain.collect(),
            })
        };
        let units: Vec<_> = layout.units().iter().enumerate().map(unit).collect();
        if units.iter().all(Option::is_none) {
            return Ok(None);
        }

        let Some(stream) = streams.first() else {
            return Ok(None);
        };
        let allocate = |len, dtype| pool.allocate(len, dtype, Purpose::Params, stream);
        Ok(Some(Self {
            format,
            dtype: settings.dtype,
            units,
            blocks: allocate(bytes, DType::U8)?,
            plain: allocate(elems, settings.dtype)?,
            kernels: Arc::clone(kernels),
            pool: pool.clone(),
            comm,
            streams,
        }))
    }

    /// Whether the unit is in blocks.
    pub(crate) fn has(&self, unit: usize) -> bool {
        self.units[unit].is_some()
    }

    /// The stored bytes of a unit that is in blocks.
    pub(crate) fn stored(&self, unit: usize) -> Option<AnySlice> {
        let unit = self.units[unit].as_ref()?;
        Some(self.blocks().slice(unit.bytes.clone()))
    }

    /// Enqueues writing the flat parameter of `unit` to `whole`, and returns whether it is in
    /// blocks.
    pub(crate) fn decode(
        &self,
        stream: &D::Stream,
        unit: usize,
        whole: AnySlice,
    ) -> Result<bool, CommError> {
        let (Some(frozen), Some(own)) = (&self.units[unit], self.stored(unit)) else {
            return Ok(false);
        };
        match &self.comm {
            None => self
                .kernels
                .decode_blocks(stream, self.format, own, 1, whole)?,
            Some(comm) => {
                let bytes = own.len() * comm.world_size();
                let mut scratch = self
                    .pool
                    .allocate(bytes, DType::U8, Purpose::Buckets, stream)?;
                // SAFETY: only this stream uses it, and it is recorded before it is dropped.
                let all = unsafe { scratch.slice() };
                let gathered = comm.all_gather(stream, own, all).and_then(|()| {
                    let kernels = &self.kernels;
                    Ok(kernels.decode_blocks(stream, self.format, all, 1, whole)?)
                });
                scratch.record_use(stream)?;
                gathered?;
            }
        }
        for (range, at) in &frozen.plain {
            let plain = self.plain().slice(*at..at + range.len());
            let to = whole.slice(range.clone());
            self.kernels.cast(stream, plain, to, 1.0)?;
        }
        Ok(true)
    }

    /// Sets a unit, in parts: `fill` returns the values of a range of its flat parameter.
    pub(crate) fn set(
        &self,
        stream: &D::Stream,
        unit: usize,
        fill: Fill<'_>,
        limit: std::time::Duration,
    ) -> Result<(), TrainError> {
        let (Some(frozen), Some(own)) = (&self.units[unit], self.stored(unit)) else {
            return Ok(());
        };
        let device = self.pool.device();
        let codec = Codec::Blocks(self.format);
        let mut values = Vec::new();
        for range in chunks(&frozen.held) {
            fill(range.clone(), &mut values)?;
            let mut bytes = vec![0; self.format.bytes(values.len())];
            codec.encode(&values, &mut bytes, Rounding::Nearest)?;
            let at = self.format.bytes(range.start - frozen.held.start as usize);
            let to = own.slice(at..at + bytes.len());
            device.upload(stream, &bytes, to, limit)?;
        }
        for (range, at) in &frozen.plain {
            fill(range.clone(), &mut values)?;
            let to = self.plain().slice(*at..at + range.len());
            match self.dtype {
                DType::Bf16 => upload::<half::bf16, D>(device, stream, &values, to, limit)?,
                DType::F16 => upload::<half::f16, D>(device, stream, &values, to, limit)?,
                _ => upload::<f32, D>(device, stream, &values, to, limit)?,
            }
        }
        Ok(())
    }

    /// Reads a range of the flat parameter of a unit, within what this rank has; `None` if it is
    /// not in blocks.
    pub(crate) fn read(
        &self,
        stream: &D::Stream,
        unit: usize,
        range: Range<u64>,
        out: &mut [f32],
        limit: std::time::Duration,
    ) -> Option<Result<(), TrainError>> {
        let frozen = self.units[unit].as_ref()?;
        let own = self.stored(unit)?;
        Some(self.read_stored((frozen, own), stream, range, out, limit))
    }

    fn read_stored(
        &self,
        (frozen, own): (&FrozenUnit, AnySlice),
        stream: &D::Stream,
        range: Range<u64>,
        out: &mut [f32],
        limit: std::time::Duration,
    ) -> Result<(), TrainError> {
        let device = self.pool.device();
        let block_elems = self.format.elems();
        let wanted = range.start as usize..range.end as usize;
        let held = frozen.held.start as usize;
        let first = (wanted.start - held) / block_elems * block_elems + held;
        for start in (first..wanted.end).step_by(CHUNK_ELEMS as usize) {
            let end = (start + CHUNK_ELEMS as usize).min(frozen.held.end as usize);
            let mut bytes = vec![0; self.format.bytes(end - start)];
            let at = self.format.bytes(start - held);
            device.download(stream, own.slice(at..at + bytes.len()), &mut bytes, limit)?;
            let mut values = vec![0.0; end - start];
            Codec::Blocks(self.format).decode(&bytes, &mut values)?;
            let both = start.max(wanted.start)..end.min(wanted.end);
            out[both.start - wanted.start..both.end - wanted.start]
                .copy_from_slice(&values[both.start - start..both.end - start]);
        }
        for (plain, at) in &frozen.plain {
            let both = plain.start.max(wanted.start)..plain.end.min(wanted.end);
            if both.is_empty() {
                continue;
            }
            let from = at + both.start - plain.start;
            let from = self.plain().slice(from..from + both.len());
            let out = &mut out[both.start - wanted.start..both.end - wanted.start];
            match self.dtype {
                DType::Bf16 => download::<half::bf16, D>(device, stream, from, out, limit)?,
                DType::F16 => download::<half::f16, D>(device, stream, from, out, limit)?,
                _ => download::<f32, D>(device, stream, from, out, limit)?,
            }
        }
        Ok(())
    }

    fn blocks(&self) -> AnySlice {
        // SAFETY: written between steps and read by operations of the rank's streams, in the order
        // of the stage's events; the drop records them.
        unsafe { self.blocks.slice() }
    }

    fn plain(&self) -> AnySlice {
        // SAFETY: as for the blocks.
        unsafe { self.plain.slice() }
    }
}

/// A range in parts of whole blocks, counted from its start.
fn chunks(range: &Range<u64>) -> impl Iterator<Item = Range<usize>> + '_ {
    let starts = range.clone().step_by(CHUNK_ELEMS as usize);
    starts.map(|start| start as usize..(start + CHUNK_ELEMS).min(range.end) as usize)
}

fn upload<T: Element + Float, D: Device>(
    device: &D,
    stream: &D::Stream,
    values: &[f32],
    to: AnySlice,
    limit: std::time::Duration,
) -> Result<(), TrainError> {
    let mut rounded = vec![T::from_f32(0.0); values.len()];
    host::cast(values, &mut rounded, 1.0)?;
    Ok(device.upload(stream, bytemuck::cast_slice(&rounded), to, limit)?)
}

fn download<T: Element + Float, D: Device>(
    device: &D,
    stream: &D::Stream,
    from: AnySlice,
    out: &mut [f32],
    limit: std::time::Duration,
) -> Result<(), TrainError> {
    let mut rounded = vec![T::from_f32(0.0); out.len()];
    device.download(stream, from, bytemuck::cast_slice_mut(&mut rounded), limit)?;
    Ok(host::cast(&rounded, out, 1.0)?)
}

impl<D: Device> Drop for FrozenUnits<D> {
    fn drop(&mut self) {
        for stream in &self.streams {
            for block in [&mut self.blocks, &mut self.plain] {
                // Recording fails only on a closed stream, which no longer uses the block.
                let _closed = block.record_use(stream);
            }
        }
    }
}
