//! Inputs of blocks in pinned host memory, for `offload_activations`.
//!
//! Row `i` is the input of block `i`, counted from 0; the last row is the head's. The device has a
//! ring of [`RING`] rows: row `i` is in slot `i % RING`. Backward begins with the last rows in the
//! ring, so only the rows before them go to the host.
//!
//! | operation | stream | waits for |
//! |---|---|---|
//! | copy of row `i` to the host | copies | the pass that wrote it |
//! | write of row `i + RING`, same slot | compute | that copy |
//! | copy of row `i` back to its slot | copies | the last use of row `i + RING`, in backward |
//! | backward that reads row `i` | compute | that copy |
//!
//! With partitioned activations (Pa+cpu) a rank of tensor parallelism copies its part of a row only.
//! The ranks gather a row that has come back, on the stream of its use.
//!
//! A copy to the host overlaps the next `RING - 1` passes, and a copy back is as many passes ahead
//! of its use.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use zero_alloc::cuda::{CudaDevice, CudaEvent, CudaStream, PinnedMemory};
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, Memory, Stream};

use zero_comm::Communicator;
use zero_trainer::ModelError;

/// Rows on the device: one that a pass reads, one that it writes, and one in transfer.
pub(crate) const RING: usize = 3;
/// The timeout of the wait for copies before their memory is freed.
const LIMIT: Duration = Duration::from_secs(300);

/// One row on the device.
struct Slot {
    row: AnySlice,
    /// The part of it that this rank copies.
    own: AnySlice,
    /// The row that it has, or that a copy brings.
    holds: Option<usize>,
    /// The completion of the copy to the host, until a write has waited for it.
    saved: Option<CudaEvent>,
    /// The completion of the copy from the host, if no use has waited for it yet.
    loaded: Option<CudaEvent>,
}

/// The rows of a model.
pub(super) struct Checkpoints {
    device: CudaDevice,
    copies: CudaStream,
    ring: Vec<Slot>,
    host: HostRows,
    /// The ranks that have the other parts of a row.
    parts: Option<Arc<dyn Communicator<CudaDevice>>>,
}

impl Checkpoints {
    /// Allocates host memory for the first of `rows` rows, those that do not stay in `ring`.
    /// `copies` is a stream whose use of the ring is recorded before that is freed.
    pub(super) fn new(
        device: &CudaDevice,
        copies: CudaStream,
        ring: &[AnySlice],
        rows: usize,
        parts: Option<&Arc<dyn Communicator<CudaDevice>>>,
    ) -> Result<Self, ModelError> {
        let own = |row: AnySlice| match parts {
            Some(comm) => {
                let len = row.len() / comm.world_size();
                row.slice(comm.rank() * len..(comm.rank() + 1) * len)
            }
            None => row,
        };
        let slot = |&row| Slot {
            row,
            own: own(row),
            holds: None,
            saved: None,
            loaded: None,
        };
        let (len, dtype) = ring
            .first()
            .map_or((0, DType::U8), |row| (own(*row).len(), row.dtype()));
        let host = HostRows::new(device, &copies, rows.saturating_sub(ring.len()), len, dtype)?;
        Ok(Self {
            device: device.clone(),
            copies,
            ring: ring.iter().map(slot).collect(),
            host,
            parts: parts.cloned(),
        })
    }

    /// Before the pass that writes `row`.
    pub(super) fn before_write(
        &mut self,
        compute: &CudaStream,
        row: usize,
    ) -> Result<(), ModelError> {
        let slot = self.slot(row);
        for copy in [slot.saved.take(), slot.loaded.take()]
            .into_iter()
            .flatten()
        {
            compute.wait(&copy)?;
        }
        slot.holds = None;
        Ok(())
    }

    /// After the pass that writes `row`: starts its copy to the host.
    pub(super) fn after_write(
        &mut self,
        compute: &CudaStream,
        row: usize,
    ) -> Result<(), ModelError> {
        let on_host = self.host.row(row);
        let nth = row % self.ring.len();
        self.ring[nth].holds = Some(row);
        if let Some(on_host) = on_host {
            self.copies.wait(&compute.record()?)?;
            self.device
                .copy(&self.copies, self.ring[nth].own, on_host)?;
            self.ring[nth].saved = Some(self.copies.record()?);
        }
        Ok(())
    }

    /// Before a pass that reads `row`.
    pub(super) fn before_read(
        &mut self,
        compute: &CudaStream,
        row: usize,
    ) -> Result<(), ModelError> {
        self.load(compute, row)?;
        let nth = row % self.ring.len();
        if let Some(copy) = self.ring[nth].loaded.take() {
            compute.wait(&copy)?;
            if let Some(comm) = &self.parts {
                let Slot { row, own, .. } = self.ring[nth];
                comm.all_gather(compute, own, row)?;
            }
        }
        Ok(())
    }

    /// After the backward that reads `row`, the last use of it: starts the copy of the row that has
    /// the slot next.
    pub(super) fn after_backward(
        &mut self,
        compute: &CudaStream,
        row: usize,
    ) -> Result<(), ModelError> {
        row.checked_sub(self.ring.len())
            .map_or(Ok(()), |next| self.load(compute, next))
    }

