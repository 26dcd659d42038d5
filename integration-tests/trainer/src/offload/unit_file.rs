//! One value of each unit in a scratch file: parameters or sums of gradients that the host updates,
//! through two slots of the largest unit. While one unit is updated in memory, the next is read and
//! the last is written.

use std::path::Path;
use std::time::Duration;

use zero_alloc::Purpose;
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, Stream};
use zero_alloc::host::{HostEvent, HostStream};
use zero_alloc::swap::{SwapBuffer, SwapFile, SwapLane};

use crate::error::TrainError;
use crate::offload::drain::drain;
use crate::rank::Rank;

/// A host stream with its queue of requests to the file.
pub(crate) type Transfers = (HostStream, SwapLane);

/// Aligned host memory for one unit. `E`: the event after which it may be overwritten.
pub(crate) struct Slot<E> {
    pub(crate) buffer: SwapBuffer,
    pub(crate) memory: AnySlice,
    pub(crate) free: Option<E>,
    /// The unit whose last values it has.
    holds: Option<usize>,
}

impl<E> Slot<E> {
    /// `bytes` bytes, pinned if the device is a GPU.
    pub(crate) fn new<D: Device>(
        rank: &Rank<D>,
        stream: &HostStream,
        bytes: usize,
    ) -> Result<Self, TrainError> {
        let buffer = SwapBuffer::allocate(&rank.host.pinned, bytes, Purpose::Workspace, stream)?;
        // SAFETY: used by streams whose operations events order; the drop of its owner records or
        // drains them.
        let memory = unsafe { buffer.slice() };
        Ok(Self {
            buffer,
            memory,
            free: None,
            holds: None,
        })
    }
}

/// A unit in the file.
#[derive(Clone, Copy, Debug)]
struct Extent {
    /// Its first byte.
    at: u64,
    elems: usize,
}

/// The file and its slots.
pub(crate) struct UnitFile {
    pub(crate) file: SwapFile,
    dtype: DType,
    extents: Vec<Extent>,
    /// After it the unit is written, if it was.
    written: Vec<Option<HostEvent>>,
    reads: Transfers,
    writes: Transfers,
    slots: [Slot<HostEvent>; 2],
    next: usize,
    /// The stream that updates.
    update: HostStream,
}

impl UnitFile {
    /// A file in `dir` for units of `lens` elements, named `what` in streams. `update` is the
    /// stream that updates.
    pub(crate) fn new<D: Device>(
        rank: &Rank<D>,
        update: &HostStream,
        dir: &Path,
        (what, dtype): (&str, DType),
        lens: &[usize],
    ) -> Result<Self, TrainError> {
        let aligned =
            |elems: usize| (elems * dtype.size_bytes()).next_multiple_of(SwapFile::ALIGN_BYTES);
        let mut bytes = 0;
        let extent = |&elems: &usize| {
            let at = bytes;
            bytes += aligned(elems) as u64;
            Extent { at, elems }
        };
        let extents: Vec<_> = lens.iter().map(extent).collect();
        let largest = aligned(lens.iter().copied().max().unwrap_or(0));
        let file = SwapFile::create(dir, bytes, rank.settings.offload.swap())?;
        let transfers = |direction: &str| {
            let stream = rank
                .host
                .plain
                .device()
                .create_stream(&format!("{} {what} {direction}", update.name()))?;
            Ok::<_, TrainError>((stream, file.lane()?))
        };
        let reads = transfers("reads")?;
        let writes = transfers("writes")?;
        let slots = [
            Slot::new(rank, update, largest)?,
            Slot::new(rank, update, largest)?,
        ];
        for (_, lane) in [&reads, &writes] {
            lane.register(&slots.each_ref().map(|slot| slot.buffer.clone()));
        }
        let written = vec![None; lens.len()];
        Ok(Self {
            file,
            dtype,
            extents,
            written,
            reads,
            writes,
            slots,
            next: 0,
            update: update.clone(),
        })
    }

    /// Bytes of the largest slot.
    pub(crate) fn slot_bytes(&self) -> usize {
        self.slots[0].memory.len()
    }

