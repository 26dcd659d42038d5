//! One value of each unit in a scratch file: parameters or sums of gradients that the host updates.
//! [`SwapRing`] reads and writes them; while one unit is updated in memory, the next is read and
//! the last is written.

use std::path::Path;

use zero_alloc::device::{AnySlice, DType, Device, DeviceError, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_alloc::swap::{HeldPart, SwapAccess, SwapFile, SwapParts, SwapRing};

use crate::error::TrainError;
use crate::rank::Rank;

/// A unit is updated in one buffer while the other is written, and then read.
const BUFFERS: usize = 2;

/// The values of all units, for operations on the stream that updates.
pub(crate) struct UnitFile {
    ring: SwapRing,
    dtype: DType,
    update: HostStream,
}

/// The values of one unit in memory.
pub(crate) struct HeldUnit<'a> {
    held: HeldPart<'a, HostDevice>,
    /// For operations on the stream that updates, before this is dropped or written back.
    pub(crate) values: AnySlice,
}

impl UnitFile {
    /// The parts of a file in `dir` for units of `lens` elements, named `name` in streams.
    pub(crate) fn parts<D: Device>(
        rank: &Rank<D>,
        name: &str,
        dir: &Path,
        dtype: DType,
        lens: &[usize],
    ) -> Result<SwapParts, TrainError> {
        let host = rank.host.plain.device();
        let bytes: Vec<_> = lens.iter().map(|len| len * dtype.size_bytes()).collect();
        let options = rank.settings.offload.swap();
        Ok(SwapParts::create(host, name, dir, &bytes, options)?)
    }

    /// A ring of `parts` for operations on `update`.
    pub(crate) fn new<D: Device>(
        rank: &Rank<D>,
        update: &HostStream,
        name: &str,
        parts: &SwapParts,
        dtype: DType,
    ) -> Result<Self, TrainError> {
        let pool = &rank.host.pinned;
        let limit = rank.settings.host_limit();
        Ok(Self {
            ring: SwapRing::new(parts, pool.device(), pool, name, BUFFERS, limit)?,
            dtype,
            update: update.clone(),
        })
    }

    /// The file, with its length and the bytes read and written so far.
    pub(crate) fn file(&self) -> &SwapFile {
        self.ring.file()
    }

    /// The values of `unit` in memory.
    pub(crate) fn acquire(
        &mut self,
        unit: usize,
        access: SwapAccess,
    ) -> Result<HeldUnit<'_>, DeviceError> {
        let held = self.ring.acquire(&self.update, unit, access)?;
        // SAFETY: users of `HeldUnit::values` keep the promise that is written there.
        let values = unsafe { held.elems(self.dtype) };
        Ok(HeldUnit { held, values })
    }
}

impl HeldUnit<'_> {
    /// Enqueues writing the values to the file, after the operations on them.
    pub(crate) fn write_back(self) -> Result<(), DeviceError> {
        self.held.write_back()
    }
}

/// The name of the streams of a file of `what`.
pub(crate) fn file_name(update: &HostStream, what: &str) -> String {
    format!("{} {what}", update.name())
}
