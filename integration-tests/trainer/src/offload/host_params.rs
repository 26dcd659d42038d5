//! The parameters that the host updates: this rank's part of each unit, the shard or at stage 0 all
//! of it.
//!
//! | home | where | how the device gets them |
//! |---|---|---|
//! | the device's own memory | the device is the host | it waits for the update |
//! | pinned memory | the device is a GPU | copied to the device's parameters, or at stage 3 with offload into the gathered unit |
//! | a scratch file | `--offload-params nvme:DIR` | read into a slot, then copied into the gathered unit |
//!
//! Gathers from the file have a separate stream and slots: one for each unit that is gathered
//! ahead, and one more.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, Stream};
use zero_alloc::host::{HostDevice, HostEvent, HostStream};
use zero_alloc::swap::SwapFile;
use zero_alloc::{Block, Purpose};
use zero_comm::ShardSource;
use zero_optim::Segment;

use crate::error::TrainError;
use crate::offload::drain::drain;
use crate::offload::settings::{Home, OffloadSettings};
use crate::offload::unit_file::{Slot, Transfers, UnitFile};
use crate::rank::Rank;

/// Parameters in a file, and their gathers.
struct OnFile<D: Device> {
    units: UnitFile,
    gathers: Transfers,
    slots: Vec<Slot<D::Event>>,
    next: usize,
}

enum Place<D: Device> {
    /// Memory of the device, which is the host's.
    Direct(Vec<AnySlice>),
    /// Pinned memory. At stages 0 to 2, and at stage 3 without offload of parameters, the device
    /// has them, too.
    Pinned {
        block: Block<HostDevice>,
        slices: Vec<AnySlice>,
        on_device: Option<Vec<AnySlice>>,
    },
    OnFile(Box<OnFile<D>>),
}

/// The parameters of one rank.
pub(crate) struct HostParams<D: Device> {
    place: Place<D>,
    /// After it the unit is updated; `None` if the device has the update.
    updated: Vec<Option<HostEvent>>,
    device: D,
    update: HostStream,
    limit: Duration,
}

/// The parameters, as the update and the gathers share them.
pub(crate) type SharedParams<D> = Arc<Mutex<HostParams<D>>>;

impl<D: Device> HostParams<D> {
    /// `on_device`: what the device has of each unit that the host updates, unless the parameters
    /// are offloaded.
    pub(crate) fn new(
        rank: &Rank<D>,
        update: &HostStream,
        segments: &[Segment],
        on_device: Option<Vec<AnySlice>>,
    ) -> Result<Self, TrainError> {
        let dtype = rank.settings.dtype;
        let lens = segments.iter().map(|s| s.state.len()).collect::<Vec<_>>();
        let place = match (&rank.settings.offload.params, on_device) {
            (Home::Nvme(dir), None) => {
                let units = UnitFile::new(rank, update, dir, ("params", dtype), &lens)?;
                Place::OnFile(Box::new(OnFile::new(rank, update, units)?))
            }
            (_, Some(slices)) if rank.is_host() => Place::Direct(slices),
            (_, on_device) => {
                let block =
                    rank.host
                        .pinned
                        .allocate(lens.iter().sum(), dtype, Purpose::Params, update)?;
                // SAFETY: used by the update's stream and by copies of the device, ordered by
                // events; the drop of this value records the first, and the drop of
                // `HostOptimizer`, which comes before, waits for all.
                let all = unsafe { block.slice() };
                rank.host.pinned.device().fill_zero(update, all)?;
                let slices = cut(all, &lens);
                Place::Pinned {
                    block,
                    slices,
                    on_device,
                }
            }
        };
        let device = rank.pool.device().clone();
        let limit = rank.settings.host_limit();
        // The device sets its memory to zero.
        device.host_waits(update, &rank.compute.record()?, limit)?;
        Ok(Self {
            place,
            updated: vec![None; lens.len()],
            device,
            update: update.clone(),
            limit,
        })
    }

    /// Makes `stream` wait for the update of `unit` and enqueues its copy to the device's
    /// parameters, if they are elsewhere. Returns whether there was an update since the last call.
    pub(crate) fn deliver(&mut self, stream: &D::Stream, unit: usize) -> Result<bool, DeviceError> {
        let Some(updated) = self.updated[unit].take() else {
            return Ok(false);
        };
        self.device.wait_for_host(stream, &updated, self.limit)?;
        if let Place::Pinned {
            slices,
            on_device: Some(on_device),
            ..
        } = &self.place
        {
            self.device.copy(stream, slices[unit], on_device[unit])?;
        }
        Ok(true)
    }

    /// Calls `run` with the parameters of `unit`, for operations on the update's stream that write
    /// all of them if `overwritten`, and otherwise may read them.
    pub(crate) fn update(
        &mut self,
        unit: usize,
        overwritten: bool,
        run: impl FnOnce(AnySlice) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        match &mut self.place {
            Place::Direct(slices) | Place::Pinned { slices, .. } => run(slices[unit])?,
            Place::OnFile(file) => file.units.update(unit, overwritten, run)?,
        }
        self.updated[unit] = Some(self.update.record()?);
        Ok(())
    }

