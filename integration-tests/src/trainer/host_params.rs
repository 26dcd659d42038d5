//! The parameters that the host updates: this rank's part of each unit, the shard or at stage 0 all of it.
//!
//! | home | where | how the device gets them |
//! |---|---|---|
//! | the device's own memory | the device is the host | it waits for the update |
//! | pinned memory | the device is a GPU | copied to the device's parameters, or at stage 3 with offload into the gathered unit |
//! | a scratch file | `--offload-params nvme:DIR` | read into a slot, then copied into the gathered unit |
//!
//! The file is read by two streams (for gathers, and for updates that need the old values) and written by one, through slots
//! of the largest part: one a unit that is gathered ahead and one more, and two for updates.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, Stream};
use zero_alloc::host::{HostDevice, HostEvent, HostStream};
use zero_alloc::swap::{SwapFile, SwapLane};
use zero_alloc::{Block, Purpose};
use zero_comm::ShardSource;
use zero_optim::Segment;

use super::host_optimizer::drain;
use super::offload::{Home, OffloadSettings};
use super::rank::Rank;
use crate::error::TrainError;

/// A host stream with its queue of requests to the file.
type Transfers = (HostStream, SwapLane);

/// Aligned host memory for one unit's part. `E`: the event after which it may be overwritten.
struct Slot<E> {
    block: Block<HostDevice>,
    memory: AnySlice,
    free: Option<E>,
}

/// Parameters in a file.
struct OnFile<D: Device> {
    file: SwapFile,
    dtype: DType,
    /// The first byte and the elements of each unit.
    extents: Vec<(u64, usize)>,
    /// After it the unit is written, if it was.
    written: Vec<Option<HostEvent>>,
    gathers: Transfers,
    gather_slots: Vec<Slot<D::Event>>,
    next_gather: usize,
    update_reads: Transfers,
    update_writes: Transfers,
    update_slots: [Slot<HostEvent>; 2],
    next_update: usize,
}

enum Place<D: Device> {
    /// Memory of the device, which is the host's.
    Direct(Vec<AnySlice>),
    /// Pinned memory. At stages 0 to 2, and at stage 3 without offload of parameters, the device has them, too.
    Pinned {
        block: Block<HostDevice>,
        slices: Vec<AnySlice>,
        on_device: Option<Vec<AnySlice>>,
    },
    OnFile(Box<OnFile<D>>),
}

/// The parameters of one rank.
pub(super) struct HostParams<D: Device> {
    place: Place<D>,
    /// After it the unit is updated; `None` if the device has the update.
    updated: Vec<Option<HostEvent>>,
    device: D,
    update: HostStream,
    limit: Duration,
}

/// The parameters, as the update and the gathers share them.
pub(super) type SharedParams<D> = Arc<Mutex<HostParams<D>>>;

impl<D: Device> HostParams<D> {
    /// `on_device`: what the device has of each unit that the host updates, unless the parameters are offloaded.
    pub(super) fn new(
        rank: &Rank<D>,
        update: &HostStream,
        segments: &[Segment],
        on_device: Option<Vec<AnySlice>>,
    ) -> Result<Self, TrainError> {
        let (dtype, lens) = (rank.settings.dtype, segments.iter().map(|s| s.state.len()).collect::<Vec<_>>());
        let place = match (&rank.settings.offload.params, on_device) {
            (Home::Nvme(dir), None) => {
                let file = |bytes| SwapFile::create(dir, bytes, rank.settings.offload.swap());
                Place::OnFile(Box::new(OnFile::new(rank, update, dtype, &lens, file)?))
            }
            (_, Some(slices)) if rank.is_host() => Place::Direct(slices),
            (_, on_device) => {
                let block = rank.host.pinned.allocate(lens.iter().sum(), dtype, Purpose::Params, update)?;
                // SAFETY: used by the update's stream and by copies of the device, ordered by events; the drop of this
                // value records the first, and the streams of the second are drained before (`Flags`).
                let all = unsafe { block.slice() };
                rank.host.pinned.device().fill_zero(update, all)?;
                let slices = cut(all, &lens);
                Place::Pinned { block, slices, on_device }
            }
        };
        let (device, limit) = (rank.pool.device().clone(), rank.settings.host_limit());
        // The device sets its memory to zero.
        device.host_waits(update, &rank.compute.record()?, limit)?;
        Ok(Self { place, updated: vec![None; lens.len()], device, update: update.clone(), limit })
    }

