//! The parameters that the host updates: this rank's part of each unit, the shard or at stage 0 all
//! of it.
//!
//! | home | where | how the device gets them |
//! |---|---|---|
//! | the device's own memory | the device is the host | it waits for the update |
//! | pinned memory | the device is a GPU | copied to the device's parameters, or at stage 3 with offload into the gathered unit |
//! | a scratch file | `--offload-params nvme:DIR` | read into a buffer, then copied into the gathered unit |
//!
//! Gathers from the file have another ring: a buffer for each unit that is gathered ahead,
//! and one more.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, DeviceId, Stream};
use zero_alloc::host::{HostDevice, HostEvent, HostStream};
use zero_alloc::swap::{SwapAccess, SwapFile, SwapRing};
use zero_alloc::{Block, Purpose};
use zero_optim::Segment;

use crate::error::TrainError;
use crate::offload::settings::{Home, OffloadSettings};
use crate::offload::unit_file::{HeldUnit, UnitFile, file_name};
use crate::rank::Rank;

/// Parameters in a file, and their gathers.
struct OnFile<D: Device> {
    units: UnitFile,
    gathers: SwapRing<D>,
    dtype: DType,
    lens: Vec<usize>,
}

enum ParamHome<D: Device> {
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
    place: ParamHome<D>,
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
            (Home::Nvme(dir), None) => ParamHome::OnFile(Box::new(OnFile::new(
                rank,
                update,
                dir,
                dtype,
                lens.clone(),
            )?)),
            (_, Some(slices)) if rank.is_host() => ParamHome::Direct(slices),
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
                ParamHome::Pinned {
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
        if let ParamHome::Pinned {
            slices,
            on_device: Some(on_device),
            ..
        } = &self.place
        {
            self.device.copy(stream, slices[unit], on_device[unit])?;
        }
        Ok(true)
    }

    /// The parameters of `unit`, for operations on the update's stream.
    pub(crate) fn acquire(
        &mut self,
        unit: usize,
        access: SwapAccess,
    ) -> Result<HeldParams<'_>, DeviceError> {
        let (values, on_file) = match &mut self.place {
            ParamHome::Direct(slices) | ParamHome::Pinned { slices, .. } => (slices[unit], None),
            ParamHome::OnFile(file) => {
                let held = file.units.acquire(unit, access)?;
                (held.values, Some(held))
            }
        };
        Ok(HeldParams {
            values,
            on_file,
            updated: &mut self.updated[unit],
            update: &self.update,
        })
    }

    /// Memory with the size of the parameters of `unit`, for calls that only check it.
    pub(crate) fn unread(&self, unit: usize) -> AnySlice {
        match &self.place {
            ParamHome::Direct(slices) | ParamHome::Pinned { slices, .. } => slices[unit],
            ParamHome::OnFile(file) => file.unread(unit),
        }
    }

    /// Makes the update's stream wait for `before`, at which the device has read what it was given.
    pub(crate) fn wait_for_device(&self, before: &D::Event) -> Result<(), DeviceError> {
        self.device.host_waits(&self.update, before, self.limit)
    }

    /// The file, if there is one.
    pub(crate) fn file(&self) -> Option<&SwapFile> {
        match &self.place {
            ParamHome::OnFile(on_file) => Some(on_file.units.file()),
            _ => None,
        }
    }

    /// Enqueues filling `own` with the parameters of `unit`, or returns the device's memory that
    /// has them.
    pub(crate) fn fetch(
        &mut self,
        stream: &D::Stream,
        unit: usize,
        own: AnySlice,
    ) -> Result<Option<AnySlice>, DeviceError> {
        self.deliver(stream, unit)?;
        match &mut self.place {
            ParamHome::Direct(slices)
            | ParamHome::Pinned {
                on_device: Some(slices),
                ..
            } => return Ok(Some(slices[unit])),
            ParamHome::Pinned { slices, .. } => self.device.copy(stream, slices[unit], own)?,
            ParamHome::OnFile(file) => file.fetch(&self.device, stream, unit, own)?,
        }
        Ok(None)
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

/// The parameters of a unit in memory.
pub(crate) struct HeldParams<'a> {
    /// For operations on the update's stream, before this is dropped or written back.
    pub(crate) values: AnySlice,
    on_file: Option<HeldUnit<'a>>,
    updated: &'a mut Option<HostEvent>,
    update: &'a HostStream,
}

impl HeldParams<'_> {
    /// Ends an update: gathers wait for it, and a file gets the new values.
    pub(crate) fn write_back(self) -> Result<(), DeviceError> {
        if let Some(on_file) = self.on_file {
            on_file.write_back()?;
        }
        *self.updated = Some(self.update.record()?);
        Ok(())
    }
}

impl<D: Device> OnFile<D> {
    fn new(
        rank: &Rank<D>,
        update: &HostStream,
        dir: &Path,
        dtype: DType,
        lens: Vec<usize>,
    ) -> Result<Self, TrainError> {
        let name = file_name(update, "params");
        let parts = UnitFile::parts(rank, &name, dir, dtype, &lens)?;
        let units = UnitFile::new(rank, update, &name, &parts, dtype)?;

        let device = rank.pool.device();
        let buffers = OffloadSettings::units_ahead(&rank.settings.prefetch, &rank.layout) + 1;
        let gathers = SwapRing::new(
            &parts,
            device,
            &rank.host.pinned,
            &format!("{name} gathers"),
            buffers,
            rank.settings.host_limit(),
        )?;
        Ok(Self {
            units,
            gathers,
            dtype,
            lens,
        })
    }

    /// A slice of the size of `unit` that no operation may access.
    fn unread(&self, unit: usize) -> AnySlice {
        let nowhere = std::ptr::without_provenance_mut(SwapFile::ALIGN_BYTES);
        // SAFETY: callers only check it.
        unsafe { AnySlice::from_raw_parts(nowhere, self.lens[unit], self.dtype, DeviceId::HOST) }
    }

    /// Enqueues reading the parameters of `unit` and copying them to `own`.
    fn fetch(
        &mut self,
        device: &D,
        stream: &D::Stream,
        unit: usize,
        own: AnySlice,
    ) -> Result<(), DeviceError> {
        let held = self.gathers.acquire(stream, unit, SwapAccess::Read)?;
        // SAFETY: read by an operation of the stream, before the drop.
        device.copy(stream, unsafe { held.elems(self.dtype) }, own)
    }
}

impl<D: Device> Drop for HostParams<D> {
    fn drop(&mut self) {
        if let ParamHome::Pinned { block, .. } = &mut self.place {
            // A closed stream runs no more work. The optimizer has waited for the streams of the
            // device.
            let _closed = block.record_use(&self.update);
        }
    }
}