    /// Starts the copy of `row` from the host, unless it is in its slot.
    fn load(&mut self, compute: &CudaStream, row: usize) -> Result<(), ModelError> {
        let on_host = self.host.row(row);
        let nth = row % self.ring.len();
        if self.ring[nth].holds == Some(row) {
            return Ok(());
        }
        let on_host = on_host.ok_or_else(|| {
            ModelError::from(format!(
                "backward: the input of pass {} is gone; run forward first",
                row + 1
            ))
        })?;
        // The stream of copies itself orders this copy after those of the same rows and slots.
        self.copies.wait(&compute.record()?)?;
        self.device
            .copy(&self.copies, on_host, self.ring[nth].own)?;
        self.ring[nth].holds = Some(row);
        self.ring[nth].loaded = Some(self.copies.record()?);
        Ok(())
    }

    fn slot(&mut self, row: usize) -> &mut Slot {
        let nth = row % self.ring.len();
        &mut self.ring[nth]
    }
}

/// Rows in pinned host memory. Dropping them waits for the copies.
struct HostRows {
    memory: PinnedMemory,
    copies: CudaStream,
    ptr: Option<NonNull<u8>>,
    rows: usize,
    row_elems: usize,
    dtype: DType,
}

// SAFETY: it owns its memory; the address is not tied to a thread.
unsafe impl Send for HostRows {}

impl HostRows {
    fn new(
        device: &CudaDevice,
        copies: &CudaStream,
        rows: usize,
        row_elems: usize,
        dtype: DType,
    ) -> Result<Self, DeviceError> {
        let memory = PinnedMemory::new(device);
        let mut all = Self {
            memory,
            copies: copies.clone(),
            ptr: None,
            rows,
            row_elems,
            dtype,
        };
        if all.bytes() > 0 {
            all.ptr = Some(all.memory.allocate(all.bytes())?);
        }
        Ok(all)
    }

    fn bytes(&self) -> usize {
        self.rows * self.row_bytes()
    }

    fn row_bytes(&self) -> usize {
        self.row_elems * self.dtype.size_bytes()
    }

    /// Row `row`, if it has a copy on the host.
    fn row(&self, row: usize) -> Option<AnySlice> {
        let ptr = self
            .ptr
            .filter(|_| row < self.rows)?
            .as_ptr()
            .wrapping_add(row * self.row_bytes());
        // SAFETY: within the allocation, aligned to elements, and valid until the drop, which waits
        // for the copies; only they access it, on one stream.
        Some(unsafe { AnySlice::from_raw_parts(ptr, self.row_elems, self.dtype, self.memory.id()) })
    }
}

impl Drop for HostRows {
    fn drop(&mut self) {
        // After a failure or a timeout a copy may still be queued, so the memory is leaked.
        if let (Some(ptr), Ok(())) = (self.ptr, self.copies.synchronize(LIMIT)) {
            // SAFETY: allocated with these bytes; every copy has run.
            unsafe { self.memory.deallocate(ptr, self.bytes()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use zero_alloc::{Pool, Purpose};

    use super::*;

    const ROWS: usize = 7;
    const ELEMS: usize = 64;

    /// Passes that only copy, so that with random delays of the stand-in
    /// (`ZERO_STANDIN_DELAY_SEED`) every order of operations that the events allow occurs: without
    /// any one of the waits the test fails.
    #[test]
    #[ignore = "needs a CUDA device"]
    fn rows_come_back_in_any_order_of_streams() {
        let device = CudaDevice::open(0).unwrap();
        let compute = device.create_stream("compute").unwrap();
        let pool = Pool::new(device.clone(), 64 << 20);
        let blocks = |n: usize| -> Vec<_> {
            (0..n)
                .map(|_| {
                    pool.allocate(ELEMS, DType::F32, Purpose::Activations, &compute)
                        .unwrap()
                })
                .collect()
        };

        let sources = blocks(ROWS);
        let seen = blocks(ROWS);
        let ring = blocks(RING);
        let slices = |blocks: &[zero_alloc::Block<CudaDevice>]| -> Vec<AnySlice> {
            let slice = |block: &zero_alloc::Block<CudaDevice>| {
                // SAFETY: the blocks live to the end of the test, which drains both streams; events
                // order the uses.
                unsafe { block.slice() }
            };
            blocks.iter().map(slice).collect()
        };

        let sources = slices(&sources);
        let seen = slices(&seen);
        let ring = slices(&ring);
        let copies = device.create_stream("activations").unwrap();
        let mut rows = Checkpoints::new(&device, copies.clone(), &ring, ROWS, None).unwrap();

        for round in 0..40 {
            let values = |row: usize| [(round * ROWS + row) as f32; ELEMS];
            for (row, source) in sources.iter().enumerate() {
                device
                    .upload(&compute, bytemuck::cast_slice(&values(row)), *source, LIMIT)
                    .unwrap();
            }
            for row in 0..ROWS {
                rows.before_write(&compute, row).unwrap();
                device
                    .copy(&compute, sources[row], ring[row % RING])
                    .unwrap();
                rows.after_write(&compute, row).unwrap();
            }
            for row in (0..ROWS).rev() {
                rows.before_read(&compute, row).unwrap();
                device.copy(&compute, ring[row % RING], seen[row]).unwrap();
                rows.after_backward(&compute, row).unwrap();
            }
            for (row, seen) in seen.iter().enumerate() {
                let mut got = [0f32; ELEMS];
                device
                    .download(&compute, *seen, bytemuck::cast_slice_mut(&mut got), LIMIT)
                    .unwrap();
                assert_eq!(got, values(row), "round {round}, row {row}");
            }
        }

        assert!(
            rows.load(&compute, ROWS - 1)
                .unwrap_err()
                .to_string()
                .contains("run forward first")
        );
        drop(rows);
        copies.synchronize(LIMIT).unwrap();
    }
}