    /// Makes `stream` wait for the update of `unit` and enqueues its copy to the device's parameters, if they are elsewhere.
    /// Returns whether there was an update since the last call.
    pub(super) fn deliver(&mut self, stream: &D::Stream, unit: usize) -> Result<bool, DeviceError> {
        let Some(updated) = self.updated[unit].take() else { return Ok(false) };
        self.device.wait_for_host(stream, &updated, self.limit)?;
        if let Place::Pinned { slices, on_device: Some(on_device), .. } = &self.place {
            self.device.copy(stream, slices[unit], on_device[unit])?;
        }
        Ok(true)
    }

    /// Calls `run` with the parameters of `unit`, for operations on the update's stream that write all of them if
    /// `overwritten`, and otherwise may read them.
    pub(super) fn update(
        &mut self,
        unit: usize,
        overwritten: bool,
        run: impl FnOnce(AnySlice) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        match &mut self.place {
            Place::Direct(slices) | Place::Pinned { slices, .. } => run(slices[unit])?,
            Place::OnFile(file) => file.update(&self.update, unit, overwritten, run)?,
        }
        self.updated[unit] = Some(self.update.record()?);
        Ok(())
    }

    /// Calls `run` with the parameters of `unit`, which operations on the update's stream only read.
    pub(super) fn read<R>(
        &mut self,
        unit: usize,
        run: impl FnOnce(AnySlice) -> Result<R, TrainError>,
    ) -> Result<R, TrainError> {
        match &mut self.place {
            Place::Direct(slices) | Place::Pinned { slices, .. } => run(slices[unit]),
            Place::OnFile(file) => file.read(&self.update, unit, run),
        }
    }

    /// Makes the update's stream wait for `before`, at which the device has read what it was given.
    pub(super) fn wait_for_device(&self, before: &D::Event) -> Result<(), DeviceError> {
        self.device.host_waits(&self.update, before, self.limit)
    }

    /// Waits for the transfers of the file.
    pub(super) fn drain(&self) {
        if let Place::OnFile(file) = &self.place {
            for (stream, _) in [&file.gathers, &file.update_reads, &file.update_writes] {
                drain(stream, self.limit);
            }
        }
    }

    /// The file's length, and what was read and written so far.
    pub(super) fn file_use(&self) -> Option<[u64; 3]> {
        match &self.place {
            Place::OnFile(on_file) => {
                let file = &on_file.file;
                Some([file.bytes(), file.read_bytes(), file.written_bytes()])
            }
            _ => None,
        }
    }

    /// What is slower than requested.
    pub(super) fn notices(&self) -> Vec<String> {
        match &self.place {
            Place::OnFile(on_file) => on_file.file.notices(),
            _ => Vec::new(),
        }
    }

    /// Enqueues filling `own` with the shard of `unit`, or returns the device's memory that has it.
    fn fetch(&mut self, stream: &D::Stream, unit: usize, own: AnySlice) -> Result<AnySlice, DeviceError> {
        self.deliver(stream, unit)?;
        match &mut self.place {
            Place::Direct(slices) | Place::Pinned { on_device: Some(slices), .. } => Ok(slices[unit]),
            Place::Pinned { slices, .. } => {
                self.device.copy(stream, slices[unit], own)?;
                Ok(own)
            }
            Place::OnFile(file) => file.fetch(&self.device, stream, unit, own, self.limit),
        }
    }
}