    /// Calls `run` with the parameters of `unit`, which operations on the update's stream only
    /// read.
    pub(crate) fn read<R>(
        &mut self,
        unit: usize,
        run: impl FnOnce(AnySlice) -> Result<R, TrainError>,
    ) -> Result<R, TrainError> {
        match &mut self.place {
            Place::Direct(slices) | Place::Pinned { slices, .. } => run(slices[unit]),
            Place::OnFile(file) => file.units.read(unit, run),
        }
    }

    /// Memory with the size of the parameters of `unit`, for calls that only check it.
    pub(crate) fn unread(&self, unit: usize) -> AnySlice {
        match &self.place {
            Place::Direct(slices) | Place::Pinned { slices, .. } => slices[unit],
            Place::OnFile(file) => file.units.unread(unit),
        }
    }

    /// Makes the update's stream wait for `before`, at which the device has read what it was given.
    pub(crate) fn wait_for_device(&self, before: &D::Event) -> Result<(), DeviceError> {
        self.device.host_waits(&self.update, before, self.limit)
    }

    /// Waits for the transfers of the file.
    pub(crate) fn drain(&self) {
        if let Place::OnFile(file) = &self.place {
            drain(&file.gathers.0, self.limit);
            file.units.drain(self.limit);
        }
    }

    /// The file, if there is one.
    pub(crate) fn file(&self) -> Option<&SwapFile> {
        match &self.place {
            Place::OnFile(on_file) => Some(&on_file.units.file),
            _ => None,
        }
    }

    /// Enqueues filling `own` with the shard of `unit`, or returns the device's memory that has it.
    fn fetch(
        &mut self,
        stream: &D::Stream,
        unit: usize,
        own: AnySlice,
    ) -> Result<AnySlice, DeviceError> {
        self.deliver(stream, unit)?;
        match &mut self.place {
            Place::Direct(slices)
            | Place::Pinned {
                on_device: Some(slices),
                ..
            } => Ok(slices[unit]),
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
    fn new(rank: &Rank<D>, update: &HostStream, units: UnitFile) -> Result<Self, TrainError> {
        let stream = rank
            .host
            .plain
            .device()
            .create_stream(&format!("{} params gathers", update.name()))?;
        let gathers = (stream, units.file.lane()?);
        let ahead = OffloadSettings::units_ahead(&rank.settings.prefetch, &rank.layout) + 1;
        let slots = (0..ahead).map(|_| Slot::new(rank, update, units.slot_bytes()));
        let slots = slots.collect::<Result<Vec<Slot<D::Event>>, TrainError>>()?;
        gathers.1.register(
            &slots
                .iter()
                .map(|slot| slot.buffer.clone())
                .collect::<Vec<_>>(),
        );
        Ok(Self {
            units,
            gathers,
            slots,
            next: 0,
        })
    }

    fn fetch(
        &mut self,
        device: &D,
        stream: &D::Stream,
        unit: usize,
        own: AnySlice,
        limit: Duration,
    ) -> Result<AnySlice, DeviceError> {
        let at = self.next;
        self.next = (at + 1) % self.slots.len();
        let slot = &mut self.slots[at];
        if let Some(free) = slot.free.take() {
            device.host_waits(&self.gathers.0, &free, limit)?;
        }
        let typed = self.units.read_into(&self.gathers, unit, slot.memory)?;
        device.wait_for_host(stream, &self.gathers.0.record()?, limit)?;
        let copied = device.copy(stream, typed, own);
        // Also after an error: the read is enqueued, and the stream is behind it.
        slot.free = Some(stream.record()?);
        copied.map(|()| own)
    }
}

impl<D: Device> Drop for HostParams<D> {
    fn drop(&mut self) {
        // A closed stream runs no more work. The optimizer has waited for the streams of the
        // device.
        match &mut self.place {
            Place::Direct(_) => {}
            Place::Pinned { block, .. } => {
                let _closed = block.record_use(&self.update);
            }
            Place::OnFile(file) => {
                let OnFile { gathers, slots, .. } = &mut **file;
                for slot in slots {
                    let _closed = slot.buffer.record_use(&gathers.0);
                }
            }
        }
    }
}

/// The shards of stage 3 for a prefetcher.
pub(crate) struct Fetch<D: Device> {
    pub(crate) params: SharedParams<D>,
    pub(crate) shard_elems: Vec<usize>,
    pub(crate) dtype: DType,
}

impl<D: Device> ShardSource<D> for Fetch<D> {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn shard_elems(&self) -> Vec<usize> {
        self.shard_elems.clone()
    }

    fn fetch(
        &mut self,
        comm_stream: &D::Stream,
        unit: usize,
        own: AnySlice,
    ) -> Result<AnySlice, DeviceError> {
        self.params.lock().fetch(comm_stream, unit, own)
    }
}