    /// Calls `run` with the elements of `unit` in memory, for operations on the update's stream:
    /// all are written if `overwritten`, and otherwise they have their last values. They are then
    /// written to the file.
    pub(crate) fn update(
        &mut self,
        unit: usize,
        overwritten: bool,
        run: impl FnOnce(AnySlice) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let at = self.slot(unit, overwritten)?;
        let (offset, bytes, typed) = self.of(unit, self.slots[at].memory);
        let enqueued = run(typed);
        let (writes, lane) = &self.writes;
        writes.wait(&self.update.record()?)?;
        if enqueued.is_ok() {
            lane.write(writes, &[(offset, bytes)])?;
        }
        let written = writes.record()?;
        self.slots[at].free = Some(written.clone());
        self.written[unit] = Some(written);
        if enqueued.is_err() {
            self.slots[at].holds = None;
        }
        enqueued
    }

    /// Calls `run` with the elements of `unit` in memory, for operations on the update's stream
    /// that only read them.
    pub(crate) fn read<R>(
        &mut self,
        unit: usize,
        run: impl FnOnce(AnySlice) -> Result<R, TrainError>,
    ) -> Result<R, TrainError> {
        let at = self.slot(unit, false)?;
        let (_, _, typed) = self.of(unit, self.slots[at].memory);
        let result = run(typed);
        self.slots[at].free = Some(self.update.record()?);
        result
    }

    /// Memory with the size of `unit` and any values, for calls that only check it.
    pub(crate) fn unread(&self, unit: usize) -> AnySlice {
        self.of(unit, self.slots[0].memory).2
    }

    /// Enqueues reading `unit` into `memory` on another stream. Returns the elements there.
    pub(crate) fn read_into(
        &self,
        (reads, lane): &Transfers,
        unit: usize,
        memory: AnySlice,
    ) -> Result<AnySlice, DeviceError> {
        let (offset, bytes, typed) = self.of(unit, memory);
        if let Some(written) = &self.written[unit] {
            reads.wait(written)?;
        }
        lane.read(reads, &[(offset, bytes)])?;
        Ok(typed)
    }

    /// The next slot, with the values of `unit` unless they are `overwritten`. The update's stream
    /// waits for them.
    fn slot(&mut self, unit: usize, overwritten: bool) -> Result<usize, DeviceError> {
        let held = self.slots.iter().position(|slot| slot.holds == Some(unit));
        if let (Some(at), false) = (held, overwritten) {
            // An operation that writes waits until the last values are in the file.
            let free = self.slots[at].free.take();
            free.iter().try_for_each(|free| self.update.wait(free))?;
            return Ok(at);
        }
        if let Some(stale) = held {
            self.slots[stale].holds = None;
        }
        let at = self.next;
        self.next = (at + 1) % self.slots.len();
        self.slots[at].holds = None;
        let free = self.slots[at].free.take();
        if overwritten {
            free.iter().try_for_each(|free| self.update.wait(free))?;
        } else {
            free.iter().try_for_each(|free| self.reads.0.wait(free))?;
            self.read_into(&self.reads, unit, self.slots[at].memory)?;
            self.update.wait(&self.reads.0.record()?)?;
        }
        self.slots[at].holds = Some(unit);
        Ok(at)
    }

    /// The first byte of `unit`, its aligned bytes at the start of `memory`, and its elements
    /// there.
    fn of(&self, unit: usize, memory: AnySlice) -> (u64, AnySlice, AnySlice) {
        let Extent { at, elems } = self.extents[unit];
        let bytes = elems * self.dtype.size_bytes();
        // SAFETY: initialised bytes of a slot, which is aligned for every dtype and has room; the
        // rest as for `memory`.
        let typed = unsafe {
            AnySlice::from_raw_parts(memory.as_ptr(), elems, self.dtype, memory.device())
        };
        (
            at,
            memory.slice(0..bytes.next_multiple_of(SwapFile::ALIGN_BYTES)),
            typed,
        )
    }

    /// Waits for the transfers.
    pub(crate) fn drain(&self, limit: Duration) {
        [&self.reads, &self.writes]
            .into_iter()
            .for_each(|(stream, _)| drain(stream, limit));
    }
}

impl Drop for UnitFile {
    fn drop(&mut self) {
        for slot in &mut self.slots {
            for stream in [&self.update, &self.reads.0, &self.writes.0] {
                // A closed stream runs no more work.
                let _closed = slot.buffer.record_use(stream);
            }
        }
    }
}