/// Consecutive parts of these lengths.
fn cut(all: AnySlice, lens: &[usize]) -> Vec<AnySlice> {
    let mut end = 0;
    let part = |len: &usize| {
        end += len;
        all.slice(end - len..end)
    };
    lens.iter().map(part).collect()
}

impl<D: Device> OnFile<D> {
    fn new(
        rank: &Rank<D>,
        update: &HostStream,
        dtype: DType,
        lens: &[usize],
        create: impl FnOnce(u64) -> Result<SwapFile, zero_alloc::swap::SwapError>,
    ) -> Result<Self, TrainError> {
        let width = dtype.size_bytes();
        let aligned = |elems: usize| (elems * width).next_multiple_of(SwapFile::ALIGN_BYTES);
        let mut bytes = 0;
        let extent = |&elems: &usize| {
            let at = bytes;
            bytes += aligned(elems) as u64;
            (at, elems)
        };
        let extents: Vec<_> = lens.iter().map(extent).collect();
        let largest = lens.iter().copied().max().unwrap_or(0);
        let file = create(bytes)?;
        let transfers = |what: &str| {
            let stream = rank.host.plain.device().create_stream(&format!("{} {what}", update.name()))?;
            Ok::<_, TrainError>((stream, file.lane()?))
        };
        let (gathers, update_reads) = (transfers("gather reads")?, transfers("param reads")?);
        let update_writes = transfers("param writes")?;
        let units_ahead = OffloadSettings::units_ahead(&rank.settings.prefetch, &rank.layout);
        let gather_slots = (0..units_ahead + 1).map(|_| slot(rank, update, aligned(largest)));
        let gather_slots = gather_slots.collect::<Result<Vec<Slot<D::Event>>, TrainError>>()?;
        let update_slots = [slot(rank, update, aligned(largest))?, slot(rank, update, aligned(largest))?];
        gathers.1.register(&gather_slots.iter().map(|slot| slot.memory).collect::<Vec<_>>())?;
        for (_, lane) in [&update_reads, &update_writes] {
            lane.register(&update_slots.each_ref().map(|slot| slot.memory))?;
        }
        let written = vec![None; lens.len()];
        let (next_gather, next_update) = (0, 0);
        Ok(Self {
            file,
            dtype,
            extents,
            written,
            gathers,
            gather_slots,
            next_gather,
            update_reads,
            update_writes,
            update_slots,
            next_update,
        })
    }

    /// The first byte of `unit`, its aligned bytes at the start of `memory`, and its elements there.
    fn of(&self, unit: usize, memory: AnySlice) -> (u64, AnySlice, AnySlice) {
        let (at, elems) = self.extents[unit];
        let bytes = elems * self.dtype.size_bytes();
        // SAFETY: initialised bytes of a slot, which is aligned for every dtype and has room; the rest as for `memory`.
        let typed = unsafe { AnySlice::from_raw_parts(memory.as_ptr(), elems, self.dtype, memory.device()) };
        (at, memory.slice(0..bytes.next_multiple_of(SwapFile::ALIGN_BYTES)), typed)
    }

    fn fetch(
        &mut self,
        device: &D,
        stream: &D::Stream,
        unit: usize,
        own: AnySlice,
        limit: Duration,
    ) -> Result<AnySlice, DeviceError> {
        let at = self.next_gather;
        self.next_gather = (at + 1) % self.gather_slots.len();
        let (offset, bytes, typed) = self.of(unit, self.gather_slots[at].memory);
        let (reads, lane) = &self.gathers;
        if let Some(free) = self.gather_slots[at].free.take() {
            device.host_waits(reads, &free, limit)?;
        }
        if let Some(written) = &self.written[unit] {
            reads.wait(written)?;
        }
        lane.read(reads, &[(offset, bytes)])?;
        device.wait_for_host(stream, &reads.record()?, limit)?;
        let copied = device.copy(stream, typed, own);
        // Also after an error: the read is enqueued, and the stream is behind it.
        self.gather_slots[at].free = Some(stream.record()?);
        copied.map(|()| own)
    }

    /// The next update slot, with its old values unless it is `overwritten`. `update` waits for them.
    fn slot(&mut self, update: &HostStream, unit: usize, overwritten: bool) -> Result<usize, DeviceError> {
        let at = self.next_update;
        self.next_update = (at + 1) % self.update_slots.len();
        let (offset, bytes, _) = self.of(unit, self.update_slots[at].memory);
        let (reads, lane) = &self.update_reads;
        let free = self.update_slots[at].free.take();
        if overwritten {
            free.iter().try_for_each(|free| update.wait(free))?;
        } else {
            free.iter().chain(&self.written[unit]).try_for_each(|before| reads.wait(before))?;
            lane.read(reads, &[(offset, bytes)])?;
            update.wait(&reads.record()?)?;
        }
        Ok(at)
    }

    fn update(
        &mut self,
        update: &HostStream,
        unit: usize,
        overwritten: bool,
        run: impl FnOnce(AnySlice) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let at = self.slot(update, unit, overwritten)?;
        let (offset, bytes, typed) = self.of(unit, self.update_slots[at].memory);
        let enqueued = run(typed);
        let (writes, lane) = &self.update_writes;
        writes.wait(&update.record()?)?;
        if enqueued.is_ok() {
            lane.write(writes, &[(offset, bytes)])?;
        }
        let written = writes.record()?;
        self.update_slots[at].free = Some(written.clone());
        self.written[unit] = Some(written);
        enqueued
    }

    fn read<R>(
        &mut self,
        update: &HostStream,
        unit: usize,
        run: impl FnOnce(AnySlice) -> Result<R, TrainError>,
    ) -> Result<R, TrainError> {
        let at = self.slot(update, unit, false)?;
        let (_, _, typed) = self.of(unit, self.update_slots[at].memory);
        let result = run(typed);
        self.update_slots[at].free = Some(update.record()?);
        result
    }
}

/// Aligned host memory, pinned on a GPU.
fn slot<D: Device, E>(rank: &Rank<D>, stream: &HostStream, bytes: usize) -> Result<Slot<E>, TrainError> {
    let block = rank.host.pinned.allocate(bytes + SwapFile::ALIGN_BYTES, DType::U8, Purpose::Workspace, stream)?;
    // SAFETY: used by streams whose operations events order; the drop of `HostParams` records or drains them.
    let all = unsafe { block.slice() };
    let start = all.as_ptr().addr().next_multiple_of(SwapFile::ALIGN_BYTES) - all.as_ptr().addr();
    Ok(Slot { block, memory: all.slice(start..start + bytes), free: None })
}

impl<D: Device> Drop for HostParams<D> {
    fn drop(&mut self) {
        // A closed stream runs no more work. The streams of the device are drained before (`Flags`).
        match &mut self.place {
            Place::Direct(_) => {}
            Place::Pinned { block, .. } => {
                let _closed = block.record_use(&self.update);
            }
            Place::OnFile(file) => {
                let OnFile { gathers, gather_slots, update_reads, update_writes, update_slots, .. } = &mut **file;
                let blocks = gather_slots.iter_mut().map(|slot| &mut slot.block);
                for block in blocks.chain(update_slots.iter_mut().map(|slot| &mut slot.block)) {
                    for stream in [&self.update, &gathers.0, &update_reads.0, &update_writes.0] {
                        let _closed = block.record_use(stream);
                    }
                }
            }
        }
    }
}

/// The shards of stage 3 for a prefetcher.
pub(super) struct Fetch<D: Device> {
    pub(super) params: SharedParams<D>,
    pub(super) shard_elems: Vec<usize>,
    pub(super) dtype: DType,
}

impl<D: Device> ShardSource<D> for Fetch<D> {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn shard_elems(&self) -> Vec<usize> {
        self.shard_elems.clone()
    }

    fn fetch(&mut self, comm_stream: &D::Stream, unit: usize, own: AnySlice) -> Result<AnySlice, DeviceError> {
        self.params.lock().fetch(comm_stream, unit, own)
    }
}
